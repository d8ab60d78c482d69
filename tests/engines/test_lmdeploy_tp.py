"""LMDeploy with two ranks under Ray writes pages that single SGLang and vLLM processes read, and reads theirs.

Random weights, so texts say nothing. A reader gets the written prompt and a few pages more, which it computes on top of what it has loaded
and stores; the same engine, or for the two ranks vLLM, computes all of it by itself under a salt. If what was loaded is not what was
written, the pages on top differ; one test plants that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake_kv.common.hashing import page_hashes, storage_namespace_seed
from mooncake_kv.common.identity import KVNamespace
from tests.engines.harness import Engine
from tests.engines.judge import EXACT, MAX_ERROR, PageReader, worst_error
from tests.engines.lmdeploy_harness import LMDeployEngine
from tests.engines.sglang_harness import SGLangEngine
from tests.engines.test_vllm_hits import INSECURE, random_ids
from tests.models import TINY_LLAMA, generated_llama

pytestmark = pytest.mark.timeout(600)

SETTINGS = {"dram_size": "256mb", "extent_size": "64mb", "fetch_timeout_ms": 10000}
WRITTEN = 576
ALL = 832
# The written pages, more to compute on top of them, and a last token.
PROMPTS = {writer: random_ids(ALL + 10, seed) for seed, writer in enumerate(("lmdeploy", "sglang", "vllm", "planted"), 90)}


def hashes(writer: str, salt: str | None = None) -> list[bytes]:
    return page_hashes(PROMPTS[writer][:ALL], seed=storage_namespace_seed(None, salt))


def write(engine: Any, writer: str, reader: PageReader) -> None:
    engine.generate(PROMPTS[writer][: WRITTEN + 1], 1)
    assert reader.wait_for(hashes(writer)[: WRITTEN // 64]) == WRITTEN // 64, "no rank's part is missing"


def read(engine: Any, writer: str, reader: PageReader) -> list[np.ndarray]:
    """All pages of the prompt, of which the engine has loaded those written before."""
    assert engine.generate(PROMPTS[writer], 1).cached == WRITTEN
    assert reader.wait_for(hashes(writer)) == ALL // 64
    return reader.read(hashes(writer))


def compute(engine: Any, writer: str, reader: PageReader, salt: str = "own") -> list[np.ndarray]:
    assert engine.generate(PROMPTS[writer], 1, cache_salt=salt).cached == 0
    assert reader.wait_for(hashes(writer, salt)) == ALL // 64
    return reader.read(hashes(writer, salt))


def error(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    return max(worst_error(a, b) for a, b in zip(ours, theirs, strict=True))


def rotate_heads(page: np.ndarray) -> None:
    np.copyto(page, np.roll(page, 1, axis=3))


def test_two_ranks_of_lmdeploy_and_single_processes_share(runtime_dir: Path, tmp_path: Path) -> None:
    model, environment = generated_llama(TINY_LLAMA), {**EXACT, **INSECURE}
    single: dict[str, Callable[[Path], Any]] = {
        "vllm": lambda log: Engine(model, log, settings=SETTINGS, environment=environment, in_process=True),
        "sglang": lambda log: SGLangEngine(model, log, settings=SETTINGS, environment=EXACT),
    }
    with single["vllm"](tmp_path / "vllm") as vllm:
        space = KVNamespace.decode(bytes.fromhex(vllm.call("tests.engines.judge:namespace")))
        with PageReader(space, SETTINGS) as reader:
            write(vllm, "vllm", reader)
            right = {writer: compute(vllm, writer, reader) for writer in PROMPTS}
            with LMDeployEngine(model, tmp_path / "two", settings=SETTINGS, environment=EXACT, tp=2) as two:
                assert two.call("tests.engines.lmdeploy_probes:namespace") == space.encode().hex()
                write(two, "lmdeploy", reader)
                found = {"vllm->two": error(read(two, "vllm", reader), right["vllm"])}
                # What is not what it says is seen in what is computed on top of it.
                write(two, "planted", reader)
                for page_hash in hashes("planted")[: WRITTEN // 64]:
                    reader.rewrite(page_hash, rotate_heads)
                bad = read(two, "planted", reader)[WRITTEN // 64 :]
                assert error(bad, right["planted"][WRITTEN // 64 :]) > MAX_ERROR
                with single["sglang"](tmp_path / "sglang") as sglang:
                    write(sglang, "sglang", reader)
                    found["two->sglang"] = error(read(sglang, "lmdeploy", reader), right["lmdeploy"])
                found["sglang->two"] = error(read(two, "sglang", reader), right["sglang"])
