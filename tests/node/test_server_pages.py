"""The node alone: pages that come and go, over a real socket to a real process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake_kv.common.node import credits, protocol
from mooncake_kv.common.node.protocol import Rectangle
from tests.node.wire_client import NodeProcess, WireClient, chain, running_node, small_namespace

SLOT = 8192
SLOTS = 128  # of the 1 MiB arena that the tests use


@pytest.fixture
def node(runtime_dir: Path) -> Iterator[NodeProcess]:
    with running_node("--dram-size", "1mb") as node:
        yield node


def connect(node: NodeProcess, credits: int = 8, **arguments: object) -> WireClient:
    client = WireClient(node.paths.folder, **arguments)  # type: ignore[arg-type]
    client.want(credits)
    return client


def test_stored_pages_come_back_verified_and_in_order(node: NodeProcess) -> None:
    client = connect(node)
    pages = chain("p", 20)
    client.store(pages)
    assert client.lookup([*pages, *chain("q", 3)]) == 20
    request, slots = client.fetch([*pages, *chain("q", 3)])
    assert len(slots) == 20 and all(client.holds(slot, page) for slot, page in zip(slots, pages, strict=True))
    assert client.stats()["leased_pages"] == 20
    client.release(request)
    assert client.stats()["leased_pages"] == 0


def test_engines_with_another_secret_or_none_share_nothing(node: NodeProcess) -> None:
    pages = chain("p", 3)
    clients = [connect(node, 4, engine=f"e{i}", secret=secret) for i, secret in enumerate(("one", "two", ""))]
    assert len({client.digest for client in clients}) == 3
    for client in clients:
        assert client.lookup(pages) == 0
        client.store(pages)
        assert client.lookup(pages) == 3
    for client in clients:
        request, slots = client.fetch(pages)
        assert all(client.holds(slot, page) for slot, page in zip(slots, pages, strict=True))
        slot = client.slot(slots[0])
        keyed = [client.layout.verify(slot, pages[0], client.digest, other.layout.key) for other in clients]
        assert keyed == [other is client for other in clients], "sealed without the secret's key"
        client.release(request)


def test_a_key_that_does_not_fit_the_digest_is_refused(node: NodeProcess) -> None:
    connect(node, engine="a", secret="one")
    for key in (b"", b"x" * 32, b"short"):
        client = WireClient(node.paths.folder, engine="b", secret="one", changes={"key": key})
        assert isinstance(client.welcome, protocol.Refused)


def test_progress_is_streamed_in_batches(runtime_dir: Path) -> None:
    # Pages of 1 MiB: eight to a batch.
    namespace = small_namespace(layers=32, heads=4, tokens=128, layers_per_group=8)
    with running_node("--dram-size", "128mb") as node:
        client = connect(node, namespace=namespace)
        pages = chain("p", 50)
        client.store(pages)
        for _ in range(5):  # on a busy machine the first batch may be the last to be checked
            request = client.start_fetch(pages)
            slots: list[int] = []
            parts = []
            while True:
                staged = client.wait_for(protocol.Staged, request)
                parts.append(len(staged.slots))
                slots += staged.slots
                if staged.done:
                    break
                assert staged.slots, "an empty message that is not the last"
            assert len(slots) == 50
            if max(parts) < 50:
                break
            client.release(request)
        assert max(parts) < 50
        assert all(client.holds(slot, page) for slot, page in zip(slots, pages, strict=True))


def test_fetch_respects_the_limit_and_the_window(node: NodeProcess) -> None:
    client = connect(node)
    pages = chain("p", 100)
    client.lookup(pages)
    client.store(pages)
    limited, slots = client.fetch(pages, limit=5 * SLOT + SLOT // 2)
    assert len(slots) == 5
    rest, slots = client.fetch(pages)
    # Half of the arena; pages leased twice count once.
    assert len(slots) == SLOTS // 2
    _, slots = client.fetch(pages[:10])
    assert len(slots) == 10, "pages that are leased already take nothing from the window"
    other = chain("q", 4)
    client.store(other)
    _, slots = client.fetch(other)
    assert slots == []
    client.release(limited)
    client.release(rest)
    _, slots = client.fetch(other)
    assert len(slots) == 4


def test_a_leased_page_is_never_evicted_or_reused(node: NodeProcess) -> None:
    client = connect(node)
    kept = chain("kept", 30)
    client.store(kept)
    request, slots = client.fetch(kept)
    for round_ in range(4):
        client.store(chain(f"flood{round_}", SLOTS))
    assert all(client.holds(slot, page) for slot, page in zip(slots, kept, strict=True))
    assert client.lookup(kept) == 30
    client.release(request)
    for round_ in range(2):
        client.store(chain(f"later{round_}", SLOTS))
    assert client.lookup(kept) == 0
    assert client.stats()["pages_evicted"] > 5 * SLOTS


def test_old_prefixes_go_first_and_their_ends_before_their_beginnings(node: NodeProcess) -> None:
    client = connect(node)
    old, used = chain("old", 40), chain("used", 40)
    for prefix in (used, old):
        client.lookup(prefix)
        client.store(prefix)
    request, _ = client.fetch(used)
    client.release(request)
    newcomers = chain("new", 60)
    client.lookup(newcomers)
    client.store(newcomers)
    # 128 slots less 8 credits hold 120 pages: 20 of the 140 went.
    assert client.lookup(used) == 40
    assert client.lookup(old) == 20
    assert client.lookup(newcomers) == 60


def test_a_prefix_longer_than_the_arena_keeps_its_beginning(node: NodeProcess) -> None:
    client = connect(node)
    pages = chain("long", 3 * SLOTS)
    client.lookup(pages)
    client.store(pages)
    assert client.lookup(pages) >= SLOTS // 2


def test_a_page_that_fails_verification_is_dropped_and_ends_the_run(node: NodeProcess) -> None:
    client = connect(node)
    pages = chain("p", 20)
    client.store(pages)
    request, slots = client.fetch(pages)
    client.release(request)
    client.ping()
    client.slot(slots[7])[100] ^= 1
    request, slots = client.fetch(pages)
    assert len(slots) == 7
    stats = client.stats()
    assert stats["pages_bad"] == 1 and stats["leased_pages"] == 7
    client.release(request)
    assert client.lookup(pages) == 7 and client.lookup(pages[8:]) == 12
    client.store([pages[7]])
    assert client.lookup(pages) == 20, "a dropped page can be stored again"


def test_a_reader_that_checks_pages_itself_gets_them_unchecked(node: NodeProcess) -> None:
    client = connect(node)
    pages = chain("p", 20)
    client.store(pages)
    request, slots = client.fetch(pages)
    client.release(request)
    client.ping()
    client.slot(slots[7])[100] ^= 1
    request = client.next_request()
    client.send(protocol.Fetch(request, b"".join(pages), check=False))
    assert client.finish_fetch(request) == slots
    client.release(request)
    assert client.stats()["pages_bad"] == 0
    assert len(client.fetch(pages)[1]) == 7, "another reader's are checked"


def test_suspected_pages_are_checked_again(node: NodeProcess) -> None:
    client = connect(node)
    pages = chain("p", 10)
    client.store(pages)
    request, slots = client.fetch(pages)
    client.slot(slots[3])[5] ^= 0xFF
    other, slots_again = client.fetch(pages)
    assert len(slots_again) == 10, "checked under the first lease, so not looked at again"
    client.release(other)
    client.send(protocol.Suspect(b"".join([*pages, *chain("unknown", 2)])))
    _, slots_again = client.fetch(pages)
    assert len(slots_again) == 3, "suspected, so looked at again"
    client.until(lambda: client.stats()["pages_bad"] == 1)
    assert client.lookup(pages) == 3 and client.lookup(pages[4:]) == 6
    before = client.stats()["free_bytes"]
    client.release(request)
    client.until(lambda: client.stats()["free_bytes"] == before + SLOT)


def test_a_new_copy_replaces_a_suspected_page(node: NodeProcess) -> None:
    """The commit of a recomputed page may come before the old one has been checked and dropped."""
    client = connect(node)
    pages = chain("p", 10)
    client.store(pages)
    request, slots = client.fetch(pages)
    client.slot(slots[3])[5] ^= 0xFF
    slot = client.credits.pop()
    client.fill(slot, pages[3])
    client.send_raw(protocol.frame(protocol.Suspect(pages[3])) + protocol.frame(protocol.Commit(pages[3], [slot])))
    client.until(lambda: client.stats()["pages_committed"] == 11)
    client.until(lambda: client.stats()["checking"] == 0)
    assert client.lookup(pages) == 10
    again, fresh = client.fetch(pages)
    assert fresh[3] == slot and client.holds(slot, pages[3])
    client.release(again)
    before = client.stats()["free_bytes"]
    client.release(request)
    client.until(lambda: client.stats()["free_bytes"] == before + SLOT)


def test_two_namespaces_do_not_see_each_other_and_share_by_lru(node: NodeProcess) -> None:
    one = connect(node, engine="one")
    two = connect(node, engine="two", namespace=small_namespace("b"))
    pages = chain("p", 50)
    one.store(pages)
    assert two.lookup(pages) == 0
    two.store(pages)
    request, slots = two.fetch(pages)
    assert all(two.holds(slot, page) for slot, page in zip(slots, pages, strict=True))
    two.release(request)
    two.store(chain("more", 58))
    assert one.lookup(pages) == 0 and two.lookup(pages) == 50, "the older namespace's pages made room"
    request = two.next_request()
    two.send(protocol.Drop(request))
    assert two.wait_for(protocol.Done, request).count >= 100
    one.store(pages)
    assert two.lookup(pages) == 0 and one.lookup(pages) == 50


def test_drop_lets_leases_end_and_stops_what_is_on_its_way(node: NodeProcess) -> None:
    client = connect(node)
    pages = chain("p", 30)
    client.store(pages)
    request, slots = client.fetch(pages)
    held = client.reserve(chain("late", 1))
    client.send(protocol.Drop(client.next_request()))
    client.wait_for(protocol.Done)
    assert client.lookup(pages) == 0
    assert all(client.holds(slot, page) for slot, page in zip(slots, pages, strict=True)), "leased pages stay as they are"
    client.commit(chain("late", 1), held)
    client.release(request)
    client.until(lambda: client.stats()["free_bytes"] == client.stats()["arena_bytes"] - 8 * SLOT)
    assert client.lookup(chain("late", 1)) == 0, "reserved before the drop"


def test_drop_reaches_pages_that_are_being_sealed(node: NodeProcess) -> None:
    client = connect(node)
    pages = chain("p", 8)
    slots = [client.credits.pop() for _ in pages]
    drop = client.next_request()
    # In one piece, so that the node handles both before the helper has answered.
    client.send_raw(protocol.frame(protocol.Commit(b"".join(pages), slots)) + protocol.frame(protocol.Drop(drop)))
    assert client.wait_for(protocol.Done, drop).count == 0
    client.until(lambda: client.stats()["sealing"] == 0 and len(client.credits) == 8)
    assert client.lookup(pages) == 0
    client.store(pages)
    assert client.lookup(pages) == 8


def test_who_asks_while_pages_are_being_sealed_gets_them_all(node: NodeProcess) -> None:
    client = connect(node)
    pages = chain("p", 8)
    slots = [client.credits.pop() for _ in pages]
    for slot, page in zip(slots, pages, strict=True):
        client.fill(slot, page)
    joined, look, fetch = b"".join(pages), client.next_request(), client.next_request()
    # In one piece, so that the node has all of it before the helper has answered.
    messages = (protocol.Commit(joined, slots), protocol.Lookup(look, joined), protocol.Fetch(fetch, joined))
    client.send_raw(b"".join(protocol.frame(message) for message in messages))
    assert client.wait_for(protocol.Hits, look).pages == 8
    got = client.finish_fetch(fetch)
    assert got == slots and all(client.holds(slot, page) for slot, page in zip(got, pages, strict=True))
    client.release(fetch)
    client.until(lambda: client.stats()["leased_pages"] == 0)


def test_a_fetch_ends_when_what_it_waited_for_is_dropped(node: NodeProcess) -> None:
    client = connect(node)
    pages = chain("p", 8)
    slots = [client.credits.pop() for _ in pages]
    joined, fetch, drop = b"".join(pages), client.next_request(), client.next_request()
    messages = (protocol.Commit(joined, slots), protocol.Fetch(fetch, joined), protocol.Drop(drop))
    client.send_raw(b"".join(protocol.frame(message) for message in messages))
    assert client.finish_fetch(fetch) == []


def test_committing_a_page_twice_keeps_the_first(node: NodeProcess) -> None:
    client = connect(node)
    (page,) = chain("p", 1)
    client.store([page])
    _, (first,) = client.fetch([page])
    client.store([page])
    assert client.stats()["commits_superfluous"] == 1
    a, b = client.credits.pop(), client.credits.pop()
    for slot in (a, b):
        client.fill(slot, chain("q", 1)[0])
    client.commit(chain("q", 1) * 2, [a, b])
    client.until(lambda: client.stats()["commits_superfluous"] == 2)
    client.until(lambda: client.lookup(chain("q", 1)) == 1)
    assert client.holds(first, page)
    client.until(lambda: len(client.credits) == 8)


def test_rectangles_make_a_page_visible_when_they_cover_it(node: NodeProcess) -> None:
    client = connect(node, namespace=small_namespace(layers=4, heads=3))
    (page,) = chain("p", 1)
    slot = client.credits.pop()
    client.fill(slot, page)
    granted = client.stats()["granted_slots"]
    for rectangles in ([Rectangle(0, 2, 0, 3)], [Rectangle(2, 4, 0, 1), Rectangle(2, 3, 1, 3)]):
        client.commit([page], [slot], rectangles)
        assert client.lookup([page]) == 0 and client.stats()["granted_slots"] == granted
    for wrong in (Rectangle(3, 5, 0, 3), Rectangle(3, 4, 2, 1), Rectangle(-1, 4, 0, 3), Rectangle(3, 4, 0, 9)):
        client.commit([page], [slot], [wrong])
    client.commit(chain("other", 1), [slot], [Rectangle(3, 4, 1, 3)])
    assert client.stats()["bad_rectangles"] == 4 and client.stats()["bad_slots"] == 1 and client.lookup([page]) == 0
    client.commit([page], [slot], [Rectangle(3, 4, 1, 3)])
    client.until(lambda: client.lookup([page]) == 1)
    _, (got,) = client.fetch([page])
    assert got == slot and client.holds(slot, page)


def test_reserved_slots_are_shared_by_the_ranks_of_an_engine(node: NodeProcess) -> None:
    ranks = [WireClient(node.paths.folder, "worker", engine="s") for _ in range(2)]
    for rank in ranks:
        rank.wait_mapped()
    pages = chain("p", 3)
    slots = ranks[0].reserve(pages)
    assert ranks[1].reserve(pages) == slots and min(slots) > 0 and len(set(slots)) == 3
    outsider = WireClient(node.paths.folder, "worker", engine="other")
    outsider.wait_mapped()
    assert outsider.reserve(pages) == [-1] * 3
    for slot, page in zip(slots, pages, strict=True):
        ranks[0].fill(slot, page)
    ranks[0].commit(pages, slots, [Rectangle(0, 2, 0, 1)])
    ranks[0].ping()
    assert ranks[0].reserve(pages) == [-1] * 3, "it has done its part"
    assert ranks[0].lookup(pages) == 0
    ranks[1].commit(pages[:2], slots[:2], [Rectangle(0, 2, 1, 2)])
    ranks[1].send(protocol.Discard(slots[2:]))
    ranks[0].until(lambda: ranks[0].lookup(pages) == 2)
    assert ranks[0].reserve(pages[:2]) == [-1, -1], "stored"
    assert outsider.reserve(pages[2:])[0] > 0, "the discarded one can be reserved anew"
    assert ranks[0].stats()["reserved_bytes"] == SLOT


def test_reservations_end_with_their_time_or_their_client(runtime_dir: Path) -> None:
    assert credits.RESERVE_S == 30.0
    with running_node("--dram-size", "1mb", patch="import mooncake_kv.common.node.credits as c; c.RESERVE_S = 1.0") as node:
        one, two = (WireClient(node.paths.folder, "worker", engine="s") for _ in range(2))
        for rank in (one, two):
            rank.wait_mapped()
        pages = chain("p", 3)
        slots = one.reserve(pages)
        assert two.reserve(pages[:2]) == slots[:2]
        free = one.stats()["free_bytes"]
        two.commit(pages[:1], slots[:1], [Rectangle(0, 1, 0, 2)])
        one.until(lambda: one.stats()["reservations_expired"] == 3)
        assert one.stats()["free_bytes"] == free, "they were asked for, and may still be written to"
        one.commit(pages, slots)
        one.until(lambda: one.stats()["free_bytes"] == free + 2 * SLOT)
        assert one.lookup(pages) == 0
        two.close()
        one.until(lambda: one.stats()["free_bytes"] == free + 3 * SLOT)
        assert one.stats()["reserved_bytes"] == 0


def test_credits_leave_most_of_the_arena_to_pages(node: NodeProcess) -> None:
    greedy = WireClient(node.paths.folder)
    greedy.send(protocol.Want(10_000))
    greedy.until(lambda: len(greedy.credits) == SLOTS // 8)
    greedy.settle()
    assert len(greedy.credits) == SLOTS // 8
    second = WireClient(node.paths.folder, engine="second")
    second.send(protocol.Want(10_000))
    second.until(lambda: len(second.credits) == SLOTS // 16)
    slots = greedy.reserve(chain("r", SLOTS))
    while slots.count(-2) > SLOTS - SLOTS // 8:  # the arena is still growing
        greedy.read(0.01)
        slots = greedy.reserve(chain("r", SLOTS))
    assert sum(slot > 0 for slot in slots) == SLOTS // 8 and slots[-1] == -2
    greedy.send(protocol.Discard([slot for slot in slots if slot > 0]))
    assert greedy.reserve(chain("r", 1))[0] > 0


def test_discarded_slots_come_back(node: NodeProcess) -> None:
    client = connect(node)
    before = set(client.credits)
    client.send(protocol.Discard(client.credits))
    client.credits.clear()
    client.until(lambda: len(client.credits) == 8)
    assert client.stats()["free_bytes"] == (SLOTS // 4 - 8) * SLOT and before


def test_64_fetches_at_once_of_four_times_the_arena(node: NodeProcess) -> None:
    """Everything stays right, everyone gets an answer, and the leases stay within the window."""
    writer = connect(node)
    prefixes = [chain(f"prefix{i}", 8) for i in range(64)]
    for prefix in prefixes:
        writer.lookup(prefix)
        writer.store(prefix)
    readers = [WireClient(node.paths.folder, engine=f"reader{i}") for i in range(4)]
    for reader in readers:
        reader.wait_mapped(4)
    total = 0
    for _ in range(3):
        requests = [(readers[i % 4], prefix, readers[i % 4].start_fetch(prefix)) for i, prefix in enumerate(prefixes)]
        answers = [(reader, prefix, request, reader.finish_fetch(request)) for reader, prefix, request in requests]
        assert writer.stats()["leased_bytes"] <= SLOTS * SLOT // 2
        for reader, prefix, request, slots in answers:
            total += len(slots)
            assert all(reader.holds(slot, page) for slot, page in zip(slots, prefix, strict=False))
            reader.release(request)
        for reader in readers:
            reader.ping()
        assert writer.stats()["leased_pages"] == 0
        for prefix in prefixes:
            missing = [page for page in prefix if writer.lookup([page]) == 0]
            writer.store(missing)
    assert total >= 3 * SLOTS // 2
    assert writer.stats()["bad_frees"] == 0


def test_fetches_released_in_the_middle_leave_nothing(runtime_dir: Path) -> None:
    namespace = small_namespace(layers=16, heads=4, tokens=128)
    with running_node("--dram-size", "256mb") as node:
        client = connect(node, namespace=namespace)
        pages = chain("p", 60)
        client.lookup(pages)
        client.store(pages)
        for i in range(20):
            request = client.start_fetch(pages)
            if i % 2:
                client.wait_for(protocol.Staged, request)
            client.release(request)
        client.until(lambda: client.stats()["leased_pages"] == 0)
        assert client.lookup(pages) == 60
        assert client.stats()["bytes_verified"] < 20 * 60 * client.layout.slot_bytes


def test_pages_verified_under_a_lease_are_not_checked_twice(node: NodeProcess) -> None:
    client = connect(node)
    pages = chain("p", 16)
    client.store(pages)
    client.fetch(pages)
    checked = client.stats()["bytes_verified"]
    _, slots = client.fetch(pages)
    assert len(slots) == 16 and client.stats()["bytes_verified"] == checked


def test_contents_survive_their_writer(node: NodeProcess) -> None:
    writer = connect(node, engine="writer")
    pages = chain("p", 12)
    writer.store(pages)
    writer.close()
    time.sleep(0.05)
    reader = WireClient(node.paths.folder, engine="reader")
    reader.wait_mapped()
    _, slots = reader.fetch(pages)
    assert [reader.holds(slot, page) for slot, page in zip(slots, pages, strict=True)] == [True] * 12
    assert np.asarray(reader.slot(slots[0])).any()
