"""Model fingerprint: which KV a model computes, as far as files and configuration tell.

Promises:
- Whatever can change KV changes the fingerprint: every key of the engine's effective configuration counts unless it is listed here as one
that cannot, so a key that nobody has thought of leads to a miss and not to another model's KV.
- Spelling does not count: RoPE parameters, head sizes and numbers are brought to one form, so that engines and versions of transformers
(4.57 and 5.19 were compared) that describe the same model differently agree. No name or path of the model goes in.
- Two spellings in one configuration that contradict each other both count.

An engine may change its configuration while it builds the model (vLLM renames DeepSeek's RoPE type): what is known of that is undone
here, but take the fingerprint before the model is built where you can.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from .errors import UnsupportedError
from .weights import Mode, weights_digest

FORMAT = 1

# Ways of loading that read the safetensors files of the folder as they are.
_LOADS_SAFETENSORS = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "runai_streamer", "layered"})
_LOADS_CONSOLIDATED = "mistral"

# Keys that cannot change KV. Everything else counts.
_IRRELEVANT = frozenset(
    key
    for keys in (
        # Names, versions, how and what to call.
        "architectures auto_map transformers_version tokenizer_class name_or_path finetuning_task prefix task_specific_params",
        # The compute dtype is an argument of its own, as the engine has it; lengths and topology are the engine's.
        "dtype torch_dtype use_bfloat16 context_len num_replicate_key_value_heads",
        # The way in and out: special tokens are in the tokens themselves, heads come after the last KV.
        "bad_words_ids begin_suppress_tokens suppress_tokens tie_word_embeddings tie_encoder_decoder is_decoder is_encoder_decoder",
        "add_cross_attention cross_attention_hidden_size id2label label2id num_labels problem_type classifier_from_token image_token_index",
        # Switches of the reference implementation.
        "use_cache return_dict output_attentions output_hidden_states output_router_logits torchscript pruned_heads tf_legacy_loss",
        "chunk_size_feed_forward pretraining_tp gradient_checkpointing attn_implementation",
        # Generation.
        "do_sample early_stopping temperature top_k top_p typical_p num_beams num_beam_groups diversity_penalty length_penalty max_length",
        "min_length repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences output_scores",
        "return_dict_in_generate remove_invalid_values exponential_decay_length_penalty",
        # Training, and draft layers, whose KV is not stored.
        "initializer_range aux_loss_alpha seq_aux router_aux_loss_coef router_jitter_noise num_nextn_predict_layers",
    )
    for key in keys.split()
)
_IRRELEVANT_ENDINGS = ("_token_id", "_token_ids", "dropout", "_pdrop", "dropout_prob")

# Absent means the same as False.
_OFF_BY_DEFAULT = ("attention_bias", "mlp_bias", "language_only", "language_model_only", "encoder_only")
# Absent means the same as head_dim; SGLang fills them in.
_HEAD_DIM_BY_DEFAULT = ("v_head_dim", "swa_head_dim", "swa_v_head_dim")

# The same fact under other names.
_ALIASES = {
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_fraction": "partial_rotary_factor",
    "num_local_experts": "num_experts",
}
_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
# vLLM gives DeepSeek's YaRN names of its own while it builds the model.
_ROPE_TYPES = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn", "deepseek_llama_scaling": "yarn"}
_SCALED_FROM_ORIGINAL = ("llama3", "yarn", "longrope")
_ROPE_DEFAULTS: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 1}
_YARN_DEFAULTS: dict[str, Any] = {"beta_fast": 32, "beta_slow": 1}


def model_fingerprint(
    hf_config: Mapping[str, Any],
    weights: Path,
    *,
    compute_dtype: str,
    max_model_len: int,
    quantization: str = "",
    load_format: str = "auto",
    mode: Mode = "sample",
    model_id: str = "",
    facts: Mapping[str, Any] | None = None,
    cache_dir: Path | None = None,
) -> str:
    """64 hex digits.

    - `hf_config`: the effective configuration after all overrides, as `config.to_dict()` gives it, with nested configurations.
    - `weights`: the local folder. Not read with `model_id`: then the operator vouches for them.
    - `compute_dtype`: what the engine computes in, such as "bfloat16" or "torch.bfloat16".
    - `max_model_len`: the longest sequence the engine allows, in tokens. Counts only where RoPE depends on it.
    - `quantization`: what the engine quantises itself while loading; "" if it takes the files as they are (their own quantisation is in
      `hf_config`).
    - `facts`: more that changes KV.

    Raises UnsupportedError where weights or configuration cannot be identified.
    """
    if model_id:
        identity = f"model_id {model_id}"
    elif load_format not in _LOADS_SAFETENSORS and load_format != _LOADS_CONSOLIDATED:
        raise UnsupportedError(
            f"weights loaded with load format {load_format!r} cannot be identified: set model_id to your own name for these weights"
        )
    else:
        identity = weights_digest(weights, mode, cache_dir=cache_dir, consolidated=load_format == _LOADS_CONSOLIDATED).hex()
    try:
        config = config_facts(hf_config)
    except (TypeError, RecursionError) as error:  # a list where a number belongs, and the like
        raise UnsupportedError(f"the model's configuration cannot be identified: {error}") from None
    everything = {
        "format": FORMAT,
        "config": config,
        "max_model_len": max_model_len if _depends_on_length(config) else 0,
        "compute_dtype": _DTYPES.get(dtype := compute_dtype.removeprefix("torch."), dtype),
        "quantization": quantization,
        "facts": _plain(facts or {}, "facts"),
        "weights": identity,
    }
    return sha256(json.dumps(everything, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def config_facts(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration can change KV, in one spelling for all engines: plain JSON values."""
    facts: dict[str, Any] = {}
    for name, value in hf_config.items():
        key = str(name)
        if value is None or key.startswith("_") or key in _IRRELEVANT or key.endswith(_IRRELEVANT_ENDINGS):
            continue
        if key.endswith("_config") and isinstance(nested := _as_mapping(value), Mapping) and "model_type" in nested:
            facts[key] = config_facts(nested)
        else:
            _merge(facts, {_ALIASES.get(key, key): _plain(value, key)}, key)
    _unify_rope(facts)
    _unify_sizes(facts)
    return facts


def _merge(target: dict[str, Any], more: Mapping[str, Any], source: str) -> None:
    """Add what is not there; what contradicts what is there is kept beside it."""
    for key, value in more.items():
        if target.setdefault(key, value) != value:
            target[f"{key} in {source}"] = value


def _unify_rope(facts: dict[str, Any]) -> None:
    """Collect all of RoPE under `rope`: one set of parameters, or one for each type of layers."""
    found = {key: facts.pop(key, {}) for key in ("rope_parameters", "rope_scaling")}
    if not all(isinstance(value, dict) for value in found.values()):
        raise UnsupportedError("the model's rope_parameters or rope_scaling is no mapping")
    outer = {key: facts.pop(key) for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings") if key in facts}
    local = {"rope_theta": facts.pop("rope_local_base_freq")} if "rope_local_base_freq" in facts else {}
    limit = facts.get("max_position_embeddings")
    by_layer = {key: value for key, value in found["rope_parameters"].items() if isinstance(value, dict)}
    shared = {key: value for key, value in found["rope_parameters"].items() if key not in by_layer}
    _merge(shared, found["rope_scaling"], "rope_scaling")
    if local and not by_layer:  # Gemma 3 before transformers 5
        by_layer = {"full_attention": {}, "sliding_attention": {}}
    if by_layer:
        # A base for sliding layers says that what stands outside is meant for the others.
        facts["rope"] = {
            layer: _one_rope(limit, own, local) if local and layer == "sliding_attention" else _one_rope(limit, own, shared, outer)
            for layer, own in by_layer.items()
        }
    else:
        facts["rope"] = _one_rope(limit, shared, outer)


def _one_rope(limit: object, *sources: dict[str, Any]) -> dict[str, Any]:
    """One set of RoPE parameters, from the most to the least specific source, with defaults made explicit."""
    rope: dict[str, Any] = {}
    for rank, source in enumerate(sources):
        for key, value in source.items():
            if key in ("rope_type", "type"):
                _merge(rope, {"rope_type": _ROPE_TYPES.get(value, value)}, f"{key} {rank}")
            else:
                _merge(rope, {key: value}, str(rank))
    defaults = dict(_ROPE_DEFAULTS)
    if rope.get("rope_type") == "yarn":
        defaults |= _YARN_DEFAULTS
    if rope.get("rope_type") in _SCALED_FROM_ORIGINAL and limit is not None:
        defaults["original_max_position_embeddings"] = limit
    return defaults | rope


def _unify_sizes(facts: dict[str, Any]) -> None:
    """Make explicit what follows from other sizes, and drop switches that are off."""
    heads, hidden = facts.get("num_attention_heads"), facts.get("hidden_size")
    if isinstance(heads, int) and heads > 0:
        facts.setdefault("num_key_value_heads", heads)
        if isinstance(hidden, int):
            facts.setdefault("head_dim", hidden // heads)
    if facts.get("qk_head_dim") == facts.get("qk_nope_head_dim", 0) + facts.get("qk_rope_head_dim", 0):
        del facts["qk_head_dim"]
    if facts.get("use_sliding_window") is False or not facts.get("sliding_window"):
        for key in ("use_sliding_window", "sliding_window", "max_window_layers"):
            facts.pop(key, None)
    if all(kind == "full_attention" for kind in facts.get("layer_types", ())):
        facts.pop("layer_types", None)
    for keys, default in ((_OFF_BY_DEFAULT, False), (_HEAD_DIM_BY_DEFAULT, facts.get("head_dim"))):
        for key in keys:
            if facts.get(key) == default:
                facts.pop(key, None)


def _depends_on_length(facts: Mapping[str, Any]) -> bool:
    """Whether the longest sequence that an engine allows changes its RoPE: LongRoPE has one set of factors for short ones, one for long."""
    return '"longrope"' in json.dumps(facts)


def _as_mapping(value: object) -> object:
    """A nested configuration object as its mapping, anything else as it is."""
    return value.to_dict() if hasattr(value, "to_dict") else value


def _plain(value: object, key: str) -> Any:
    """JSON values in one form: numbers that are equal are written alike, mappings lose entries that are None."""
    value = _as_mapping(value)
    if isinstance(value, enum.Enum):
        return _plain(value.value, key)
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return repr(value)
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {str(name): _plain(item, key) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item, key) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item, key) for item in value), key=repr)
    if type(value).__module__ == "torch":  # a dtype
        return str(value).removeprefix("torch.")
    raise UnsupportedError(f"the model's configuration key {key!r} holds a {type(value).__name__}, so the model cannot be identified")
