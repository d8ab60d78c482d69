"""vLLM's KV tensors as a PagedKVView, and the one hook into its KV cache manager.

Promises: the CPU layout is asked of vLLM itself, never guessed; a layout that no view knows is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..common import kv_copy, kv_views
from ..common.errors import UnsupportedError
from . import compat


def view_of(vllm_config: Any, kv_caches: dict[str, torch.Tensor]) -> kv_copy.PagedKVView:
    """View of one worker's tensors: per layer, logically [blocks, KV heads, tokens, K dim + V dim]. Raises UnsupportedError."""
    from vllm.model_executor.models.utils import extract_layer_index

    names = sorted(kv_caches, key=extract_layer_index)
    tensors = [kv_caches[name] for name in names]
    first = tensors[0]
    if any(t.shape != first.shape or t.dtype != first.dtype or t.device != first.device for t in tensors):
        raise UnsupportedError(
            f"mooncake-kv does not serve layers whose KV tensors differ in shape, dtype or device ({', '.join(names[:4])}, ...)"
        )
    if len({t.data_ptr() for t in tensors}) != len(tensors):
        raise UnsupportedError("mooncake-kv does not serve layers that share a KV tensor")
    model = vllm_config.model_config
    if first.device.type == "cpu" and not model.use_mla:
        compat.require(compat.CPU_LAYOUT)
        from vllm.v1.attention.backends import cpu_attn

        block, head_dim = first.shape[2], first.shape[3] // 2
        # The model's dtype, as vLLM asks; with an fp8 cache the tensors' own dtype would give another answer.
        isa = cpu_attn._get_attn_isa(model.dtype, block, head_dim, vllm_config.cache_config.cache_dtype)
        return kv_views.vllm_cpu(tensors, block, isa)
    return kv_views.vllm_gpu(tensors, first.shape[2], mla=model.use_mla)


def skip_local_match(manager: Any, blind_ask: Callable[[str], bool]) -> None:
    """Spare vLLM the local prefix match of a waiting request while the answer will be "ask again" whatever it finds."""
    original = manager.get_computed_blocks

    def get_computed_blocks(request: Any) -> Any:
        if blind_ask(request.request_id):
            return manager.empty_kv_cache_blocks, 0, 0
        return original(request)

    manager.get_computed_blocks = get_computed_blocks
