"""Real LMDeploy, two ranks under Ray: loads that fail half-way. After each fault every page that anybody can see is judged against another
computation (see judge)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mooncake_kv.common.hashing import page_hashes
from mooncake_kv.common.identity import KVNamespace
from tests.engines.judge import EXACT, MAX_ERROR, Judged, PageReader, judge_pages
from tests.engines.lmdeploy_harness import LMDeployEngine, LMDeployRequest
from tests.engines.test_lmdeploy_hits import PROBES, counter
from tests.engines.test_vllm_hits import random_ids
from tests.models import TINY_LLAMA, generated_llama

pytestmark = pytest.mark.timeout(400)

SETTINGS = {"dram_size": "256mb", "extent_size": "64mb", "fetch_timeout_ms": 10000}
KINDS = ["drop", "truncate", "flip", "swap", "error"]
PREFIXES = [random_ids(700, 900 + i) for i in range(2)]


class Salted:
    """The engine as judge_pages wants one: pages under a salt are computed, not loaded."""

    def __init__(self, engine: LMDeployEngine) -> None:
        self._engine = engine

    def generate(self, ids: list[int], _: int, *, cache_salt: str, **__: Any) -> None:
        self._engine.call(f"{PROBES}forget")
        self._engine.call(f"{PROBES}salt", salt=cache_salt)
        self._engine.generate(ids, 4, sampling={"ignore_eos": True})
        self._engine.call(f"{PROBES}salt", salt="")


class Bench:
    """An engine whose loads fail while `control` exists."""

    def __init__(self, engine: LMDeployEngine, reader: PageReader, control: Path) -> None:
        self.engine, self.reader, self.control = engine, reader, control
        self.asked: list[tuple[list[int], list[int]]] = []

    def ask(self, seed: int) -> None:
        """Requests that share the prefixes and go on differently, so that new pages are computed on top of the loaded ones."""
        requests = []
        for i, prefix in enumerate(PREFIXES):
            for branch in range(2):
                ids = prefix + random_ids(150, seed * 100 + i * 10 + branch)
                requests.append(LMDeployRequest(ids=ids, sampling={"max_new_tokens": 24, "ignore_eos": True}))
        results = self.engine.run(requests, together=True)
        assert all((r.finish, len(r.output)) == ("finish", 24) for r in results)
        self.asked += [(r.ids, result.output) for r, result in zip(requests, results, strict=True)]

    def meet(self, kind: str, ranks: list[int], seed: int) -> int:
        """Ask twice while loads meet the fault; the second time what was stored meanwhile is loaded, in vain again. Returns how many loads
        failed the first time."""
        before = counter(self.engine, "failed_loads")
        self.engine.call(f"{PROBES}forget")
        self.control.write_text(json.dumps({"kind": kind, "ranks": ranks}))
        self.ask(seed)
        failed = counter(self.engine, "failed_loads") - before
        self.engine.call(f"{PROBES}forget")
        self.ask(seed)
        self.control.unlink()
        return failed

    def judge(self) -> Judged:
        """Every stored page of everything asked since the last time."""
        judged = judge_pages(Salted(self.engine), self.reader, self.asked)  # type: ignore[arg-type]
        self.asked.clear()
        print(judged)
        return judged


@contextmanager
def bench(folder: Path, **environment: str) -> Iterator[Bench]:
    control = folder / "fault"
    ranks = int(environment.pop("ranks"))
    variables = {**EXACT, "OMP_NUM_THREADS": "1", "MOONCAKE_KV_TEST_FAULT": str(control), **environment}
    more: dict[str, Any] = {"tp": ranks, "enable_prefix_caching": True, "max_prefill_token_num": 512, "eager_mode": True}
    with LMDeployEngine(generated_llama(TINY_LLAMA), folder / "log", settings=SETTINGS, environment=variables, **more) as engine:
        space = KVNamespace.decode(bytes.fromhex(engine.call(f"{PROBES}namespace")))
        with PageReader(space, SETTINGS) as reader:
            made = Bench(engine, reader, control)
            made.ask(1)
            assert all(reader.wait_for(page_hashes(ids)) == 13 for ids, _ in made.asked)
            judged = made.judge()
            assert (judged.pages, judged.missing, judged.different) == (2 * 10 + 4 * 3, 0, 0)
            yield made


@pytest.fixture(scope="module")
def two_ranks(module_runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("two"), ranks="2") as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_computed_on_a_failed_load_becomes_visible(two_ranks: Bench, kind: str) -> None:
    for i, ranks in enumerate(([0, 1], [1])):
        assert two_ranks.meet(kind, ranks, 10 + 2 * KINDS.index(kind) + i) > 0, "no load met the fault"
    judged = two_ranks.judge()
    assert judged.worst < MAX_ERROR
    # A damaged page is replaced by what was computed in its stead, so at the end all are there: 10 of each prefix, 3 of each request.
    assert (judged.pages, judged.missing, judged.different) == (2 * 10 + 2 * 4 * 3, 0, 0)


def test_all_ranks_idle_hold_nothing(two_ranks: Bench) -> None:
    two_ranks.engine.call(f"{PROBES}forget")
    held = two_ranks.engine.call(f"{PROBES}held")
    assert {name: value for name, value in held.items() if value and name != "blocks"} == {}
    assert counter(two_ranks.engine, "loaded_tokens") > 0


@pytest.mark.parametrize(("what", "kind"), [("report", "swap"), ("verify", "swap")])
def test_a_connector_without_protection_is_caught(runtime_dir: Path, tmp_path: Path, what: str, kind: str) -> None:
    """The test above sees the pages of a connector that keeps failed loads to itself, or does not check what it loads."""
    with bench(tmp_path, ranks="1", MOONCAKE_KV_TEST_UNPROTECTED=what) as made:
        made.meet(kind, [0], 50)
        assert made.judge().different > 0
