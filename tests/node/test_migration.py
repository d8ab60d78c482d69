"""connectors/migration.py over real transfer engines and TCP, with peers that are killed, frozen and restarted."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake_kv.common.config import load_config
from mooncake_kv.common.errors import ConfigError
from mooncake_kv.connectors import migration
from mooncake_kv.connectors.migration import Link, MigrationError, Piece, Transfer, plan
from tests.node.migration_peer import content

BLOCK = 49_152
BLOCKS = 400
LENGTH = BLOCK * BLOCKS
PEER = Path(__file__).with_name("migration_peer.py")
LOOP = asyncio.new_event_loop()


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[None]:
    yield
    LOOP.close()


class Peer:
    """The process of migration_peer.py."""

    def __init__(self) -> None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), str(LENGTH)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        assert self.process.stdout
        self.endpoint = self.process.stdout.readline()
        assert self.endpoint

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def fill(self, seed: int) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def transfer() -> Transfer:
    return Transfer(load_config({}), "127.0.0.1")


@pytest.fixture
def memory() -> np.ndarray:
    return np.zeros(LENGTH, np.uint8)


@pytest.fixture
def link(transfer: Transfer, memory: np.ndarray, peer: Peer) -> Link:
    return connected(transfer, memory, peer)


def connected(transfer: Transfer, memory: np.ndarray, peer: Peer) -> Link:
    link = Link(transfer, "peer")
    link.add("0", memory.ctypes.data, len(memory))
    link.connect(peer.endpoint)
    return link


def blocks(pairs: list[tuple[int, int]]) -> list[Piece]:
    """Block `there` of the peer to block `here`."""
    return [Piece("0", there * BLOCK, here * BLOCK, BLOCK) for there, here in pairs]


def shuffled(n: int, seed: int = 1) -> list[tuple[int, int]]:
    choose = random.Random(seed)
    return list(zip(choose.sample(range(BLOCKS), n), choose.sample(range(BLOCKS), n), strict=True))


def check(memory: np.ndarray, pairs: list[tuple[int, int]], seed: int = 0) -> None:
    there = content(seed, LENGTH)
    expected = np.zeros(LENGTH, np.uint8)
    for a, b in pairs:
        expected[b * BLOCK : (b + 1) * BLOCK] = there[a * BLOCK : (a + 1) * BLOCK]
    assert np.array_equal(memory, expected)


def read(link: Link, pieces: list[Piece], timeout_s: float = 5.0) -> float:
    """Returns how long it took."""
    start = time.monotonic()
    LOOP.run_until_complete(link.read(pieces, timeout_s))
    return time.monotonic() - start


@pytest.mark.parametrize("pairs", [shuffled(300), [(i, i) for i in range(BLOCKS)], [(i, BLOCKS - 1 - i) for i in range(BLOCKS)]])
def test_blocks_arrive(link: Link, memory: np.ndarray, pairs: list[tuple[int, int]]) -> None:
    read(link, blocks(pairs))
    check(memory, pairs)


def test_without_staging(memory: np.ndarray, peer: Peer) -> None:
    link = connected(Transfer(load_config({}), "127.0.0.1", direct=True), memory, peer)
    read(link, blocks(shuffled(300)))
    check(memory, shuffled(300))
    peer.signal(signal.SIGSTOP)
    with pytest.raises(MigrationError):
        read(link, blocks(shuffled(300)))


def test_several_reads_at_once_do_not_hold_the_loop(link: Link, memory: np.ndarray) -> None:
    async def main() -> float:
        stop = False
        longest = 0.0

        async def tick() -> None:
            nonlocal longest
            while not stop:
                before = time.monotonic()
                await asyncio.sleep(0.001)
                longest = max(longest, time.monotonic() - before)

        ticking = asyncio.create_task(tick())
        parts = [blocks(shuffled(BLOCKS)[i::4]) for i in range(4)]
        await asyncio.gather(*(link.read(part, 10.0) for part in parts))
        stop = True
        await ticking
        return longest

    # One blocking read of them takes as long as all; on two shared cores a tick may be late by a few switch intervals.
    assert LOOP.run_until_complete(main()) < 0.06
    check(memory, shuffled(BLOCKS))


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (Piece("1", 0, 0, 1), "region 1 is not known here"),
        (Piece("0", LENGTH - 9, 0, 10), "lie outside region 0"),
        (Piece("0", 0, LENGTH - 9, 10), "lie outside region 0"),
        (Piece("0", -1, 0, 10), "lie outside region 0"),
        (Piece("0", 0, -1, 10), "lie outside region 0"),
        (Piece("0", 0, 0, 0), "lie outside region 0"),
    ],
)
def test_what_lies_outside_is_refused_before_anything_is_read(link: Link, memory: np.ndarray, piece: Piece, words: str) -> None:
    with pytest.raises(MigrationError, match=words):
        read(link, [*blocks([(0, 0)]), piece])
    assert not memory.any()
    link.add("1", memory.ctypes.data, 10)
    with pytest.raises(MigrationError, match="region 1 is not known at peer"):
        read(link, [Piece("1", 0, 0, 1)])
    read(link, blocks([(0, 0)]))  # a refusal is no failure of the peer


def test_dead_peer_fails_soon_and_a_new_one_serves(transfer: Transfer, link: Link, memory: np.ndarray, peer: Peer) -> None:
    read(link, blocks([(0, 0)]))
    peer.signal(signal.SIGKILL)
    peer.process.wait()
    memory[:] = 0
    start = time.monotonic()
    with pytest.raises(MigrationError):
        read(link, blocks(shuffled(300)))
    with pytest.raises(MigrationError, match="left alone"):
        read(link, blocks(shuffled(300)))
    assert time.monotonic() - start < 3.0
    assert not memory.any()
    restarted = Peer()
    try:
        link.connect(restarted.endpoint)
        read(link, blocks(shuffled(300)))
        check(memory, shuffled(300))
    finally:
        restarted.close()


def test_frozen_peer_and_what_it_sends_late(transfer: Transfer, link: Link, memory: np.ndarray, peer: Peer) -> None:
    """When it goes on, bytes of reads that failed arrive; the engine's memory, by then another request's, must not get them."""
    read(link, blocks([(0, 0)]))
    memory[:] = 0
    peer.signal(signal.SIGSTOP)
    start = time.monotonic()
    for timeout_s in (1.5, 0.3):
        with pytest.raises(MigrationError):
            read(link, blocks(shuffled(BLOCKS)), timeout_s)
        link.connect(peer.endpoint)
    assert time.monotonic() - start < 2.5
    assert not memory.any()
    peer.signal(signal.SIGCONT)
    for _ in range(20):
        time.sleep(0.1)
        assert not memory.any()
    deadline = time.monotonic() + 20  # a native call may still hold both of the peer's places
    while True:
        try:
            read(link, blocks(shuffled(300)))
            break
        except MigrationError:
            assert time.monotonic() < deadline
            time.sleep(0.5)
    check(memory, shuffled(300))


def test_frozen_in_the_middle_of_reads(link: Link, memory: np.ndarray, peer: Peer) -> None:
    """Every read gives all bytes or an error, and nothing after the error."""
    good = bad = 0
    choose = random.Random(3)
    for round_ in range(6):
        memory[:] = 0
        timer = subprocess.Popen(["sh", "-c", f"sleep {choose.uniform(0, 0.02):.4f}; kill -STOP {peer.process.pid}"])
        try:
            read(link, blocks(shuffled(BLOCKS, round_)), 0.5)
            good += 1
            check(memory, shuffled(BLOCKS, round_))
        except MigrationError:
            bad += 1
            before = memory.copy()
            timer.wait(10)
            peer.signal(signal.SIGCONT)
            time.sleep(0.4)
            assert np.array_equal(memory, before)
        timer.wait(10)
        peer.signal(signal.SIGCONT)
        link.connect(peer.endpoint)
    assert bad, f"{good} reads ended before the peer froze"


def test_buffers_of_failed_reads_are_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "QUARANTINE_BYTES", 2 * migration.CHUNK_BYTES)
    registered: list[int] = []
    staging = migration._Staging(lambda address, _: registered.append(address))
    good = staging.take()
    staging.give(good, good=True)
    assert staging.take() is good
    bad = [good, staging.take()]
    for buffer in bad:
        staging.give(buffer, good=False)
    assert registered == [buffer.address for buffer in bad]
    with pytest.raises(MigrationError, match="no more reads in this process"):
        staging.take()


def test_registration(transfer: Transfer, peer: Peer) -> None:
    old = np.zeros(1 << 20, np.uint8)
    link = Link(transfer, "peer")
    for _ in range(3):
        link.add("0", old.ctypes.data, len(old))
    Link(transfer, "another").add("0", old.ctypes.data, len(old))
    # Memory that was freed and came back in another size.
    link.add("0", old.ctypes.data, len(old) // 2)
    link.connect(peer.endpoint)
    read(link, [Piece("0", 0, 0, len(old) // 2)])
    assert np.array_equal(old[: len(old) // 2], content(0, LENGTH)[: len(old) // 2])
    with pytest.raises(MigrationError, match="no host memory"):
        link.add("1", 1 << 46, 4096)
    json.dumps(link.endpoint())


@pytest.mark.parametrize(
    "endpoint", ["", "{}", '{"session": "x", "regions": {}}', '{"session": "a:1", "regions": {"0": {"address": 1, "length": 0}}}']
)
def test_what_is_no_endpoint_is_refused(transfer: Transfer, endpoint: str) -> None:
    link = Link(transfer, "peer")
    with pytest.raises(MigrationError, match="no Mooncake endpoint"):
        link.connect(endpoint)
    with pytest.raises(MigrationError, match="not connected"):
        read(link, [Piece("0", 0, 0, 1)])


def test_rdma_without_a_card_is_refused_before_setup() -> None:
    if os.path.isdir("/sys/class/infiniband"):
        pytest.skip("there are network cards")
    with pytest.raises(ConfigError, match=r"protocol is 'rdma' .*no network card"):
        Transfer(load_config({"protocol": "rdma"}), "127.0.0.1")


def test_addresses() -> None:
    config = load_config({})
    assert migration.host_for(config, "127.0.0.1", "10.1.1.1") == "127.0.0.1"
    assert migration.host_for(config, "192.0.2.1", "127.0.0.1") == "127.0.0.1"
    assert migration.host_for(load_config({"local_hostname": "127.0.0.1"}), "192.0.2.1", None) == "127.0.0.1"
    with pytest.raises(ConfigError, match="local_hostname"):
        migration.host_for(load_config({"local_hostname": "192.0.2.1"}), "127.0.0.1", None)
    with pytest.raises(ConfigError, match="local_hostname"):
        migration.host_for(config, "0.0.0.0", None)


@pytest.mark.parametrize("seed", range(20))
def test_plan(seed: int) -> None:
    choose = random.Random(seed)
    length = 4096
    there = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
    cuts = sorted(choose.sample(range(1, length), 60))
    pieces = list(zip([0, *cuts], np.diff([0, *cuts, length]).tolist(), strict=True))
    moved = pieces[:]
    if seed % 2:
        choose.shuffle(moved)
    where, at = {}, 0
    for start, size in moved:
        where[start], at = at, at + size
    here = np.zeros(length, np.uint8)
    total = 0
    for chunk in plan([(start, where[start], size) for start, size in pieces], chunk_bytes=300, chunk_reads=3):
        assert len(chunk.reads) <= 3
        used = sum(size for _, _, size in chunk.reads)
        assert 0 < used <= 300
        total += used
        staging = np.zeros(300, np.uint8)
        for remote, offset, size in chunk.reads:
            staging[offset : offset + size] = there[remote : remote + size]
        for offset, address, size in chunk.copies:
            here[address : address + size] = staging[offset : offset + size]
    assert total == length
    for start, size in pieces:
        assert np.array_equal(here[where[start] : where[start] + size], there[start : start + size])
    assert len(next(plan([(10, 50, 10), (20, 60, 10)])).reads) == 1
