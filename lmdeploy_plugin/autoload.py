"""What puts the plugin into LMDeploy, which loads no plugins itself: an entry point of PyTorch's group `torch.backends`.

`load` runs at the end of every `import torch` of every program in the environment, LMDeploy or not. So it promises to import nothing but
this module, to raise nothing (it would break torch; MOONCAKE_KV_STRICT=1 lets errors through, for tests), and to do nothing where
LMDeploy is not imported but look at the names of modules. Every process of LMDeploy imports torch before the modules hooked here: the main
one, the command line, spawned ones, Ray's actors. TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns all of it off.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

logger = logging.getLogger("mooncake_kv.lmdeploy")

STRICT = "MOONCAKE_KV_STRICT"

# Module of LMDeploy -> the function of this package that is called with it after each execution, in this order.
HOOKS: tuple[tuple[str, str], ...] = (
    ("lmdeploy.pytorch.kv_connector.factory", "registration:add_connector"),
    ("lmdeploy.pytorch.disagg.backend", "registration:add_migration_backend"),
    ("lmdeploy.pytorch.engine.engine", "migration.engine:mend_engine"),
    ("lmdeploy.pytorch.engine.engine_loop", "migration.engine:mend_loop"),
    ("lmdeploy.pytorch.disagg.conn.engine_conn", "migration.engine:mend_connection"),
    ("lmdeploy.serve.proxy.proxy", "migration.proxy:mend_proxy"),
    ("lmdeploy.metrics.stats", "metrics:read_schedule_metrics"),
)

_waiting: dict[str, list[Callable[[ModuleType], object]]] = {}
_loaded = False


def load() -> None:
    """Entry point of the group `torch.backends`; idempotent."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    for name, function in HOOKS:
        try:
            on_import(name, _named(function))
        except Exception:
            _failed(f"what it changes in {name} is not in effect")


def on_import(name: str, function: Callable[[ModuleType], object]) -> None:
    """Call `function(module)` right after the module `name` has executed, before whoever imports it goes on; at once if it has already. Its
    errors are logged in one line, and the module is imported all the same."""
    _waiting.setdefault(name, []).append(function)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    module = sys.modules.get(name)
    if module is not None:
        if getattr(module.__spec__, "_initializing", False):
            raise ImportError(f"{name} is being imported, too late to be told when it has been")
        _call(function, module)


class _Finder:
    """On sys.meta_path. Finds a module that somebody waits for with the finders after it, and all others not at all."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _waiting or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                try:
                    self._watch(spec)
                except Exception:
                    _failed(f"cannot be told when {name} has been imported")
                return spec
        return None

    @staticmethod
    def _watch(spec: ModuleSpec) -> None:
        loader: Any = spec.loader  # this module's own, by the import system's path finder
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            for function in _waiting[spec.name]:
                _call(function, module)

        loader.exec_module = exec_module


_finder = _Finder()


def _named(function: str) -> Callable[[ModuleType], object]:
    """A function of this package, imported when it is called."""

    def call(module: ModuleType) -> object:
        place, _, name = function.partition(":")
        return getattr(import_module(f"{__package__}.{place}"), name)(module)

    return call


def _call(function: Callable[[ModuleType], object], module: ModuleType) -> None:
    try:
        function(module)
    except Exception:
        _failed(f"what it changes in {module.__name__} is not in effect")


def _failed(what: str) -> None:
    """Inside an except block."""
    if os.environ.get(STRICT) == "1":
        raise
    error = sys.exception()
    logger.warning("mooncake-kv: %s: %s: %s", what, type(error).__name__, error)
