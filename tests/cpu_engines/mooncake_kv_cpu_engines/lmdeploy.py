"""Lets LMDeploy's real PyTorch engine run on a CPU, as the device `cuda`; and a record of which process loaded what.

`MOONCAKE_KV_TEST_CUDA=cpu`: what a CPU lacks is replaced, nothing else. torch's CUDA calls do nothing, tensors meant for the device lie in
ordinary memory, LMDeploy's default operators stand in for its kernels, with paged attention in plain torch on the same cache layout, ranks
talk by gloo, and Ray starts on loopback with as many devices as a test may want. Computing anything else in such a process is wrong: a
reference needs one of its own.

`MOONCAKE_KV_TEST_LOADED=FOLDER`: each process that imports LMDeploy's engine writes FOLDER/PID, a JSON object: the modules of the
"connector" factory, of the "migration" backend and of the operators ("shims") that are in effect; one that serves pages FOLDER/namespace,
the namespace in hex.
`MOONCAKE_KV_TEST_STATE=FILE`: the engine's process keeps there, as JSON, the number of its free blocks and the results of migrations.
`MOONCAKE_KV_TEST_UNMENDED=Class.method,...`: what the plugin replaced in the engine around migrations is LMDeploy's own again.
`MOONCAKE_KV_TEST_FAULT=FILE`, `MOONCAKE_KV_TEST_UNPROTECTED=WHAT`: see `faults`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

CUDA = "MOONCAKE_KV_TEST_CUDA"
LOADED = "MOONCAKE_KV_TEST_LOADED"
STATE = "MOONCAKE_KV_TEST_STATE"
UNMENDED = "MOONCAKE_KV_TEST_UNMENDED"
# The modules whose classes the plugin changes.
MENDED = (
    "lmdeploy.pytorch.engine.engine",
    "lmdeploy.pytorch.engine.engine_loop",
    "lmdeploy.pytorch.disagg.conn.engine_conn",
    "lmdeploy.serve.proxy.proxy",
)
# Never more devices than this are used; LMDeploy takes one a rank.
DEVICES = 4
_MEMORY = 4 << 30
_FACTORIES = (
    "arange as_tensor empty empty_like empty_strided eye full full_like linspace logspace ones ones_like rand rand_like randint randn "
    "randn_like randperm scalar_tensor tensor tril_indices triu_indices zeros zeros_like"
)


def load() -> None:
    """Entry point of the group `torch.backends`; idempotent."""
    if os.environ.get(CUDA) != "cpu":
        return
    import torch

    if hasattr(torch, "mooncake_kv_test"):
        return
    torch.mooncake_kv_test = True
    from mooncake_kv.lmdeploy_plugin import autoload

    autoload.load()  # so that what follows is told after it
    on_import = autoload.on_import

    os.environ["LMDEPLOY_ENABLE_CHECK_ENV"] = "0"
    _replace_cuda(torch)
    on_import("lmdeploy.pytorch.backends.selector", _replace_backend)
    on_import("lmdeploy.pytorch.ray", _start_ray_small)
    on_import("lmdeploy.pytorch.engine.mp_engine.zmq_engine", _start_server_whole)
    if folder := os.environ.get(LOADED):
        for module in ("lmdeploy.pytorch.engine.engine", "lmdeploy.pytorch.engine.model_agent.agent"):
            on_import(module, lambda _: _record(Path(folder)))
    if file := os.environ.get(STATE):
        on_import("lmdeploy.pytorch.engine.engine", lambda module: _watch(module, Path(file)))
    for name in filter(None, os.environ.get(UNMENDED, "").split(",")):
        for module in MENDED:
            on_import(module, functools.partial(_unmend, name))
    on_import("mooncake_kv.lmdeploy_plugin.connector", _in_the_connector)


class _Stream:
    """A CUDA stream, and an event: everything has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def query(self) -> bool:
        return True

    def record_event(self, *_: Any) -> _Stream:
        return _Stream()

    def elapsed_time(self, *_: Any) -> float:
        return 0.0

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    record = synchronize = wait = wait_event = wait_stream = _nothing

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class _Event(_Stream):
    pass


def _replace_cuda(torch: Any) -> None:
    stream = _Stream()
    properties = SimpleNamespace(
        major=8, minor=0, name="cpu", total_memory=_MEMORY, multi_processor_count=2, uuid="0", warp_size=32, shared_memory_per_block_optin=0
    )
    fixed = {
        "is_available": True,
        "is_bf16_supported": True,
        "device_count": DEVICES,
        "current_device": 0,
        "current_stream": stream,
        "default_stream": stream,
        "mem_get_info": (_MEMORY // 2, _MEMORY),
        "get_device_capability": (8, 0),
        "get_device_properties": properties,
        "get_device_name": "cpu",
    }
    for name, value in fixed.items():
        setattr(torch.cuda, name, _always(value))
    for name in ("synchronize", "empty_cache", "set_device", "ipc_collect"):
        setattr(torch.cuda, name, _always(None))
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch._C._cuda_clearCublasWorkspaces = _always(None)
    for name in _FACTORIES.split():
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    for kind in (torch.Tensor, torch.nn.Module):
        kind.to = _on_cpu(kind.to, positional=True)
        kind.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.Tensor.record_stream = _always(None)


def _always(value: Any) -> Callable[..., Any]:
    """A function of its own for each name: torch's compiler wants no object under two names."""
    return lambda *_, **__: value


def _on_cpu(function: Callable[..., Any], positional: bool = False) -> Callable[..., Any]:
    """The same function, for which the device is the CPU, and no memory is pinned."""
    import torch

    def placed(device: Any) -> Any:
        cuda = str(device).startswith("cuda") if isinstance(device, str | torch.device) else type(device) is int
        return "cpu" if cuda else device

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = placed(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if positional:
            args = (args[0], *map(placed, args[1:]))
        return function(*args, **kwargs)

    return call


def _replace_backend(selector: ModuleType) -> None:
    """LMDeploy's operators for the device."""
    import torch
    from lmdeploy.pytorch.backends.attention import AttentionImpl, AttentionMetadata, PagedAttentionBuildSpec
    from lmdeploy.pytorch.backends.default import DefaultOpsBackend

    class CpuAttention(AttentionImpl):
        """Query, key and value [tokens of the batch, heads, dim]; caches [blocks, block tokens, KV heads, dim]. A value cache without
        dims (MLA) means that the value is the head of the key."""

        def forward(
            self, query: Any, key: Any, value: Any, k_cache: Any, v_cache: Any, attn_metadata: Any, *_: Any, **__: Any
        ) -> torch.Tensor:
            block_tokens, latent = k_cache.size(1), v_cache.size(-1) == 0
            out = query.new_empty((query.size(0), self.num_heads, self.v_head_size))
            begin = 0
            for new, total, blocks in zip(
                attn_metadata.q_seqlens.tolist(), attn_metadata.kv_seqlens.tolist(), attn_metadata.block_offsets.long(), strict=True
            ):
                end = begin + new
                known = torch.arange(total)
                places = blocks[known // block_tokens], known % block_tokens
                fresh = places[0][total - new :], places[1][total - new :]
                k_cache[fresh] = key[begin:end].to(k_cache.dtype)
                if not latent:
                    v_cache[fresh] = value[begin:end].to(v_cache.dtype)
                k = k_cache[places]
                v = k[..., : self.v_head_size] if latent else v_cache[places]
                q, k, v = (x.transpose(0, 1)[None].float() for x in (query[begin:end], k, v))
                mask = known[None, :] <= known[total - new :, None]
                answer = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)
                out[begin:end] = answer[0].transpose(0, 1).to(out.dtype)
                begin = end
            return out

    class CpuBackend(DefaultOpsBackend):
        @staticmethod
        def get_name() -> str:
            return "cuda"

        @classmethod
        def build_op(cls, spec: Any, *, enable_deterministic: bool = False) -> Any:
            if not isinstance(spec, PagedAttentionBuildSpec):
                return super().build_op(spec, enable_deterministic=enable_deterministic)
            more = {"num_kv_heads": spec.num_kv_heads, "v_head_size": spec.v_head_dim, "causal": spec.causal}
            return CpuAttention(spec.num_heads, spec.head_dim, scale=spec.scale, **more)

        @staticmethod
        def get_attention_metadata_cls() -> type[AttentionMetadata]:
            return AttentionMetadata

        @classmethod
        def update_step_context(cls, context: Any) -> Any:
            context.attn_metadata = AttentionMetadata(
                is_decoding=context.is_decoding,
                block_offsets=context.block_offsets,
                q_start_loc=context.q_start_loc,
                q_seqlens=context.q_seqlens,
                kv_seqlens=context.kv_seqlens,
            )
            return context

        @staticmethod
        def ccl_backend() -> str:
            return "gloo"

        @staticmethod
        def device_count() -> int:
            return DEVICES

        @staticmethod
        def support_ray() -> bool:
            return True

    selector._get_backend = lambda: CpuBackend  # type: ignore[attr-defined]


def _start_ray_small(module: ModuleType) -> None:
    """One machine, loopback only, with devices that LMDeploy may ask for, little memory, and no dashboard."""
    ray: Any = module.ray  # type: ignore[attr-defined]
    init = ray.init

    @functools.wraps(init)
    def small(**arguments: Any) -> Any:
        small_ones = {"num_gpus": DEVICES, "object_store_memory": 100 << 20, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        return init(**{**arguments, **small_ones})

    if not hasattr(ray, "mooncake_kv_test"):
        ray.mooncake_kv_test = True
        ray.init = small


def _unmend(name: str, module: ModuleType) -> None:
    owner, _, method = name.partition(".")
    found = vars(module).get(owner)
    if found is not None:
        mended = getattr(found, method)
        setattr(found, method, getattr(mended, "__wrapped__", mended))  # modules see each other's classes


def _watch(module: ModuleType, file: Path) -> None:
    """Writes the file again whenever the number has changed."""
    from mooncake_kv.lmdeploy_plugin.migration.engine import RESULTS

    engine: Any = module.Engine  # type: ignore[attr-defined]
    making = engine.__init__

    @functools.wraps(making)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        making(self, *args, **kwargs)
        threading.Thread(target=watch, args=(self.scheduler.block_manager,), daemon=True).start()

    def watch(manager: Any) -> None:
        last = None
        while True:
            if (state := {"free": manager.get_num_free_gpu_blocks(), "results": dict(RESULTS)}) != last:
                file.with_suffix(".new").write_text(json.dumps(state))
                file.with_suffix(".new").rename(file)
                last = state
            time.sleep(0.02)

    engine.__init__ = __init__


def _start_server_whole(module: ModuleType) -> None:
    """On a busy machine an engine's process may hear no more that its word, that it has begun, was taken (the server has ended the process
    that passes it on), and LMDeploy lets it end then."""
    engine: Any = module.ZMQMPEngine  # type: ignore[attr-defined]
    running = engine._mp_proc

    class Tolerant:
        def __init__(self, condition: Any) -> None:
            self._condition = condition

        def __enter__(self) -> Any:
            return self._condition.__enter__()

        def __exit__(self, *_: Any) -> None:
            with contextlib.suppress(EOFError, OSError):
                self._condition.__exit__(None, None, None)

        def notify(self) -> None:
            self._condition.notify()

    @functools.wraps(running)
    def _mp_proc(shared_dict: Any, condition: Any, *args: Any, **kwargs: Any) -> None:
        running(shared_dict, Tolerant(condition), *args, **kwargs)

    engine._mp_proc = staticmethod(_mp_proc)


def _record(folder: Path) -> None:
    from lmdeploy.pytorch.backends import selector
    from lmdeploy.pytorch.disagg.backend.backend import MIGRATION_BACKENDS
    from lmdeploy.pytorch.kv_connector import build_kv_connector

    found = {
        "connector": build_kv_connector.__globals__["__name__"],
        "migration": getattr(MIGRATION_BACKENDS.module_dict["Mooncake"], "__globals__", {}).get("__name__", ""),
        "shims": selector._get_backend().__module__,
    }
    (folder / str(os.getpid())).write_text(json.dumps(found))


def _in_the_connector(module: ModuleType) -> None:
    from mooncake_kv.connectors.store.worker import WorkerHalf

    from . import faults

    making = WorkerHalf.__init__

    @functools.wraps(making)
    def __init__(self: Any, client: Any, view: Any, layout: Any, **more: Any) -> None:
        making(self, client, view, layout, **more)
        if folder := os.environ.get(LOADED):
            (Path(folder) / "namespace").write_text(layout.namespace.encode().hex())

    WorkerHalf.__init__ = __init__  # type: ignore[method-assign]
    if os.environ.get(faults.FAULT):
        making_connector = module.MooncakeConnector.__init__  # type: ignore[attr-defined]

        @functools.wraps(making_connector)
        def init(self: Any, role: Any, cache_config: Any, **ranks: Any) -> None:
            making_connector(self, role, cache_config, **ranks)
            if role.name == "WORKER":
                if what := os.environ.get(faults.UNPROTECTED):
                    faults.unprotect(what)
                faults.install(ranks.get("tp_rank", 0))

        module.MooncakeConnector.__init__ = init  # type: ignore[attr-defined]
