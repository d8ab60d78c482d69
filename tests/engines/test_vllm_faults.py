"""Real vLLM: loads that fail half-way. After each fault every page that anybody can see is judged against another computation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mooncake_kv.common.hashing import page_hashes
from mooncake_kv.common.identity import KVNamespace
from tests.engines.harness import ONE_THREAD, Engine, Request
from tests.engines.judge import EXACT, MAX_ERROR, Judged, PageReader, judge_pages
from tests.engines.test_vllm_hits import INSECURE, failed_loads, random_ids
from tests.models import TINY_LLAMA, generated_llama

# A patient client: on a busy test machine the node may not get a core for longer than the default 150 ms.
SETTINGS = {"dram_size": "256mb", "extent_size": "64mb", "fetch_timeout_ms": 10000}
KINDS = ["drop", "truncate", "flip", "swap", "error"]
PREFIXES = [random_ids(700, 900 + i) for i in range(2)]


class Bench:
    """An engine whose loads fail while `control` exists."""

    def __init__(self, engine: Engine, reader: PageReader, control: Path) -> None:
        self.engine, self.reader, self.control = engine, reader, control
        self.asked: list[tuple[list[int], list[int]]] = []

    def ask(self, seed: int) -> None:
        """Requests that share the prefixes and go on differently, so that new pages are computed on top of the loaded ones."""
        requests = []
        for i, prefix in enumerate(PREFIXES):
            for branch in range(2):
                ids = prefix + random_ids(150, seed * 100 + i * 10 + branch)
                requests.append(Request(ids=ids, sampling={"max_tokens": 24, "ignore_eos": True}))
        results = self.engine.run(requests)
        assert all(len(r.output) == 24 for r in results)
        self.asked += [(r.ids, result.output) for r, result in zip(requests, results, strict=True)]

    def meet(self, kind: str, ranks: list[int], seed: int) -> float:
        """Ask twice while loads meet the fault; the second time what was stored meanwhile is loaded, in vain again. Returns how many loads
        failed the first time."""
        before = failed_loads(self.engine)
        assert self.engine.reset_prefix_cache()
        self.control.write_text(json.dumps({"kind": kind, "ranks": ranks}))
        self.ask(seed)
        failed = failed_loads(self.engine) - before
        assert self.engine.reset_prefix_cache()
        self.ask(seed)
        self.control.unlink()
        return failed

    def judge(self) -> Judged:
        """Every stored page of everything asked since the last time."""
        judged = judge_pages(self.engine, self.reader, self.asked)
        self.asked.clear()
        print(judged)
        return judged


@contextmanager
def bench(folder: Path, environment: Mapping[str, str], **arguments: Any) -> Iterator[Bench]:
    control = folder / "fault"
    variables = {**INSECURE, **EXACT, **ONE_THREAD, "MOONCAKE_KV_TEST_FAULT": str(control), **environment}
    chunks = {"max_num_batched_tokens": 512}
    with Engine(generated_llama(TINY_LLAMA), folder / "log", settings=SETTINGS, environment=variables, **chunks, **arguments) as engine:
        assert engine.call("tests.engines.probes:asynchronous") == (environment.get("MOONCAKE_KV_TEST_ASYNC") == "1")
        space = KVNamespace.decode(bytes.fromhex(engine.call("tests.engines.judge:namespace")))
        with PageReader(space, SETTINGS) as reader:
            made = Bench(engine, reader, control)
            made.ask(1)
            assert all(reader.wait_for(page_hashes(ids)) == 13 for ids, _ in made.asked)
            judged = made.judge()
            assert (judged.pages, judged.missing, judged.different) == (2 * 10 + 4 * 3, 0, 0)
            yield made


@pytest.fixture(scope="module", params=["", "1"], ids=["sync", "async"])
def two_ranks(request: pytest.FixtureRequest, module_runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    environment = {"MOONCAKE_KV_TEST_ASYNC": request.param}
    with bench(tmp_path_factory.mktemp("two"), environment, tensor_parallel_size=2) as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_computed_on_a_failed_load_becomes_visible(two_ranks: Bench, kind: str) -> None:
    seeds = [10 + 2 * KINDS.index(kind) + i for i in range(2)]
    for ranks, seed in zip(([0, 1], [1]), seeds, strict=True):
        assert two_ranks.meet(kind, ranks, seed) > 0, "no load met the fault"
    judged = two_ranks.judge()
    assert judged.worst < MAX_ERROR
    # A damaged page is replaced by what was computed in its stead, so at the end all are there: 10 of each prefix, 3 of each request.
    assert (judged.pages, judged.missing, judged.different) == (2 * 10 + 2 * 4 * 3, 0, 0)


@pytest.mark.parametrize(("what", "kind"), [("report", "swap"), ("verify", "swap")])
def test_a_connector_without_protection_is_caught(runtime_dir: Path, tmp_path: Path, what: str, kind: str) -> None:
    """The test above sees the pages of a connector that keeps failed loads to itself, or does not check what it loads."""
    with bench(tmp_path, {"MOONCAKE_KV_TEST_UNPROTECTED": what}, in_process=True) as made:
        failed = made.meet(kind, [0], 50)
        assert (failed > 0) == (what == "report")
        assert made.judge().different > 0
