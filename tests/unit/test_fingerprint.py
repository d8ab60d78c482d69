"""Fingerprint of configurations: what changes KV counts, spelling does not."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_kv.common import fingerprint as module
from mooncake_kv.common.errors import UnsupportedError
from mooncake_kv.common.fingerprint import config_facts, model_fingerprint

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "_name_or_path": "some/where",
    "transformers_version": "4.57.1",
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 2048}


def fingerprint(config: Mapping[str, Any], **more: Any) -> str:
    arguments: dict[str, Any] = {"compute_dtype": "bfloat16", "max_model_len": 4096, "model_id": "m"} | more
    return model_fingerprint(config, Path("unused"), **arguments)


def without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


# ---- the same model, spelled differently ---------------------------------------------------------------------------------------

BARE = without(LLAMA, "rope_theta", "rope_scaling")
SAME: dict[str, list[dict[str, Any]]] = {
    "default": [
        LLAMA,
        without(LLAMA, "rope_scaling"),
        BARE | {"rope_theta": 500000},
        BARE | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        BARE | {"rope_parameters": {"rope_theta": 500000.0}},
        BARE | {"rope_theta": 500000.0, "rope_parameters": {"rope_theta": 500000, "type": "default", "factor": None}},
        BARE | {"rope_theta": 500000.0, "partial_rotary_factor": 1.0},
        BARE | {"rotary_emb_base": 500000, "rotary_pct": 1},
        LLAMA | {"rope_scaling": {"type": "default"}},
    ],
    "no theta": [BARE, BARE | {"rope_theta": 10000.0}, BARE | {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}}],
    "linear": [
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2}},
        LLAMA | {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2}},
        BARE | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "linear", "factor": 2.0}},
    ],
    "yarn": [
        LLAMA | {"rope_scaling": {"type": "yarn", **YARN}},
        LLAMA | {"rope_scaling": {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1, "attention_factor": None, **YARN}},
        BARE | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "yarn", **YARN}},
        BARE | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "deepseek_yarn", **YARN}},
    ],
    "yarn from the maximum": [
        LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}},
    ],
    "longrope": [
        LLAMA | {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.5]}, "original_max_position_embeddings": 4096},
        LLAMA
        | {"rope_scaling": {"type": "longrope", "short_factor": (1,), "long_factor": (2.5,), "original_max_position_embeddings": 4096}},
        BARE
        | {
            "original_max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_theta": 500000,
                "rope_type": "longrope",
                "short_factor": [1.0],
                "long_factor": [2.5],
                "original_max_position_embeddings": 4096,
            },
        },
    ],
    "partial": [
        LLAMA | {"partial_rotary_factor": 0.25},
        LLAMA | {"rotary_pct": 0.25},
        BARE | {"rope_parameters": {"rope_theta": 500000.0, "partial_rotary_factor": 0.25}},
        BARE | {"partial_rotary_factor": 0.25, "rope_parameters": {"rope_theta": 500000.0, "partial_rotary_factor": 0.25}},
    ],
    "mrope": [
        LLAMA | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        LLAMA | {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]}},
        BARE | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default", "mrope_section": [16, 24, 24]}},
    ],
    "two ropes": [  # Gemma 3 as transformers 4 and 5 write it
        LLAMA | {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        BARE
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            }
        },
    ],
    "no sliding window": [
        LLAMA,
        LLAMA | {"sliding_window": None},
        LLAMA | {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
        LLAMA | {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 36},
        LLAMA | {"layer_types": ["full_attention"] * 4},
    ],
    "sizes": [
        LLAMA,
        LLAMA | {"head_dim": 32},
        LLAMA | {"head_dim": None},
        LLAMA | {"head_dim": 32, "v_head_dim": 32, "swa_head_dim": 32, "swa_v_head_dim": 32, "context_len": 100},  # SGLang
        LLAMA | {"num_replicate_key_value_heads": 2},  # LMDeploy
    ],
    "all heads": [without(LLAMA, "num_key_value_heads"), LLAMA | {"num_key_value_heads": 8}],
    "names": [
        LLAMA,
        LLAMA | {"_name_or_path": "x", "transformers_version": "5", "architectures": None, "dtype": "float16", "torch_dtype": None},
        LLAMA | {"_attn_implementation": "sdpa", "use_cache": False, "pad_token_id": 7, "attention_dropout": 0.1, "resid_pdrop": 0.1},
        without(
            LLAMA, "_name_or_path", "transformers_version", "architectures", "bos_token_id", "eos_token_id", "attention_bias", "use_cache"
        ),
        dict(reversed(LLAMA.items())),
    ],
}


@pytest.mark.parametrize("name", SAME)
def test_spelling_does_not_count(name: str) -> None:
    first, *others = SAME[name]
    for other in others:
        assert config_facts(other) == config_facts(first)
        assert fingerprint(other) == fingerprint(first)


def test_these_models_all_differ() -> None:
    different = [name for name in SAME if SAME[name][0] is not LLAMA] + ["default"]
    assert len({fingerprint(SAME[name][0]) for name in different}) == len(different) >= 9


# ---- other models ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 500001.0},
        {"rope_theta": 1e6},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 16}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "yarn", **YARN, "mscale": 0.7}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"partial_rotary_factor": 0.5},
        {"num_hidden_layers": 3},
        {"num_key_value_heads": 4},
        {"head_dim": 64},
        {"v_head_dim": 64},
        {"max_position_embeddings": 4096},
        {"rms_norm_eps": 1e-6},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"sliding_window": 4096},
        {"sliding_window": 4096, "use_sliding_window": True},
        {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
        {"attn_logit_softcapping": 50.0},
        {"query_pre_attn_scalar": 224},
        {"attention_multiplier": 0.5},
        {"qk_norm": True},
        {"use_qk_norm": False},
        {"model_type": "mistral"},
        {"quantization_config": {"quant_method": "fp8"}},
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {"something_new": 0},
        {"something_new": False},
        {"nested_config": {"a": 1}},
        {"vision_config": {"model_type": "siglip", "image_size": 224}},
    ],
    ids=str,
)
def test_what_changes_kv_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert fingerprint(LLAMA | change) != fingerprint(LLAMA)


@given(
    st.text("abcdefghij", min_size=1, max_size=12).map(lambda name: f"x_{name}"),
    st.one_of(st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers(), min_size=1), st.just({"a": {"b": [1.5]}})),
)
def test_a_key_that_nobody_has_thought_of_counts(key: str, value: Any) -> None:
    assert fingerprint(LLAMA | {key: value}) != fingerprint(LLAMA)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c"]), st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.just(0.5), st.just("a")))
)
def test_unequal_facts_never_give_one_fingerprint(extra: dict[str, Any]) -> None:
    plain = {key: value for key, value in extra.items() if value is not None}
    assert (fingerprint(LLAMA | extra) == fingerprint(LLAMA)) == (not plain)
    assert fingerprint(LLAMA | extra) == fingerprint(LLAMA | plain)


def test_two_spellings_that_contradict_each_other_both_count() -> None:
    """An override that reaches one spelling only must not disappear behind the other."""
    both = BARE | {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 500000.0}}
    seen = {fingerprint(both), fingerprint(LLAMA), fingerprint(LLAMA | {"rope_theta": 1e6})}
    seen.add(fingerprint(LLAMA | {"rope_scaling": {"type": "yarn", "rope_type": "linear", **YARN}}))
    seen.add(fingerprint(LLAMA | {"rope_scaling": {"type": "yarn", **YARN}}))
    seen.add(fingerprint(LLAMA | {"rope_scaling": {"type": "linear", **YARN}}))
    seen.add(fingerprint(LLAMA | {"rotary_emb_base": 1e6}))
    seen.add(fingerprint(LLAMA | {"rope_scaling": {"type": "linear", **YARN}, "rope_parameters": {"type": "yarn", **YARN}}))
    assert len(seen) == 8


def test_facts_of_the_engine_count() -> None:
    base = fingerprint(LLAMA)
    assert fingerprint(LLAMA, compute_dtype="torch.bfloat16") == base
    assert fingerprint(LLAMA, compute_dtype="half") == fingerprint(LLAMA, compute_dtype="torch.float16")
    seen = {
        base,
        fingerprint(LLAMA, compute_dtype="float16"),
        fingerprint(LLAMA, quantization="fp8"),
        fingerprint(LLAMA, facts={"a": 1}),
        fingerprint(LLAMA, facts={"a": 2}),
        fingerprint(LLAMA, model_id="n"),
    }
    assert len(seen) == 6
    assert fingerprint(LLAMA, facts={"a": None}) == fingerprint(LLAMA, facts={}) == base


def test_the_longest_sequence_counts_only_where_rope_depends_on_it() -> None:
    assert fingerprint(LLAMA, max_model_len=100) == fingerprint(LLAMA, max_model_len=8000)
    config = SAME["longrope"][0]
    assert fingerprint(config, max_model_len=100) != fingerprint(config, max_model_len=8000)
    nested = {"model_type": "vlm", "text_config": config}
    assert fingerprint(nested, max_model_len=100) != fingerprint(nested, max_model_len=8000)


# ---- forms in which configurations come --------------------------------------------------------------------------------------------


class Nested:
    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return self.values


class Method(enum.Enum):
    FP8 = "fp8"


def test_nested_configurations_are_canonical_too() -> None:
    base = {"model_type": "vlm", "text_config": LLAMA}
    assert config_facts({"model_type": "vlm", "text_config": Nested(SAME["default"][3])}) == config_facts(base)
    assert fingerprint({"model_type": "vlm", "text_config": LLAMA | {"rope_theta": 1.0}}) != fingerprint(base)
    quantized = LLAMA | {"quantization_config": {"quant_method": "fp8", "bits": None}}
    assert config_facts(LLAMA | {"quantization_config": Nested({"quant_method": Method.FP8})}) == config_facts(quantized)


def test_dtypes_are_written_by_name() -> None:
    torch = pytest.importorskip("torch")
    assert config_facts(LLAMA | {"x_dtype": torch.float16}) == config_facts(LLAMA | {"x_dtype": "float16"})
    assert fingerprint(LLAMA | {"x_dtype": torch.float16}) != fingerprint(LLAMA | {"x_dtype": torch.bfloat16})


def test_what_cannot_be_written_down_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="'x' holds a object"):
        fingerprint(LLAMA | {"x": object()})
    with pytest.raises(UnsupportedError, match="no mapping"):
        fingerprint(LLAMA | {"rope_scaling": "yarn"})
    for odd in ({"layer_types": 5}, {"rope_scaling": {"type": ["yarn"]}}, {"qk_nope_head_dim": "64", "qk_rope_head_dim": 32}):
        with pytest.raises(UnsupportedError, match=r"^the model's configuration cannot be identified"):
            fingerprint(LLAMA | odd)


@pytest.mark.parametrize("load_format", ["dummy", "gguf", "pt", "bitsandbytes", "sharded_state", "tensorizer"])
def test_other_ways_of_loading_need_a_model_id(load_format: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=f"{load_format}.*model_id"):
        model_fingerprint(LLAMA, tmp_path, compute_dtype="bfloat16", max_model_len=1, load_format=load_format)
    assert fingerprint(LLAMA, load_format=load_format) == fingerprint(LLAMA)


def test_no_listed_key_is_one_that_changes_kv() -> None:
    assert not module._IRRELEVANT & {
        "model_type",
        "sliding_window",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "quantization_config",
        "is_causal",
    }
