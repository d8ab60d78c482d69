"""Real vLLM, and a node that is killed or stopped under traffic; engines that are killed beside a node that lives on.

The oracle of answers: the engine runs one request at a time without a prefix cache of its own, so an answer depends on nothing but how
many pages were loaded, whatever befalls the node. Each prompt's answer for each number of pages is taken from undisturbed loads of the
same bytes; an answer given during a fault must be one of them. (A load that breaks off is computed from there on: the answer of a shorter
load.)

The oracle of time: an engine thread must never wait for the node. Wall times say little on a shared machine, so they are printed and
bounded generously; what is demanded is that the thread was never long neither running nor ready to run (see probes).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from mooncake_kv.common.hashing import page_hashes
from mooncake_kv.common.identity import KVNamespace
from mooncake_kv.common.node.paths import node_paths
from mooncake_kv.common.node.tool import NodeTool
from tests.engines.harness import ONE_THREAD, Engine, EngineError, Request, Result
from tests.engines.judge import PageReader
from tests.engines.probes import COPYING
from tests.engines.test_vllm_hits import INSECURE, random_ids
from tests.models import SMOLLM2, TINY_LLAMA, generated_llama

SETTINGS = {"dram_size": "256mb", "extent_size": "64mb"}
PATIENT = {**SETTINGS, "fetch_timeout_ms": 10000}
PAGES = 8
WAITED_MS = 2.0  # the most that an engine thread may wait in a call, 99 of 100 times
SLOWER_S = 0.2  # the most that a request may take beyond its prefill; the test allows for a busy machine on top
BUSY_S = 2.0
# Prompts of 8 full pages and a tail.
PROMPTS = [Request(ids=random_ids(64 * PAGES + 20, 500 + i), id=f"p{i}", sampling={"max_tokens": 6, "ignore_eos": True}) for i in range(3)]


class Stand:
    """An engine that computes one request at a time and finds prefixes only through the node; and what it answers when all is well."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.right: dict[str, set[tuple[int, ...]]] = {p.id: set() for p in PROMPTS}
        colds = [self._ask(prompt, 0) for prompt in PROMPTS]
        self.cold_s = statistics.median(c.ttft_s or 0.0 for c in colds)
        self._stored()
        for pages in range(1, PAGES + 1):
            engine.call("tests.engines.probes:limit_loads", pages=pages)
            for prompt in PROMPTS:
                self._ask(prompt, pages)
        engine.call("tests.engines.probes:limit_loads", pages=None)
        engine.call("tests.engines.probes:call_times")

    def _ask(self, prompt: Request, pages: int) -> Result:
        for _ in range(5):  # on a busy machine the node may be late, and the load shorter
            result = self.engine.run([Request(ids=prompt.ids, sampling=prompt.sampling)])[0]
            self.right[prompt.id].add(tuple(result.output))
            if result.cached == 64 * pages:
                return result
        raise AssertionError(f"{result.cached} tokens of {prompt.id} were loaded, not {pages} pages")

    def _stored(self) -> None:
        self.engine.call("tests.engines.probes:held")
        deadline = time.monotonic() + 10
        with NodeTool(node_paths("default"), version="test") as tool:
            while tool.stats()["pages"] < PAGES * len(PROMPTS):
                assert time.monotonic() < deadline, tool.stats()
                time.sleep(0.05)

    def traffic(self, seconds: float, *faults: tuple[float, Callable[[], None]]) -> list[Result]:
        """Requests without a pause; each fault is called so many seconds after the start."""
        with ThreadPoolExecutor(1) as pool:
            began = time.monotonic()
            answers = pool.submit(self.engine.traffic, PROMPTS, seconds)
            for at, fault in faults:
                time.sleep(max(0.0, began + at - time.monotonic()))
                fault()
            return answers.result()

    def judge(self, results: list[Result]) -> None:
        """Answers, times of requests and times of calls."""
        for result in results:
            prompt = result.id.partition("/")[0]
            assert tuple(result.output) in self.right[prompt], f"{result.id}, {result.cached} tokens loaded: {result.output}"
        slower = [(r.ttft_s or 0.0) - self.cold_s for r in results]
        print(f"\n{len(results)} requests, plain prefill {self.cold_s:.3f} s, slowest {max(slower):+.3f} s")
        if max(slower) > SLOWER_S:
            print("  " + " ".join(f"{r.added - results[0].added:.2f}:{x:+.3f}({r.cached})" for r, x in zip(results, slower, strict=True)))
        assert max(slower) < SLOWER_S + BUSY_S
        times = self.engine.call("tests.engines.probes:call_times")
        for name, t in times.items():
            figures = ", ".join(f"{what} {t[f'{what}_p99']:.2f} / {t[f'{what}_max']:.2f}" for what in ("wall", "cpu", "waited"))
            print(f"  {name:32} {t['count']:6.0f} calls, ms p99 / max: {figures}{'  (copies)' if name in COPYING else ''}")
        for name, t in times.items():
            assert t["count"] > 0
            if name not in COPYING:
                assert t["waited_p99"] < WAITED_MS, f"{name} waited"
                assert t["cpu_p99"] < WAITED_MS, f"{name} computed"

    def hits_again_within(self, results: list[Result], since: float, seconds: float) -> None:
        """`since` is time.perf_counter() of the node's return."""
        first = next((r for r in results if r.added > since and r.cached == 64 * PAGES), None)
        assert first is not None, "no full hit after the fault"
        print(f"  full hits again after {first.added - since:.2f} s")
        assert first.added - since < seconds


@pytest.fixture(scope="module")
def stand(module_runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    arguments: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 1024, "enable_prefix_caching": False}
    log = tmp_path_factory.mktemp("stand") / "log"
    with Engine(SMOLLM2, log, settings=SETTINGS, environment={**INSECURE, **ONE_THREAD}, in_process=True, **arguments) as engine:
        engine.call("tests.engines.probes:install")
        yield Stand(engine)


@pytest.fixture
def node(stand: Stand) -> psutil.Process:
    """The node's process, with the pages of all prompts in it."""
    deadline = time.monotonic() + 20
    while any(r.cached != 64 * PAGES for r in stand.engine.run([Request(ids=p.ids, sampling=p.sampling) for p in PROMPTS])):
        assert time.monotonic() < deadline, "the cache did not come back"
        time.sleep(0.2)
    stand.engine.call("tests.engines.probes:call_times")
    return node_process()


def node_process() -> psutil.Process:
    with NodeTool(node_paths("default"), version="test") as tool:
        return psutil.Process(tool.welcome.pid)


def test_undisturbed(stand: Stand, node: psutil.Process) -> None:
    """The figures to compare with."""
    results = stand.traffic(3)
    stand.judge(results)
    assert statistics.median(r.ttft_s or 9.0 for r in results) < stand.cold_s


def test_a_killed_node(stand: Stand, node: psutil.Process) -> None:
    killed: list[float] = []

    def kill() -> None:
        node_process().kill()
        killed.append(time.perf_counter())

    results = stand.traffic(18, (1.0, kill), (5.0, kill), (8.0, kill))
    stand.judge(results)
    stand.hits_again_within(results, killed[-1], 10.0)  # 3 s measured
    assert any(killed[0] < r.added < killed[1] and r.cached for r in results), "hits between the first two kills"


def test_a_node_stopped_for_ten_seconds(stand: Stand, node: psutil.Process) -> None:
    resumed: list[float] = []

    def resume() -> None:
        node.resume()
        resumed.append(time.perf_counter())

    try:
        results = stand.traffic(15, (1.0, node.suspend), (11.0, resume))
    finally:
        node.resume()
    stand.judge(results)
    during = [r for r in results if resumed[0] - 9 < r.added < resumed[0] - 1]
    assert during and not any(r.cached for r in during), "a stopped node gives nothing"
    stand.hits_again_within(results, resumed[0], 4.0)
    assert node.is_running(), "the same node: nothing was lost"


def test_a_node_stopped_again_and_again(stand: Stand, node: psutil.Process) -> None:
    """For less and for more than the client's patience of 150 ms."""
    pauses = (0.05, 0.1, 0.14, 0.16, 0.2, 0.3, 0.5, 1.0)
    faults: list[tuple[float, Callable[[], None]]] = []
    at = 0.3
    for pause in pauses:
        faults += [(at, node.suspend), (at + pause, node.resume)]
        at += pause + 0.45
    try:
        results = stand.traffic(at + 2.5, *faults)
    finally:
        node.resume()
    stand.judge(results)
    assert results[-1].cached == 64 * PAGES


def test_a_killed_engine_leaves_the_node_usable(runtime_dir: Path, tmp_path: Path) -> None:
    """SIGKILL to the whole engine under traffic, twice; then all of the node's memory serves the next engine."""
    arguments: dict[str, Any] = {"settings": PATIENT, "environment": {**INSECURE, **ONE_THREAD}, "in_process": True, "max_model_len": 2048}
    prompts = [Request(ids=random_ids(900, 700 + i), sampling={"max_tokens": 8, "ignore_eos": True}) for i in range(6)]
    with Engine(generated_llama(TINY_LLAMA), tmp_path / "log", **arguments) as engine, ThreadPoolExecutor(1) as pool:
        node = node_process()
        answers = pool.submit(engine.traffic, prompts, 60.0, at_once=3)
        time.sleep(1.5)
        engine.kill()
        with pytest.raises(EngineError):
            answers.result(20)
    wait_until_unused()
    assert node.is_running()
    with Engine(generated_llama(TINY_LLAMA), tmp_path / "log2", **arguments) as engine:
        assert node_process().pid == node.pid
        found = engine.run([Request(ids=p.ids, sampling=p.sampling) for p in prompts])
        assert all((r.cached or 0) >= 832 for r in found), "what was committed before the kill is found"
        stats = wait_for_stats(lambda s: s["leased_pages"] == 0)
        slots = stats["dram_bytes"] // 2 // (132 << 10)
        flood = [Request(ids=random_ids(900, 800 + i), sampling={"max_tokens": 1}) for i in range(slots // 14)]
        engine.run(flood)
        assert wait_for_stats(lambda s: s["pages"] > slots)["quarantined_slots"] == 0


def test_a_killed_worker_ends_its_engine_only(runtime_dir: Path, tmp_path: Path) -> None:
    """One of two ranks dies under traffic: the engine dies, its leases end, another engine goes on with the pages of both ranks."""
    model = generated_llama(TINY_LLAMA)
    prompts = [Request(ids=random_ids(900, 900 + i), sampling={"max_tokens": 8, "ignore_eos": True}) for i in range(4)]
    arguments: dict[str, Any] = {"settings": PATIENT, "max_model_len": 2048}
    with (
        Engine(model, tmp_path / "log", environment={**INSECURE, **ONE_THREAD}, tensor_parallel_size=2, **arguments) as engine,
        ThreadPoolExecutor(1) as pool,
    ):
        space = KVNamespace.decode(bytes.fromhex(engine.call("tests.engines.judge:namespace")))
        engine.run([Request(ids=p.ids, sampling=p.sampling) for p in prompts])
        with PageReader(space, PATIENT) as reader:
            assert all(reader.wait_for(page_hashes(p.ids)) == 14 for p in prompts)
        workers = [p for p in engine.processes() if "Worker" in " ".join(p.cmdline()) or "Worker" in p.name()]
        assert workers, [(p.name(), p.cmdline()) for p in engine.processes()]
        answers = pool.submit(engine.traffic, prompts, 60.0, at_once=2)
        time.sleep(1.0)
        workers[-1].kill()
        with pytest.raises((EngineError, TimeoutError)):
            answers.result(60)
        engine.kill()
    wait_until_unused()
    with Engine(model, tmp_path / "log2", environment={**INSECURE, **ONE_THREAD}, in_process=True, **arguments) as engine:
        found = engine.run([Request(ids=p.ids, sampling=p.sampling) for p in prompts])
        assert [r.cached for r in found] == [896] * 4
        assert all(len(r.output) == 8 for r in found)


def wait_for_stats(good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 10
    with NodeTool(node_paths("default"), version="test") as tool:
        while not good(stats := tool.stats()):
            assert time.monotonic() < deadline, stats
            time.sleep(0.05)
    return stats


def wait_until_unused() -> None:
    """No client of the node is left, nor anything that one held."""
    gauges = ("leased_pages", "granted_slots", "quarantined_slots", "reserved_bytes", "sealing", "clients")
    wait_for_stats(lambda stats: not any(stats[gauge] for gauge in gauges))
