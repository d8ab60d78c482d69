"""Real SGLang engines of two tensor-parallel sizes: their ranks write a page together, and each size reads what the other wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake_kv.common.hashing import page_hashes, storage_namespace_seed
from tests.engines.judge import EXACT, MAX_ERROR, PageReader, worst_error
from tests.engines.sglang_harness import LOADED, SGLangEngine, namespace_in
from tests.engines.test_vllm_hits import random_ids
from tests.models import TINY_LLAMA, generated_llama

pytestmark = pytest.mark.timeout(600)

SETTINGS = {"dram_size": "256mb", "extent_size": "64mb", "fetch_timeout_ms": 10000}
PROMPT = random_ids(620, 77)
REUSED = 576
SAMPLING = {"ignore_eos": True}


def test_ranks_write_together_and_sizes_share(runtime_dir: Path, tmp_path: Path) -> None:
    model, control = generated_llama(TINY_LLAMA), tmp_path / "fault"
    hashes = page_hashes(PROMPT)
    single = page_hashes(PROMPT, seed=storage_namespace_seed(None, "single"))
    environment = {**EXACT, LOADED: str(tmp_path), "MOONCAKE_KV_TEST_FAULT": str(control), "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with (
        SGLangEngine(model, tmp_path / "two", settings=SETTINGS, environment=environment, tp_size=2) as two,
        PageReader(namespace_in(tmp_path), SETTINGS) as reader,
    ):
        two.generate(PROMPT, 8, sampling=SAMPLING)
        local = two.generate(PROMPT, 8, sampling=SAMPLING)
        assert local.cached == REUSED
        assert reader.wait_for(hashes) == len(hashes), "no rank's part is missing"
        assert two.flush()
        loaded = two.generate(PROMPT, 8, sampling=SAMPLING)
        assert (loaded.stored, loaded.output) == (REUSED, local.output)
        good = reader.read(hashes)
        # One rank's load fails: all use what came before, and what was computed in its stead is right.
        assert two.flush()
        control.write_text(json.dumps({"kind": "flip", "ranks": [1]}))
        cut = two.generate(PROMPT, 8, sampling=SAMPLING)
        control.unlink()
        assert cut.stored == cut.cached < REUSED
        assert reader.wait_for(hashes) == len(hashes)
        assert all(worst_error(a, b) < MAX_ERROR for a, b in zip(reader.read(hashes), good, strict=True))
        assert two.flush()
        assert two.generate(PROMPT, 8, sampling=SAMPLING).stored == REUSED
        node = reader.node_pid
    with (
        SGLangEngine(model, tmp_path / "one", settings=SETTINGS, environment=EXACT) as one,
        PageReader(namespace_in(tmp_path), SETTINGS) as reader,
    ):
        assert reader.node_pid == node
        assert one.generate(PROMPT, 8, sampling=SAMPLING).stored == REUSED
        one.generate(PROMPT, 1, cache_salt="single")
        assert reader.wait_for(single) == len(single)
        pages = zip(reader.read(hashes), reader.read(single), strict=True)
        assert max(worst_error(a, b) for a, b in pages) < MAX_ERROR
