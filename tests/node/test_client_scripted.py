"""The client against a scripted peer: what it sends, what it believes, and what it does when the peer misbehaves (scripted_peer.py)."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mooncake_kv.common.errors import ConfigError
from mooncake_kv.common.node import client as client_module
from mooncake_kv.common.node import client_link, protocol
from mooncake_kv.common.node.client import Fetch, NodeClient
from mooncake_kv.common.node.client_link import unique_generation
from tests.node.scripted_peer import SLOT, Connect, Listener, config, hashes, namespace, until


def slot(extent: int, index: int) -> int:
    return extent << protocol.SLOT_SHIFT | index * SLOT


# ---- hello -----------------------------------------------------------------------------------------------------------------------


def test_hello_says_who_we_are_and_want_follows(listener: Listener, connect: Connect) -> None:
    client = connect(credits=9)
    peer = listener.greet(epoch=5, generation=3, dram_bytes=123)
    hello = listener.hello
    assert (hello.major, hello.role, hello.engine, hello.pid) == (protocol.MAJOR, "scheduler", "e", os.getpid())
    assert hello.namespace == namespace().encode() and hello.digest == namespace().digest()
    assert hello.settings["dram_size"] == 64 << 20 and hello.sources["dram_size"] == "--moon-cache-config"
    assert hello.sources["idle_exit_s"] == "default"
    assert peer.expect(protocol.Want).count == 9
    assert client.wait_ready(5)
    assert (client.epoch, client.generation, client.slot_bytes, client.dram_bytes) == (5, unique_generation(5, 3), SLOT, 123)
    assert client.reason == ""


def test_generations_of_two_nodes_differ() -> None:
    assert unique_generation(1, 1) != unique_generation(2, 1)
    assert unique_generation(9, 1) < unique_generation(9, 2)
    assert unique_generation(9, 0) == 0


def test_other_major_is_refused_with_advice(listener: Listener, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REFUSED_S", 0.2)
    client = connect()
    listener.greet(major=99, version="9.9").close()
    assert not client.wait_ready(0.3)
    assert f"protocol 99.{protocol.MINOR}" in client.reason and "mooncake-kv node stop default" in client.reason
    listener.greet()  # replaced by one that fits: no restart of the engine needed
    assert client.wait_ready(5)


def test_refusal_is_shown(listener: Listener, connect: Connect) -> None:
    client = connect()
    peer = listener.accept()
    peer.expect(protocol.Hello)
    peer.send(protocol.Refused(reason="bad namespace"))
    until(lambda: "bad namespace" in client.reason)
    assert not client.ready


def test_conflicts_disable_or_fail(listener: Listener, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    conflict = "dram_size is 1 (default) here and 2 (--moon-cache-config) there"
    disabled = connect()
    listener.greet(conflicts=[conflict])
    assert not disabled.wait_ready(5)
    assert conflict in disabled.reason
    until(lambda: sum(conflict in record.getMessage() for record in caplog.records) == 1)
    failing = connect(settings={"node_conflict": "fail"})
    listener.greet(conflicts=[conflict])
    with pytest.raises(ConfigError, match="dram_size is 1"):
        failing.wait_ready(5)


def test_no_node_is_a_reason_and_not_an_error(runtime_dir: Path) -> None:
    client = NodeClient(config(), namespace(), engine="e", role="scheduler", spawn=False)
    client.start()
    assert not client.wait_ready(0.1)
    assert "no node 'default' is running" in client.reason
    assert client.fetch(hashes(1)) is None and client.take(3).slots == [] and client.arena() is None
    client.close()
    assert client.reason == "the client was closed"


# ---- fetch -----------------------------------------------------------------------------------------------------------------------


def ready(listener: Listener, client: NodeClient, **welcome: Any) -> Any:
    peer = listener.greet(**welcome)
    peer.expect(protocol.Want)
    assert client.wait_ready(5)
    return peer


def test_fetch_grows_and_is_released(listener: Listener, connect: Connect) -> None:
    client = connect()
    peer = ready(listener, client)
    fetch = client.fetch(hashes(4), limit_bytes=3 * SLOT)
    assert fetch is not None and (fetch.epoch, fetch.generation) == (7, client.generation)
    asked = peer.expect(protocol.Fetch)
    assert (asked.hashes, asked.limit_bytes) == (b"".join(hashes(4)), 3 * SLOT)
    peer.send(protocol.Staged(request=asked.request, slots=[10, 11], done=False))
    until(lambda: fetch.slots == [10, 11])
    assert not fetch.done
    peer.send(protocol.Staged(request=asked.request, slots=[12], done=True, tier="ssd"))
    until(lambda: fetch.done)
    assert fetch.slots == [10, 11, 12] and fetch.tiers == ["dram", "dram", "ssd"] and not fetch.failed
    client.release(fetch)
    client.release(fetch)
    assert peer.expect(protocol.Release).request == asked.request
    assert peer.quiet(0.05)  # once


def test_release_of_a_fetch_in_flight_is_sent_and_its_answer_ignored(listener: Listener, connect: Connect) -> None:
    client = connect()
    peer = ready(listener, client)
    fetch = client.fetch(hashes(1))
    assert fetch is not None
    request = peer.expect(protocol.Fetch).request
    client.release(fetch)
    assert peer.expect(protocol.Release).request == request
    peer.send(protocol.Staged(request=request, slots=[1], done=True))
    until(lambda: client.counters().get("answers_too_late"))
    assert fetch.slots == []


def test_lookup_and_reserve(listener: Listener, connect: Connect) -> None:
    client = connect()
    peer = ready(listener, client)
    lookup, reserve = client.lookup(hashes(3)), client.reserve(hashes(3))
    assert lookup is not None and reserve is not None
    peer.send(protocol.Hits(request=peer.expect(protocol.Lookup).request, pages=2, tiers={"dram": 1, "ssd": 1}))
    peer.send(protocol.Reserved(request=peer.expect(protocol.Reserve).request, slots=[-1, 5, -2]))
    until(lambda: lookup.done and reserve.done)
    assert lookup.pages == 2 and lookup.tiers == {"dram": 1, "ssd": 1} and reserve.slots == [-1, 5, -2]
    client.discard(client.generation, [5])
    assert peer.expect(protocol.Discard).slots == [5]  # a reserved slot goes back to the node, it is no credit
    assert client.take(1).slots == []


# ---- credits ---------------------------------------------------------------------------------------------------------------------


def test_credits_are_taken_once_and_come_back_by_discard(listener: Listener, connect: Connect) -> None:
    client = connect()
    peer = ready(listener, client)
    peer.send(protocol.Granted(slots=[1, 2, 3]))
    until(lambda: client.counters()["credits"] == 3)
    first = client.take(2)
    assert (first.epoch, first.generation, first.slots) == (7, client.generation, [1, 2])
    assert client.take(5).slots == [3]
    client.discard(first.generation, [1])
    client.discard(first.generation, [1])  # a mistake of the caller: counted, and the slot is a credit only once
    assert client.take(5).slots == [1] and client.take(1).slots == []
    assert client.counters()["slots_misused"] == 1
    client.commit(first.generation, list(zip(hashes(2), [2, 99], strict=True)))
    commit = peer.expect(protocol.Commit)
    assert commit.slots == [2] and commit.hashes == hashes(1)[0]
    client.commit(first.generation, [(hashes(1)[0], 2)])
    assert peer.quiet(0.05)


def test_credits_never_used_twice_by_many_threads(listener: Listener, connect: Connect) -> None:
    client = connect()
    peer = ready(listener, client)
    peer.send(protocol.Granted(slots=list(range(1000))))
    until(lambda: client.counters()["credits"] == 1000)
    held: set[int] = set()
    twice: list[int] = []

    def worker(seed: int) -> None:
        for turn in range(2000):
            got = client.take(1 + (turn + seed) % 7)
            for one in got.slots:
                twice.extend([one] if one in held else [])
                held.add(one)
            for one in got.slots:
                held.discard(one)
            client.discard(got.generation, got.slots)

    threads = [threading.Thread(target=worker, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not twice and sorted(client.take(2000).slots) == list(range(1000))


def test_commits_of_a_wake_up_are_one_message_and_never_pass_a_drop() -> None:
    class Bell:
        def ring(self) -> None:
            pass

    link = client_link.Link(1, 1, doorbell=Bell())  # type: ignore[arg-type]
    link.push(protocol.Release(request=1), 10)
    link.push(protocol.Commit(hashes=b"a" * 32, slots=[1]), 10)
    link.push(protocol.Commit(hashes=b"b" * 32, slots=[2]), 10)
    link.push(protocol.Drop(request=2), 10)
    link.push(protocol.Commit(hashes=b"c" * 32, slots=[3]), 10)
    kinds = link.pull()
    assert [type(message).__name__ for message in kinds] == ["Commit", "Release", "Drop", "Commit"]
    assert kinds[0] == protocol.Commit(hashes=b"a" * 32 + b"b" * 32, slots=[1, 2]) and kinds[3] == protocol.Commit(
        hashes=b"c" * 32, slots=[3]
    )
    assert link.queued == 0


def test_retire_voids_credits(listener: Listener, connect: Connect) -> None:
    client = connect()
    peer = ready(listener, client)
    peer.send(protocol.Granted(slots=[slot(0, 0), slot(1, 0), slot(1, 1), slot(0, 1)]))
    until(lambda: client.counters()["credits"] == 4)
    taken = client.take(2)
    peer.send(protocol.Retire(extent=1))
    assert peer.expect(protocol.Unmapped).extent == 1
    client.discard(taken.generation, taken.slots)
    assert sorted(client.take(9).slots) == [slot(0, 0), slot(0, 1)]


def test_nothing_of_an_old_connection_is_used_on_the_next(listener: Listener, connect: Connect) -> None:
    client = connect()
    peer = ready(listener, client, epoch=1)
    peer.send(protocol.Granted(slots=[1, 2, 3]))
    until(lambda: client.counters()["credits"] == 3)
    old = client.take(2)
    fetch = client.fetch(hashes(1))
    assert fetch is not None
    peer.expect(protocol.Fetch)
    peer.close()
    until(lambda: fetch.done)
    assert fetch.failed
    peer = ready(listener, client, epoch=2)  # also generation 1 of its node
    assert client.take(1).slots == []
    client.commit(old.generation, list(zip(hashes(2), old.slots, strict=True)))
    client.discard(old.generation, old.slots)
    client.release(fetch)
    assert peer.quiet(0.1)
    assert client.counters()["pages_stale"] == 4 and client.take(1).slots == []


# ---- breaker ---------------------------------------------------------------------------------------------------------------------


def test_silence_opens_the_breaker_and_a_ping_closes_it(listener: Listener, connect: Connect) -> None:
    client = connect(settings={"fetch_timeout_ms": 150})
    peer = ready(listener, client)
    peer.send(protocol.Granted(slots=[1]))
    until(lambda: client.counters()["credits"] == 1)
    fetch = client.fetch(hashes(1))
    assert fetch is not None
    until(lambda: fetch.done)
    took = time.monotonic() - fetch.started
    assert fetch.failed and 0.14 < took < 2, took
    assert not client.ready and "has not answered" in client.reason
    assert client.fetch(hashes(1)) is None and client.lookup(hashes(1)) is None and client.take(1).slots == []
    client.release(fetch)
    assert isinstance(peer.receive(), protocol.Fetch)
    late = peer.expect(protocol.Ping)
    assert peer.expect(protocol.Release).request == fetch.request
    assert peer.quiet(0.3)  # one Ping is enough while it is not answered
    peer.send(protocol.Done(request=late.request))
    assert not client.ready  # that answer was too late to prove anything
    while not client.ready:
        peer.send(protocol.Done(request=peer.expect(protocol.Ping).request))
        client.wait_ready(0.05)
    assert client.reason == ""
    assert client.take(1).slots == [1]
    assert client.counters()["breaker_opened"] == 1


def test_a_slow_fetch_on_a_living_node_does_not_open_the_breaker(listener: Listener, connect: Connect) -> None:
    client = connect(settings={"fetch_timeout_ms": 500})
    peer = ready(listener, client)
    fetch = client.fetch(hashes(1))
    assert fetch is not None
    peer.expect(protocol.Fetch)
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        peer.send(protocol.Done(request=peer.expect(protocol.Ping).request))
    assert client.ready and not fetch.done
    assert fetch.expired(time.monotonic())  # the caller may give this one up all the same


def test_expired_needs_no_thread() -> None:
    fetch = Fetch(1, 1, 1, 0.06, 0.2)
    assert not fetch.expired(fetch.started + 0.05) and fetch.expired(fetch.started + 0.07)
    fetch.slow = True
    assert not fetch.expired(fetch.started + 0.19) and fetch.expired(fetch.started + 0.21)


def test_a_fetch_from_slow_tiers_has_until_its_deadline(listener: Listener, connect: Connect) -> None:
    client = connect(settings={"fetch_timeout_ms": 300, "fetch_deadline_ms": 1500})
    peer = ready(listener, client)
    fetch = client.fetch(hashes(3))
    assert fetch is not None
    asked = peer.expect(protocol.Fetch)
    assert asked.deadline_ms == 1500
    peer.send(protocol.Staged(request=asked.request, slots=[10], done=False))
    peer.send(protocol.Staged(request=asked.request, slots=[], done=False, tier="ssd"))
    end = fetch.started + 1.0
    while time.monotonic() < end:
        peer.send(protocol.Done(request=peer.expect(protocol.Ping).request))
    assert client.ready and fetch.slow and not fetch.done and not fetch.expired(time.monotonic())
    assert fetch.expired(fetch.started + 1.6)
    peer.send(protocol.Staged(request=asked.request, slots=[11, 12], done=True, tier="ssd"))
    until(lambda: fetch.done)
    assert fetch.slots == [10, 11, 12] and fetch.tiers == ["dram", "ssd", "ssd"] and not fetch.expired(fetch.started + 9)


# ---- queue -----------------------------------------------------------------------------------------------------------------------


def test_a_full_queue_ends_the_connection(listener: Listener, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_link, "QUEUE_BYTES", 1 << 20)
    client = connect()
    peer = ready(listener, client)
    peer.send(protocol.Granted(slots=list(range(60000))))
    until(lambda: client.counters()["credits"] == 60000)
    big = hashes(4096)
    fetches = [client.fetch(big) for _ in range(40)]  # the peer does not read
    assert fetches[0] is not None and fetches[-1] is None
    assert client.ready
    for turn in range(60):
        got = client.take(1000)
        client.commit(got.generation, list(zip(hashes(len(got.slots), turn * 1000), got.slots, strict=True)))
    until(lambda: not client.ready)
    assert client.counters()["overflows"] == 1 and "queue" in client.reason
    ready(listener, client, generation=2)


# ---- lifetime --------------------------------------------------------------------------------------------------------------------


def test_close_sends_what_is_queued(listener: Listener, connect: Connect) -> None:
    client = connect()
    peer = ready(listener, client)
    peer.send(protocol.Granted(slots=[1]))
    until(lambda: client.counters()["credits"] == 1)
    client.commit(client.generation, [(hashes(1)[0], client.take(1).slots[0])])
    client.close()
    assert peer.expect(protocol.Commit).slots == [1]
    assert peer.receive() is None
    assert not client.ready and client.take(1).slots == []


def test_hashes_of_another_length_are_an_error_here_and_not_at_the_node(listener: Listener, connect: Connect) -> None:
    client = connect()
    ready(listener, client)
    with pytest.raises(ValueError, match="32 each"):
        client.fetch([b"short"])
    assert client.ready


def test_drop_is_sent_when_connected(listener: Listener, connect: Connect) -> None:
    client = connect()
    client.drop()
    assert client.counters()["requests_awaited"] == 0
    peer = ready(listener, client)
    client.drop()
    peer.send(protocol.Done(request=peer.expect(protocol.Drop).request, count=3))
    until(lambda: client.counters()["requests_awaited"] == 0)
    client.suspect(hashes(2))
    assert peer.expect(protocol.Suspect).hashes == b"".join(hashes(2))


def test_garbage_ends_the_connection(listener: Listener, connect: Connect) -> None:
    client = connect()
    peer = ready(listener, client)
    peer.connection.sendall(protocol.HEADER.pack(3) + b"\xc1\xc1\xc1")
    until(lambda: "no message" in client.reason)
    peer = ready(listener, client)
    peer.connection.sendall(protocol.HEADER.pack(protocol.MAX_FRAME + 1))
    until(lambda: "limit" in client.reason)
