"""SGLang's own parts without an engine: host pools, storage configurations, and the process that our backend asks about itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from mooncake_kv.sglang_plugin import compat, hooks


def host_pool(*, layout: str, pages: int, page_tokens: int, layers: int, heads: int, dim: int) -> Any:
    """A MHATokenToKVPoolHost of bf16, of this many pages and SGLang's one more, in ordinary memory."""
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = tuple(torch.zeros((page_tokens, heads, dim), dtype=torch.bfloat16) for _ in range(layers))
    pointers = torch.tensor([layer.data_ptr() for layer in device], dtype=torch.uint64)
    info = MHABufferInfo(
        buffers=KVBuffers(k=device, v=device, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD),
        page_size=page_tokens,
        head_num=heads,
        head_dim=dim,
        v_head_dim=dim,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    tokens = pages * page_tokens
    with host_memory_budget_scope(64 << 30):
        return MHATokenToKVPoolHost(
            info, 1.0, 0, page_tokens, layout, pin_memory=False, device_capacity_tokens=tokens, start_layer=0, end_layer=layers
        )


def storage_config(extra: dict[str, Any], **more: Any) -> Any:
    """Of one rank of one, unless `more` says otherwise."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    given = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False}
    given |= {"enable_storage_metrics": True, "is_page_first_layout": True, "model_name": "m", **more}
    return HiCacheStorageConfig(**given, extra_config=dict(extra))


def process(hf_config: Any, model_path: str, *, layers: int, heads: int) -> dict[str, Any]:
    """What our backend asks SGLang's process for, as plain objects that a test may change: by group, and `model_config`, `parallel`."""
    return {
        "model_config": SimpleNamespace(
            hf_config=hf_config,
            model_path=model_path,
            revision=None,
            dtype=torch.bfloat16,
            context_len=8192,
            quantization=None,
            num_hidden_layers=layers,
            num_attention_layers=layers,
            get_total_num_kv_heads=lambda: heads,
            is_hybrid_swa=False,
            sliding_window_size=None,
            attention_chunk_size=None,
        ),
        "parallel": SimpleNamespace(nnodes=1),
        "model": SimpleNamespace(kv_cache_dtype="auto", quantization_param_path=None, load_format="auto", download_dir=None),
        "spec": SimpleNamespace(speculative_algorithm=None),
        "lora": SimpleNamespace(enable_lora=False),
        "device": SimpleNamespace(device="cpu"),
        "observability": SimpleNamespace(extra_metric_labels=None),
        "memory": SimpleNamespace(hicache_storage_backend="mooncake", hicache_storage_backend_extra_config='{"kind": "Store"}'),
    }


def pretend(state: dict[str, Any], patch: Any) -> None:
    """Make this process the one that `state` describes. `patch(object, name, value)` is setattr, or undoes itself."""
    patch(compat, "settings", lambda group: state[group])
    patch(compat, "parallel", lambda: state["parallel"])
    patch(compat, "model_config", lambda: state["model_config"])
    patch(compat, "server_args", lambda: SimpleNamespace(port=30000, random_seed=1))
    patch(hooks, "_installed", True)
    patch(hooks, "weights_changed", False)


def mla_pool(*, layout: str, pages: int, page_tokens: int, layers: int, latent: int, rope: int) -> Any:
    """A MLATokenToKVPoolHost, likewise."""
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device = tuple(torch.zeros((page_tokens, 1, latent + rope), dtype=torch.bfloat16) for _ in range(layers))
    info = MLABufferInfo(
        buffers=device,
        data_ptrs=torch.tensor([layer.data_ptr() for layer in device], dtype=torch.uint64),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=page_tokens,
        kv_lora_rank=latent,
        qk_rope_head_dim=rope,
        kv_cache_dim=latent + rope,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(64 << 30):
        return MLATokenToKVPoolHost(
            info,
            1.0,
            0,
            page_tokens,
            layout,
            pin_memory=False,
            device_capacity_tokens=pages * page_tokens,
            start_layer=0,
            end_layer=layers,
            target_layer_num=layers,
        )
