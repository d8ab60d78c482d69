"""The worker half's client against a scripted peer: mappings, pins, fences, and what becomes of memory when the connection ends."""

from __future__ import annotations

import fcntl
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from mooncake_kv.common.node import client as client_module
from mooncake_kv.common.node import protocol
from mooncake_kv.common.node.client import NodeClient
from mooncake_kv.common.node.client_link import unique_generation
from tests.node.scripted_peer import SLOT, Connect, Listener, hashes, memory, never_blocked, until


def slot(extent: int, index: int) -> int:
    return extent << protocol.SLOT_SHIFT | index * SLOT


def worker(listener: Listener, client: NodeClient, extents: int = 1, **welcome: Any) -> tuple[Any, list[int]]:
    peer = listener.greet(**{"generation": 0, **welcome})
    fds = []
    for extent in range(extents):
        fds.append(memory(16 * SLOT))
        peer.send(protocol.Extent(extent=extent, size=16 * SLOT), fds[-1])
        assert peer.expect(protocol.Mapped).extent == extent
    assert client.wait_ready(5)
    return peer, fds


def test_extents_are_mapped_and_seen_by_the_other_side(listener: Listener, connect: Connect) -> None:
    mapped: list[tuple[int, int, int]] = []
    unmapped: list[tuple[int, int]] = []
    client = connect("worker", on_map=lambda *what: mapped.append(what), on_unmap=lambda *what: unmapped.append(what))
    peer, fds = worker(listener, client, 2)
    arena = client.arena()
    assert arena is not None and client.counters()["mapped_bytes"] == 32 * SLOT
    with arena.pin(7, 0) as pinned:
        assert pinned is not None
        page = pinned.slot(slot(1, 3))
        assert page is not None and page.shape == (SLOT,) and page.flags.writeable
        page[:4] = [1, 2, 3, 4]
        assert pinned.slot(slot(2, 0)) is None and pinned.slot(slot(1, 16)) is None
        del page
    assert os.pread(fds[1], 4, 3 * SLOT) == b"\1\2\3\4"
    assert pinned.slot(slot(1, 3)) is None  # over
    with arena.pin(8, 0) as other:
        assert other is None
    assert [what[0] for what in mapped] == [0, 1] and not unmapped
    peer.send(protocol.Retire(extent=0))
    assert peer.expect(protocol.Unmapped).extent == 0
    assert unmapped == [mapped[0][1:]]


def test_retire_waits_for_the_pin_and_for_views(listener: Listener, connect: Connect) -> None:
    client = connect("worker")
    peer, _ = worker(listener, client)
    arena = client.arena()
    assert arena is not None
    with arena.pin(7, 0) as pinned:
        assert pinned is not None
        peer.send(protocol.Retire(extent=0))
        assert peer.quiet(0.1)
        page = pinned.slot(slot(0, 1))
        assert page is not None
    assert peer.quiet(0.1)  # a careless caller kept the view
    page[0] = 1
    del page
    assert peer.expect(protocol.Unmapped).extent == 0


def test_fence_waits_for_pins_and_refuses_later_ones(listener: Listener, connect: Connect) -> None:
    client = connect("worker")
    peer, _ = worker(listener, client, generation=2)  # generations 1 and 2 were over before we came
    arena = client.arena()
    assert arena is not None
    with arena.pin(7, unique_generation(7, 2)) as over:
        assert over is None
    with arena.pin(7, unique_generation(7, 3)) as copying, arena.pin(7, unique_generation(7, 4)), arena.pin(7, 0):
        assert copying is not None
        peer.send(protocol.Fence(generation=3))
        assert peer.quiet(0.1)
        with arena.pin(7, unique_generation(7, 3)) as late:
            assert late is None
        first = arena.pin(7, unique_generation(7, 4))
        assert first.__enter__() is not None
        first.__exit__(None, None, None)
        assert peer.quiet(0.05)
    assert peer.expect(protocol.Fenced).generation == 3


def test_the_socket_stays_open_while_a_copy_runs(listener: Listener, connect: Connect) -> None:
    """To the node, the end of the socket means that nothing is copied or mapped any more."""
    client = connect("worker")
    peer, _ = worker(listener, client, 2)
    arena = client.arena()
    assert arena is not None
    with arena.pin(7, 0) as pinned:
        assert pinned is not None
        peer.connection.shutdown(1)  # the node ends the connection
        until(lambda: not client.ready)
        assert client.arena() is None
        with arena.pin(7, 0) as late:
            assert late is None
        page = pinned.slot(slot(1, 0))
        assert page is not None
        page[0] = 7  # still there
        del page
        peer.connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            peer.connection.recv(1)
    peer.connection.settimeout(5)
    assert peer.connection.recv(1) == b""
    worker(listener, client, epoch=8)


def test_a_copy_that_never_ends_keeps_memory_and_socket_but_not_the_client(
    listener: Listener, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "UNMAP_S", 0.2)
    client = connect("worker")
    peer, _ = worker(listener, client)
    arena = client.arena()
    assert arena is not None
    with arena.pin(7, 0) as pinned:
        peer.connection.shutdown(1)
        worker(listener, client, epoch=8)
        assert pinned is not None
        page = pinned.slot(slot(0, 0))
        assert page is not None
        page[0] = 1
        peer.connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            peer.connection.recv(1)
    del page
    peer.connection.settimeout(5)
    assert peer.connection.recv(1) == b""


@pytest.mark.parametrize(
    ("size", "seals", "why"),
    [(16 * SLOT, 0, "not sealed"), (16 * SLOT, fcntl.F_SEAL_GROW, "not sealed"), (15 * SLOT, fcntl.F_SEAL_SHRINK, "whose memory has")],
)
def test_memory_that_could_vanish_is_refused(listener: Listener, connect: Connect, size: int, seals: int, why: str) -> None:
    client = connect("worker")
    peer = listener.greet(generation=0)
    peer.send(protocol.Extent(extent=0, size=16 * SLOT), memory(size, seals))
    until(lambda: why in client.reason)
    assert client.arena() is None
    assert peer.receive() is None


def test_a_forked_child_is_inert_and_keeps_nothing_open(listener: Listener, connect: Connect) -> None:
    client = connect("worker")
    peer, fds = worker(listener, client)
    arena = client.arena()
    assert arena is not None
    arena._lock.acquire()  # as if another thread were in the middle of it
    go_on, go = os.pipe()
    child = os.fork()
    if not child:
        try:
            started = time.monotonic()
            with arena.pin(7, 0) as pinned:
                inert = pinned is None
            inert = inert and not client.ready and client.fetch(hashes(1)) is None and client.arena() is None and not client.wait_ready(1)
            client.close()
            os.close(go)
            os.read(go_on, 1)  # lives on until the parent has seen the end of the connection
            os._exit(0 if inert and time.monotonic() - started < 5 else 1)
        finally:
            os._exit(2)
    os.close(go_on)
    arena._lock.release()
    with open(f"/proc/{child}/maps") as maps:
        assert "mkv-test" not in maps.read()
    with arena.pin(7, 0) as pinned:
        assert pinned is not None and client.ready
    client.close()
    assert peer.receive() is None
    os.close(go)
    assert os.waitpid(child, 0)[1] == 0
    for fd in fds:
        os.close(fd)


def test_views_outlive_the_client(listener: Listener, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "UNMAP_S", 0.1)
    client = connect("worker")
    _, fds = worker(listener, client)
    arena = client.arena()
    assert arena is not None
    with arena.pin(7, 0) as pinned:
        assert pinned is not None
        page = pinned.slot(slot(0, 2))
    assert page is not None
    client.close()
    page[0] = 9
    assert os.pread(fds[0], 1, 2 * SLOT) == b"\x09"
    with open("/proc/self/maps") as maps:
        assert "mkv-test" in maps.read()
    del page
    gc.collect()
    with open("/proc/self/maps") as maps:
        assert "mkv-test" not in maps.read()


def test_mapping_and_removing_half_a_gibibyte_holds_nobody_up(listener: Listener, connect: Connect) -> None:
    client = connect("worker")
    peer = listener.greet(generation=0)
    assert client.wait_ready(5)
    size = 512 << 20
    fd = memory(size)
    times: list[float] = []

    def calls(done: Callable[[], bool]) -> float:
        began = time.monotonic()
        while not done():
            turn = time.perf_counter()
            arena = client.arena()
            if arena is not None:
                with arena.pin(7, 0) as pinned:
                    assert pinned is None or pinned.slot(slot(9, 0)) is None
            times.append(time.perf_counter() - turn)
            assert time.monotonic() - began < 30
        return time.monotonic() - began

    peer.send(protocol.Extent(extent=0, size=size), fd)
    os.close(fd)
    mapping = calls(lambda: client.counters()["mapped_bytes"] == size)
    assert peer.expect(protocol.Mapped).extent == 0
    held = client.arena()
    assert held is not None
    peer.connection.shutdown(1)
    # The last mapping of the memory: removing it frees it.
    removing = calls(lambda: not held.live)
    print(f"\nmapping took {mapping * 1e3:.0f} ms, removing {removing * 1e3:.0f} ms, longest call {max(times) * 1e3:.2f} ms")
    never_blocked(times, "pin")
