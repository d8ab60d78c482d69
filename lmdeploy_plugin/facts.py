"""What a LMDeploy engine's KV bytes are: its namespace, and the rectangle of a page that one of its workers holds.

LMDeploy gives a connector its cache configuration and nothing of the model. So the facts are gathered where the engine has everything, in
the process that makes its executor and before the executor makes its workers, and travel with the cache configuration to all of them: no
rank reads the weights again, and all ranks agree.

Promises: the namespace is that of any other engine with the same model, page size and KV dtype. Everything LMDeploy could configure that
would make its KV differ from the canonical pages, or that pages of one attention group cannot express, is refused here by name
(UnsupportedError), before anything is stored; with `on_unsupported: "disable"` it becomes `EngineFacts.refused`.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..common.adapter import adapter_fingerprint
from ..common.config import CacheConfig, load_config
from ..common.errors import UnsupportedError
from ..common.identity import ITEM_BYTES, KVNamespace
from ..common.kv_copy import PagedKVView
from ..common.kv_views import lmdeploy_rows
from ..common.weights import Mode
from ..connectors.model import heads_of_rank, local_weights, namespace_of_model

logger = logging.getLogger("mooncake_kv.lmdeploy")

SOURCE = "kv_connector_extra_config"
# Name of the attribute of LMDeploy's KVTransferConfig under which the facts travel.
_ATTRIBUTE = "mooncake_kv_facts"
# LMDeploy picks their frequencies by the longest sequence of the batch, so the KV of a token depends on what comes later.
_ROPE_BY_LENGTH = ("dynamic", "longrope", "su")
# QuantPolicy -> logical dtype, tokens' values in a byte.
_PACKED = {"INT8": ("int8", 1), "INT4": ("int4", 2)}
_FP8 = {"FP8": "fp8_e4m3", "FP8_E5M2": "fp8_e5m2"}


@dataclass(slots=True)
class EngineFacts:
    """Plain data, pickled with the cache configuration. `namespace`: encoded, or empty with the reason in `refused`. `adapters`: LoRA
    adapter name -> fingerprint, '' if it cannot be identified. `stored_dim`: items of a head's vector in K or V as LMDeploy stores them,
    without the `scale_bytes` of its scales and zero points."""

    engine: str
    executor: str
    host: str
    namespace: bytes = b""
    refused: str = "the engine's executor is none that mooncake-kv knows"
    adapters: dict[str, str] = field(default_factory=dict)
    adapter_paths: dict[str, str] = field(default_factory=dict)
    stored_dim: int = 0
    scale_bytes: int = 0


class Kv(NamedTuple):
    """How LMDeploy stores KV: logical dtype, items of a head's vector, bytes of its scales, and who can share it ('' for everybody)."""

    dtype: str
    dim: int
    scale_bytes: int
    variant: str


class Rank(NamedTuple):
    """One worker: the first KV head that it holds, how many, and whether it is the one of its replicas that writes."""

    first_head: int
    heads: int
    writes: bool


def uses_us(cache_config: Any) -> bool:
    """Does this CacheConfig name our connector?"""
    from . import CONNECTOR

    transfer = cache_config.kv_transfer_config
    return transfer is not None and transfer.is_kv_transfer_instance and transfer.kv_connector == CONNECTOR


def config_of(cache_config: Any) -> CacheConfig:
    """Raises ConfigError in one sentence."""
    return load_config(cache_config.kv_transfer_config.kv_connector_extra_config, flag_source=SOURCE)


def prepare(
    cache_config: Any, *, model_path: str | None = None, dist_config: Any = None, distributed_executor_backend: str | None = None
) -> None:
    """In place of LMDeploy's prepare_kv_connector_config, when an engine is made. Raises ConfigError."""
    if model_path is None:
        return
    from . import hooks

    if config_of(cache_config).pool_secret and "pool_secret" in cache_config.kv_transfer_config.kv_connector_extra_config:
        logger.warning("LMDeploy may log what --kv-transfer-config says: give pool_secret in the file of MOONCAKE_CONFIG_PATH instead")
    facts = EngineFacts(uuid.uuid4().hex, distributed_executor_backend or "", socket.gethostname())
    setattr(cache_config.kv_transfer_config, _ATTRIBUTE, facts)
    hooks.install()


def facts_of(cache_config: Any) -> EngineFacts:
    """Raises UnsupportedError if nobody prepared this configuration."""
    facts = getattr(cache_config.kv_transfer_config, _ATTRIBUTE, None)
    if not isinstance(facts, EngineFacts):
        raise UnsupportedError("mooncake-kv's hooks were not in place when LMDeploy made this engine: see `mooncake-kv doctor`")
    return facts


def gather(executor: Any, arguments: Mapping[str, Any]) -> None:
    """Complete the facts of an executor that is being made; `arguments` are those of its constructor. Raises UnsupportedError unless
    `on_unsupported` is "disable"."""
    cache = executor.cache_config
    facts, config = facts_of(cache), config_of(cache)
    try:
        namespace, kv = namespace_of(facts, executor, arguments, config)
    except UnsupportedError as error:
        if config.on_unsupported != "disable":
            raise
        facts.refused = str(error)
        return
    facts.namespace, facts.refused = namespace.encode(), ""
    facts.stored_dim, facts.scale_bytes = kv.dim, kv.scale_bytes
    facts.adapter_paths = {str(name): str(path) for name, path in (arguments.get("adapters") or {}).items()}
    facts.adapters = fingerprints(facts.adapter_paths, config.fingerprint)


def namespace_of(facts: EngineFacts, executor: Any, arguments: Mapping[str, Any], config: CacheConfig) -> tuple[KVNamespace, Kv]:
    """Raises UnsupportedError for what the cache does not serve."""
    from lmdeploy.pytorch.config import override_hf_config
    from lmdeploy.pytorch.transformers import config_from_pretrained

    model, misc, path = executor.model_config, executor.misc_config, str(arguments["model_path"])
    # Read anew: LMDeploy writes into its own what holds for one rank (the KV heads).
    hf_config = config_from_pretrained(path, trust_remote_code=bool(arguments.get("trust_remote_code", False)))
    if misc.hf_overrides:
        override_hf_config(hf_config, misc.hf_overrides)
    refuse_unsupported(facts, executor, hf_config)
    mla = _is_mla(model)
    kv = _stored(model, executor.cache_config, mla)
    total = kv.dim + kv.scale_bytes
    namespace = namespace_of_model(
        config,
        hf_config,
        lambda: local_weights(path, None, None),
        compute_dtype=str(model.dtype),
        max_model_len=0,
        # What an engine quantises while it loads differs between engines by more than rounding.
        quantization=f"lmdeploy {misc.model_format}" if misc.model_format else "",
        load_format="auto",
        page_tokens=config.page_tokens,
        kv_dtype=kv.dtype,
        num_layers=model.num_layers,
        num_kv_heads=1 if mla else model.num_key_value_heads // model.num_replicate_key_value_heads,
        k_head_dim=total,
        v_head_dim=0 if mla else total,
        mla=mla,
        variant=kv.variant,
    )
    return namespace, kv


def refuse_unsupported(facts: EngineFacts, executor: Any, hf_config: Any) -> None:
    """Raises UnsupportedError naming the setting or the property of the model that the cache does not serve."""
    model, cache, misc, dist = executor.model_config, executor.cache_config, executor.misc_config, executor.dist_config
    if facts.executor == "mp":
        _refuse("distributed_executor_backend 'mp', whose workers' reports LMDeploy does not join (use 'ray')")
    if dist.dp > 1:
        _refuse(f"data parallelism within one engine (dp={dist.dp}): start one engine a replica, they share the node")
    if cache.device_type != "cuda":
        _refuse(f"device type {cache.device_type!r}, whose KV layout is not known")
    if cache.num_cpu_blocks > 0:
        _refuse(f"swapping KV to host memory (num_cpu_blocks={cache.num_cpu_blocks})")
    if executor.specdecode_config is not None:
        _refuse(f"speculative decoding with {executor.specdecode_config.method!r}, whose draft layers share the KV cache")
    if misc.memdecode_config is not None:
        _refuse("MemDecode, whose memory model has a KV cache of its own")
    if misc.custom_module_map:
        _refuse(f"modules in the model's place (custom_module_map={misc.custom_module_map!r})")
    if misc.empty_init:
        _refuse("weights that are given at run time (empty_init)")
    if model.model_paradigm != "ar":
        _refuse(f"a model of the paradigm {model.model_paradigm!r}, which changes tokens after their KV was computed")
    if model.states_shapes or model.state_cache_specs or not model.use_standard_kv_cache:
        _refuse("a model with state beside the KV cache (Mamba, linear attention, ...)")
    text = hf_config.get_text_config()
    if (window := model.sliding_window or 0) > 0:
        _refuse(f"sliding window attention (window {window})")
    if any(kind != "full_attention" for kind in getattr(text, "layer_types", None) or ()):
        _refuse(f"layers of different kinds ({', '.join(sorted(set(text.layer_types)))})")
    for name in ("attention_chunk_size", "num_kv_shared_layers"):
        if value := getattr(text, name, None):
            _refuse(f"a model with {name}={value}")
    for rope in (getattr(text, "rope_scaling", None), getattr(text, "rope_parameters", None)):
        kind = (rope or {}).get("rope_type", (rope or {}).get("type", "default"))
        if kind in _ROPE_BY_LENGTH:
            _refuse(f"RoPE of type {kind!r}, which LMDeploy computes by the length of the longest sequence in the batch")
    if model.num_layers != text.num_hidden_layers:
        _refuse(f"{model.num_layers} KV layers for {text.num_hidden_layers} layers of the model")
    if not _is_mla(model) and model.k_head_dim != model.v_head_dim:
        _refuse(f"KV heads of unequal dims (K {model.k_head_dim}, V {model.v_head_dim})")


def rank_of(namespace: KVNamespace, tp_rank: int, tp_size: int) -> Rank:
    """What one rank holds of every layer."""
    if namespace.mla:
        return Rank(0, 1, tp_rank == 0)
    first_head, writes = heads_of_rank(tp_rank, tp_size, namespace.num_kv_heads)
    return Rank(first_head, max(1, namespace.num_kv_heads // tp_size), writes)


def view_of(facts: EngineFacts, namespace: KVNamespace, heads: int, kernel_block: int, kv_caches: Mapping[str, Any]) -> PagedKVView:
    """View of a worker's cache rows, `cache_pool.POOL.row.LAYER` -> uint8 [kernel blocks, row bytes]. Raises UnsupportedError."""
    pools: dict[str, list[Any]] = {}
    for name, row in kv_caches.items():
        pools.setdefault(name.partition(".row.")[0], []).append(row)
    rows = next(iter(pools.values()), [])
    if len(pools) != 1 or len(rows) != namespace.num_layers or any(row.itemsize != 1 or row.ndim != 2 for row in rows):
        sizes = ", ".join(f"{name}: {len(part)} x {tuple(part[0].shape)}" for name, part in pools.items())
        _refuse(f"a KV cache other than one pool of {namespace.num_layers} rows ({sizes[:200]})")
    item = ITEM_BYTES[namespace.kv_dtype]
    return lmdeploy_rows(rows, kernel_block, heads, facts.stored_dim, item, mla=namespace.mla, scale_bytes=facts.scale_bytes)


def same_machine(facts: EngineFacts) -> None:
    """Raises UnsupportedError in a worker that runs on another machine than the scheduler: it has another node."""
    if (host := socket.gethostname()) != facts.host:
        _refuse(f"tensor parallelism over several machines ({facts.host}, {host})")


def fingerprints(paths: Mapping[str, str], mode: Mode) -> dict[str, str]:
    """Of LoRA adapters by name; '' for one that cannot be identified."""
    found = {}
    for name, path in paths.items():
        try:
            found[name] = adapter_fingerprint(Path(path), mode)
        except (OSError, ValueError, UnsupportedError) as error:
            logger.warning("requests with the LoRA adapter %r are served without the cache: %s", name, error)
            found[name] = ""
    return found


def _is_mla(model: Any) -> bool:
    return bool(model.v_head_dim == 0 and model.num_key_value_heads == model.num_replicate_key_value_heads)


def _stored(model: Any, cache: Any, mla: bool) -> Kv:
    """MLA: LMDeploy de-interleaves the RoPE dims when it loads the weights, so the latent is its own."""
    policy = cache.quant_policy.name
    variant = "lmdeploy mla" if mla else ""
    if model.use_mla_fp8_cache:
        _refuse("MLA rows in the format fp8_ds_mla")
    if policy == "NONE":
        return Kv(model.mla_kv_cache_dtype or str(model.dtype).removeprefix("torch."), model.k_head_dim, 0, variant)
    if policy in _FP8:
        return Kv(_FP8[policy], model.k_head_dim, 0, f"{variant or 'lmdeploy'} {_FP8[policy]}")
    if policy not in _PACKED or mla:
        _refuse(f"quant_policy {policy.lower()}{' with MLA' if mla else ''}")
    dtype, values = _PACKED[policy]
    # A scale and a zero point in the model's dtype for each token and head.
    return Kv(dtype, model.k_head_dim // values, 2 * model.dtype.itemsize, f"lmdeploy {dtype} {str(model.dtype).removeprefix('torch.')}")


def _refuse(what: str) -> NoReturn:
    raise UnsupportedError(
        f"mooncake-kv does not serve {what}; start without it, or set on_unsupported to 'disable' to run without the cache."
    )
