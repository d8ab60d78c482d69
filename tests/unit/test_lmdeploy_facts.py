"""Whose KV a LMDeploy engine's KV is, what is refused by name, and how quantised rows become pages."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lmdeploy.messages import KVTransferConfig, QuantPolicy
from lmdeploy.pytorch.config import CacheConfig, DistConfig, MiscConfig, ModelConfig
from transformers import AutoConfig

from mooncake_kv.common.config import load_config
from mooncake_kv.common.errors import ConfigError, UnsupportedError
from mooncake_kv.common.identity import KVNamespace
from mooncake_kv.common.page import PageLayout
from mooncake_kv.connectors.model import namespace_of_model
from mooncake_kv.lmdeploy_plugin import facts
from mooncake_kv.lmdeploy_plugin.facts import EngineFacts
from tests.models import TINY_LLAMA, generated_llama

DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "vocab_size": 1000,
}


@pytest.fixture(autouse=True)
def bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; without one LMDeploy would compute in fp16, and ask the driver about MLA."""
    monkeypatch.setattr("lmdeploy.pytorch.config.is_bf16_supported", lambda *_: True)
    monkeypatch.setattr("lmdeploy.pytorch.configurations.deepseek_v2.flash_mla_available", lambda: True)


def executor(folder: Path, *, tp: int = 1, dtype: str = "auto", settings: dict[str, Any] | None = None, **cache: Any) -> Any:
    """What LMDeploy's executor is when its base class has been made."""
    dist = DistConfig(tp=tp)
    transfer = KVTransferConfig("mooncake", "kv_both", settings or {})
    cache_config = CacheConfig(max_batches=8, block_size=64, num_cpu_blocks=0, num_gpu_blocks=8, kv_transfer_config=transfer)
    for name, value in cache.items():
        setattr(cache_config, name, value)
    setattr(transfer, facts._ATTRIBUTE, EngineFacts("e", "uni", "here"))
    return SimpleNamespace(
        model_path=str(folder),
        model_config=ModelConfig.from_pretrained(str(folder), dtype=dtype, dist_config=dist),
        cache_config=cache_config,
        misc_config=MiscConfig(),
        dist_config=dist,
        specdecode_config=None,
    )


def gathered(made: Any, **arguments: Any) -> tuple[KVNamespace, EngineFacts]:
    facts.gather(made, {"model_path": made.model_path, **arguments})
    found = pickle.loads(pickle.dumps(facts.facts_of(made.cache_config)))
    return KVNamespace.decode(found.namespace), found


def namespace_elsewhere(folder: Path, dtype: str = "bfloat16") -> KVNamespace:
    """The namespace that another engine's plugin makes of this model."""
    return namespace_of_model(
        load_config({}),
        AutoConfig.from_pretrained(folder),
        lambda: folder,
        compute_dtype=dtype,
        max_model_len=4096,
        quantization="",
        load_format="auto",
        page_tokens=64,
        kv_dtype=dtype,
        num_layers=TINY_LLAMA.layers,
        num_kv_heads=TINY_LLAMA.kv_heads,
        k_head_dim=TINY_LLAMA.head_dim,
        v_head_dim=TINY_LLAMA.head_dim,
        mla=False,
        variant="",
    )


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_namespace_is_that_of_other_engines_whatever_the_ranks(tp: int) -> None:
    folder = generated_llama()
    space, found = gathered(executor(folder, tp=tp))
    assert space == namespace_elsewhere(folder)
    assert (found.refused, found.stored_dim, found.scale_bytes) == ("", TINY_LLAMA.head_dim, 0)


def test_other_dtypes_overrides_and_weights_are_others() -> None:
    folder = generated_llama()
    plain, _ = gathered(executor(folder))
    half, _ = gathered(executor(folder, dtype="float16"))
    assert half == namespace_elsewhere(folder, "float16") and half != plain
    overridden = executor(folder)
    overridden.misc_config.hf_overrides = {"rope_theta": 20000.0}
    assert gathered(overridden)[0].model != plain.model
    quantised = executor(folder)
    quantised.misc_config.model_format = "fp8"
    assert gathered(quantised)[0].model != plain.model
    named, _ = gathered(executor(folder, settings={"model_id": "mine"}))
    assert named.model != plain.model


@pytest.mark.parametrize(
    ("policy", "dtype", "dim", "scales"), [("INT8", "int8", 32, 4), ("INT4", "int4", 16, 4), ("FP8", "fp8_e4m3", 32, 0)]
)
def test_quantised_kv_is_a_namespace_of_its_own(policy: str, dtype: str, dim: int, scales: int) -> None:
    space, found = gathered(executor(generated_llama(), quant_policy=QuantPolicy[policy]))
    assert (space.kv_dtype, space.k_head_dim, space.v_head_dim) == (dtype, dim + scales, dim + scales)
    assert space.variant.startswith("lmdeploy") and (found.stored_dim, found.scale_bytes) == (dim, scales)


@pytest.mark.parametrize("tp", [1, 4])
def test_mla_is_a_namespace_of_its_own(tmp_path: Path, tp: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    space, _ = gathered(executor(tmp_path, tp=tp, settings={"model_id": "mine"}))
    assert (space.mla, space.num_kv_heads, space.k_head_dim, space.v_head_dim) == (True, 1, 80, 0)
    assert space.variant == "lmdeploy mla"
    assert [facts.rank_of(space, rank, tp).writes for rank in range(tp)] == [True, *[False] * (tp - 1)]


def test_ranks_of_replicated_heads() -> None:
    space = namespace_elsewhere(generated_llama())
    assert [tuple(facts.rank_of(space, rank, 2)) for rank in range(2)] == [(0, 2, True), (2, 2, True)]
    assert [tuple(facts.rank_of(space, rank, 8)) for rank in range(4)] == [(0, 1, True), (0, 1, False), (1, 1, True), (1, 1, False)]


def changed(name: str, **values: Any) -> Any:
    """An edit of one of the executor's configurations."""

    def edit(made: Any) -> None:
        target = getattr(made, name)
        for key, value in values.items():
            setattr(target, key, value)

    return edit


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (lambda made: setattr(facts.facts_of(made.cache_config), "executor", "mp"), "distributed_executor_backend 'mp'"),
        (changed("dist_config", dp=2), "dp=2"),
        (changed("cache_config", device_type="ascend"), "device type 'ascend'"),
        (changed("cache_config", num_cpu_blocks=4), "num_cpu_blocks=4"),
        (lambda made: setattr(made, "specdecode_config", SimpleNamespace(method="eagle3")), "speculative decoding with 'eagle3'"),
        (changed("misc_config", memdecode_config=object()), "MemDecode"),
        (changed("misc_config", custom_module_map="map.py"), "custom_module_map='map.py'"),
        (changed("misc_config", empty_init=True), "empty_init"),
        (changed("model_config", model_paradigm="dllm"), "paradigm 'dllm'"),
        (changed("model_config", states_shapes=[((1,), torch.float32)]), "state beside the KV cache"),
        (changed("model_config", sliding_window=4096), "sliding window attention (window 4096)"),
        (changed("model_config", num_layers=3), "3 KV layers for 4 layers"),
        (changed("model_config", v_head_dim=16), "KV heads of unequal dims"),
        (changed("model_config", mla_kv_cache_dtype="fp8_ds_mla"), "fp8_ds_mla"),
        (changed("cache_config", quant_policy=QuantPolicy.TURBO_QUANT), "quant_policy turbo_quant"),
        (changed("misc_config", hf_overrides={"layer_types": ["sliding_attention"] * 4}), "layers of different kinds"),
        (changed("misc_config", hf_overrides={"attention_chunk_size": 512}), "attention_chunk_size=512"),
        (changed("misc_config", hf_overrides={"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}), "RoPE of type 'dynamic'"),
    ],
)
def test_what_the_cache_does_not_serve_is_refused_by_name(edit: Any, name: str) -> None:
    made = executor(generated_llama())
    edit(made)
    with pytest.raises(UnsupportedError) as refusal:
        gathered(made)
    assert name in str(refusal.value) and "on_unsupported" in str(refusal.value)
    made = executor(generated_llama(), settings={"on_unsupported": "disable"})
    edit(made)
    facts.gather(made, {"model_path": made.model_path})
    found = facts.facts_of(made.cache_config)
    assert name in found.refused and not found.namespace


def test_an_engine_that_nobody_prepared_is_refused() -> None:
    made = executor(generated_llama())
    delattr(made.cache_config.kv_transfer_config, facts._ATTRIBUTE)
    with pytest.raises(UnsupportedError, match="hooks were not in place"):
        facts.gather(made, {"model_path": made.model_path})


def test_a_bad_setting_ends_the_start_with_its_name() -> None:
    made = executor(generated_llama(), settings={"page_tokes": 64})
    with pytest.raises(ConfigError, match=r"'page_tokes' \(kv_connector_extra_config\).*page_tokens"):
        facts.prepare(made.cache_config, model_path=made.model_path, dist_config=made.dist_config, distributed_executor_backend="uni")


def test_adapters(tmp_path: Path) -> None:
    import safetensors.torch

    good = tmp_path / "good"
    good.mkdir()
    (good / "adapter_config.json").write_text("{}")
    safetensors.torch.save_file({"w": torch.ones(8)}, good / "adapter_model.safetensors")
    _, found = gathered(executor(generated_llama()), adapters={"a": str(good), "b": str(tmp_path / "missing")})
    assert len(found.adapters["a"]) == 32 and found.adapters["b"] == ""


@pytest.mark.parametrize(("dtype", "values"), [("int8", 1), ("int4", 2)])
def test_quantised_rows_travel_with_their_scales(dtype: str, values: int) -> None:
    """Rows as LMDeploy lays them out (cache_engine/schema.py): K, V, K's scales and zero points, V's, each aligned to 256 bytes."""
    layers, heads, block, blocks, dim, item = 3, 2, 16, 12, 40 // values, 2
    sizes = [block * heads * dim, block * heads * dim, block * heads * 2 * item, block * heads * 2 * item]
    starts = np.cumsum([0, *(-(-size // 256) * 256 for size in sizes)])
    rng = np.random.default_rng(0)
    pools = [torch.from_numpy(rng.integers(0, 256, (layers, blocks, int(starts[-1])), dtype=np.uint8)) for _ in range(2)]
    stored = dim + 2 * item
    space = KVNamespace.build(
        model="m", kv_dtype=dtype, num_layers=layers, num_kv_heads=heads, k_head_dim=stored, v_head_dim=stored, variant="lmdeploy"
    )
    known = EngineFacts("e", "uni", "here", space.encode(), "", stored_dim=dim, scale_bytes=2 * item)
    layout = PageLayout(space)
    views = []
    for pool in pools:
        rows = {f"cache_pool.0.row.{i}": row for i, row in enumerate(pool)}
        views.append(facts.view_of(known, space, heads, block, rows).bind(layout, 0, 0))
    pages = [np.zeros(layout.slot_bytes, np.uint8) for _ in range(2)]
    tables = np.array([3, 9, 0, 5, 7, 2, 11, 4]), np.array([1, 2, 3, 4, 10, 9, 8, 7])
    slots = [(table[:, None] * block + np.arange(block)).reshape(-1) for table in tables]
    views[0].gather(slots[0], 0, pages)
    assert views[1].scatter(slots[1], 0, pages) == 2
    for here, there in zip(*tables, strict=True):
        for start, size in zip(starts, sizes, strict=False):
            assert torch.equal(pools[0][:, here, start : start + size], pools[1][:, there, start : start + size])
    page = layout.arrays(pages[0])[0]
    assert np.array_equal(page[1, 1, 20, 1, dim:], pools[0][1, 9, starts[3] :][(4 * heads + 1) * 4 : (4 * heads + 2) * 4].numpy())


def test_other_cache_pools_are_refused_by_name() -> None:
    space = namespace_elsewhere(generated_llama())
    known = EngineFacts("e", "uni", "here", space.encode(), "", stored_dim=TINY_LLAMA.head_dim)
    rows = {f"cache_pool.{pool}.row.{i}": torch.zeros((4, 1 << 15), dtype=torch.uint8) for pool in range(2) for i in range(4)}
    with pytest.raises(UnsupportedError, match="other than one pool of 4 rows"):
        facts.view_of(known, space, 4, 64, rows)


def test_facts_are_plain_data() -> None:
    assert dataclasses.asdict(EngineFacts("e", "uni", "here"))["engine"] == "e"
