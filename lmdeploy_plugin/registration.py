"""How LMDeploy gets to know the connector and the migration backend. Each is imported only where it is chosen."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from . import CONNECTOR, MIGRATION_BACKEND, MIGRATION_SWITCH, compat


def add_connector(factory: ModuleType) -> None:
    """LMDeploy's factory has its one connector in an `if`: the two functions around it are replaced."""
    prepare, build = factory.prepare_kv_connector_config, factory.build_kv_connector

    @functools.wraps(prepare)
    def prepare_kv_connector_config(cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        if not _chosen(cache_config):
            return prepare(cache_config, *args, **kwargs)
        compat.require(compat.FACTORY)
        return _our("facts").prepare(cache_config, *args, **kwargs)

    @functools.wraps(build)
    def build_kv_connector(role: Any, cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        if not _chosen(cache_config):
            return build(role, cache_config, *args, **kwargs)
        compat.require(compat.FACTORY)
        return _our("connector").MooncakeConnector(role, cache_config, *args, **kwargs)

    _replace(prepare, prepare_kv_connector_config)
    _replace(build, build_kv_connector)


def add_migration_backend(package: ModuleType) -> None:
    """After LMDeploy has registered its own: that one works over RDMA only, and one failed read ends the decode engine."""
    if os.environ.get(MIGRATION_SWITCH) != "0":
        registry = sys.modules[f"{package.__name__}.backend"].MIGRATION_BACKENDS
        registry.register_module(MIGRATION_BACKEND, module=_migration_backend, force=True)


def _migration_backend() -> Any:
    compat.require(compat.MIGRATION | compat.MIGRATION_ENGINE | compat.MIGRATION_LOOP | compat.MIGRATION_CONNECTION)
    return _our("migration").MooncakeMigrationBackend()


def _our(module: str) -> Any:
    return import_module(f"{__package__}.{module}")


def _chosen(cache_config: Any) -> bool:
    transfer = cache_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR


def _replace(original: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """In the module that defines it, and wherever it has been imported from there."""
    for name, module in list(sys.modules.items()):
        if name.startswith("lmdeploy.") and vars(module).get(ours.__name__) is original:
            setattr(module, ours.__name__, ours)
