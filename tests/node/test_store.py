"""Both halves of the store connector over a real node, without an engine: two ranks with paged KV of their own, in plain tensors.

The KV of a sequence is drawn from its tokens, so what a load brings back can be compared byte for byte with what another sequence of the
same prefix computed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mooncake_kv.common import kv_views
from mooncake_kv.common.config import load_config
from mooncake_kv.common.hashing import page_hashes
from mooncake_kv.common.identity import KVNamespace
from mooncake_kv.common.node.client import NodeClient
from mooncake_kv.common.page import PageLayout
from mooncake_kv.connectors.store import Plan, Report, SchedulerHalf, WorkerHalf
from tests.node.scripted_peer import until

PAGE, BLOCK, BLOCKS, LAYERS, HEADS, DIM, RANKS = 64, 32, 64, 3, 2, 32, 2
SPACE = KVNamespace.build(model="m", kv_dtype="bfloat16", num_layers=LAYERS, num_kv_heads=HEADS, k_head_dim=DIM, v_head_dim=DIM)
DEADLINE_S = 60.0


class Rank:
    """One worker: KV tensors [blocks, heads, tokens, K and V], one head of the model's two."""

    def __init__(self, number: int, client: NodeClient, layout: PageLayout, verify: bool = True) -> None:
        self.number = number
        self.client = client
        self.kv = [torch.zeros((BLOCKS, 1, BLOCK, 2 * DIM), dtype=torch.int16) for _ in range(LAYERS)]
        view = kv_views.vllm_gpu(self.kv, BLOCK).bind(layout, 0, number)
        self.half = WorkerHalf(client, view, layout, block_tokens=BLOCK, verify=verify)

    def compute(self, tokens: list[int], table: list[int], first: int, last: int) -> None:
        for layer, kv in enumerate(self.kv):
            for i in range(first, last):
                rng = np.random.default_rng([layer, self.number, i, *tokens[: i + 1][-3:]])
                row = torch.from_numpy(rng.integers(-30000, 30000, 2 * DIM, dtype=np.int16))
                kv[table[i // BLOCK], 0, i % BLOCK] = row

    def rows(self, table: list[int], last: int) -> np.ndarray:
        return np.stack([np.concatenate([kv[b, 0].numpy() for b in table])[:last] for kv in self.kv])


class Rig:
    def __init__(self, folder: Path, **more: object) -> None:
        self.config = load_config({"dram_size": "64mb", "extent_size": "16mb", "fetch_timeout_ms": 5000, **more})
        self.layout = PageLayout(SPACE)
        self.clients = [NodeClient(self.config, SPACE, engine="e", role="scheduler", credits=40)]
        self.clients += [NodeClient(self.config, SPACE, engine="e", role="worker") for _ in range(RANKS)]
        for client in self.clients:
            client.start()
        assert all(client.wait_ready(DEADLINE_S) for client in self.clients)
        self.half = SchedulerHalf(
            self.clients[0], SPACE.digest(), page_tokens=PAGE, block_tokens=BLOCK, ranks=RANKS, slot_bytes=self.layout.slot_bytes
        )
        self.ranks = [Rank(i, client, self.layout) for i, client in enumerate(self.clients[1:])]
        self.settle()

    def settle(self) -> None:
        scheduler, *workers = self.clients
        until(lambda: all(c.ready for c in self.clients))
        until(lambda: scheduler.counters()["credits"] > 0 and all(w.counters()["mapped_bytes"] for w in workers))

    def ask(self, name: str, tokens: list[int], weights: str = "") -> int:
        self.half.arrive(name, tokens, weights=weights)
        found: list[int | None] = [None]

        def asked() -> bool:
            found[0] = self.half.match(name, 0, len(tokens))
            return found[0] is not None

        until(asked)
        assert found[0] is not None
        return found[0]

    def run(self, name: str, tokens: list[int], table: list[int], external: int, lazy_rank: int = -1) -> set[int]:
        """Load, then compute the rest of the prompt and save (not on `lazy_rank`). Returns the invalid blocks."""
        self.half.start(name, external, lambda: table)
        invalid = self.load(name) if external else set()
        self.half.scheduled(name, len(tokens), lambda: table)
        plan = self.half.end_step()
        merged = Report(plan.step)
        for rank in self.ranks:
            report = Report(plan.step)
            rank.compute(tokens, table, external, len(tokens))
            if rank.number != lazy_rank:
                rank.half.save(plan, report)
            merged.merge(report)
        self.half.output(merged, ())
        return invalid

    def load(self, name: str, before: Callable[[Plan], None] = lambda plan: None) -> set[int]:
        """Steps until the load has ended, `before` them something else. Returns the invalid blocks."""
        invalid: set[int] = set()
        loaded: list[str] = []
        while name not in loaded:
            plan = self.half.end_step()
            before(plan)
            merged, failed = Report(plan.step), set()
            for rank in self.ranks:
                report = Report(plan.step)
                failed |= rank.half.load(plan, report)
                merged.merge(report)
            self.half.output(merged, failed)
            invalid |= failed
            loaded += plan.loaded
        return invalid

    def store(self, name: str, tokens: list[int]) -> None:
        """A request of 300 tokens that finds nothing, in blocks 0 to 9; its four pages can be found when this returns."""
        assert self.ask(name, tokens) == 0
        assert self.run(name, tokens, list(range(10)), 0) == set()
        until(lambda: self.stored(tokens) == 4)

    def stored(self, tokens: list[int]) -> int:
        lookup = self.clients[0].lookup(page_hashes(tokens))
        assert lookup is not None
        until(lambda: lookup.done)
        return lookup.pages


@pytest.fixture
def rig(runtime_dir: Path) -> Iterator[Rig]:
    made = Rig(runtime_dir)
    yield made
    for rank in made.ranks:
        rank.half.close()
    for client in made.clients:
        client.close()


def prompt(length: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 50000, length)]


def test_what_two_ranks_saved_comes_back_in_other_blocks(rig: Rig) -> None:
    tokens = prompt(300, 1)
    rig.store("a", tokens)
    written = [rank.rows(list(range(10)), 256) for rank in rig.ranks]
    assert rig.ask("b", tokens) == 256
    table = [40, 33, 52, 21, 60, 11, 12, 57, 30, 31]
    assert rig.run("b", tokens, table, 256) == set()
    for rank, expected in zip(rig.ranks, written, strict=True):
        assert np.array_equal(rank.rows(table, 256), expected)
    assert not rig.half.finish("a", 300, []) and not rig.half.finish("b", 300, [])
    assert rig.half.counters["loaded_tokens"] == rig.half.counters["loaded_tokens_dram"] == 256


def test_a_prompt_comes_back_from_disk_when_the_node_was_replaced(runtime_dir: Path, tmp_path: Path) -> None:
    disk = tmp_path / "ssd"
    rig = Rig(runtime_dir, ssd_path=str(disk), ssd_size="1gb")
    try:
        tokens = prompt(300, 2)
        assert rig.ask("a", tokens) == 0
        rig.run("a", tokens, list(range(10)), 0)
        until(lambda: sum(path.is_file() for path in disk.glob("*/*/*")) == 4)
        written = [rank.rows(list(range(10)), 256) for rank in rig.ranks]
        old = rig.clients[0].node_pid
        os.kill(old, signal.SIGKILL)
        until(lambda: all(client.ready and client.node_pid != old for client in rig.clients), DEADLINE_S)
        rig.settle()
        assert rig.ask("b", tokens) == 256
        rig.half.start("b", 256, lambda: list(range(20, 30)))
        assert rig.half.loaded_tokens("b") == {"ssd": 256}
        assert rig.load("b") == set()
        for rank, expected in zip(rig.ranks, written, strict=True):
            assert np.array_equal(rank.rows(list(range(20, 30)), 256), expected)
        rig.half.finish("b", 300, [])
        # The first of the tokens that end and begin in the middle of a page are not counted twice.
        rig.half.arrive("c", tokens)
        until(lambda: rig.half.match("c", 96, 200) == 103)
        rig.half.start("c", 103, lambda: list(range(40, 50)))
        assert rig.half.loaded_tokens("c") == {"dram": 103}
        rig.load("c")
        assert rig.half.counters["loaded_tokens_ssd"] == 256 and rig.half.counters["loaded_tokens_dram"] == 103
    finally:
        for rank in rig.ranks:
            rank.half.close()
        for client in rig.clients:
            client.close()


def test_a_large_load_takes_several_steps(rig: Rig) -> None:
    tokens = prompt(300, 6)
    rig.store("a", tokens)
    rig.half._load_step_pages = 3
    plans: list[Plan] = []
    for name, table in (("b", list(range(20, 30))), ("c", list(range(40, 50)))):
        assert rig.ask(name, tokens) == 256
        rig.half.start(name, 256, lambda table=table: table)  # type: ignore[misc]
    assert rig.load("c", plans.append) == set()
    assert [[len(load.slots) for load in plan.loads] for plan in plans] == [[3], [1, 2], [2]]
    assert [plan.loaded for plan in plans] == [[], ["b"], ["c"]]
    for rank in rig.ranks:
        for table in (list(range(20, 30)), list(range(40, 50))):
            assert np.array_equal(rank.rows(table, 256), rank.rows(list(range(10)), 256))


def test_an_abort_ends_a_load_with_the_next_step(rig: Rig) -> None:
    tokens = prompt(300, 7)
    rig.store("a", tokens)
    rig.half._load_step_pages = 1
    assert rig.ask("b", tokens) == 256
    rig.half.start("b", 256, lambda: list(range(20, 30)))
    plans: list[Plan] = []

    def abort(plan: Plan) -> None:
        plans.append(plan)
        if len(plans) == 2:
            assert not rig.half.finish("b", 256, list(range(20, 30)))

    rig.load("b", abort)
    assert [len(plan.loads) for plan in plans] == [1, 1, 0]
    assert rig.half._staged_bytes == 0


def test_a_page_that_one_rank_did_not_copy_is_never_seen(rig: Rig) -> None:
    tokens = prompt(200, 2)
    rig.ask("a", tokens)
    rig.run("a", tokens, list(range(7)), 0, lazy_rank=1)
    assert rig.half.counters["discarded_pages"] == 3
    assert rig.stored(tokens) == 0
    # The blocks are still there: the next step saves them after all.
    rig.half.scheduled("a", len(tokens), lambda: list(range(7)))
    plan = rig.half.end_step()
    merged = Report(plan.step)
    for rank in rig.ranks:
        report = Report(plan.step)
        rank.half.save(plan, report)
        merged.merge(report)
    rig.half.output(merged, set())
    until(lambda: rig.stored(tokens) == 3)


def test_a_rank_with_another_adapter_loads_and_saves_nothing_of_it(rig: Rig) -> None:
    tokens = prompt(300, 6)
    rig.ask("a", tokens, weights="1:f")
    rig.ranks[1].half._lacks = lambda weights: weights == "1:f"
    rig.run("a", tokens, list(range(10)), 0)
    assert rig.stored(tokens) == 0
    plain = rig.ask("plain", tokens)
    rig.run("plain", tokens, list(range(10)), plain)
    until(lambda: rig.stored(tokens) == 4)
    assert rig.ask("b", tokens, weights="1:f") == 0, "known by now"
    rig.half._refused.clear()
    assert rig.ask("c", tokens, weights="1:f") == 256
    assert rig.run("c", tokens, list(range(20, 30)), 256) == set(range(20, 28))
    assert rig.half._refused == {"1:f"}


@pytest.mark.parametrize("verify", [True, False])
def test_a_flipped_bit_ends_the_load_where_it_is_checked(rig: Rig, verify: bool) -> None:
    tokens = prompt(300, 3)
    rig.store("a", tokens)
    assert rig.ask("b", tokens) == 256
    for rank in rig.ranks:
        rank.half._verify = verify
    rig.half.start("b", 256, lambda: list(range(20, 30)))

    def flip(plan: Plan) -> None:
        load, arena = plan.loads[0], rig.clients[1].arena()
        assert arena is not None
        with arena.pin(load.epoch, load.generation) as pinned:
            assert pinned is not None
            page = pinned.slot(load.slots[2])
            assert page is not None
            page[100] ^= 4

    invalid = rig.load("b", flip)
    if verify:
        assert invalid == {24, 25, 26, 27}, "the blocks of pages 2 and 3"
        until(lambda: rig.stored(tokens) == 2)
    else:
        assert invalid == set(), "what nobody checks is not found"


def test_a_killed_node_costs_a_miss_and_comes_back_empty(rig: Rig) -> None:
    tokens = prompt(300, 4)
    rig.store("a", tokens)
    assert rig.ask("b", tokens) == 256
    rig.half.start("b", 256, lambda: list(range(20, 30)))

    def kill(plan: Plan) -> None:
        os.kill(rig.clients[0].node_pid, signal.SIGKILL)
        until(lambda: not any(client.epoch == plan.loads[0].epoch for client in rig.clients))

    assert rig.load("b", kill) == set(range(20, 28)), "a slot of a lost node is not read"
    rig.settle()
    tokens = prompt(300, 5)
    rig.store("c", tokens)
