"""The pool tier's data path against a real mooncake_master and real clients: what is stored, read, refused and remembered.

Together with tests/faults/test_pool.py the contract that facts about Mooncake's client (docs/operations.md) demand of ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake_kv.common.page import TRAILER_BYTES, PageLayout
from tests.node.pool_peer import Failed, Master, Peer, namespace, page_hash, settings

MIB = 1 << 20
Make = Callable[..., Peer]


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    running = Master()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def owner(master: Master) -> Iterator[Peer]:
    """The segment that this module's pages lie on; also plants objects with Mooncake's own client."""
    peer = Peer()
    peer.call("raw_open", master.address, 512 * MIB)
    yield peer
    peer.close()


@pytest.fixture
def make(master: Master, owner: Peer) -> Iterator[Make]:
    """`make(**settings)`: another process with a tier that writes every page."""
    peers: list[Peer] = []

    def start(**given: Any) -> Peer:
        peers.append(Peer())
        peers[-1].call("open", settings(master.address, **given))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


@pytest.fixture(scope="module")
def tier(master: Master, owner: Peer) -> Iterator[Peer]:
    peer = Peer()
    peer.call("open", settings(master.address))
    yield peer
    peer.close()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def object_key(kind: str, name: str, number: int, index: int = 0) -> str:
    layout = PageLayout(namespace(kind))
    return layout.object_key(namespace(kind).digest(), page_hash(name, number), layout.objects[index])


def object_bytes(kind: str) -> int:
    return PageLayout(namespace(kind)).objects[0].payload_bytes + TRAILER_BYTES


# ---- pages ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "pages"), [("small", 20), ("wide", 20)])
def test_what_one_process_writes_another_reads(make: Make, tier: Peer, name: str, kind: str, pages: int) -> None:
    numbers = list(range(pages))
    stored, _ = tier.call("write", kind, name, numbers)
    assert stored == [True] * pages
    other = make()
    assert other.call("leading", kind, name, [*numbers, 1000])[0] == pages
    count, good, _ = other.call("read", kind, name, [*numbers, 1000])
    assert (count, good) == (pages, pages)
    before = other.call("stats")
    assert before["bytes_read"] == pages * len(PageLayout(namespace(kind)).objects) * object_bytes(kind)


def test_a_page_that_is_stored_already_is_not_sent_again(make: Make, tier: Peer, name: str) -> None:
    tier.call("write", "wide", name, list(range(4)))
    other = make()
    stored, _ = other.call("write", "wide", name, list(range(6)))
    assert stored == [True] * 6
    stats = other.call("stats")
    assert stats["puts_existed"] == 16 and "keys_taken_over" not in stats and "objects_replaced" not in stats


@pytest.mark.parametrize(
    ("policy", "reasons"), [("auto", {"second_use", "prefix_end"}), ("second_use", {"second_use"}), ("prefix_end", {"prefix_end"})]
)
def test_write_policy(make: Make, name: str, policy: str, reasons: set[str]) -> None:
    tier = make(write_policy=policy)
    for why in ("", "second_use", "prefix_end"):
        stored, _ = tier.call("write", "small", f"{name}{why}", [0, 1], why)
        assert stored == [why in reasons] * 2
        assert tier.call("leading", "small", f"{name}{why}", [0, 1])[0] == (2 if why in reasons else 0)


def test_a_partial_page_ends_the_prefix_and_is_completed_by_the_next_write(make: Make, owner: Peer, tier: Peer, name: str) -> None:
    tier.call("write", "wide", name, list(range(6)))
    assert owner.call("raw_call", "remove", object_key("wide", name, 3, 2), True) == 0
    other = make()
    assert other.call("leading", "wide", name, list(range(6)))[0] == 6, "a lookup asks for one object of a page"
    assert other.call("read", "wide", name, list(range(6)))[:2] == [3, 3]
    stored, _ = other.call("write", "wide", name, [3])
    assert stored == [True]
    assert other.call("read", "wide", name, list(range(6)))[:2] == [6, 6]


def test_reading_nothing_is_a_miss(tier: Peer, name: str) -> None:
    assert tier.call("leading", "small", name, [])[0] == 0
    assert tier.call("read", "small", name, [])[:2] == [0, 0]
    assert tier.call("read", "small", name, [0, 1, 2])[:2] == [0, 0]
    assert tier.call("leading", "small", name, [0, 1, 2])[0] == 0


def test_a_lookup_of_a_thousand_pages_asks_for_few_keys(make: Make, name: str) -> None:
    tier = make()
    tier.call("write", "small", name, list(range(300)))
    for there, asked in ((300, 1000), (300, 301), (299, 299), (1, 1), (2, 2), (3, 3), (0, 0)):
        numbers = [*range(there), *range(10_000, 10_000 + asked - there)]
        before = tier.call("stats").get("probes", 0)
        assert tier.call("leading", "small", name, numbers)[0] == there
        assert tier.call("stats").get("probes", 0) - before <= 50
    before = tier.call("stats")["probes"]
    assert tier.call("leading", "small", f"{name} missing", list(range(1000)))[0] == 0
    assert tier.call("stats")["probes"] - before <= 11


def test_threads_of_one_process(make: Make, name: str) -> None:
    tier = make()
    assert tier.call("together", "wide", name, 4, 3) == []


def test_two_processes_that_write_the_same_pages_at_once(make: Make, name: str) -> None:
    peers = [make(), make(), make()]
    for turn in range(5):
        for peer in peers:
            peer.send("write", "wide", f"{name}{turn}", list(range(4)))
        for peer in peers:
            assert peer.answer()[0] == [True] * 4
        for peer in peers:
            assert peer.call("read", "wide", f"{name}{turn}", list(range(4)))[:2] == [4, 4]


def test_drop_removes_what_this_process_has_written_or_read(make: Make, tier: Peer, name: str) -> None:
    tier.call("write", "small", name, list(range(3)))
    first, second = make(), make()
    assert first.call("read", "small", name, list(range(3)))[0] == 3
    second.call("drop", "small")
    assert second.call("leading", "small", name, list(range(3)))[0] == 3
    first.call("drop", "small")
    assert second.call("leading", "small", name, list(range(3)))[0] == 0


# ---- objects that are not what they should be --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("difference", [-1, -TRAILER_BYTES, 1, 4096])
def test_an_object_of_another_size_is_a_miss_and_is_replaced(make: Make, owner: Peer, name: str, difference: int) -> None:
    key, size = object_key("small", name, 1), object_bytes("small")
    assert owner.call("raw_put", key, size + difference) == 0
    # Mooncake's own client says 0 and keeps the old object.
    assert owner.call("raw_put", key, size) == 0
    assert owner.call("raw_call", "get_size", key) == size + difference
    tier = make()
    assert tier.call("write", "small", name, [0])[0] == [True]
    assert tier.call("read", "small", name, [0, 1])[:2] == [1, 1]
    assert tier.call("stats")["short_objects"] == 1
    assert tier.call("leading", "small", name, [0, 1])[0] == 1, "asked again for a key that has proved wrong"
    assert owner.call("raw_put", key, size + difference) == 0
    assert tier.call("write", "small", name, [0, 1, 2])[0] == [True] * 3
    assert tier.call("stats")["objects_replaced"] == 1
    assert tier.call("read", "small", name, [0, 1, 2])[:2] == [3, 3]


def test_wrong_bytes_are_removed_when_the_caller_finds_them(make: Make, owner: Peer, name: str) -> None:
    assert owner.call("raw_put", object_key("small", name, 1), object_bytes("small"), "", 3) == 0
    tier = make()
    tier.call("write", "small", name, [0, 2])
    assert tier.call("read", "small", name, [0, 1, 2])[:2] == [3, 1]
    tier.call("bad", "small", name, [1])
    assert tier.call("leading", "small", name, [0, 1, 2])[0] == 1
    assert owner.call("raw_call", "is_exist", object_key("small", name, 1)) == 0
    assert tier.call("write", "small", name, [1])[0] == [True]
    assert tier.call("read", "small", name, [0, 1, 2])[:2] == [3, 3]


def test_a_miss_writes_no_line_to_the_log(make: Make, name: str) -> None:
    tier = make()
    for number in range(20):
        assert tier.call("read", "wide", name, [number])[0] == 0
    assert len(Path(tier.log.name).read_text().splitlines()) < 5


# ---- codes -------------------------------------------------------------------------------------------------------------------------------


def test_codes_of_our_client(master: Master, owner: Peer, name: str) -> None:
    client = Peer()
    try:
        client.call("connect", settings(master.address))
        there, new = f"{name}/there", f"{name}/new"
        assert client.call("client_put", [there], [1000]) == [0]
        assert client.call("client_call", "claim", [there, new], [1000, 1000]) == [-705, 0]
        assert client.call("client_call", "exists", [there, new]) == [True, False], "a claim leaves something behind"
        assert client.call("client_get", [there, new], [1000, 1000]) == [1000, -704]
        assert client.call("client_get", [there], [1001]) == [1000]
        assert client.call("client_get", [there], [999]) == [-600]
        (replicas, missing) = client.call("client_call", "replicas", [there, new])
        assert replicas[0] == 1000 and len(replicas[1]) == 1 and missing is None
        assert client.call("client_call", "replicas", [new]) == [None]
        assert client.call("client_put", [there], [500]) == [0]
        assert client.call("client_get", [there], [1000]) == [1000], "a put has replaced an existing object"
        assert client.call("client_put", [there], [500], replace=True) == [0]
        assert client.call("client_get", [there], [1000]) == [500]
        client.call("client_call", "remove", [there])  # leased by all the looking
        assert client.call("client_call", "exists", [there]) == [False]
        client.call("client_call", "remove", [there])
        client.call("client_call", "probe", owner.call("raw_call", "get_hostname"))
        assert client.call("client_call", "close") is True
        for method in ("exists", "replicas", "remove"):
            with pytest.raises(Failed, match="TierDown: Mooncake's client is closed"):
                client.call("client_call", method, [there])
        assert client.call("client_call", "close") is True
    finally:
        client.close()


# ---- a full pool -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lease_ms", [100, 600_000])
def test_full_pool(name: str, lease_ms: int) -> None:
    """Four times what fits. With short leases old pages make room; where leases of what was just read forbid that, new pages are dropped
    within the budget. Nothing that reads says anything wrong."""
    master = Master(f"--default_kv_lease_ttl={lease_ms}")
    owner, tier = Peer(), Peer()
    try:
        owner.call("raw_open", master.address, 64 * MIB)
        tier.call("open", settings(master.address))
        stored = 0
        for turn in range(8):
            results, seconds = tier.call("write", "wide", f"{name}{turn}", list(range(8)))
            assert seconds < 3
            stored += sum(results)
            count, good, _ = tier.call("read", "wide", f"{name}{turn}", list(range(8)))
            assert count == good
        stats = tier.call("stats")
        assert stats["pages_written"] == stored and stats["pages_written"] + stats["pages_dropped"] == 64
        if lease_ms == 100:
            assert stored > 32, stats
        else:
            # 16 fit; what no read has leased may still make room.
            assert 8 <= stored < 32 and stats["puts_full"] > 0, stats
    finally:
        for process in (tier, owner):
            process.close()
        master.kill()


def test_a_pool_without_any_segment_drops_writes(name: str) -> None:
    master = Master()
    tier = Peer()
    try:
        tier.call("open", settings(master.address))
        begin = time.monotonic()
        assert tier.call("write", "small", name, [0, 1])[0] == [False, False]
        assert time.monotonic() - begin < 3
        assert tier.call("read", "small", name, [0, 1])[:2] == [0, 0]
    finally:
        tier.close()
        master.kill()
