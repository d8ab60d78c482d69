"""Client and real node together: pages that come back, and what happens when either side dies or stands still.

The latency bounds here say "never blocks" with room for a loaded machine; the measured figures are printed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mooncake_kv.common.errors import ConfigError
from mooncake_kv.common.identity import trailer_key
from mooncake_kv.common.node import protocol
from mooncake_kv.common.node.client import Arena, Fetch, NodeClient
from mooncake_kv.common.page import PageLayout
from tests.node.scripted_peer import config, hashes, namespace, never_blocked, until

START_S = 60.0
LAYOUT = PageLayout(namespace())
Make = Callable[..., NodeClient]


@pytest.fixture
def make(runtime_dir: Path) -> Iterator[Make]:
    clients: list[NodeClient] = []

    def make(role: Any = "scheduler", engine: str = "e", settings: dict[str, Any] | None = None, **arguments: Any) -> NodeClient:
        client = NodeClient(config(**(settings or {})), namespace(), engine=engine, role=role, **arguments)
        clients.append(client)
        client.start()
        return client

    yield make
    for client in clients:
        client.close()
        assert not client._thread.is_alive()


def pair(make: Make, **arguments: Any) -> tuple[NodeClient, NodeClient]:
    scheduler, worker = make(**arguments), make("worker", **arguments)
    assert scheduler.wait_ready(START_S) and worker.wait_ready(START_S), (scheduler.reason, worker.reason)
    # A slot that was granted before the worker came is of no use to it until it has mapped what the node had by then.
    until(lambda: scheduler.counters()["credits"] and worker.counters()["mapped_bytes"], START_S)
    return scheduler, worker


def content(page_hash: bytes) -> np.ndarray:
    return np.random.default_rng(int.from_bytes(page_hash, "little")).integers(0, 256, LAYOUT.slot_bytes, dtype=np.uint8)


def arena_of(worker: NodeClient) -> Arena:
    arena = worker.arena()
    assert arena is not None, worker.reason
    return arena


def mapped_extents(worker: NodeClient) -> set[int]:
    return set(arena_of(worker)._extents)


def save(scheduler: NodeClient, worker: NodeClient, pages: list[bytes]) -> int:
    """Write and commit as many of these pages as there are slots for; returns how many."""
    got = scheduler.take(len(pages))
    with arena_of(worker).pin(got.epoch, got.generation) as pinned:
        assert pinned is not None
        for page_hash, slot in zip(pages, got.slots, strict=False):
            memory = pinned.slot(slot)
            assert memory is not None
            memory[:] = content(page_hash)
            del memory
    scheduler.commit(got.generation, list(zip(pages, got.slots, strict=False)))
    return len(got.slots)


def load(scheduler: NodeClient, pages: list[bytes]) -> Fetch:
    """A fetch that the node has answered. On a machine that is busy with something else the breaker may open for a moment."""

    def answered() -> Fetch | None:
        fetch = scheduler.fetch(pages)
        if fetch is not None:
            until(lambda: fetch.done)
            if not fetch.failed:
                return fetch
            scheduler.release(fetch)
        return None

    return until(answered)


def check(worker: NodeClient, fetch: Fetch, pages: list[bytes]) -> None:
    with arena_of(worker).pin(fetch.epoch, fetch.generation) as pinned:
        assert pinned is not None
        for page_hash, slot in zip(pages, fetch.slots, strict=False):
            memory = pinned.slot(slot)
            assert memory is not None and LAYOUT.verify(memory, page_hash, namespace().digest())
            wanted = content(page_hash)
            for got, expected in zip(LAYOUT.arrays(memory), LAYOUT.arrays(wanted), strict=True):
                assert np.array_equal(got, expected)
            del memory, got


def stored(scheduler: NodeClient, pages: list[bytes]) -> int:
    """How many leading pages the node has, -1 if it does not say."""
    lookup = scheduler.lookup(pages)
    if lookup is None:
        return -1
    until(lambda: lookup.done)
    return -1 if lookup.failed else lookup.pages


def test_a_pool_secret_keys_the_pages_and_stays_off_command_lines(make: Make) -> None:
    secret = {"pool_secret": "hunter2"}
    scheduler, worker = pair(make, settings=secret)
    pages = hashes(4, 7000)
    assert save(scheduler, worker, pages) == 4
    until(lambda: stored(scheduler, pages) == 4)
    fetch = load(scheduler, pages)
    layout = PageLayout(namespace(), trailer_key("hunter2"))
    with arena_of(worker).pin(fetch.epoch, fetch.generation) as pinned:
        assert pinned is not None
        memory = pinned.slot(fetch.slots[0])
        assert memory is not None and layout.verify(memory, pages[0], namespace().digest("hunter2"))
        assert not LAYOUT.verify(memory, pages[0], namespace().digest("hunter2"))
        del memory
    scheduler.release(fetch)
    stranger, _ = pair(make, engine="other")
    assert stored(stranger, pages) == 0
    runtime = os.environ["XDG_RUNTIME_DIR"]
    ours = [process for process in psutil.process_iter(["cmdline"]) if runtime in " ".join(process.info["cmdline"] or ())]
    children = [child for process in ours for child in process.children(recursive=True)]
    assert len(children) >= 1 and not any("hunter" in " ".join(process.cmdline()) for process in [*ours, *children])


class Latencies:
    """Times calls as an engine makes them, and keeps what the calls returned honest."""

    def __init__(self, scheduler: NodeClient, worker: NodeClient) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.times: dict[str, list[float]] = defaultdict(list)
        self.hits = 0
        self.waited: list[float] = []

    def call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        result = function(*arguments)
        self.times[name].append(time.perf_counter() - began)
        return result

    def step(self, pages: list[bytes]) -> None:
        """What a step of an engine calls: a fetch with its polling, slots taken, written and committed or discarded."""
        scheduler = self.scheduler
        fetch = self.call("fetch", scheduler.fetch, pages)
        got = self.call("take", scheduler.take, 2)
        arena = self.worker.arena()
        if arena is not None:
            pin = arena.pin(got.epoch, got.generation)
            self.call("pin", pin.__enter__)
            self.call("unpin", pin.__exit__, None, None, None)
        self.call("discard", scheduler.discard, got.generation, got.slots)
        if fetch is not None:
            while not fetch.done and not self.call("expired", fetch.expired, time.monotonic()):
                time.sleep(0.0005)
            self.waited.append(time.monotonic() - fetch.started)
            self.hits += fetch.done and not fetch.failed and len(fetch.slots) == len(pages)
            self.call("release", scheduler.release, fetch)
        time.sleep(0.001)

    def report(self, title: str) -> None:
        print(f"\n{title}: {self.hits} hits, longest wait for a fetch {max(self.waited, default=0) * 1e3:.0f} ms")
        for name, times in self.times.items():
            p50, p99 = np.percentile(times, [50, 99]) * 1e6
            print(f"  {name:8} n={len(times):6} p50={p50:7.1f} us p99={p99:7.1f} us max={max(times) * 1e6:8.1f} us")
            never_blocked(times, f"{title}: {name}")
        assert max(self.waited, default=0) < 2


# ---- pages -----------------------------------------------------------------------------------------------------------------------


def test_pages_come_back_byte_for_byte(make: Make) -> None:
    scheduler, worker = pair(make)
    assert (scheduler.slot_bytes, scheduler.dram_bytes) == (LAYOUT.slot_bytes, 64 << 20)
    pages = hashes(20)
    assert save(scheduler, worker, pages) == 20
    until(lambda: stored(scheduler, pages) == 20)
    fetch = load(scheduler, [*pages, *hashes(1, 500)])
    assert len(fetch.slots) == 20 and fetch.tiers == ["dram"] * 20
    check(worker, fetch, pages)
    scheduler.release(fetch)
    assert load(scheduler, hashes(1, 500)).slots == []


def test_two_engines_share_pages_but_not_slots(make: Make) -> None:
    scheduler, worker = pair(make)
    other, other_worker = pair(make, engine="f")
    assert not set(scheduler.take(10**6).slots) & set(other.take(10**6).slots)
    scheduler, worker = pair(make, engine="g")
    save(scheduler, worker, hashes(3))
    until(lambda: stored(other, hashes(3)) == 3)
    check(other_worker, load(other, hashes(3)), hashes(3))


def test_credits_never_used_twice(make: Make) -> None:
    """Slots that are taken, discarded, committed and given back in turn: none is handed out while it holds a page or is held by
    somebody."""
    scheduler, worker = pair(make)
    held: set[int] = set()
    saved: list[bytes] = []
    while len(saved) < 240:
        got = scheduler.take(8)
        assert not held & set(got.slots)
        held |= set(got.slots)
        kept, back = got.slots[::2], got.slots[1::2]
        pages = hashes(len(kept), len(saved))
        with arena_of(worker).pin(got.epoch, got.generation) as pinned:
            assert pinned is not None
            for page_hash, slot in zip(pages, kept, strict=True):
                memory = pinned.slot(slot)
                assert memory is not None
                memory[:] = content(page_hash)
                del memory
        scheduler.commit(got.generation, list(zip(pages, kept, strict=True)))
        saved += pages
        scheduler.discard(got.generation, back)
        held -= set(back)
    until(lambda: stored(scheduler, saved) == len(saved))
    check(worker, load(scheduler, saved), saved)
    assert "slots_misused" not in scheduler.counters()


def test_growth_is_mapped_by_all_clients(make: Make) -> None:
    scheduler, worker = pair(make)
    second = make("worker")
    assert second.wait_ready(START_S)
    saved: list[bytes] = []
    extents: set[int] = set()
    while len(extents) < 3:
        until(lambda: scheduler.counters()["credits"])
        got = scheduler.take(16)
        extents |= {slot >> 40 for slot in got.slots}
        scheduler.discard(got.generation, got.slots)
        until(lambda: extents <= mapped_extents(worker) & mapped_extents(second))  # noqa: B023
        pages = hashes(16, len(saved))
        saved.extend(pages[: save(scheduler, worker, pages)])
    until(lambda: stored(scheduler, saved) == len(saved))
    for reader in (worker, second):
        fetch = load(scheduler, saved)
        check(reader, fetch, saved)
        scheduler.release(fetch)


def test_extents_move_to_an_engine_with_other_pages(make: Make) -> None:
    scheduler, worker = pair(make)
    saved: list[bytes] = []
    while len(saved) < 2000:  # more than fit
        until(lambda: scheduler.counters()["credits"])
        pages = hashes(16, len(saved))
        saved.extend(pages[: save(scheduler, worker, pages)])
    larger = NodeClient(config(), namespace("larger", layers=16), engine="larger", role="scheduler")
    larger.start()
    try:
        with arena_of(worker).pin(worker.epoch, 0) as pinned:
            assert pinned is not None
            assert larger.wait_ready(START_S)
            # The node leaves an engine's extents alone for their first 10 s. Then it asks for one, and gets it when the pin is over.
            until(lambda: len(mapped_extents(worker)) < len(pinned._extents), 30)
            time.sleep(0.2)
            assert larger.counters()["credits"] == 0
        until(lambda: larger.counters()["credits"])
    finally:
        larger.close()
    usable = mapped_extents(worker)
    assert {slot >> 40 for slot in scheduler.take(10**6).slots} <= usable
    fetch = load(scheduler, saved[-16:])
    check(worker, fetch, saved[-16:])


# ---- the node dies or stands still -----------------------------------------------------------------------------------------------


def mapped_nodes() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:" in line for line in maps)


def test_killed_node(make: Make) -> None:
    scheduler, worker = pair(make, settings={"fetch_timeout_ms": 150})
    latencies = Latencies(scheduler, worker)
    pages = hashes(12)
    save(scheduler, worker, pages)
    until(lambda: stored(scheduler, pages) == 12)
    for _ in range(100):
        latencies.step(pages)
    assert latencies.hits > 50
    latencies.report("node alive")
    latencies = Latencies(scheduler, worker)
    node, epoch, generation = scheduler.node_pid, scheduler.epoch, scheduler.generation
    taken = scheduler.take(1)
    os.kill(node, signal.SIGKILL)
    killed = time.monotonic()
    back = 0.0
    while time.monotonic() - killed < 30 and not (back and time.monotonic() - killed > back + 0.5):
        latencies.step(pages)
        if not back and scheduler.ready and worker.ready and scheduler.node_pid != node:
            back = time.monotonic() - killed
    latencies.report(f"node killed, the next one is ready after {back:.2f} s")
    assert back and scheduler.epoch == worker.epoch != epoch and scheduler.generation != generation
    scheduler.commit(taken.generation, [(hashes(1)[0], taken.slots[0])])
    assert scheduler.counters()["pages_stale"] >= 1
    with arena_of(worker).pin(taken.epoch, taken.generation) as pinned:
        assert pinned is None
    until(lambda: stored(scheduler, pages) == 0)
    until(lambda: scheduler.counters()["credits"])
    save(scheduler, worker, pages)
    until(lambda: stored(scheduler, pages) == 12)
    check(worker, load(scheduler, pages), pages)


def test_five_killed_nodes_leave_one_arena(make: Make) -> None:
    others = mapped_nodes()
    _, worker = pair(make)
    for _ in range(5):
        node = worker.node_pid
        os.kill(node, signal.SIGKILL)
        until(lambda: worker.ready and worker.node_pid != node and worker.counters()["mapped_bytes"], START_S)  # noqa: B023
    until(lambda: mapped_nodes() - others == len(mapped_extents(worker)))


def test_stopped_node(make: Make) -> None:
    scheduler, worker = pair(make, settings={"fetch_timeout_ms": 150})
    pages = hashes(12)
    save(scheduler, worker, pages)
    until(lambda: stored(scheduler, pages) == 12)
    latencies = Latencies(scheduler, worker)
    node, epoch = scheduler.node_pid, scheduler.epoch
    held = load(scheduler, pages)
    os.kill(node, signal.SIGSTOP)
    try:
        until_s = time.monotonic() + 3
        while time.monotonic() < until_s:
            latencies.step(pages)
        assert not scheduler.ready and latencies.hits == 0
        check(worker, held, pages)  # leased pages stay readable
    finally:
        os.kill(node, signal.SIGCONT)
    went_on = time.monotonic()
    until(lambda: scheduler.ready)
    latencies.report(f"node stopped for 3 s, ready again {time.monotonic() - went_on:.2f} s later")
    assert (scheduler.node_pid, scheduler.epoch) == (node, epoch)
    scheduler.release(held)
    check(worker, load(scheduler, pages), pages)


def test_a_node_that_stands_still_at_hello_is_waited_for(make: Make) -> None:
    first = make()
    assert first.wait_ready(START_S)
    os.kill(first.node_pid, signal.SIGSTOP)
    try:
        late = make(engine="late")
        assert not late.wait_ready(0.5)
    finally:
        os.kill(first.node_pid, signal.SIGCONT)
    assert late.wait_ready(START_S) and late.node_pid == first.node_pid


# ---- an engine dies --------------------------------------------------------------------------------------------------------------

ENGINE = textwrap.dedent(
    """
    import sys, time
    from tests.node.test_client_node import *
    role, pages = sys.argv[1], hashes(4)
    client = NodeClient(config(), namespace(), engine="victim", role=role)
    client.start()
    assert client.wait_ready(60), client.reason
    if role == "scheduler":
        until(lambda: client.counters()["credits"] > 4)
        until(lambda: stored(client, pages) == 4 and len(load(client, pages).slots) == 4)  # as soon as the worker has mapped them
        print(len(client.take(10**6).slots), flush=True)
    else:
        until(lambda: client.counters()["mapped_bytes"])
        print("mapped", flush=True)
    time.sleep(60)
    """
)


def test_killed_engine_gives_back_slots_and_leases(make: Make) -> None:
    scheduler, worker = pair(make)
    save(scheduler, worker, hashes(4))
    until(lambda: stored(scheduler, hashes(4)) == 4)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for _ in range(3):  # a leak of slots would leave the next engine without
        halves = [
            subprocess.Popen([sys.executable, "-c", ENGINE, role], stdout=subprocess.PIPE, env=environment, text=True)
            for role in ("worker", "scheduler")
        ]
        try:
            answers = [half.stdout.readline().split() for half in halves if half.stdout is not None]
            assert answers[0] == ["mapped"] and int(answers[1][0]) > 0, answers
        finally:
            for half in reversed(halves):
                half.kill()
                half.communicate(timeout=10)
    check(worker, load(scheduler, hashes(4)), hashes(4))


def test_a_worker_fences_a_scheduler_that_was_replaced(make: Make) -> None:
    scheduler, worker = pair(make)
    old = scheduler.take(2)
    with arena_of(worker).pin(old.epoch, old.generation) as copying:
        assert copying is not None
        scheduler.close()
        following = make()
        assert following.wait_ready(START_S)
        assert following.generation != old.generation

        def refused() -> bool:
            with arena_of(worker).pin(old.epoch, old.generation) as late:
                return late is None

        until(refused)
        assert not set(old.slots) & set(following.take(10**6).slots)


# ---- settings --------------------------------------------------------------------------------------------------------------------


def test_conflicting_settings(make: Make) -> None:
    first = make()
    assert first.wait_ready(START_S)
    second = make(engine="f", settings={"dram_size": 128 << 20})
    assert not second.wait_ready(START_S)
    assert all(word in second.reason for word in ("dram_size", str(64 << 20), str(128 << 20), "--moon-cache-config")), second.reason
    third = make(engine="g", settings={"dram_size": 128 << 20, "node_conflict": "fail"})
    with pytest.raises(ConfigError, match="dram_size"):
        third.wait_ready(START_S)
    assert first.ready


def test_other_protocol_version(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()
    assert first.wait_ready(START_S)
    monkeypatch.setattr(protocol, "MAJOR", 99)
    second = make(engine="f")
    until(lambda: f"99.{protocol.MINOR}" in second.reason)
    assert f"kill {first.node_pid}" in second.reason and not second.ready and first.ready


def test_spawn_off_joins_a_node_that_comes_later(make: Make) -> None:
    patient = make(spawn=False)
    assert not patient.wait_ready(0.3) and "mooncake-kv node" in patient.reason
    starter = make(engine="f")
    assert starter.wait_ready(START_S)
    assert patient.wait_ready(START_S) and patient.node_pid == starter.node_pid
