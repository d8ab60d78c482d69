"""The pool tier when others die, freeze or lie: masters, owners of segments, writers in the middle of a put, and its own process.

Real processes, killed and stopped. Mooncake's own waits (62 s for a frozen owner, 30 s for a dead writer's key, 4.3 s a call for a dead
master) are what our client has to avoid, so each test also bounds the time.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake_kv.common.page import TRAILER_BYTES, PageLayout
from tests.node.pool_peer import Failed, Master, Peer, namespace, page_hash, settings, wait_for

MIB = 1 << 20
# Seconds until a master takes a silent client for dead; 10 by default.
CLIENT_TTL = 3
Start = Callable[..., Peer]


@pytest.fixture
def master() -> Iterator[Master]:
    running = Master(f"--client_ttl={CLIENT_TTL}")
    yield running
    running.process.send_signal(signal.SIGCONT)
    running.kill()


@pytest.fixture
def peers() -> Iterator[Start]:
    """Starts peers, which end with the test; stopped ones, too."""
    started: list[Peer] = []

    def start(**environment: str) -> Peer:
        started.append(Peer(environment))
        return started[-1]

    yield start
    for peer in started:
        peer.close()


def owner_of(start: Start, master: Master, mebibytes: int = 64) -> tuple[Peer, str]:
    owner = start()
    return owner, owner.call("raw_open", master.address, mebibytes * MIB)


def tier_of(start: Start, master: Master, **given: Any) -> Peer:
    tier = start()
    tier.call("open", settings(master.address, **given))
    return tier


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.monotonic()
    return call(), time.monotonic() - begin


def down(peer: Peer, method: str, *arguments: Any) -> tuple[str, float]:
    """The sentence with which a call says that the tier is down, and how long it took."""
    begin = time.monotonic()
    with pytest.raises(Failed) as caught:
        peer.call(method, *arguments)
    assert caught.value.kind == "TierDown"
    return str(caught.value), time.monotonic() - begin


# ---- owners of segments ------------------------------------------------------------------------------------------------------------------


def test_an_owner_that_is_killed(master: Master, peers: Start) -> None:
    owner, _ = owner_of(peers, master)
    tier = tier_of(peers, master)
    assert all(tier.call("write", "small", "a", list(range(40)))[0])
    owner.kill()
    assert tier.call("leading", "small", "a", list(range(40)))[0] == 40, "Mooncake says that they exist"
    (count, _, spent) = tier.call("read", "small", "a", list(range(40)))
    assert count == 0 and spent < 1.5
    # Asked once more at most, then known.
    assert tier.call("leading", "small", "a", list(range(40)))[0] == 0
    (count, _, spent) = tier.call("read", "small", "a", list(range(1, 40)))
    assert count == 0 and spent < 0.1
    # A write goes to the dead segment as well, and fails soon.
    stored, spent = tier.call("write", "small", "b", list(range(40)))
    assert not any(stored) and spent < 3
    stored, spent = tier.call("write", "small", "b", list(range(40)))
    assert not any(stored) and spent < 3
    # Another machine joins: nothing needs a restart.
    owner_of(peers, master)
    assert wait_for(lambda: all(tier.call("write", "small", "a", list(range(40)))[0]), 20)
    assert tier.call("read", "small", "a", list(range(40)))[:2] == [40, 40], "the pages were written anew and are still avoided"


def test_a_dead_owner_costs_only_its_own_pages(master: Master, peers: Start) -> None:
    first, _ = owner_of(peers, master)
    writer = tier_of(peers, master)
    assert all(writer.call("write", "small", "first", list(range(8)))[0])
    first.stop()
    assert wait_for(lambda: writer.call("leading", "small", "first", [0])[0] == 0, CLIENT_TTL + 5)
    owner_of(peers, master)
    assert wait_for(lambda: all(writer.call("write", "small", "second", list(range(8)))[0]), 10)
    reader = tier_of(peers, master)
    assert reader.call("read", "small", "second", list(range(8)))[:2] == [8, 8]
    assert reader.call("read", "small", "first", list(range(8)))[0] == 0


def test_an_owner_that_is_frozen(master: Master, peers: Start, tmp_path: Path) -> None:
    owner, _ = owner_of(peers, master)
    tier = tier_of(peers, master, folder=tmp_path)
    assert all(tier.call("write", "wide", "a", list(range(12)))[0])
    owner.stop()
    (count, _, spent) = tier.call("read", "wide", "a", list(range(12)))
    assert count == 0 and spent < 5
    for numbers in (range(12), range(3, 12)):
        (count, _, spent) = tier.call("read", "wide", "a", list(numbers))
        assert count == 0 and spent < 0.1, "the frozen owner was asked again"
    # A process that starts now knows it from the file.
    other = tier_of(peers, master, folder=tmp_path)
    (count, _, spent) = other.call("read", "wide", "a", list(range(5, 12)))
    assert count == 0 and spent < 0.1


def test_an_owner_that_was_frozen_before_we_came(master: Master, peers: Start) -> None:
    """The first transfer from a frozen process takes Mooncake 62 s."""
    owner, _ = owner_of(peers, master)
    writer = tier_of(peers, master)
    assert all(writer.call("write", "wide", "a", list(range(4)))[0])
    reader = tier_of(peers, master)
    owner.stop()
    time.sleep(0.1)
    (count, _, spent) = reader.call("read", "wide", "a", list(range(4)))
    assert count == 0 and spent < 1.5
    assert reader.call("stats")["owners_avoided"] == 1
    (count, _, spent) = reader.call("read", "wide", "a", list(range(1, 4)))
    assert count == 0 and spent < 0.1


def test_a_process_killed_while_it_waits_for_a_frozen_owner_leaves_word(master: Master, peers: Start, tmp_path: Path) -> None:
    owner, _ = owner_of(peers, master)
    tier = peers(MC_TCP_PROGRESS_TIMEOUT_SEC="60", MC_TCP_STATUS_TIMEOUT_SEC="60")  # what the operator has set stays
    tier.call("open", settings(master.address, folder=tmp_path))
    assert all(tier.call("write", "wide", "a", list(range(4)))[0])
    assert tier.call("read", "wide", "a", [0])[0] == 1
    owner.stop()
    tier.send("read", "wide", "a", list(range(4)))
    with pytest.raises(TimeoutError):
        tier.answer(0.5)
    tier.kill()
    again = tier_of(peers, master, folder=tmp_path)
    (count, _, spent) = again.call("read", "wide", "a", list(range(4)))
    assert count == 0 and spent < 0.1, "the frozen owner was asked again"
    assert again.call("stats")["owners_suspected"] == 1


def test_an_owner_that_freezes_does_not_hold_up_writes_for_long(master: Master, peers: Start) -> None:
    owner, _ = owner_of(peers, master)
    tier = tier_of(peers, master)
    assert all(tier.call("write", "wide", "first", [0])[0])
    owner.stop()
    # What fits into the kernel's buffers counts as sent.
    stored, spent = tier.call("write", "wide", "a", list(range(4)))
    assert not all(stored) and spent < 8
    stored, spent = tier.call("write", "wide", "b", list(range(16)))
    assert not any(stored) and spent < 0.1, "writing goes on into a frozen segment"
    owner.go_on()
    assert wait_for(lambda: all(tier.call("write", "wide", "a", list(range(8)))[0]), 15)


# ---- writers -----------------------------------------------------------------------------------------------------------------------------


def test_a_key_whose_writer_died_in_the_middle_is_taken_over(master: Master, peers: Start) -> None:
    layout = PageLayout(namespace("small"))
    size = layout.objects[0].payload_bytes + TRAILER_BYTES
    key = layout.object_key(namespace("small").digest(), page_hash("a", 1), layout.objects[0])
    frozen, segment = owner_of(peers, master)
    frozen.stop()
    writer = peers()
    writer.call("raw_open", master.address)
    writer.send("raw_put", key, size, segment)
    with pytest.raises(TimeoutError):
        writer.answer(0.3)
    writer.kill()
    frozen.kill()
    healthy, _ = owner_of(peers, master)
    # What it is like without us: every put says 0 and stores nothing.
    assert healthy.call("raw_put", key, size) == 0
    assert healthy.call("raw_call", "is_exist", key) == 0
    tier = tier_of(peers, master)
    # Puts also go to the dead segment until the master gives it up.
    assert wait_for(lambda: all(tier.call("write", "small", "a", [0, 1, 2])[0]), CLIENT_TTL + 10)
    assert tier.call("stats")["keys_taken_over"] >= 1
    assert tier.call("read", "small", "a", [0, 1, 2])[:2] == [3, 3]


# ---- masters -----------------------------------------------------------------------------------------------------------------------------


def test_a_master_that_is_killed_and_comes_back_empty(master: Master, peers: Start) -> None:
    owner, _ = owner_of(peers, master)
    tier = tier_of(peers, master)
    assert all(tier.call("write", "small", "a", list(range(8)))[0])
    master.kill()
    message, spent = down(tier, "leading", "small", "a", list(range(8)))
    assert master.address in message and spent < 6
    for method in ("leading", "read", "write"):
        message, spent = down(tier, method, "small", "a", list(range(8)))
        assert spent < 0.3, f"{method} waits for a dead master"
    with pytest.raises(Failed, match="no Mooncake master answers at master_server_address"):
        tier_of(peers, master)
    master.start()
    assert wait_for(lambda: works(tier), 10)
    assert tier.call("read", "small", "a", list(range(8)))[0] == 0, "a fresh master knows no keys"
    assert wait_for(lambda: all(tier.call("write", "small", "a", list(range(8)))[0]), 10), "the segment is not mounted again"
    assert tier.call("read", "small", "a", list(range(8)))[:2] == [8, 8]
    assert owner.process.poll() is None


@pytest.mark.parametrize("method", ["leading", "read", "write"])
def test_a_master_that_is_frozen(master: Master, peers: Start, method: str) -> None:
    owner_of(peers, master)
    tier = tier_of(peers, master)
    assert all(tier.call("write", "small", "a", list(range(8)))[0])
    master.process.send_signal(signal.SIGSTOP)
    message, spent = down(tier, method, "small", "a", list(range(8)))
    assert "does not answer" in message and spent < 6
    master.process.send_signal(signal.SIGCONT)
    assert wait_for(lambda: works(tier), 10)
    # The master may have taken everybody for dead meanwhile.
    assert wait_for(lambda: all(tier.call("write", "small", "a", list(range(8)))[0]), 10)
    assert tier.call("read", "small", "a", list(range(8)))[:2] == [8, 8]


def test_a_master_that_is_not_there_is_found_within_two_seconds(peers: Start) -> None:
    tier = peers()
    # Reserved for documentation: nothing answers there, or the network refuses at once.
    message, spent = down(tier, "open", settings("192.0.2.1:50051", local_hostname="127.0.0.1"))
    assert "master_server_address '192.0.2.1:50051' (--moon-cache-config)" in message and spent < 4


def test_closing_with_a_dead_master_ends_in_time(master: Master, peers: Start) -> None:
    tier = tier_of(peers, master)
    master.kill()
    assert timed(lambda: tier.call("close"))[1] < 1
    message, spent = down(tier, "read", "small", "a", [0])
    assert "closed" in message and spent < 0.1


@pytest.mark.parametrize("lease_ms", [0, 30])
def test_leases_shorter_than_a_transfer(peers: Start, lease_ms: int) -> None:
    """64 MiB take longer than the lease: read in smaller pieces. Where even one page takes longer: a miss, soon."""
    master = Master(f"--default_kv_lease_ttl={lease_ms}")
    try:
        owner_of(peers, master, 640)
        tier = tier_of(peers, master)
        counts = []
        for name in "abcde":
            assert all(tier.call("write", "wide", name, list(range(24)))[0])
            (count, good, spent) = tier.call("read", "wide", name, list(range(24)))
            assert count == good and spent < 2
            counts.append(count)
        # On a busy machine a page, too, may take 30 ms once; not five times.
        assert max(counts) == (24 if lease_ms else 0), counts
        if not lease_ms:
            assert tier.call("stats")["leases_lost"] == 5
    finally:
        master.kill()


def works(tier: Peer) -> bool:
    try:
        tier.call("leading", "small", "works", [0])
    except Failed as failed:
        assert failed.kind == "TierDown"
        return False
    return True
