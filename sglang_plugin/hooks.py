"""What the plugin changes in SGLang, through its own hook registry.

Promises: with no key of ours in the configuration, SGLang's own backend called mooncake and everything around it stay as they are. With
one, no process of SGLang calls Mooncake's native code for the cache's sake (it can crash a process or block it for a minute): the host
memory is ordinary memory, and no transfer engine is set up. KV of other weights never mixes: a run-time change of weights ends the cache of
this engine, and an adapter's id depends on its files.
"""

from __future__ import annotations

import logging
import uuid
import weakref
from collections.abc import Callable
from typing import Any

from ..common.adapter import adapter_fingerprint
from ..common.config import asks_for_us
from ..common.errors import UnsupportedError
from . import BACKEND, compat

logger = logging.getLogger("mooncake_kv.sglang")

# Backends of this process; anything with `stop(reason)`.
backends: weakref.WeakSet[Any] = weakref.WeakSet()
# Since the start of the process: the files on disk say nothing about the weights any more.
weights_changed = False
_installed = False


def installed() -> bool:
    return _installed


def install() -> None:
    global _installed
    if _installed:
        return
    try:
        compat.require(compat.HOOKS)
    except UnsupportedError as error:
        logger.warning("%s", error)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    create, allocator, transfer_engine, create_embeddings, lora_id, *_ = compat.HOOKS
    around: dict[str, Callable[..., Any]] = {
        create: _create_backend,
        allocator: _allocator_type,
        transfer_engine: _transfer_engine,
        create_embeddings: _create_embeddings,
        lora_id: _lora_id,
        **dict.fromkeys(compat.WEIGHT_UPDATES, _update_weights),
    }
    for target, hook in around.items():
        HookRegistry.register(compat.hook_target(target), hook, HookType.AROUND)
    _installed = True


def _create_backend(original: Callable[..., Any], cls: Any, backend_name: str, storage_config: Any, *args: Any, **kwargs: Any) -> Any:
    if backend_name == BACKEND and asks_for_us(storage_config.extra_config):
        from .backend import MooncakeHiCache

        return MooncakeHiCache(storage_config)
    return original(cls, backend_name, storage_config, *args, **kwargs)


def _create_embeddings(original: Callable[..., Any], cls: Any, backend_name: str, **kwargs: Any) -> Any:
    """The encoder cache has no flag for settings: the file and the environment say whose it is."""
    if backend_name == BACKEND and not kwargs and asks_for_us(None):
        from .embeddings import MooncakeEmbeddings

        return MooncakeEmbeddings()
    return original(cls, backend_name, **kwargs)


def _ours_at_start() -> bool:
    return compat.settings("memory").hicache_storage_backend == BACKEND and asks_for_us(compat.startup_extra_config())


def _allocator_type(original: Callable[[], str]) -> str:
    """Of the host memory. SGLang's own backend wants memory of Mooncake's allocator."""
    chosen = original()
    return "default" if chosen == BACKEND and _ours_at_start() else chosen


def _transfer_engine(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _ours_at_start():
        return original(*args, **kwargs)
    from sglang.srt.environ import envs

    with envs.SGLANG_HICACHE_MOONCAKE_REUSE_TE.override(False):  # other users of the transfer engine still get it
        return original(*args, **kwargs)


def _lora_id(original: Callable[[str, str], str], lora_name: str, lora_path: str) -> str:
    """SGLang makes the id of an adapter given at start from name and path, and puts it into the page hashes. Other files at the same path
    must not find the old one's pages."""
    known = original(lora_name, lora_path)
    try:
        return uuid.uuid5(uuid.UUID(hex=known), adapter_fingerprint(lora_path)).hex
    except (OSError, ValueError) as error:
        logger.warning("pages of LoRA adapter %r are not shared with other engines: %s", lora_name, error)
        return uuid.uuid4().hex


def _update_weights(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global weights_changed
    weights_changed = True
    for backend in list(backends):
        backend.stop("the weights were changed at run time, so this engine's KV is that of another model")
    return original(*args, **kwargs)
