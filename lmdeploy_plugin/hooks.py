"""Where the plugin reaches into LMDeploy's engine: the making of an executor, for the facts of the model; updates of its weights; and what
it reports to its server.

Promises: installed only in a process that makes an engine with our connector, once; an executor of an engine without it is not touched.
"""

from __future__ import annotations

import functools
import inspect
from importlib import import_module
from typing import Any

from ..connectors.compat import Signatures
from . import compat, facts, metrics

EXECUTOR = "lmdeploy.pytorch.engine.executor.base:ExecutorBase.__init__"
_ENGINE = "lmdeploy.pytorch.engine.engine:Engine."
METRICS = f"{_ENGINE}get_schedule_metrics"
# What replaces weights of a running engine.
WEIGHT_UPDATES = tuple(f"{_ENGINE}{name}" for name in ("update_params", "update_weights_from_ipc", "update_weights_from_distributed"))
HOOKS: Signatures = {
    EXECUTOR: (
        "self",
        "model_path",
        "model_config",
        "cache_config",
        "backend_config",
        "dist_config",
        "misc_config",
        "adapters",
        "specdecode_config",
        "device_type",
        "trust_remote_code",
    ),
    METRICS: ("self",),
    f"{_ENGINE}update_params": ("self", "request"),
    f"{_ENGINE}update_weights_from_ipc": ("self", "request", "reject_reason"),
    f"{_ENGINE}update_weights_from_distributed": ("self", "request"),
}


def install() -> None:
    """Idempotent. Raises UnsupportedError in one sentence for a LMDeploy that it does not fit."""
    executor, _ = _find(EXECUTOR)
    if hasattr(executor.__init__, "mooncake_kv"):
        return
    compat.require(HOOKS)
    _wrap_executor(executor)
    for name in WEIGHT_UPDATES:
        _wrap_update(*_find(name))
    _wrap_metrics(*_find(METRICS))


def _wrap_executor(executor: Any) -> None:
    plain = executor.__init__
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if facts.uses_us(self.cache_config):
            facts.gather(self, signature.bind(self, *args, **kwargs).arguments)

    __init__.mooncake_kv = True  # type: ignore[attr-defined]
    executor.__init__ = __init__


def _wrap_update(engine: Any, name: str) -> None:
    plain = getattr(engine, name)

    @functools.wraps(plain)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        connector = getattr(self.scheduler, "kv_connector", None)
        if connector is not None and facts.uses_us(self.cache_config):
            connector.weights_changed()
        return plain(self, *args, **kwargs)

    setattr(engine, name, update)


def _wrap_metrics(engine: Any, name: str) -> None:
    plain = getattr(engine, name)

    @functools.wraps(plain)
    def get_schedule_metrics(self: Any) -> Any:
        found = plain(self)
        connector = getattr(self.scheduler, "kv_connector", None)
        if connector is not None and facts.uses_us(self.cache_config):
            setattr(found, metrics.ATTRIBUTE, connector.counts())
        return found

    setattr(engine, name, get_schedule_metrics)


def _find(name: str) -> tuple[Any, str]:
    """The class of "module:Class.method", and the method's name."""
    module, _, path = name.partition(":")
    owner, _, method = path.partition(".")
    return getattr(import_module(module), owner), method
