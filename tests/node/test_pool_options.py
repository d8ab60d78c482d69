"""Options of the pool against a real master: replicas, soft pins and metadata servers; and lines of Mooncake's contract that no other test
needs: codes for what cannot be, leases, and what is left of a client that unmounts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.node.pool_peer import Failed, Master, Peer, free_port, settings, wait_for
from tests.node.test_pool_data import object_bytes, object_key

MIB = 1 << 20
Start = Callable[..., Peer]


@pytest.fixture
def peers() -> Iterator[Start]:
    """Starts peers, which end with the test."""
    started: list[Peer] = []

    def start() -> Peer:
        started.append(Peer())
        return started[-1]

    yield start
    for peer in started:
        peer.close()


@pytest.fixture
def master() -> Iterator[Master]:
    running = Master("--default_kv_lease_ttl=100", "--client_ttl=2")
    yield running
    running.kill()


def tier_of(peers: Start, master: Master, **given: Any) -> Peer:
    tier = peers()
    tier.call("open", settings(master.address, **given))
    return tier


def owner_of(peers: Start, master: Master, mebibytes: int = 64) -> Peer:
    owner = peers()
    owner.call("raw_open", master.address, mebibytes * MIB)
    return owner


# ---- replicas --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_a_page_with_two_replicas_outlives_one_owner(master: Master, peers: Start, fault: str) -> None:
    owners = [owner_of(peers, master) for _ in range(2)]
    writer = tier_of(peers, master, replicas=2)
    assert all(writer.call("write", "small", "a", list(range(16)))[0])
    client = peers()
    client.call("connect", settings(master.address))
    found = client.call("client_call", "replicas", [object_key("small", "a", number) for number in range(16)])
    assert all(size == object_bytes("small") and len(set(at)) == 2 for size, at in found), found
    reader = tier_of(peers, master)
    assert reader.call("read", "small", "a", list(range(16)))[:2] == [16, 16]
    if fault == "killed":
        owners[0].kill()
    else:
        owners[0].stop()
    begin = time.monotonic()

    def whole() -> bool:
        count, good, _ = reader.call("read", "small", "a", list(range(16)))
        assert count == good
        return bool(count == 16)

    # The master forgets the owner after 2 s here. Until then Mooncake may choose its replica, and a key that has failed so is not asked for
    # again for GONE_S, 12 s.
    assert wait_for(whole, 30), reader.call("stats")
    print(f"all pages again {time.monotonic() - begin:.1f} s after an owner was {fault}")


def test_replicas_that_have_no_second_owner(master: Master, peers: Start) -> None:
    """Mooncake stores as many as there are segments."""
    owner_of(peers, master)
    tier = tier_of(peers, master, replicas=2)
    assert all(tier.call("write", "small", "a", list(range(4)))[0])
    assert tier.call("read", "small", "a", list(range(4)))[:2] == [4, 4]


# ---- soft pins -------------------------------------------------------------------------------------------------------------------------


def test_soft_pinned_pages_stay_while_others_go(master: Master, peers: Start) -> None:
    owner_of(peers, master)
    pinning, other = tier_of(peers, master, soft_pin=True), tier_of(peers, master)
    assert all(pinning.call("write", "wide", "pinned", list(range(4)))[0])
    assert all(other.call("write", "wide", "plain", list(range(4)))[0])
    for turn in range(4):  # with the others more than fits
        other.call("write", "wide", f"flood{turn}", list(range(4)))
    assert other.call("leading", "wide", "plain", list(range(4)))[0] == 0
    assert other.call("read", "wide", "pinned", list(range(4)))[:2] == [4, 4]


# ---- metadata servers ------------------------------------------------------------------------------------------------------------------


def test_an_http_metadata_server(peers: Start) -> None:
    port = free_port()
    master = Master("--enable_http_metadata_server=true", f"--http_metadata_server_port={port}", "--http_metadata_server_host=127.0.0.1")
    try:
        given = {"metadata_server": f"http://127.0.0.1:{port}/metadata", "local_hostname": "127.0.0.1"}
        owner = peers()
        owner.call("connect", settings(master.address, **given), 64 * MIB)
        writer, reader = tier_of(peers, master, **given), tier_of(peers, master, **given)
        assert all(writer.call("write", "wide", "a", list(range(6)))[0])
        assert reader.call("read", "wide", "a", list(range(6)))[:2] == [6, 6]
        owner.kill()
        (count, _, spent) = reader.call("read", "wide", "a", list(range(6)))
        assert count == 0 and spent < 3
    finally:
        master.kill()


@pytest.mark.parametrize("server", ["http://127.0.0.1:{}/metadata", "etcd://127.0.0.1:{}", "127.0.0.1:{}"])
def test_a_metadata_server_that_does_not_answer(master: Master, peers: Start, server: str) -> None:
    """Mooncake itself waits for more than 100 s where it is etcd."""
    begin = time.monotonic()
    with pytest.raises(Failed, match="TierDown: no metadata server answers at metadata_server"):
        tier_of(peers, master, metadata_server=server.format(free_port()), local_hostname="127.0.0.1")
    assert time.monotonic() - begin < 4


# ---- lines of the contract -------------------------------------------------------------------------------------------------------------


def test_a_claim_grants_no_lease_and_a_look_does(master: Master, peers: Start) -> None:
    master.kill()
    master.options = ("--default_kv_lease_ttl=600000",)
    master.start()
    owner = owner_of(peers, master)
    client = peers()
    client.call("connect", settings(master.address))
    for key in ("claimed", "looked at"):
        assert owner.call("raw_put", key, 1000) == 0
    assert client.call("client_call", "claim", ["claimed"], [1000]) == [-705]
    assert client.call("client_call", "exists", ["looked at"]) == [True]
    assert owner.call("raw_call", "remove", "claimed", False) == 0
    assert owner.call("raw_call", "remove", "looked at", False) == -706
    assert client.call("client_call", "replicas", ["looked at", "claimed"])[1] is None


def test_what_cannot_be_is_a_code_and_no_crash(master: Master, peers: Start) -> None:
    owner_of(peers, master)
    client = peers()
    client.call("connect", settings(master.address))
    assert client.call("client_put", [""], [1000])[0] < 0
    assert client.call("client_put", ["larger than the pool"], [65 * MIB]) == [-200]
    assert client.call("client_get", ["", "missing"], [10, 10])[1] == -704
    assert client.call("client_call", "exists", ["", "missing"])[1] is False
    assert client.call("client_call", "replicas", ["missing"]) == [None]
    client.call("client_call", "remove", ["missing", ""])
    assert client.call("client_register_twice", MIB).startswith("Mooncake does not take memory")


def test_what_an_owner_that_leaves_had_is_missing_at_once(master: Master, peers: Start) -> None:
    """One that is killed is believed to have it for `client_ttl` more."""
    leaving, killed = peers(), peers()
    for owner, name in ((leaving, "leaving"), (killed, "killed")):
        owner.call("connect", settings(master.address, local_hostname="127.0.0.1"), 64 * MIB)
        assert owner.call("client_put", [f"{name}{i}" for i in range(8)], [1000] * 8) == [0] * 8
        if owner is leaving:
            begin = time.monotonic()
            assert owner.call("client_call", "close") is True and time.monotonic() - begin < 0.5
            assert killed.process.poll() is None
            owner.kill()
    killed.kill()
    client = peers()
    client.call("connect", settings(master.address))
    assert client.call("client_call", "exists", [f"leaving{i}" for i in range(8)]) == [False] * 8
    assert client.call("client_call", "exists", [f"killed{i}" for i in range(8)]) == [True] * 8
    assert wait_for(lambda: not any(client.call("client_call", "exists", [f"killed{i}" for i in range(8)])), 10)
