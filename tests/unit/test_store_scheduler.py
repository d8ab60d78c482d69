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

    def step(self, name: str, external: int, table: list[int]) -> Plan:
        self.half.start(name, external)
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
    plan = rig.step("first", 3 * PAGE, [10, 11, 12, 13])
    rig.half.output(rig.saved(plan), {11, 12})
    assert rig.match("second") == PAGE, "the page before the failed one is good"
    plan = rig.step("second", PAGE, [20, 21, 22, 23])
    assert [load.slots for load in plan.loads] == [[rig.node.pages[page_hashes(TOKENS, PAGE)[0]]]]
    assert [(save.first_page, len(save.slots)) for save in plan.saves] == [(1, 2)], "the dead copies are to be replaced"


def test_a_failed_first_page_leaves_nothing_to_load(rig: Rig) -> None:
    rig.arrive("first")
    rig.arrive("second")
    assert rig.match("first") == 3 * PAGE
    plan = rig.step("first", 3 * PAGE, [10, 11, 12, 13])
    rig.half.output(rig.saved(plan), {10, 11, 12})
    assert rig.match("second") == 0
    assert rig.half.counters["failed_keys_avoided"] == 1
    assert rig.half.counters["misses"] == 0
    assert not any(rig.node.leases.values()), "what is not used is not kept"


def test_nothing_is_planned_once_a_rank_cannot_copy(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.arrive("first")
    rig.arrive("second")
    assert rig.match("first") == 3 * PAGE
    plan = rig.step("first", 3 * PAGE, [10, 11, 12, 13])
    with caplog.at_level(logging.ERROR, "mooncake_kv"):
        for _ in range(2):
            rig.half.output(rig.saved(plan, unable="an unknown layout").merge(Report(plan.step)), {10, 11, 12})
            plan = rig.half.end_step()
    assert [record.getMessage() for record in caplog.records].count(caplog.records[0].getMessage()) == len(caplog.records) == 1
    assert "an unknown layout" in caplog.text
    assert not rig.half.blind_ask("second") and rig.match("second") == 0
    plan = rig.step("second", 0, [20, 21, 22, 23])
    assert not plan.loads and not plan.saves
    assert not rig.half.finish("first", len(TOKENS), [10, 11, 12, 13])
    rig.half.arrive("third", TOKENS)
    assert rig.match("third") == 0
    assert rig.half.counters["skipped_worker_unable"] == 1
    assert not any(rig.node.leases.values()) and not rig.node.fetches
    assert not rig.node.granted, "no slot is taken for pages that nobody copies"


def test_a_request_whose_adapter_the_engine_does_not_have(rig: Rig) -> None:
    rig.arrive("first", weights="1:old")
    rig.arrive("other", weights="2:good")
    assert rig.match("first") == 3 * PAGE
    plan = rig.step("first", 3 * PAGE, [10, 11, 12, 13])
    assert [load.weights for load in plan.loads] == ["1:old"]
    rig.half.output(rig.saved(plan, refused={"1:old"}), {10, 11, 12})
    rig.half.scheduled("first", len(TOKENS), lambda: [10, 11, 12, 13])
    assert not rig.half.end_step().saves, "what was computed with other weights is never stored"
    assert rig.match("first") == 0
    rig.arrive("next", weights="1:old")
    assert rig.match("next") == 0 and rig.half.counters["skipped_other_weights"] == 1
    rig.now += 3600
    assert rig.match("other") == 3 * PAGE
