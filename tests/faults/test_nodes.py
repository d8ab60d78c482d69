"""Faults of the pool behind real nodes: masters and owners of segments that are killed, frozen and started again in the middle of a lookup,
a fetch and a write; nodes that are killed or start together; and what is left after ten thousand aborted fetches from both slow tiers.

After each, every page is right or a miss, nothing takes longer than its deadline, and the tier comes back by itself.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mooncake_kv.common.node.paths import node_paths
from tests.conftest import wait_for_end
from tests.node.pool_peer import Master, Peer
from tests.node.test_tiers_order import store
from tests.node.test_tiers_ssd import files
from tests.node.wire_client import NodeProcess, WireClient, chain, running_node

DEADLINE_MS = 1000
# On top of a deadline, for a busy machine.
BUSY_S = 1.0
SLOTS = 128
# Seconds until a master takes a silent client for dead; 10 by default.
CLIENT_TTL = 2
POOL = ("--dram-size", "1mb", "--local-hostname", "127.0.0.1", "--write-policy", "all")


@pytest.fixture
def master() -> Iterator[Master]:
    running = Master(f"--client_ttl={CLIENT_TTL}")
    yield running
    running.process.send_signal(signal.SIGCONT)
    running.kill()


class Owner:
    """The segment of another machine."""

    def __init__(self, master: Master) -> None:
        self._master = master
        self.start()

    def start(self) -> None:
        self.peer = Peer()
        self.peer.call("raw_open", self._master.address, 64 << 20)

    def restart(self) -> None:
        self.peer.close()
        self.start()


@pytest.fixture
def owner(master: Master) -> Iterator[Owner]:
    made = Owner(master)
    yield made
    made.peer.close()


def arguments(master: str, segment: str = "0") -> list[str]:
    return [*POOL, "--global-segment-size", segment, "--master-server-address", master]


def connect(node: NodeProcess, credits: int = 8) -> WireClient:
    client = WireClient(node.paths.folder)
    client.want(credits)
    up(client)
    return client


def up(client: WireClient) -> None:
    client.until(lambda: client.tier("pool")["state"] == "up", 40)


# ---- masters and owners ----------------------------------------------------------------------------------------------------------------


def in_the_middle(client: WireClient, what: str, pages: list[bytes], fault: Callable[[], object]) -> None:
    """A lookup, a fetch or a write that the fault hits on its way, and whatever comes soon after it."""
    began = time.monotonic()
    if what == "lookup":
        fault()  # a lookup takes less than a signal
        found = client.lookup(pages)
        assert 0 <= found <= len(pages) and time.monotonic() - began < 0.1 + BUSY_S
    elif what == "fetch":
        request = client.start_fetch(pages, deadline_ms=DEADLINE_MS)
        fault()
        slots = client.finish_fetch(request)
        assert all(client.holds(slot, page) for slot, page in zip(slots, pages, strict=False))
        assert time.monotonic() - began < DEADLINE_MS / 1e3 + BUSY_S
        client.release(request)
    else:
        client.store(chain(f"new{random.random()}", 8))
        fault()
    for _ in range(3):
        began = time.monotonic()
        request = client.start_fetch(pages, deadline_ms=DEADLINE_MS)
        slots = client.finish_fetch(request)
        assert all(client.holds(slot, page) for slot, page in zip(slots, pages, strict=False))
        assert time.monotonic() - began < DEADLINE_MS / 1e3 + BUSY_S
        client.release(request)


def store_slowly(client: WireClient, pages: list[bytes]) -> None:
    """The queue of a tier has room for 16 small pages."""
    for i in range(0, len(pages), 8):
        client.store(pages[i : i + 8])
        client.written("pool")


def push_out(client: WireClient) -> None:
    client.store(chain(f"flood{random.random()}", SLOTS))
    client.written("pool")


def serves(client: WireClient, name: str) -> bool:
    """Whether pages written now come back from the pool."""
    pages = chain(f"{name}{random.random()}", 8)
    client.store(pages)
    client.written("pool")
    push_out(client)
    return client.lookup_tiers(pages).get("pool") == 8 and client.check(pages) == ["pool"] * 8


@pytest.mark.parametrize("fault", ["killed", "frozen"])
@pytest.mark.parametrize("victim", ["master", "owner"])
def test_in_the_middle_of_lookup_fetch_and_write(runtime_dir: Path, master: Master, owner: Owner, victim: str, fault: str) -> None:
    quick = "import mooncake_kv.common.tiers.link as l; l.PAUSE_MAX_S = 1"
    with running_node(*arguments(master.address), patch=quick) as node:
        client = connect(node)
        for what in ("lookup", "fetch", "write"):
            client.until(lambda: serves(client, "before"), 40)
            pages = chain(f"{what}{fault}", 40)
            store_slowly(client, pages)
            push_out(client)
            process = master.process if victim == "master" else owner.peer.process
            in_the_middle(client, what, pages, process.kill if fault == "killed" else lambda p=process: p.send_signal(signal.SIGSTOP))
            if fault == "frozen":
                process.send_signal(signal.SIGCONT)
            elif victim == "master":
                process.wait(10)
                master.start()
            else:
                owner.restart()
        client.until(lambda: serves(client, "after"), 40)
        client.quiet()


# ---- nodes -----------------------------------------------------------------------------------------------------------------------------


def test_two_nodes_that_start_at_once(runtime_dir: Path, tmp_path: Path, master: Master) -> None:
    """On one master and one folder of the disk, writing the same pages."""
    disk = ["--ssd-path", str(tmp_path / "ssd"), "--ssd-size", "64mb"]
    nodes: dict[str, NodeProcess] = {}

    def start(name: str) -> None:
        nodes[name] = NodeProcess(node_paths(name), *arguments(master.address, "64mb"), *disk)

    starting = [threading.Thread(target=start, args=(name,)) for name in "ab"]
    try:
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join(30)
        one, two = (connect(nodes[name]) for name in "ab")
        common = [chain(f"common{i}", 8) for i in range(6)]
        for pages in common:
            one.lookup(pages)
            two.lookup(pages)
            one.store(pages)
            two.store(pages)
        for client in (one, two):
            client.written()
            client.written("pool")
            push_out(client)
            for pages in common:
                client.check(pages, 8)
            client.quiet()
        assert len([file for file in files(tmp_path / "ssd") if any(bytes.fromhex(file.name[:64]) in pages for pages in common)]) == 48
    finally:
        logs = [node.end() for node in nodes.values()]
    assert len(logs) == 2 and not any("Traceback" in log or "a bug" in log for log in logs), logs


def test_a_node_killed_with_its_part_of_the_pool(runtime_dir: Path, master: Master) -> None:
    """The pages in its segment are misses for others within their deadline, and are stored anew elsewhere; three times over."""
    with running_node(*arguments(master.address, "64mb"), name="lives") as lives:
        reader = connect(lives)
        for turn in range(3):
            pages = chain(f"p{turn}", 40)
            other = NodeProcess(node_paths("dies"), *arguments(master.address, "64mb"))
            family = psutil.Process(other.pid).children(recursive=True)
            try:
                writer = connect(other)
                family = psutil.Process(other.pid).children(recursive=True)
                store_slowly(writer, pages)
                request = reader.start_fetch(pages, deadline_ms=DEADLINE_MS)
                time.sleep(0.002 * turn)
                began = time.monotonic()
                other.process.kill()
                slots = reader.finish_fetch(request)
                assert time.monotonic() - began < DEADLINE_MS / 1e3 + BUSY_S
            finally:
                other.kill()
            assert all(reader.holds(slot, page) for slot, page in zip(slots, pages, strict=False))
            reader.release(request)
            assert wait_for_end(family, 8) == [], "its keeper and tier processes outlive it"
            writer.close()
        reader.until(lambda: serves(reader, "after"), 40)
        reader.quiet()


# ---- nothing is left -------------------------------------------------------------------------------------------------------------------


def test_ten_thousand_aborted_fetches_leave_nothing(runtime_dir: Path, tmp_path: Path, master: Master, owner: Owner) -> None:
    """From memory, disk and pool: no lease, slot, thread, descriptor, file or shared memory."""
    folder = tmp_path / "ssd"
    both = [*arguments(master.address), "--ssd-path", str(folder), "--ssd-size", "64mb"]
    with running_node(*both) as node:
        client = connect(node, credits=4)
        prefixes = [chain(f"p{i}", 30) for i in range(8)]
        for prefix in prefixes:
            store(client, prefix)
        for file in files(folder):  # the first half of each prefix on the disk, the second in the pool
            if any(bytes.fromhex(file.name[:64]) in prefix[15:] for prefix in prefixes):
                file.unlink()
        push_out(client)
        assert {"ssd", "pool"} <= set(client.check(prefixes[0], 30))
        tiers = [psutil.Process(client.tier(name)["pid"]) for name in ("ssd", "pool")]
        processes = [psutil.Process(node.pid), *tiers]

        def abort(count: int) -> None:
            for i in range(count):
                client.release(client.start_fetch(prefixes[i % 8]))
                if i % 50 == 0:
                    client.ping()
                    client.inbox.clear()

        def held() -> list[object]:
            maps = [len(process.memory_maps(grouped=False)) for process in processes[:2]]
            return [*(process.num_fds() for process in processes), *maps, sorted(os.listdir("/dev/shm")), len(client.extents)]

        abort(1000)
        client.quiet()
        before = held()
        threads = [process.num_threads() for process in processes]
        abort(9_000)
        client.inbox.clear()
        client.quiet()
        # Threads start when they are needed: in a tier main, keeper, report, populate, 1 to write, 2 to look, 4 to read; Mooncake's.
        assert processes[0].num_threads() == 2 and processes[1].num_threads() <= 11
        assert processes[2].num_threads() <= threads[2] + 4
        now = held()
        assert now[:3] == before[:3] and now[-2:] == before[-2:], (before, now)
        assert now[3] <= before[3] + 8 and now[4] <= before[4] + 16, "memory is mapped again and again"  # type: ignore[operator]
        # A page read from the pool is written to the disk again.
        assert len(files(folder)) <= 8 * 30 + SLOTS and not list(folder.glob("tmp-*"))
        assert client.stats()["fetches"] == 10_001
        assert client.check(prefixes[0], 30)
