"""Real vLLM: loads that fail half-way. After each fault every page that anybody can see is judged against another engine's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_kv.common.hashing import page_hashes, storage_namespace_seed
from mooncake_kv.common.identity import KVNamespace
from tests.engines.harness import Engine, Request, Result
from tests.engines.judge import MAX_ERROR, PageReader, worst_error
from tests.engines.test_vllm_hits import INSECURE, random_ids
from tests.models import TINY_LLAMA, generated_llama

# A patient client: on a busy test machine the node may not get a core for longer than the default 150 ms.
SETTINGS = {"dram_size": "256mb", "extent_size": "64mb", "fetch_timeout_ms": 10000}
KINDS = ["drop", "truncate", "flip", "error"]
PREFIXES = [random_ids(700, 900 + i) for i in range(2)]


class Bench:
    """An engine whose loads fail while `control` exists, and the right page for every hash of what it was asked."""

    def __init__(self, engine: Engine, reader: PageReader, control: Path) -> None:
        self.engine, self.reader, self.control = engine, reader, control
        self.space = reader.namespace
        self.asked: list[list[int]] = []

    def ask(self, seed: int) -> list[Result]:
        """Requests that share the prefixes and go on differently, so that new pages are computed on top of the loaded ones."""
        requests = []
        for i, prefix in enumerate(PREFIXES):
            for branch in range(2):
                ids = prefix + random_ids(150, seed * 100 + i * 10 + branch)
                requests.append(Request(ids=ids, sampling={"max_tokens": 24, "ignore_eos": True}))
        results = self.engine.run(requests)
        known = [r.ids + result.output for r, result in zip(requests, results, strict=True)]
        self.asked += [ids for ids in known if ids not in self.asked]
        assert all(len(r.output) == 24 for r in results)
        return results

    def judge(self) -> int:
        """Every stored page of everything asked, against the same tokens prefilled under a salt that no load ever touched."""
        self.control.unlink(missing_ok=True)

        seed, judged = storage_namespace_seed(None, "reference"), 0
        for ids in self.asked:
            self.engine.generate(ids, 1, cache_salt="reference", sampling={"skip_reading_prefix_cache": True})
            found = {h: p for h in page_hashes(ids) for p in self.reader.read([h])}
            reference = page_hashes(ids, seed=seed)
            assert self.reader.wait_for(reference) == len(reference)
            right = self.reader.read(reference)
            for page_hash, expected in zip(page_hashes(ids), right, strict=True):
                if page_hash in found:
                    judged += 1
                    assert worst_error(found[page_hash], expected) < MAX_ERROR
        self.asked.clear()
        return judged


@pytest.fixture(scope="module", params=["sync", "async"])
def bench(request: pytest.FixtureRequest, module_runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp(request.param)
    control = folder / "fault"
    environment = {**INSECURE, "MOONCAKE_KV_TEST_FAULT": str(control), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if request.param == "async":
        environment["MOONCAKE_KV_TEST_ASYNC"] = "1"
    arguments = {"tensor_parallel_size": 2, "max_num_batched_tokens": 512}
    with Engine(generated_llama(TINY_LLAMA), folder / "log", settings=SETTINGS, environment=environment, **arguments) as engine:
        space = KVNamespace.decode(bytes.fromhex(engine.call("tests.engines.judge:namespace")))
        with PageReader(space, SETTINGS) as reader:
            bench = Bench(engine, reader, control)
            bench.ask(1)
            for ids in bench.asked:
                assert reader.wait_for(page_hashes(ids)[:13]) == 13
            assert bench.judge() >= 4 * 13
            yield bench


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_computed_on_a_failed_load_becomes_visible(bench: Bench, kind: str) -> None:
    for ranks in ([0, 1], [1]):
        seed = 10 + 2 * KINDS.index(kind) + len(ranks)
        before = _failures(bench)
        bench.engine.reset_prefix_cache()
        bench.control.write_text(json.dumps({"kind": kind, "ranks": ranks}))
        bench.ask(seed)
        assert _failures(bench) > before, "no load met the fault"
        bench.engine.reset_prefix_cache()
        bench.ask(seed)  # the same again: what the first round stored is loaded now
    assert bench.judge() > 100


def _failures(bench: Bench) -> float:
    return sum(v for k, v in bench.engine.metrics().items() if "mooncake_kv_failures_total" in k and 'what="load"' in k)
