"""SGLang plugin that lets the real engine, with its hierarchical cache, run on a CPU; and a record of which process loaded what.

What a CPU lacks is replaced, nothing else: copies between the device's and the host's KV pools (SGLang has GPU kernels for them), the
registration of host memory with CUDA, pinned memory (LoRA), PyNccl, a method of PyTorch's stand-in for streams, and a library for sound;
and MLA is computed on the cached latents, because the attention in plain PyTorch reads K and V from the cache.

`MOONCAKE_KV_TEST_LOADED=FOLDER`: each process writes FOLDER/PID, a JSON list of the functions that plugins have patched in it (SGLang logs
and swallows what a plugin raises, so a test has to look), and one that serves pages FOLDER/namespace, the namespace in hex.
`MOONCAKE_KV_TEST_FAULT=FILE`: see `faults`.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import faults
from .faults import FAULT

LOADED = "MOONCAKE_KV_TEST_LOADED"
_POOLS = "sglang.srt.mem_cache.pool_host"
_ATTENTION = "sglang.srt.models.deepseek_common.attention_backend_handler"


def register() -> None:
    """Idempotent; called by SGLang in each of its processes."""
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if getattr(HookRegistry, "mooncake_kv_test", False):
        return
    HookRegistry.mooncake_kv_test = True
    _without_soundfile()
    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = lambda self: None  # type: ignore[attr-defined]
    if not torch.accelerator.is_available():
        _without_pinning()
    replaced: dict[str, Callable[..., Any]] = {
        f"{_POOLS}.common._cuda_host_register": lambda *_, **__: None,
        f"{_POOLS}.mha.MHATokenToKVPoolHost.load_to_device_per_layer": _load_mha,
        f"{_POOLS}.mha.MHATokenToKVPoolHost.backup_from_device_all_layer": _backup_mha,
        f"{_POOLS}.mla.MLATokenToKVPoolHost.load_to_device_per_layer": _load_mla,
        f"{_POOLS}.mla.MLATokenToKVPoolHost.backup_from_device_all_layer": _backup_mla,
    }
    for target, function in replaced.items():
        HookRegistry.register(target, function, HookType.REPLACE)
    HookRegistry.register(f"{_ATTENTION}.AttentionBackendRegistry.get_handler", _mla_handler, HookType.AROUND)
    HookRegistry.register("sglang.srt.distributed.parallel_state.init_model_parallel_group", _without_pynccl, HookType.BEFORE)
    if folder := os.environ.get(LOADED):
        _record(HookRegistry, Path(folder))
    if os.environ.get(FAULT):
        from sglang.srt.runtime_context import get_parallel

        faults.install_hicache(lambda: get_parallel().tp_rank)


def _record(registry: Any, folder: Path) -> None:
    """SGLang applies the hooks once all plugins have run."""
    original = registry.apply_hooks

    @functools.wraps(original)
    def apply_hooks() -> None:
        original()
        (folder / str(os.getpid())).write_text(json.dumps(sorted(registry._patched)))

    registry.apply_hooks = apply_hooks

    from mooncake_kv.connectors.hicache import HiCacheStore

    making = HiCacheStore.__init__

    @functools.wraps(making)
    def __init__(self: Any, client: Any, view: Any, layout: Any, **more: Any) -> None:
        making(self, client, view, layout, **more)
        (folder / "namespace").write_text(layout.namespace.encode().hex())

    HiCacheStore.__init__ = __init__  # type: ignore[method-assign]


def _without_soundfile() -> None:
    """SGLang's HTTP server imports it for a route that nobody uses here; its library is not in the environment."""
    if importlib.util.find_spec("soundfile") is None:
        stub = types.ModuleType("soundfile")
        stub.__spec__ = importlib.machinery.ModuleSpec("soundfile", None)
        stub.available_formats = dict  # type: ignore[attr-defined]
        sys.modules["soundfile"] = stub


def _without_pinning() -> None:
    """Pinned memory is ordinary memory."""
    import torch

    for name in ("tensor", "empty", "zeros", "arange"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def _unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})

    return wrapper


def _mla_handler(original: Callable[..., Any], cls: Any, backend_name: str) -> Any:
    if backend_name != "torch_native":
        return original(cls, backend_name)
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return lambda attention, forward_batch: AttnForwardMethod.MLA


def _without_pynccl(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "use_pynccl": False}


def _load_mha(pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, io_backend: str, **more: Any) -> None:
    if 0 <= layer_id < pool.target_layer_num:
        for host, device in ((pool.kv_buffer[0], pool.device_k_buffers), (pool.kv_buffer[1], pool.device_v_buffers)):
            device[layer_id][device_indices] = _layer(pool, host, layer_id)[_places(pool, host_indices)]


def _backup_mha(pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:
    for host, device in ((pool.kv_buffer[0], pool.device_k_buffers), (pool.kv_buffer[1], pool.device_v_buffers)):
        for layer_id, buffer in enumerate(device):
            _layer(pool, host, layer_id)[_places(pool, host_indices)] = buffer[device_indices]


def _load_mla(pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, io_backend: str, **more: Any) -> None:
    if 0 <= layer_id < pool.target_layer_num:
        pool.device_kv_buffers[layer_id][device_indices] = _layer(pool, pool.kv_buffer, layer_id)[_places(pool, host_indices)]


def _backup_mla(pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:
    for layer_id, buffer in enumerate(pool.device_kv_buffers):
        _layer(pool, pool.kv_buffer, layer_id)[_places(pool, host_indices)] = buffer[device_indices]


def _layer(pool: Any, host: Any, layer: int) -> Any:
    """View of one layer's K, V or latent in the host pool: [slots, heads, dim] or [pages, page tokens, heads, dim]."""
    if pool.layout == "layer_first":
        return host[layer]
    if pool.layout == "page_head":  # [pages, heads, page tokens, layers, dim]
        return host[:, :, :, layer].transpose(1, 2)
    return host[:, layer]


def _places(pool: Any, indices: Any) -> tuple[Any, ...]:
    """Slots as indices into the view of `_layer`."""
    if pool.layout in ("layer_first", "page_first"):
        return (indices,)
    return indices // pool.page_size, indices % pool.page_size
