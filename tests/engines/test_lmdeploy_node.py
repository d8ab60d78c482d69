"""Real LMDeploy, and a node that is killed or stopped under traffic.

The oracle of answers: one request at a time and no prefix cache of LMDeploy's own, so an answer depends on nothing but how many pages were
loaded. Each prompt's answer for each number of pages is taken from undisturbed loads; an answer given during a fault must be one of them.
The oracle of time: see probes. No call of the connector may wait for the node.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_kv.common.hashing import page_hashes
from mooncake_kv.common.identity import KVNamespace
from tests.engines.judge import PageReader
from tests.engines.lmdeploy_harness import LMDeployEngine, LMDeployResult
from tests.engines.lmdeploy_probes import COPYING
from tests.engines.test_lmdeploy_hits import PROBES, counter
from tests.engines.test_vllm_hits import random_ids
from tests.models import TINY_LLAMA, generated_llama
from tests.node.scripted_peer import until

pytestmark = pytest.mark.timeout(300)

SETTINGS = {"dram_size": "256mb", "extent_size": "64mb", "fetch_timeout_ms": 2000}
PAGES = 6
PROMPTS = [random_ids(64 * PAGES + 20, 700 + i) for i in range(3)]
WAITED_MS = 2.0  # the most that an engine's thread may wait in a call, 99 of 100 times
SLOWER_S = 4.0  # the most that a request may take beyond its prefill: fetch_timeout_ms, and a busy machine


class Stand:
    def __init__(self, engine: LMDeployEngine) -> None:
        self.engine = engine
        self.right: list[set[tuple[int, ...]]] = [set() for _ in PROMPTS]
        self.ask_all(0)
        space = KVNamespace.decode(bytes.fromhex(engine.call(f"{PROBES}namespace")))
        with PageReader(space, SETTINGS) as reader:
            assert all(reader.wait_for(page_hashes(prompt)) == PAGES for prompt in PROMPTS)
        for pages in range(1, PAGES + 1):
            engine.call(f"{PROBES}limit_loads", pages=pages)
            self.ask_all(pages)
        engine.call(f"{PROBES}limit_loads", pages=None)
        engine.call(f"{PROBES}time_calls")

    def ask_all(self, pages: int) -> None:
        for i in range(len(PROMPTS)):
            result = self.ask(i)
            assert result.cached == 64 * pages
            self.right[i].add(tuple(result.output))

    def ask(self, i: int) -> LMDeployResult:
        return self.engine.generate(PROMPTS[i], 6, sampling={"ignore_eos": True})

    def traffic(self, seconds: float) -> list[tuple[float, LMDeployResult]]:
        """(seconds, answer) of requests without a pause; all are right."""
        answers, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            for i in range(len(PROMPTS)):
                began = time.monotonic()
                result = self.ask(i)
                answers.append((time.monotonic() - began, result))
                assert result.finish == "finish" and tuple(result.output) in self.right[i]
        return answers

    def nothing_waited(self) -> None:
        for name, times in self.engine.call(f"{PROBES}call_times").items():
            print(name, {key: round(value, 2) for key, value in times.items()})
            assert name in COPYING or times["waited_p99"] < WAITED_MS, name


@pytest.fixture(scope="module")
def stand(module_runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    log = tmp_path_factory.mktemp("stand") / "log"
    with LMDeployEngine(generated_llama(TINY_LLAMA), log, settings=SETTINGS, environment={"OMP_NUM_THREADS": "1"}) as engine:
        yield Stand(engine)


def test_a_stopped_node_costs_misses(stand: Stand) -> None:
    node = stand.engine.call(f"{PROBES}node_pid")
    threading.Timer(0.5, os.kill, (node, signal.SIGSTOP)).start()
    try:
        answers = stand.traffic(5)
    finally:
        os.kill(node, signal.SIGCONT)
    assert any(result.cached == 0 for _, result in answers), "nothing was computed while the node stood still"
    assert max(seconds for seconds, _ in answers) < SLOWER_S
    stand.nothing_waited()
    until(lambda: stand.traffic(0.1)[-1][1].cached == 64 * PAGES, 30)


def test_a_killed_node_costs_misses_and_is_replaced(stand: Stand) -> None:
    for _ in range(2):
        node = stand.engine.call(f"{PROBES}node_pid")
        threading.Timer(0.5, os.kill, (node, signal.SIGKILL)).start()
        answers = stand.traffic(3)
        assert max(seconds for seconds, _ in answers) < SLOWER_S
        until(lambda node=node: stand.engine.call(f"{PROBES}node_pid") not in (0, node), 30)  # type: ignore[misc]
        # The new one is empty; what is computed now is stored there.
        until(lambda: stand.traffic(0.1)[-1][1].cached == 64 * PAGES, 30)
    stand.nothing_waited()
    assert counter(stand.engine, "node_away") + counter(stand.engine, "timeouts") + counter(stand.engine, "failed_loads") > 0


def test_an_engine_that_starts_without_a_node_is_joined_later(tmp_path: Path, runtime_dir: Path) -> None:
    blocked = runtime_dir / "mooncake-kv"
    blocked.write_text("in the way")
    with LMDeployEngine(generated_llama(TINY_LLAMA), tmp_path / "log", settings=SETTINGS) as engine:
        assert len(engine.generate(PROMPTS[0], 6, sampling={"ignore_eos": True}).output) == 6
        blocked.unlink()
        until(lambda: engine.call(f"{PROBES}node_pid") != 0, 30)
        until(lambda: engine.generate(PROMPTS[0], 6, sampling={"ignore_eos": True}).cached == 64 * PAGES, 30)
