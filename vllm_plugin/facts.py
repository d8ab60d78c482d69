"""What a vLLM engine's KV bytes are: its namespace, and the rectangle of a page that one of its workers holds.

Promises: everything vLLM could configure that would make its KV differ from the canonical pages, or that a paged cache of one attention
group cannot express, is refused here by name (UnsupportedError), before anything is stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..common.config import CacheConfig
from ..common.errors import UnsupportedError
from ..common.identity import KVNamespace
from ..connectors.model import heads_of_rank, local_weights, namespace_of_model

# Drafting methods that add no layers to the KV cache.
DRAFTERS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")
_FP8 = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}


class Rank(NamedTuple):
    """One worker: the first layer and KV head it holds, and whether it is the one of its replicas that writes."""

    first_layer: int
    first_head: int
    writes: bool


def namespace_of(vllm_config: Any, kv_cache_config: Any, config: CacheConfig) -> KVNamespace:
    """Raises UnsupportedError for what the cache does not serve."""
    refuse_unsupported(vllm_config, kv_cache_config)
    model = vllm_config.model_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    kv_dtype, variant = _kv_dtype(vllm_config, spec)
    mla = bool(model.use_mla)
    load = vllm_config.load_config
    return namespace_of_model(
        config,
        model.hf_config,
        lambda: local_weights(model.model, model.revision, load.download_dir),
        compute_dtype=str(model.dtype),
        max_model_len=model.max_model_len,
        quantization=model.quantization or "",
        load_format=str(load.load_format),
        page_tokens=config.page_tokens,
        kv_dtype=kv_dtype,
        num_layers=model.get_total_num_hidden_layers(),
        num_kv_heads=1 if mla else model.get_total_num_kv_heads(),
        k_head_dim=spec.head_size,
        v_head_dim=0 if mla else spec.head_size_v,
        mla=mla,
        variant=variant,
    )


def rank_of(vllm_config: Any, namespace: KVNamespace) -> Rank:
    """The rectangle of this worker process (uses the rank in its parallel configuration)."""
    parallel = vllm_config.parallel_config
    first_layer, _ = vllm_config.model_config.get_layers_start_end_indices(parallel)
    tp_size = parallel.tensor_parallel_size
    first_head, writes = heads_of_rank(parallel.rank % tp_size, tp_size, namespace.num_kv_heads)
    return Rank(first_layer, first_head, writes)


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises UnsupportedError naming the setting or the property of the model that the cache does not serve."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            _refuse(f"context parallelism ({name}={getattr(parallel, name)})")
    if getattr(parallel, "nnodes", 1) > 1:
        _refuse(f"tensor or pipeline parallelism over several machines (nnodes={parallel.nnodes})")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in DRAFTERS_WITHOUT_KV:
        _refuse(f"speculative decoding with method {speculative.method!r}, whose draft layers share the KV cache")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        _refuse(f"a model with {len(groups)} KV cache groups ({kinds}): sliding windows, Mamba and cross attention are not served")
    spec = groups[0].kv_cache_spec
    if (window := getattr(spec, "sliding_window", None)) is not None:
        _refuse(f"sliding window attention (window {window})")
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        _refuse(f"KV cache of kind {type(spec).__name__}")
    if spec.attention_chunk_size is not None:
        _refuse(f"chunked local attention (chunk {spec.attention_chunk_size})")
    if spec.non_causal:
        _refuse("attention that is not causal, where a page depends on later tokens")
    if spec.tokens_per_state != 1:
        _refuse(f"compressed KV (tokens_per_state={spec.tokens_per_state})")
    model = vllm_config.model_config
    if not model.is_prefix_caching_supported:
        pooling = getattr(model.pooler_config, "seq_pooling_type", None)
        _refuse(f"a model for which vLLM supports no prefix caching (pooling {pooling}): its answer needs every token computed")
    layers = model.get_num_layers(parallel)
    if len(groups[0].layer_names) != layers:
        _refuse(f"layers that share KV, or extra ones ({len(groups[0].layer_names)} KV layers for {layers} layers of the model)")


def _refuse(what: str) -> None:
    raise UnsupportedError(
        f"mooncake-kv does not serve {what}; start without it, or set on_unsupported to 'disable' to run without the cache."
    )


def _kv_dtype(vllm_config: Any, spec: Any) -> tuple[str, str]:
    """Logical dtype of the KV cache, and the variant that keeps KV with scales of vLLM's own apart from everybody else's."""
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype in ("auto", "bfloat16", "float16", "float32"):
        return str(spec.dtype).removeprefix("torch."), ""
    if cache_dtype in _FP8:
        return _FP8[cache_dtype], f"vllm {cache_dtype} {spec.kv_quant_mode.name.lower()}"
    _refuse(f"kv_cache_dtype {cache_dtype!r}")
    raise AssertionError
