"""Real SGLang: loads that fail half-way, and a node that stops or dies. After each fault every page that anybody can see is judged against
another computation, and a new prompt is stored and found again: SGLang's storage threads are alive."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake_kv.common.hashing import page_hashes
from tests.engines.judge import EXACT, MAX_ERROR, Judged, PageReader, judge_pages
from tests.engines.sglang_harness import LOADED, SGLangEngine, SGLangRequest, SGLangResult, namespace_in
from tests.engines.test_vllm_hits import random_ids
from tests.models import TINY_LLAMA, generated_llama

SETTINGS = {"dram_size": "256mb", "extent_size": "64mb", "fetch_timeout_ms": 1500}
KINDS = ["drop", "truncate", "flip", "swap", "error"]
PREFIX = random_ids(700, 900)
PREFIX_PAGES = 10


class Bench:
    """An engine whose loads fail while `control` exists."""

    def __init__(self, engine: SGLangEngine, reader: PageReader, control: Path) -> None:
        self.engine, self.reader, self.control = engine, reader, control
        self.asked: list[tuple[list[int], list[int]]] = []

    def ask(self, seed: int) -> list[SGLangResult]:
        """Requests that share the prefix and go on differently, so that new pages are computed on top of the loaded ones."""
        requests = [SGLangRequest(ids=PREFIX + random_ids(150, seed * 10 + i), sampling=sampling()) for i in range(2)]
        results = self.engine.run(requests)
        self.asked += [(r.ids, result.output) for r, result in zip(requests, results, strict=True)]
        return results

    def stored(self) -> None:
        for prompt, _ in self.asked:
            hashes = page_hashes(prompt)
            assert self.reader.wait_for(hashes) == len(hashes)

    def meet(self, kind: str, ranks: list[int], seed: int) -> list[SGLangResult]:
        """Ask while loads meet the fault."""
        assert self.engine.flush()
        self.control.write_text(json.dumps({"kind": kind, "ranks": ranks}))
        results = self.ask(seed)
        self.control.unlink()
        return results

    def judge(self, *, complete: bool = True) -> Judged:
        """Every stored page of everything asked since the last time; all of them, if `complete`."""
        if complete:
            self.stored()
        assert self.engine.flush()
        judged = judge_pages(Plain(self.engine), self.reader, self.asked)
        self.asked.clear()
        print(judged)
        return judged

    def alive(self, seed: int) -> None:
        prompt = random_ids(300, seed)
        self.engine.generate(prompt, 1)
        assert self.reader.wait_for(page_hashes(prompt)) == 4
        assert self.engine.flush()
        assert self.engine.generate(prompt, 1).stored == 256


class Plain:
    """What judge_pages asks of an engine, in SGLang's words."""

    def __init__(self, engine: SGLangEngine) -> None:
        self._engine = engine

    def generate(self, ids: Any, max_tokens: int, *, cache_salt: str, sampling: Any) -> None:
        self._engine.generate(ids, max_tokens, cache_salt=cache_salt)


def sampling() -> dict[str, Any]:
    return {"max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def bench(module_runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("bench")
    control, model = folder / "fault", generated_llama(TINY_LLAMA)
    environment = {**EXACT, "MOONCAKE_KV_TEST_FAULT": str(control), LOADED: str(folder)}
    with SGLangEngine(model, folder / "log", settings=SETTINGS, environment=environment) as engine:
        space = namespace_in(folder)
        with PageReader(space, SETTINGS) as reader:
            made = Bench(engine, reader, control)
            made.ask(1)
            judged = made.judge()
            assert (judged.pages, judged.missing) == (PREFIX_PAGES + 2 * 3, 0) and judged.worst < MAX_ERROR
            yield made


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_computed_on_a_failed_load_becomes_visible(bench: Bench, kind: str) -> None:
    seed = 10 + KINDS.index(kind)
    first, _ = bench.meet(kind, [0], seed)
    assert first.stored < PREFIX_PAGES * 64, "the load met no fault"
    if kind != "error":
        assert first.stored == first.cached == PREFIX_PAGES // 2 * 64, "what lies before the fault is used"
    judged = bench.judge()
    # A damaged page is replaced by what was computed in its stead, so at the end all are there.
    assert (judged.pages, judged.missing) == (PREFIX_PAGES + 2 * 3, 0)
    assert judged.worst < MAX_ERROR
    bench.alive(1000 + seed)


def test_a_fresh_engine_reads_nothing_that_a_fault_has_touched(bench: Bench, tmp_path: Path) -> None:
    """After loads that were cut or failed in every way: what another process loads gives the answers of its own cache."""
    for number, kind in enumerate(KINDS):
        bench.meet(kind, [0], 20 + number)
        bench.stored()
    prompts, short = [prompt for prompt, _ in bench.asked[::2]], {**sampling(), "max_new_tokens": 8}
    bench.asked.clear()
    with SGLangEngine(generated_llama(TINY_LLAMA), tmp_path / "log", settings=SETTINGS, environment=EXACT) as fresh:
        for prompt in prompts:
            loaded = fresh.generate(prompt, sampling=short)
            assert loaded.cached == (len(prompt) - 1) // 64 * 64 and loaded.stored
            fresh.generate(prompt, 1, cache_salt="own")
            local = fresh.generate(prompt, sampling=short, cache_salt="own")
            assert (local.cached, local.output) == (loaded.cached, loaded.output)


def test_a_stopped_node_costs_a_request_little(bench: Bench) -> None:
    bench.ask(30)
    bench.stored()
    assert bench.engine.flush()
    pid = bench.reader.node_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        results = bench.ask(31)
        took = time.monotonic() - began
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [r.stored for r in results] == [0, 0]
    assert took < 10
    wait_until_ready(bench)
    bench.alive(2030)
    # What was to be stored while the node stood still is not.
    judged = bench.judge(complete=False)
    assert judged.pages >= PREFIX_PAGES + 2 * 3 and judged.worst < MAX_ERROR


def test_a_killed_node_comes_back_without_a_restart_of_the_engine(bench: Bench) -> None:
    assert bench.engine.flush()
    pid = bench.reader.node_pid
    os.kill(pid, signal.SIGKILL)
    results = bench.ask(40)
    assert [r.stored for r in results] == [0, 0]
    wait_until_ready(bench, other_than=pid)
    bench.asked.clear()  # stored with the first node, or with nobody
    bench.alive(2040)
    assert bench.engine.flush()
    bench.ask(41)
    judged = bench.judge()
    assert judged.missing == 0 and judged.worst < MAX_ERROR


def wait_until_ready(bench: Bench, other_than: int = 0) -> None:
    deadline = time.monotonic() + 20
    while not (bench.reader.node_pid not in (0, other_than) and bench.reader._scheduler.ready and bench.reader._worker.ready):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)  # the engine's client tries again at its own pace
