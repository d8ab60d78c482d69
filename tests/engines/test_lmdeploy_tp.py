"""LMDeploy with two ranks under Ray writes pages that single SGLang and vLLM processes read, and reads theirs.

Random weights, so texts say nothing. A reader gets the written prompt and a few pages more, which it computes on top of what it has loaded
and stores; vLLM computes all of it by itself, under a salt. If what was loaded is not what was
written, the pages on top differ; one test plants that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mooncake_kv.common.hashing import page_hashes, storage_namespace_seed
from mooncake_kv.common.identity import KVNamespace
from tests.engines.harness import ONE_THREAD, Engine
from tests.engines.judge import EXACT, MAX_ERROR, PageReader, worst_error
from tests.engines.lmdeploy_harness import IN_EFFECT, LOADED, LMDeployEngine, in_effect
from tests.engines.sglang_harness import SGLangEngine
from tests.engines.test_vllm_hits import INSECURE, random_ids
from tests.models import TINY_LLAMA, generated_llama

pytestmark = pytest.mark.timeout(600)

SETTINGS = {"dram_size": "256mb", "extent_size": "64mb", "fetch_timeout_ms": 10000}
WRITTEN = 576
ALL = 832
# The written pages, more to compute on top of them, and a last token.
PROMPTS = {name: random_ids(ALL + 10, seed) for seed, name in enumerate(("for sglang", "for vllm", "of sglang", "of vllm", "planted"), 90)}


def hashes(name: str, salt: str | None = None) -> list[bytes]:
    return page_hashes(PROMPTS[name][:ALL], seed=storage_namespace_seed(None, salt))


def write(engine: Any, name: str, reader: PageReader) -> None:
    engine.generate(PROMPTS[name][: WRITTEN + 1], 1)
    assert reader.wait_for(hashes(name)[: WRITTEN // 64]) == WRITTEN // 64, "no rank's part is missing"


def read(engine: Any, name: str, reader: PageReader) -> list[np.ndarray]:
    """All pages of the prompt, of which the engine has loaded those written before."""
    assert engine.generate(PROMPTS[name], 1).cached == WRITTEN
    assert reader.wait_for(hashes(name)) == ALL // 64
    return reader.read(hashes(name))


def compute(engine: Any, name: str, reader: PageReader, salt: str = "own") -> list[np.ndarray]:
    assert engine.generate(PROMPTS[name], 1, cache_salt=salt).cached == 0
    assert reader.wait_for(hashes(name, salt)) == ALL // 64
    return reader.read(hashes(name, salt))


def error(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    return max(worst_error(a, b) for a, b in zip(ours, theirs, strict=True))


def rotate_heads(page: np.ndarray) -> None:
    np.copyto(page, np.roll(page, 1, axis=3))


def test_two_ranks_of_lmdeploy_and_single_processes_share(runtime_dir: Path, tmp_path: Path) -> None:
    model, environment = generated_llama(TINY_LLAMA), {**EXACT, **INSECURE, **ONE_THREAD}
    with Engine(model, tmp_path / "vllm", settings=SETTINGS, environment=environment, in_process=True) as vllm:
        space = KVNamespace.decode(bytes.fromhex(vllm.call("tests.engines.judge:namespace")))
        with PageReader(space, SETTINGS) as reader:
            right = {name: compute(vllm, name, reader) for name in PROMPTS}
            ranks = {**EXACT, LOADED: str(tmp_path)}
            with LMDeployEngine(model, tmp_path / "two", settings=SETTINGS, environment=ranks, tp=2) as two:
                found = in_effect(tmp_path)
                actors = [pid for pid in found if "RayWorkerWrapper" in " ".join(psutil.Process(pid).cmdline())]
                assert len(actors) == 2 and found == dict.fromkeys((two.pid, *actors), IN_EFFECT)
                assert two.call("tests.engines.lmdeploy_probes:namespace") == space.encode().hex()

                def passed(writer: Any, name: str, to: Any) -> None:
                    write(writer, name, reader)
                    worst = error(read(to, name, reader), right[name])
                    print(f"\n{name}: worst error {worst:.4f}")
                    assert worst < MAX_ERROR

                passed(vllm, "of vllm", two)
                passed(two, "for vllm", vllm)
                with SGLangEngine(model, tmp_path / "sglang", settings=SETTINGS, environment=EXACT) as sglang:
                    passed(sglang, "of sglang", two)
                    passed(two, "for sglang", sglang)
                # What is not what it says is seen in what is computed on top of it.
                write(two, "planted", reader)
                for page_hash in hashes("planted")[: WRITTEN // 64]:
                    reader.rewrite(page_hash, rotate_heads)
                bad = read(two, "planted", reader)[WRITTEN // 64 :]
                assert error(bad, right["planted"][WRITTEN // 64 :]) > MAX_ERROR
