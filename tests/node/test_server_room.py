"""The node's memory: growth, engines with different slot sizes in one arena, extents that are taken back."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from mooncake_kv.common.node import protocol, room
from tests.node.wire_client import WireClient, chain, running_node, small_namespace

QUICK = "import mooncake_kv.common.node.room as r; r.SETTLE_S = 0.2; r.RETRY_S = 0.1"
IMPATIENT = "import mooncake_kv.common.node.session as s; s.MAPPING_S = 1.0"
ROLES: tuple[protocol.Role, ...] = ("scheduler", "worker")
BIG = small_namespace("big", layers=8)  # slots of 20 KiB instead of 8
BIG_SLOT = 20480


def test_grows_on_demand_and_not_beyond_its_size(runtime_dir: Path) -> None:
    with running_node("--dram-size", "1mb") as node:
        client = WireClient(node.paths.folder)
        client.want(4)
        assert client.stats()["arena_bytes"] == 256 << 10, "an arena has at least four extents"
        client.store(chain("p", 20))
        assert client.stats()["arena_bytes"] == 256 << 10
        client.store(chain("q", 50))
        assert client.stats()["arena_bytes"] == 768 << 10
        client.store(chain("r", 300))
        assert client.stats()["arena_bytes"] == 1 << 20 and client.stats()["extents"] == 4


def test_extent_size_is_respected(runtime_dir: Path) -> None:
    with running_node("--dram-size", "8mb", "--extent-size", "1mb") as node:
        client = WireClient(node.paths.folder)
        client.want(4)
        assert client.stats()["arena_bytes"] == 1 << 20
        assert client.extents[1].nbytes == 1 << 20


def test_extents_are_sealed_and_private(runtime_dir: Path) -> None:
    with running_node("--dram-size", "1mb") as node:
        client = WireClient(node.paths.folder, answers=False)
        client.until(lambda: client.kept)
        (fd,) = client.kept
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        for size in (0, 2 << 20):
            try:
                os.ftruncate(fd, size)
            except PermissionError:
                continue
            raise AssertionError("the extent can be resized")
        client.close()


def test_an_extent_moves_to_an_engine_with_another_slot_size(runtime_dir: Path) -> None:
    assert room.SETTLE_S >= 5
    with running_node("--dram-size", "1mb", patch=QUICK) as node:
        small = WireClient(node.paths.folder, engine="small")
        small.want(8)
        old, warm = chain("old", 30), chain("warm", 90)
        for prefix in (old, warm):
            small.lookup(prefix)
            small.store(prefix)
        small.lookup(warm)
        time.sleep(0.3)
        big = WireClient(node.paths.folder, engine="big", namespace=BIG)
        big.send(protocol.Want(2))
        while not big.credits:
            small.read(0.01)  # it has to unmap
            big.read(0.01)
        stats = big.stats()
        assert stats["extents_recarved"] == 1 and stats["arena_bytes"] <= 1 << 20
        pages = chain("b", 6)
        while big.lookup(pages) < 6:
            big.store(pages)
        _, slots = big.fetch(pages)
        assert all(big.holds(slot, page) for slot, page in zip(slots, pages, strict=True))
        # The coldest extent went: what was used last is still there, and both engines go on.
        assert len(small.extents) == 3 and sum(small.lookup([page]) for page in warm) >= 85
        small.until(lambda: small.credits)
        small.store(chain("new", 10))
        _, slots = small.fetch(chain("new", 10))
        assert all(small.holds(slot, page) for slot, page in zip(slots, chain("new", 10), strict=True))
        assert big.stats()["bad_frees"] == 0


def full_of_small_pages(folder: Path) -> tuple[WireClient, WireClient, list[bytes]]:
    """A scheduler and a worker that have mapped all four extents, and the pages in them, in order of their slots."""
    small = WireClient(folder, engine="small")
    worker = WireClient(folder, "worker", engine="small")
    small.send(protocol.Want(8))
    pages = chain("p", 120)
    small.lookup(pages)
    for start in range(0, 120, 8):
        while len(small.credits) < 8:
            worker.read(0.01)
            small.read(0.01)
        small.store(pages[start : start + 8])
    worker.wait_mapped(4)
    time.sleep(0.3)
    return small, worker, pages


def pump(*clients: WireClient, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for client in clients:
            client.read(0.005)


def test_leases_are_respected_while_an_extent_moves(runtime_dir: Path) -> None:
    with running_node("--dram-size", "1mb", patch=QUICK) as node:
        small, worker, pages = full_of_small_pages(node.paths.folder)
        leases = []
        for start in (0, 33, 66, 99):
            request, slots = small.fetch(pages[start : start + 10])
            assert len(slots) == 10
            leases.append((request, pages[start : start + 10], slots))
        assert {slot >> protocol.SLOT_SHIFT for _, _, slots in leases for slot in slots} == {1, 2, 3, 4}
        big = WireClient(node.paths.folder, engine="big", namespace=BIG)
        big.send(protocol.Want(2))
        pump(small, worker, big, seconds=1.0)
        assert not big.credits and len(small.extents) == len(worker.extents) == 4
        assert big.stats()["extents_recarved"] == 1, "one is on its way, and only one"
        for request, part, slots in leases:
            assert all(worker.holds(slot, page) for slot, page in zip(slots, part, strict=True))
            small.release(request)
        while not big.credits:
            pump(small, worker, big, seconds=0.01)
        assert len(small.extents) == len(worker.extents) == 3 and big.stats()["bad_frees"] == 0


def test_an_extent_waits_for_every_client_to_unmap_it(runtime_dir: Path) -> None:
    with running_node("--dram-size", "1mb", patch=QUICK) as node:
        small, worker, _ = full_of_small_pages(node.paths.folder)
        worker.answers = False
        big = WireClient(node.paths.folder, engine="big", namespace=BIG)
        big.send(protocol.Want(2))
        pump(small, worker, big, seconds=1.0)
        assert len(small.extents) == 3 and not big.credits and big.stats()["extents"] == 4
        # Whatever the scheduler held in that extent is void, so it may not come back by any way.
        assert small.stats()["granted_slots"] == 8
        worker.close()
        while not big.credits:
            pump(small, big, seconds=0.01)
        assert big.stats()["bad_frees"] == 0


def test_memory_of_a_dropped_namespace_without_clients_is_given_back(runtime_dir: Path) -> None:
    with running_node("--dram-size", "1mb") as node:
        tool = WireClient(node.paths.folder, "tool")
        client = WireClient(node.paths.folder)
        client.want(4)
        client.store(chain("p", 60))
        client.send(protocol.Drop(client.next_request()))
        client.wait_for(protocol.Done)
        assert tool.stats()["arena_bytes"] == 512 << 10, "kept while its engine is there"
        client.close()
        tool.until(lambda: tool.stats()["arena_bytes"] == 0)
        assert tool.stats()["namespaces"] == 0 and tool.stats()["extents"] == 0
        again = WireClient(node.paths.folder)
        again.want(4)
        again.store(chain("p", 60))
        assert again.lookup(chain("p", 60)) == 60 and min(again.extents) > 2, "numbers of extents do not come back"


def test_nothing_is_granted_before_all_clients_of_the_engine_have_mapped(runtime_dir: Path) -> None:
    with running_node("--dram-size", "1mb") as node:
        scheduler = WireClient(node.paths.folder)
        worker = WireClient(node.paths.folder, "worker", answers=False)
        bystander = WireClient(node.paths.folder, engine="bystander")
        scheduler.send(protocol.Want(4))
        scheduler.settle(0.3)
        assert scheduler.extents and not scheduler.credits
        bystander.want(4)
        bystander.store(chain("p", 5))
        request = scheduler.start_fetch(chain("p", 5))
        scheduler.settle(0.3)
        assert not scheduler.inbox, "nor staged, nor missed: the worker may still be mapping"
        worker.send(protocol.Mapped(1))
        scheduler.until(lambda: len(scheduler.credits) == 4)
        assert len(scheduler.finish_fetch(request)) == 5


def test_a_fetch_waits_for_new_memory_to_be_mapped(runtime_dir: Path) -> None:
    with running_node("--dram-size", "1mb") as node:
        writer, reader = WireClient(node.paths.folder), WireClient(node.paths.folder, engine="reader")
        worker = WireClient(node.paths.folder, "worker", engine="reader", answers=False)
        worker.send(protocol.Mapped(1))
        writer.want(4)
        pages = chain("p", 60)
        writer.store(pages)
        assert len(writer.extents) == 2
        request = reader.start_fetch(pages)
        reader.settle(0.3)
        assert 0 < sum(len(m.slots) for m in reader.inbox if isinstance(m, protocol.Staged)) < 60
        assert not any(m.done for m in reader.inbox)
        worker.send(protocol.Mapped(2))
        assert len(reader.finish_fetch(request)) == 60


def test_nobody_waits_long_for_an_engine_that_does_not_map(runtime_dir: Path) -> None:
    with running_node("--dram-size", "1mb", patch=IMPATIENT) as node:
        writer = WireClient(node.paths.folder)
        writer.want(4)
        writer.store(chain("p", 60))
        reader, worker = (WireClient(node.paths.folder, role, engine="reader", answers=role == "scheduler") for role in ROLES)
        worker.send(protocol.Mapped(1))
        request, slots = reader.fetch(chain("p", 60))
        assert 0 < len(slots) < 60
        reader.release(request)
        # What it has mapped is all it will get.
        reader.want(4)
        assert all(slot >> protocol.SLOT_SHIFT == 1 for slot in reader.credits) and reader.stats()["pages_evicted"]


def test_an_engine_that_joins_evicts_nothing_while_there_is_free_memory(runtime_dir: Path) -> None:
    with running_node("--dram-size", "1mb", patch=IMPATIENT) as node:
        writer = WireClient(node.paths.folder)
        writer.want(4)
        writer.store(chain("p", 44))
        assert len(writer.extents) == 2
        time.sleep(1.1)  # the memory is old
        joining, worker = (WireClient(node.paths.folder, role, engine="joining", answers=role == "scheduler") for role in ROLES)
        joining.send(protocol.Want(4))
        worker.send(protocol.Mapped(1))
        joining.settle(0.3)
        assert not joining.credits
        worker.send(protocol.Mapped(2))
        joining.until(lambda: len(joining.credits) == 4)
        assert joining.stats()["pages_evicted"] == 0 and writer.lookup(chain("p", 44)) == 44
