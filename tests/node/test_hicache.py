"""The store behind SGLang's storage interface over a real node, without an engine: host pools of SGLang's layouts in plain tensors."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mooncake_kv.common import kv_views
from mooncake_kv.common.config import load_config
from mooncake_kv.common.hashing import page_hashes
from mooncake_kv.common.identity import KVNamespace
from mooncake_kv.common.node.client import NodeClient
from mooncake_kv.common.node.protocol import Rectangle
from mooncake_kv.common.page import PageLayout
from mooncake_kv.connectors import hicache
from mooncake_kv.connectors.hicache import HiCacheStore, page_hash
from tests.node.scripted_peer import until

PAGE, PAGES, LAYERS, HEADS, DIM = 16, 40, 3, 2, 32
SPACE = KVNamespace.build(
    model="m", kv_dtype="bfloat16", num_layers=LAYERS, num_kv_heads=HEADS, k_head_dim=DIM, v_head_dim=DIM, page_tokens=PAGE
)
LAYOUT = PageLayout(SPACE)
SHAPES = {
    "layer_first": (2, LAYERS, PAGES * PAGE, HEADS, DIM),
    "page_first": (2, PAGES * PAGE, LAYERS, HEADS, DIM),
    "page_first_direct": (2, PAGES, LAYERS, PAGE, HEADS, DIM),
    "page_head": (2, PAGES, HEADS, PAGE, LAYERS, DIM),
}
HASHES = page_hashes(list(range(PAGE * PAGES)), PAGE)
SETTINGS: dict[str, Any] = {"dram_size": "64mb", "extent_size": "16mb", "fetch_timeout_ms": 5000}
DEADLINE_S = 60.0


class Rank:
    """One process of an engine: a host pool of some layout, with all heads or one."""

    def __init__(self, layout: str = "page_first", head: int | None = None, engine: str = "e", **more: Any) -> None:
        heads = HEADS if head is None else 1
        self.layout = layout
        self.pool = torch.zeros([heads if n == HEADS and i > 1 else n for i, n in enumerate(SHAPES[layout])], dtype=torch.int16)
        view = kv_views.sglang_host(self.pool, layout).bind(LAYOUT, 0, head or 0)
        config = load_config(more.pop("settings", SETTINGS))
        self.client = NodeClient(config, SPACE, engine=engine, role="worker")
        self.client.start()
        assert self.client.wait_ready(DEADLINE_S), self.client.reason
        until(lambda: self.client.counters()["mapped_bytes"] > 0)
        rectangle = Rectangle(0, LAYERS, head or 0, (head or 0) + heads)
        self.store = HiCacheStore(
            self.client,
            view,
            LAYOUT,
            digest=SPACE.digest(),
            rectangle=rectangle,
            timeout_s=config.fetch_timeout_ms / 1e3,
            **{"writes": True, "verify": True, **more},
        )

    def fill(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.pool.copy_(torch.randint(-30000, 30000, self.pool.shape, generator=generator, dtype=torch.int16))

    def pages(self, places: list[int]) -> np.ndarray:
        """[pages, K and V, layers, page tokens, heads, dim], whatever the layout."""
        pool, n = self.pool, len(places)
        order = {"layer_first": (0, 2, 1, 3, 4), "page_first": (0, 1, 2, 3, 4)}.get(self.layout)
        if order is not None:  # [2, tokens, layers, heads, dim]
            tokens = pool.permute(*order).reshape(2, PAGES, PAGE, LAYERS, -1, DIM)[:, places]
            return tokens.permute(1, 0, 3, 2, 4, 5).numpy().reshape(n, 2, LAYERS, PAGE, -1, DIM)
        if self.layout == "page_head":
            pool = pool.permute(0, 1, 4, 3, 2, 5)
        return pool[:, places].permute(1, 0, 2, 3, 4, 5).numpy()

    def close(self) -> None:
        self.store.close()
        self.client.close()


@pytest.fixture
def ranks(runtime_dir: Path) -> Iterator[Any]:
    made: list[Rank] = []

    def make(*args: Any, **kwargs: Any) -> Rank:
        made.append(Rank(*args, **kwargs))
        return made[-1]

    yield make
    for rank in made:
        rank.close()
        assert not rank.store._keeper.is_alive()


def slots(places: list[int]) -> np.ndarray:
    return (np.asarray(places)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)


def stored(rank: Rank, count: int) -> bool:
    until(lambda: rank.store.exists(HASHES[:count]) == count)
    return True


@pytest.mark.parametrize("writer", list(SHAPES))
def test_pages_come_back_in_every_layout(ranks: Any, writer: str) -> None:
    a = ranks(writer, engine="a")
    a.fill()
    places = [7, 3, 4, 30, 31, 0]
    assert a.store.set(HASHES[:6], slots(places)) == [True] * 6
    assert stored(a, 6)
    for reader in SHAPES:
        b = ranks(reader, engine=f"b-{reader}")
        assert b.store.exists(HASHES[:8]) == 6
        assert b.store.get(HASHES[:6], slots([9, 8, 7, 6, 5, 4])) == 6
        assert np.array_equal(b.pages([9, 8, 7, 6, 5, 4]), a.pages(places))
        assert not b.pages([0, 1, 2, 3, *range(10, PAGES)]).any(), "nothing else is written"


def test_without_asking_first_and_in_pieces(ranks: Any) -> None:
    a = ranks()
    a.fill()
    everything = list(range(PAGES))
    assert all(a.store.set(HASHES, slots(everything)))
    assert stored(a, PAGES)
    b = ranks(engine="b")
    assert b.store.get(HASHES[3:9], slots(everything[3:9])) == 6, "nothing was staged"
    assert b.store.exists(HASHES) == PAGES
    for first in range(0, PAGES, 16):  # as SGLang reads: one answer, several batches
        part = everything[first : first + 16]
        assert b.store.get(HASHES[first : first + 16], slots(part)) == len(part)
    assert np.array_equal(a.pages(everything), b.pages(everything))
    until(lambda: not b.store._staged)


def test_each_rank_writes_its_part_and_a_page_shows_when_all_have(ranks: Any) -> None:
    first, second = ranks(head=0), ranks("page_head", head=1)
    for seed, rank in enumerate((first, second)):
        rank.fill(seed)
    assert first.store.set(HASHES[:5], slots([0, 1, 2, 3, 4])) == [True] * 5
    time.sleep(0.2)
    assert second.store.exists(HASHES[:5]) == 0
    assert second.store.set(HASHES[:5], slots([5, 6, 7, 8, 9])) == [True] * 5
    assert stored(first, 5)
    whole = ranks(engine="other")
    assert whole.store.get(HASHES[:5], slots([0, 1, 2, 3, 4])) == 5
    found = whole.pages([0, 1, 2, 3, 4])
    assert np.array_equal(found[..., :1, :], first.pages([0, 1, 2, 3, 4]))
    assert np.array_equal(found[..., 1:, :], second.pages([5, 6, 7, 8, 9]))


def test_a_replica_writes_nothing(ranks: Any) -> None:
    a = ranks(writes=False)
    assert a.store.set(HASHES[:2], slots([0, 1])) == [True, True]
    time.sleep(0.2)
    assert a.store.exists(HASHES[:2]) == 0


def test_a_page_that_is_there_is_not_written_again(ranks: Any) -> None:
    a = ranks()
    a.fill(1)
    a.store.set(HASHES[:3], slots([0, 1, 2]))
    assert stored(a, 3)
    first = a.pages([0, 1, 2]).copy()
    a.fill(2)
    assert a.store.set(HASHES[:3], slots([0, 1, 2])) == [True] * 3
    b = ranks(engine="b")
    assert b.store.get(HASHES[:3], slots([0, 1, 2])) == 3
    assert np.array_equal(b.pages([0, 1, 2]), first)


def test_a_flipped_bit_ends_the_run_there(ranks: Any) -> None:
    a = ranks()
    a.fill()
    a.store.set(HASHES[:6], slots([0, 1, 2, 3, 4, 5]))
    assert stored(a, 6)
    flip(a, 3)
    b = ranks(engine="b")
    assert b.store.exists(HASHES[:6]) == 6
    assert b.store.get(HASHES[:6], slots([0, 1, 2, 3, 4, 5])) == 3
    assert np.array_equal(b.pages([0, 1, 2]), a.pages([0, 1, 2]))
    assert b.store.counters["bad_pages"] == 1
    until(lambda: b.store.exists(HASHES[:6]) == 3)  # the node looked again and dropped it
    assert a.store.set(HASHES[:6], slots([0, 1, 2, 3, 4, 5])) == [True] * 6
    until(lambda: b.store.get(HASHES[:6], slots([0, 1, 2, 3, 4, 5])) == 6)


def test_without_the_check_the_bit_would_be_served(ranks: Any) -> None:
    """That the test above tests something."""
    a = ranks()
    a.fill()
    a.store.set(HASHES[:6], slots([0, 1, 2, 3, 4, 5]))
    assert stored(a, 6)
    b = ranks(engine="b", verify=False)
    assert b.store.exists(HASHES[:6]) == 6
    until(lambda: all(staged.fetch.done for staged in b.store._staged.values()))  # the node has checked
    flip(a, 3)
    assert b.store.get(HASHES[:6], slots([0, 1, 2, 3, 4, 5])) == 6
    assert not np.array_equal(b.pages([3]), a.pages([3]))


def test_what_was_staged_over_a_lost_connection_is_fetched_anew(ranks: Any, runtime_dir: Path) -> None:
    """The node and its memory are the same, but the leases ended with the connection: the slots may hold other pages by now."""
    a = ranks(verify=False)
    a.fill()
    a.store.set(HASHES[:4], slots([0, 1, 2, 3]))
    assert stored(a, 4)
    (staged,) = a.store._staged.values()
    cut(runtime_dir)
    until(lambda: not a.client.ready)
    until(lambda: a.client.ready and a.client.counters()["mapped_bytes"] > 0, DEADLINE_S)
    assert a.client.epoch == staged.fetch.epoch, "the same node"
    assert a.store._scatter(staged.fetched, staged.fetch.slots, HASHES[:4], slots([9, 8, 7, 6]), a.store._view) is None
    until(lambda: a.store.get(HASHES[:4], slots([9, 8, 7, 6])) == 4)
    assert np.array_equal(a.pages([9, 8, 7, 6]), a.pages([0, 1, 2, 3]))


def cut(folder: Path) -> None:
    """End this process's connections to nodes below `folder`."""
    for number in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(number))) as connection:
                if str(connection.getpeername()).startswith(str(folder)):
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


def flip(rank: Rank, page: int) -> None:
    """One bit of a stored page, behind the node's back."""
    fetch = rank.client.fetch(HASHES[: page + 1])
    assert fetch is not None
    until(lambda: fetch.done)
    arena = rank.client.arena()
    assert arena is not None
    with arena.pin(fetch.epoch, 0) as pinned:
        assert pinned is not None
        slot = pinned.slot(fetch.slots[page])
        assert slot is not None
        slot[LAYOUT.slot_bytes // 3] ^= 4
        del slot
    rank.client.release(fetch)


def test_more_pages_than_the_node_lets_write_at_once(ranks: Any) -> None:
    """1/8 of 4 MB has room for a few pages only; the rest waits for those to be sealed."""
    a = ranks(settings={**SETTINGS, "dram_size": "4mb", "extent_size": "2mb"})
    a.fill()
    assert LAYOUT.slot_bytes * PAGES > 4 << 17
    assert all(a.store.set(HASHES, slots(list(range(PAGES)))))


def test_a_long_run_is_read_in_the_pieces_that_the_limit_allows(ranks: Any) -> None:
    a = ranks()
    a.fill()
    assert all(a.store.set(HASHES, slots(list(range(PAGES)))))
    assert stored(a, PAGES)
    b = ranks(engine="b", staged_bytes=3 * LAYOUT.slot_bytes)
    assert b.store.exists(HASHES) == PAGES
    assert b.store.get(HASHES, slots(list(range(PAGES)))) == PAGES
    assert np.array_equal(a.pages(list(range(PAGES))), b.pages(list(range(PAGES))))


def test_what_nobody_reads_is_released(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hicache, "STAGED_S", 0.3)
    a = ranks()
    a.store.set(HASHES[:8], slots(list(range(8))))
    assert stored(a, 8)
    until(lambda: not a.store._staged and a.client.counters()["requests_awaited"] == 0)
    limited = ranks(engine="b", staged_bytes=10 * LAYOUT.slot_bytes)
    for _ in range(5):
        assert limited.store.exists(HASHES[:8]) == 8
    assert len(limited.store._staged) == 1, "older ones gave way"


def test_clear_forgets_this_namespace(ranks: Any) -> None:
    a = ranks()
    a.store.set(HASHES[:3], slots([0, 1, 2]))
    assert stored(a, 3)
    a.store.clear()
    until(lambda: a.store.exists(HASHES[:3]) == 0)


def test_three_threads_at_once(ranks: Any) -> None:
    a = ranks()
    a.fill()
    everything = list(range(PAGES))
    expected = a.pages(everything).copy()
    reader = ranks(engine="b")
    wrong: list[str] = []

    def write() -> None:
        for _ in range(20):
            if not all(a.store.set(HASHES, slots(everything))):
                wrong.append("set")

    def look() -> None:
        for _ in range(200):
            reader.store.exists(HASHES)

    def read() -> None:
        for _ in range(50):
            good = reader.store.get(HASHES, slots(everything))
            if good and not np.array_equal(reader.pages(everything[:good]), expected[:good]):
                wrong.append("get")

    threads = [threading.Thread(target=target) for target in (write, look, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_a_stopped_node_costs_the_timeout_once_and_a_dead_one_comes_back(ranks: Any) -> None:
    a = ranks(settings={**SETTINGS, "fetch_timeout_ms": 300})
    a.fill()
    a.store.set(HASHES[:4], slots([0, 1, 2, 3]))
    assert stored(a, 4)
    pid = a.client.node_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert a.store.exists(HASHES[:4]) == 0
        assert a.store.get(HASHES[4:6], slots([4, 5])) == 0
        assert a.store.set(HASHES[4:6], slots([4, 5])) == [False, False]
        assert time.monotonic() - began < 2.0
        until(lambda: not a.client.ready)
        began = time.monotonic()
        assert a.store.exists(HASHES[:4]) == 0
        assert a.store.set(HASHES[4:6], slots([4, 5])) == [False, False]
        assert time.monotonic() - began < 0.05, "nobody waits for a node that does not answer"
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: a.client.ready and a.store.exists(HASHES[:4]) == 4)
    until(lambda: not a.store._late, DEADLINE_S)
    assert a.store.set(HASHES[4:6], slots([4, 5])) == [True, True]
    os.kill(pid, signal.SIGKILL)
    until(lambda: a.client.ready and a.client.node_pid != pid, DEADLINE_S)
    assert a.store.exists(HASHES[:4]) == 0
    until(lambda: a.store.set(HASHES[:4], slots([0, 1, 2, 3])) == [True] * 4)
    assert stored(a, 4)


def test_storage_keys() -> None:
    assert page_hash("ab" * 32) == bytes.fromhex("ab" * 32)
    assert page_hash("ab") is page_hash("zz" * 32) is page_hash("") is None
