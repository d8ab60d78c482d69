"""What a SGLang engine's KV bytes are: its namespace, and the rectangle of a page that one of its ranks holds.

Promises: the namespace is that of any other engine with the same model, page size and KV dtype. Everything SGLang could configure that
would make its KV differ from the canonical pages, or that pages of one attention pool cannot express, is refused here by name
(UnsupportedError), before anything is stored.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..common.config import CacheConfig
from ..common.errors import ConfigError, UnsupportedError
from ..common.identity import KVNamespace
from ..common.node.protocol import Rectangle
from ..connectors.model import heads_of_rank, local_weights, namespace_of_model
from . import FLAG, compat, hooks

DEFAULT_PAGE = 64
# Drafting methods that add no layers to the KV cache.
DRAFTERS_WITHOUT_KV = (None, "NGRAM")
POOLS = {"MHATokenToKVPoolHost": False, "MLATokenToKVPoolHost": True}  # class -> is it MLA
_DTYPES = {
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float32": "float32",
    "torch.float8_e4m3fn": "fp8_e4m3",
    "torch.float8_e5m2": "fp8_e5m2",
}


class Rank(NamedTuple):
    """One rank: what it holds of a page, and whether it is the one of its replicas that writes."""

    rectangle: Rectangle
    writes: bool


def namespace_of(pool: Any, storage_config: Any, config: CacheConfig) -> KVNamespace:
    """`pool` is the host pool, `storage_config` SGLang's HiCacheStorageConfig. Raises UnsupportedError for what the cache does not serve,
    ConfigError where the page size was configured otherwise."""
    model = compat.model_config()
    refuse_unsupported(pool, storage_config, model)
    if hooks.weights_changed:
        _refuse("weights that were changed at run time")
    if config.sources.get("page_tokens", "default") != "default" and config.page_tokens != pool.page_size:
        raise ConfigError(
            f"page_tokens is {config.page_tokens} ({config.sources['page_tokens']}), but SGLang's pages have {pool.page_size} tokens: "
            f"start it with --page-size {config.page_tokens}"
        )
    chosen = compat.settings("model")
    kv_dtype, variant = _kv_dtype(pool, chosen)
    mla = POOLS[type(pool).__name__]
    return namespace_of_model(
        config,
        model.hf_config,
        lambda: local_weights(model.model_path, model.revision, chosen.download_dir),
        compute_dtype=str(model.dtype),
        max_model_len=model.context_len,
        # What an engine quantises while it loads differs between engines by more than rounding.
        quantization=f"sglang {model.quantization}" if model.quantization else "",
        load_format=str(chosen.load_format),
        page_tokens=pool.page_size,
        kv_dtype=kv_dtype,
        num_layers=model.num_hidden_layers,
        num_kv_heads=1 if mla else model.get_total_num_kv_heads(),
        k_head_dim=pool.kv_cache_dim if mla else pool.head_dim,
        v_head_dim=0 if mla else pool.v_head_dim,
        mla=mla,
        variant=variant,
    )


def rank_of(pool: Any, storage_config: Any, namespace: KVNamespace) -> Rank:
    """What this process holds of each page. Raises UnsupportedError where the pool does not have the size that follows from the ranks."""
    first_layer = pool.start_layer if storage_config.pp_size > 1 else 0
    if namespace.mla:
        heads, first_head, writes = 1, 0, storage_config.is_storage_writer
    else:
        heads = pool.head_num
        first_head, writes = heads_of_rank(storage_config.tp_rank, storage_config.tp_size, namespace.num_kv_heads)
    rectangle = Rectangle(first_layer, first_layer + pool.layer_num, first_head, first_head + heads)
    whole = storage_config.pp_size == 1 and storage_config.tp_size == 1
    expected = max(1, namespace.num_kv_heads // storage_config.tp_size)
    if rectangle.last_layer > namespace.num_layers or heads != expected or (whole and pool.layer_num != namespace.num_layers):
        _refuse(
            f"a host pool of {pool.layer_num} layers and {heads} KV heads on rank {storage_config.tp_rank} of {storage_config.tp_size} for "
            f"a model of {namespace.num_layers} layers and {namespace.num_kv_heads} KV heads"
        )
    return Rank(rectangle, writes)


def refuse_unsupported(pool: Any, storage_config: Any, model: Any) -> None:
    """Raises UnsupportedError naming the setting or the property of the model that the cache does not serve."""
    kind = type(pool).__name__
    if kind not in POOLS:
        _refuse(f"a host pool of kind {kind}")
    if pool.kv_buffer is None or getattr(pool, "_is_dummy", False):
        _refuse("a host pool without memory")
    if pool.storage_format_tag is not None:
        _refuse(f"the host page format {pool.storage_format_tag!r}")
    if pool.layer_num != pool.target_layer_num:
        _refuse(f"{pool.layer_num - pool.target_layer_num} draft layers in the KV pool")
    if POOLS[kind]:
        if pool.dsa_kv_cache_store_fp8 or pool.kv_cache_dim != pool.kv_lora_rank + pool.qk_rope_head_dim:
            _refuse(f"MLA rows of {pool.kv_cache_dim} items, which SGLang packs in a format of its own")
        if pool._native_buffers is not None:
            _refuse("MLA with separate latent and RoPE buffers")
    for name in ("attn_cp_size", "dcp_size"):
        if getattr(storage_config, name) > 1:
            _refuse(f"context parallelism ({name}={getattr(storage_config, name)})")
    if (nodes := compat.parallel().nnodes) > 1:
        _refuse(f"parallelism over several machines (nnodes={nodes})")
    if (algorithm := compat.settings("spec").speculative_algorithm) not in DRAFTERS_WITHOUT_KV:
        _refuse(f"speculative decoding with {algorithm}, whose draft layers share the KV cache")
    if model.is_hybrid_swa or model.sliding_window_size:
        _refuse(f"sliding window attention (window {model.sliding_window_size})")
    if model.attention_chunk_size is not None:
        _refuse(f"chunked local attention (chunk {model.attention_chunk_size})")
    if model.num_attention_layers != model.num_hidden_layers:
        _refuse(f"{model.num_attention_layers} KV layers for {model.num_hidden_layers} layers of the model")


def refuse_side_pool(name: str) -> NoReturn:
    _refuse(f"the side pool {name!r} (sliding window, Mamba, indexer or draft state beside the KV)")


def notes(namespace: KVNamespace, config: CacheConfig) -> list[str]:
    """What a user should know at start: whom this engine shares with, and what has no effect here."""
    found = []
    for key in ("save_decode", "load_step_bytes", "credits"):
        if (source := config.sources.get(key, "default")) != "default":
            found.append(f"{key} ({source}) has no effect in SGLang")
    if namespace.page_tokens != DEFAULT_PAGE:
        found.append(
            f"pages have {namespace.page_tokens} tokens: they are shared with engines of the same page size only; elsewhere the default is "
            f"{DEFAULT_PAGE} (--page-size {DEFAULT_PAGE})"
        )
    if namespace.variant:
        found.append(f"KV of dtype {namespace.kv_dtype} is shared with SGLang engines of the same settings only")
    if compat.settings("lora").enable_lora:
        found.append(
            "KV of LoRA adapters given at start is shared with SGLang engines that give the same adapter the same name and path, of "
            "adapters loaded later with nobody; vLLM and LMDeploy name adapters in another way"
        )
    return found


def _kv_dtype(pool: Any, chosen: Any) -> tuple[str, str]:
    """Logical dtype of the KV, and the variant that keeps KV with scales of SGLang's own apart from everybody else's."""
    asked = str(chosen.kv_cache_dtype)
    dtype = _DTYPES.get(str(pool.dtype))
    if str(pool.dtype) == "torch.uint8" and asked in ("fp8_e4m3", "fp8_e5m2"):  # stored as bytes
        dtype = asked
    if dtype is None:
        _refuse(f"KV of dtype {pool.dtype} (kv_cache_dtype {asked!r})")
    if not dtype.startswith("fp8"):
        return dtype, ""
    scales = chosen.quantization_param_path
    digest = sha256(Path(scales).read_bytes()).hexdigest()[:16] if scales else "none"
    return dtype, f"sglang {dtype} scales {digest}"


def _refuse(what: str) -> NoReturn:
    raise UnsupportedError(
        f"mooncake-kv does not serve {what}; start without it, or set on_unsupported to 'disable' in {FLAG} to run without the cache."
    )
