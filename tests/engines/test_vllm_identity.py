"""Real vLLM: engines whose KV must not mix, on one node. Each pair is tried in both directions, and each engine finds its own pages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from mooncake_kv.common.weights import weights_digest
from tests.engines.harness import Engine
from tests.engines.test_vllm_hits import random_ids
from tests.engines.variants import copied, one_tensor, one_weight
from tests.models import generated_llama

SETTINGS = {"dram_size": "256mb", "extent_size": "64mb", "fetch_timeout_ms": 10000}
WRITTEN = random_ids(400, 41)  # by the ordinary engine; six whole pages, 384 tokens


@pytest.fixture(scope="module")
def ordinary(module_runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """bf16, default settings, and WRITTEN stored (which its own hit proves)."""
    log = tmp_path_factory.mktemp("ordinary") / "log"
    with Engine(generated_llama(), log, settings=SETTINGS, in_process=True) as engine:
        assert stored(engine, WRITTEN)
        yield engine


def hit(engine: Engine, ids: list[int], **request: Any) -> int | None:
    """Tokens that the engine reuses although it has nothing of its own."""
    assert engine.reset_prefix_cache()
    return engine.generate(ids, 1, **request).cached


def stored(engine: Engine, ids: list[int], expected: int = 384, **request: Any) -> bool:
    """Does the engine come to reuse that many tokens of what itself has computed? A page is found a moment after it was committed."""
    for _ in range(20):
        if hit(engine, ids, **request) == expected:
            return True
        time.sleep(0.1)
    return False


def seed_of(variant: dict[str, Any]) -> int:
    """Of the prompt that only this test and its engines use."""
    return crc32(repr(variant).encode())


def start(log: Path, settings: Mapping[str, Any] | None = None, model: Path | None = None, **arguments: Any) -> Engine:
    return Engine(model or generated_llama(), log, settings={**SETTINGS, **(settings or {})}, in_process=True, **arguments)


def keep_apart(ordinary: Engine, other: Engine, seed: int, page_tokens: int = 64) -> None:
    mine = random_ids(400, seed)
    assert stored(other, mine, 399 // page_tokens * page_tokens), "it does not use the cache at all"
    assert hit(other, WRITTEN) == 0
    assert hit(ordinary, mine) == 0
    assert hit(ordinary, WRITTEN) == 384


@pytest.mark.parametrize(
    "settings",
    [{"tenant": "other"}, {"weights_epoch": "2"}, {"page_tokens": 128}],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_keep_engines_apart(ordinary: Engine, tmp_path: Path, settings: dict[str, Any]) -> None:
    with start(tmp_path / "log", settings) as other:
        keep_apart(ordinary, other, seed_of(settings), settings.get("page_tokens", 64))


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "float16"},
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}},
        {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}},
    ],
    ids=["fp16", "rope_theta", "rope_scaling"],
)
def test_engine_arguments_keep_engines_apart(ordinary: Engine, tmp_path: Path, arguments: dict[str, Any]) -> None:
    with start(tmp_path / "log", **arguments) as other:
        keep_apart(ordinary, other, seed_of(arguments))


def test_a_fine_tune_under_the_same_folder_name(ordinary: Engine, tmp_path: Path) -> None:
    tuned = copied(generated_llama(), tmp_path / generated_llama().name, one_tensor)
    with start(tmp_path / "log", model=tuned) as other:
        keep_apart(ordinary, other, 301)


def test_one_changed_weight_with_a_full_fingerprint(ordinary: Engine, tmp_path: Path) -> None:
    """Against another engine with the full fingerprint: the mode alone would keep it apart from the ordinary one."""
    full = {"fingerprint": "full"}
    with start(tmp_path / "log", full, copied(generated_llama(), tmp_path / "copy" / generated_llama().name)) as original:
        assert stored(original, WRITTEN)
    changed = copied(generated_llama(), tmp_path / generated_llama().name, one_weight)
    assert weights_digest(changed, "sample") == weights_digest(generated_llama(), "sample")
    with start(tmp_path / "log2", full, changed) as other:
        keep_apart(ordinary, other, 302)


def test_a_copy_in_another_folder_shares(ordinary: Engine, tmp_path: Path) -> None:
    with start(tmp_path / "log", model=copied(generated_llama(), tmp_path / "elsewhere")) as other:
        mine = random_ids(400, 303)
        assert stored(other, mine)
        assert hit(other, WRITTEN) == 384
        assert hit(ordinary, mine) == 384
