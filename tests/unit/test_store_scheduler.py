"""The scheduler half's answers in single situations that random schedules (test_store_simulated) do not judge."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from mooncake_kv.common.hashing import page_hashes
from mooncake_kv.connectors.store import Plan, Report, SchedulerHalf
from tests.unit.test_store_simulated import PAGE, SimulatedNode

TOKENS = list(range(3 * PAGE + 1))


class Rig:
    """One rank, blocks as large as pages. The three pages of `TOKENS` are in the node."""

    def __init__(self) -> None:
        self.node = SimulatedNode(random.Random(0), 48, 1)
        self.now = 0.0
        self.half = SchedulerHalf(
            self.node,  # type: ignore[arg-type]
            "digest",
            page_tokens=PAGE, block_tokens=PAGE, ranks=1, slot_bytes=1, clock=lambda: self.now,
        )  # fmt: skip
        for page_hash in page_hashes(TOKENS, PAGE):
            self.node.pages[page_hash] = self.node.free.pop()

    def arrive(self, name: str, **more: Any) -> None:
        """A request for TOKENS whose pages are staged at once."""
        self.half.arrive(name, TOKENS, **more)
        self.half.match(name, 0, len(TOKENS))
        for fetch in self.node.fetches:
            fetch.done = True

    def match(self, name: str) -> int | None:
        return self.half.match(name, 0, len(TOKENS))

    def load(self, name: str, external: int, table: list[int]) -> Plan:
        """The step that loads for a request, which is not computed yet."""
        self.half.start(name, external, lambda: table)
        return self.half.end_step()

    def compute(self, name: str, table: list[int]) -> Plan:
        self.half.scheduled(name, len(TOKENS), lambda: table)
        return self.half.end_step()

    def saved(self, plan: Plan, **more: Any) -> Report:
        return Report(plan.step, {save.op: 1 for save in plan.saves}, **more)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_what_was_staged_before_its_load_failed_is_not_loaded_again(rig: Rig) -> None:
    rig.arrive("first")
    rig.arrive("second")
    assert rig.match("first") == rig.match("second") == 3 * PAGE
    rig.half.output(rig.saved(rig.load("first", 3 * PAGE, [10, 11, 12, 13])), {11, 12})
    assert rig.match("second") == PAGE, "the page before the failed one is good"
    plan = rig.load("second", PAGE, [20, 21, 22, 23])
    assert [load.slots for load in plan.loads] == [[rig.node.pages[page_hashes(TOKENS, PAGE)[0]]]]
    rig.half.output(rig.saved(plan), ())
    plan = rig.compute("second", [20, 21, 22, 23])
    assert [(save.first_page, len(save.slots)) for save in plan.saves] == [(1, 2)], "the dead copies are to be replaced"


def test_a_failed_first_page_leaves_nothing_to_load(rig: Rig) -> None:
    rig.arrive("first")
    rig.arrive("second")
    assert rig.match("first") == 3 * PAGE
    rig.half.output(rig.saved(rig.load("first", 3 * PAGE, [10, 11, 12, 13])), {10, 11, 12})
    assert rig.match("second") == 0
    assert rig.half.counters["failed_keys_avoided"] == 1
    assert rig.half.counters["misses"] == 0
    assert not any(rig.node.leases.values()), "what is not used is not kept"


def test_nothing_is_planned_once_a_rank_cannot_copy(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.arrive("first")
    rig.arrive("second")
    assert rig.match("first") == 3 * PAGE
    plan = rig.load("first", 3 * PAGE, [10, 11, 12, 13])
    with caplog.at_level(logging.ERROR, "mooncake_kv"):
        rig.half.output(rig.saved(plan, unable="an unknown layout").merge(Report(plan.step)), {10, 11, 12})
        rig.half.output(rig.saved(rig.half.end_step(), unable="an unknown layout"), ())
    assert len(caplog.records) == 1 and "an unknown layout" in caplog.text
    assert not rig.half.blind_ask("second") and rig.match("first") == rig.match("second") == 0
    for name in ("first", "second"):
        plan = rig.load(name, 0, [])
        assert not plan.loads
        assert not rig.compute(name, [20, 21, 22, 23]).saves
        assert not rig.half.finish(name, len(TOKENS), [20, 21, 22, 23])
    rig.half.arrive("third", TOKENS)
    assert rig.match("third") == 0
    assert rig.half.counters["skipped_worker_unable"] == 3
    assert not rig.node.fetches, "nothing stays leased"
    assert not rig.node.granted, "no slot is taken for pages that nobody copies"


def test_a_request_whose_adapter_the_engine_does_not_have(rig: Rig) -> None:
    rig.arrive("first", weights="1:old")
    rig.arrive("other", weights="2:good")
    assert rig.match("first") == 3 * PAGE
    plan = rig.load("first", 3 * PAGE, [10, 11, 12, 13])
    assert [load.weights for load in plan.loads] == ["1:old"]
    rig.half.output(rig.saved(plan, refused={"1:old"}), {10, 11, 12})
    assert rig.match("first") == 0
    rig.load("first", 0, [])
    assert not rig.compute("first", [10, 11, 12, 13]).saves, "what was computed with other weights is never stored"
    rig.arrive("next", weights="1:old")
    assert rig.match("next") == 0 and rig.half.counters["skipped_other_weights"] == 2
    rig.now += 3600
    assert rig.match("other") == 3 * PAGE
