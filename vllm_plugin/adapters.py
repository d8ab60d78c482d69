"""Which weights this process's engine has loaded for its LoRA adapters.

Promises: `differ` is true for every adapter whose files were read with another content than its pages' keys say, or whose weights were
replaced since under the same id or the same name and path. vLLM goes on with what it has loaded when the files change, may load them again
at any time (eviction, `load_inplace`), and finds blocks in its own prefix cache by the adapter's name and path alone; so once replaced,
such an id or name is distrusted for as long as the process lives. New weights under a new name are served.

Only the worker knows: it loads an adapter on `add_lora`, before there is a request, or with the first step that needs it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable
from typing import Any

from ..common.adapter import adapter_fingerprint
from ..common.weights import Mode

logger = logging.getLogger(__name__)

REPLACED = "replaced"
# LoRA id, and name and path -> fingerprint of what was loaded, '' where it could not be told, REPLACED where it was not always the same.
_loaded: dict[Hashable, str] = {}
_names: dict[int, tuple[str, str]] = {}
_mode: Mode = "sample"


def watch(mode: Mode) -> None:
    """Take down what vLLM loads in this process from now on, fingerprinted as `mode` says. Idempotent."""
    global _mode
    _mode = mode
    from vllm.lora.worker_manager import WorkerLoRAManager

    original = WorkerLoRAManager._load_adapter
    if hasattr(original, "mooncake_kv"):
        return

    @functools.wraps(original)
    def _load_adapter(self: Any, lora_request: Any) -> Any:
        before = _fingerprint(lora_request.lora_path)
        lora = original(self, lora_request)
        after = _fingerprint(lora_request.lora_path)
        _note(lora_request, after if before == after else "")
        return lora

    _load_adapter.mooncake_kv = True  # type: ignore[attr-defined]
    WorkerLoRAManager._load_adapter = _load_adapter


def token(lora_request: Any, fingerprint: str) -> str:
    """What plans say of the weights that a request's pages stand for."""
    return f"{lora_request.lora_int_id}:{fingerprint}"


def differ(weights: str) -> bool:
    """Has the engine loaded other weights than this token's? What it has not loaded yet is judged when it has computed with it."""
    number, _, fingerprint = weights.partition(":")
    keys = (int(number), _names.get(int(number)))
    return any(_loaded.get(key, fingerprint) != fingerprint for key in keys)


def _note(lora_request: Any, fingerprint: str) -> None:
    name = (lora_request.lora_name, lora_request.lora_path)
    _names[lora_request.lora_int_id] = name
    for key in (lora_request.lora_int_id, name):
        if _loaded.setdefault(key, fingerprint) != fingerprint:
            _loaded[key] = REPLACED
    if REPLACED in (_loaded[lora_request.lora_int_id], _loaded[name]):
        logger.warning(
            "the weights of LoRA adapter %r were replaced: its requests are served without the cache until they are loaded from a folder "
            "and under a name of their own",
            lora_request.lora_name,
        )


def _fingerprint(folder: str) -> str:
    try:
        return adapter_fingerprint(folder, _mode)
    except (OSError, ValueError):  # the scheduler says why, and the request is served without the cache
        return ""
