"""A small synchronous client that speaks the node's protocol over a real socket, for tests of the node alone.

It can be made to misbehave: nothing is answered unless it reads, and the automatic answers (Mapped, Unmapped, Fenced) can be switched off.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mooncake_kv.common.identity import KVNamespace, trailer_key
from mooncake_kv.common.node import protocol
from mooncake_kv.common.node.paths import NodePaths, node_paths
from mooncake_kv.common.page import PageLayout

M = TypeVar("M")
WAIT_S = 10.0


def small_namespace(tag: str = "a", *, layers: int = 2, heads: int = 2, tokens: int = 16, layers_per_group: int = 0) -> KVNamespace:
    """Pages of 4 KiB of payload in slots of 8 KiB, by default."""
    return KVNamespace.build(
        model=sha256(tag.encode()).hexdigest(),
        kv_dtype="float16",
        num_layers=layers,
        num_kv_heads=heads,
        k_head_dim=16,
        v_head_dim=16,
        page_tokens=tokens,
        layers_per_group=layers_per_group,
    )


def chain(tag: str, count: int) -> list[bytes]:
    return [sha256(f"{tag}/{i}".encode()).digest() for i in range(count)]


class NodeProcess:
    """A node in a process of its own, listening. `patch`: Python to run in it first, to shorten times."""

    def __init__(self, paths: NodePaths, *arguments: str, patch: str = "") -> None:
        self.paths = paths
        module = "mooncake_kv.common.node"
        code = f"{patch}\nimport sys\nfrom {module}.__main__ import main\nsys.exit(main(sys.argv[1:]))"
        start = ["-c", code] if patch else ["-m", module]
        command = [sys.executable, *start, "--folder", str(paths.folder), "--metrics-port", "-1", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE)
        deadline = time.monotonic() + WAIT_S
        while not self._accepts():
            assert self.process.poll() is None, self.process.stderr.read().decode()  # type: ignore[union-attr]
            assert time.monotonic() < deadline, "the node does not listen"
            time.sleep(0.005)

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.paths.socket)) == 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> str:
        """SIGTERM; returns what it logged."""
        self.process.terminate()
        return self.wait()

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def wait(self) -> str:
        try:
            _, log = self.process.communicate(timeout=WAIT_S)
        finally:
            self.process.kill()
        return log.decode()


@contextlib.contextmanager
def running_node(*arguments: str, name: str = "t", patch: str = "") -> Iterator[NodeProcess]:
    """A node in the folder that follows from XDG_RUNTIME_DIR. Fails the test if the node met a bug in itself."""
    node = NodeProcess(node_paths(name), *arguments, patch=patch)
    try:
        yield node
    finally:
        log = node.end()
        sys.stderr.write(log)
    assert not any(sign in log for sign in ("a bug", "a background task failed", "Traceback", "Exception")), log


class WireClient:
    def __init__(
        self,
        folder: Path,
        role: protocol.Role = "scheduler",
        *,
        engine: str = "e",
        namespace: KVNamespace | None = None,
        answers: bool = True,
        hello: bool = True,
        changes: dict[str, Any] | None = None,
        secret: str = "",
    ) -> None:
        """Connects and says Hello (`changes` replaces fields of it). With `answers`, extents are mapped and unmapped and fences confirmed
        while reading; without, the descriptors of extents are `kept`."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(folder / "socket"))
        self.answers = answers
        self.extents: dict[int, np.ndarray] = {}
        self.credits: list[int] = []
        self.inbox: list[Any] = []
        self.fences: list[int] = []
        self.told: list[int] = []
        self.ended = False
        self._buffer = bytearray()
        self._fds: list[int] = []
        self.kept: list[int] = []
        self.tiers: list[str] = []  # of the pages of the last fetch that was finished
        self._request = 0
        self.namespace = namespace or small_namespace()
        self.layout = PageLayout(self.namespace, trailer_key(secret))
        self.digest = self.namespace.digest(secret)
        if hello:
            tool = role == "tool"
            fields: dict[str, Any] = {
                "major": protocol.MAJOR,
                "minor": protocol.MINOR,
                "version": "test",
                "role": role,
                "engine": "" if tool else engine,
                "pid": os.getpid(),
                "namespace": b"" if tool else self.namespace.encode(),
                "digest": "" if tool else self.digest,
                "key": self.layout.key,
            }
            self.send(protocol.Hello(**{**fields, **(changes or {})}))
            self.welcome: Any = self.wait_for(protocol.Welcome | protocol.Refused)  # type: ignore[arg-type]

    # ---- frames

    def send(self, message: protocol.Message) -> None:
        self.sock.settimeout(WAIT_S)
        self.sock.sendall(protocol.frame(message))

    def send_raw(self, data: bytes) -> None:
        self.sock.sendall(data)

    def read(self, timeout_s: float = 0.0) -> bool:
        """Take in what has come, waiting at most so long for something. False: nothing came, or the node has ended the connection."""
        self.sock.settimeout(max(timeout_s, 0.001))
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 20, 16)
        except TimeoutError:
            return False
        except ConnectionResetError:
            data, fds = b"", []
        self._fds += fds
        if not data:
            self.ended = True
            return False
        self._buffer += data
        while len(self._buffer) >= 4:
            (length,) = protocol.HEADER.unpack_from(self._buffer)
            if len(self._buffer) < 4 + length:
                break
            message = protocol.decode_to_client(bytes(self._buffer[4 : 4 + length]))
            del self._buffer[: 4 + length]
            self._take(message)
        return True

    def _take(self, message: Any) -> None:
        if isinstance(message, protocol.Extent):
            fd = self._fds.pop(0)
            self.told.append(message.extent)
            if self.answers:
                self.extents[message.extent] = np.frombuffer(mmap.mmap(fd, message.size), np.uint8)
                self.send(protocol.Mapped(message.extent))
                os.close(fd)
            else:
                self.kept.append(fd)
        elif isinstance(message, protocol.Retire) and self.answers:
            self.unmap(message.extent)
        elif isinstance(message, protocol.Fence):
            self.fences.append(message.generation)
            if self.answers:
                self.send(protocol.Fenced(message.generation))
        elif isinstance(message, protocol.Granted):
            self.credits += message.slots
        else:
            self.inbox.append(message)

    def unmap(self, extent: int) -> None:
        self.extents.pop(extent, None)
        self.credits = [slot for slot in self.credits if slot >> protocol.SLOT_SHIFT != extent]
        self.send(protocol.Unmapped(extent))

    def until(self, what: Callable[[], object], timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, f"gave up waiting; inbox {self.inbox}, {len(self.credits)} credits, ended {self.ended}"
            assert not self.ended or what(), f"the node has ended the connection; inbox {self.inbox}"
            self.read(0.002)

    def settle(self, quiet_s: float = 0.1) -> None:
        """Read until nothing has come for a while."""
        while self.read(quiet_s):
            pass

    def wait_for(self, kind: type[M], request: int | None = None, timeout_s: float = WAIT_S) -> M:
        def found() -> list[M]:
            return [m for m in self.inbox if isinstance(m, kind) and (request is None or m.request == request)]  # type: ignore[attr-defined]

        self.until(found, timeout_s)
        message = found()[0]
        self.inbox.remove(message)
        return message

    def wait_mapped(self, count: int = 1) -> None:
        """Until this client has mapped so many extents, the node knows it and has slots in them."""
        self.until(lambda: len(self.extents) >= count)
        self.until(lambda: self.stats()["free_bytes"] + self.stats()["pages"])

    def wait_end(self, timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.ended:
            assert time.monotonic() < deadline, "the node keeps the connection"
            self.read(0.02)

    def close(self) -> None:
        self.extents.clear()
        while self.kept:
            os.close(self.kept.pop())
        self.sock.close()

    # ---- requests

    def next_request(self) -> int:
        self._request += 1
        return self._request

    def want(self, count: int, at_least: int | None = None) -> None:
        """Ask for credits and wait until there are `at_least` (`count` unless given)."""
        self.send(protocol.Want(count))
        self.until(lambda: len(self.credits) >= (count if at_least is None else at_least))

    def slot(self, slot: int) -> np.ndarray:
        offset = slot & ((1 << protocol.SLOT_SHIFT) - 1)
        return self.extents[slot >> protocol.SLOT_SHIFT][offset : offset + self.layout.slot_bytes]

    def fill(self, slot: int, page_hash: bytes) -> None:
        """Bytes that follow from the hash, so that a reader can tell what it got."""
        for array in self.layout.arrays(self.slot(slot)):
            array[...] = np.frombuffer(page_hash, np.uint16)[0]

    def holds(self, slot: int, page_hash: bytes) -> bool:
        """Whether the slot holds what `fill` wrote for this hash, sealed."""
        value = np.frombuffer(page_hash, np.uint16)[0]
        whole = all((array == value).all() for array in self.layout.arrays(self.slot(slot)))
        return whole and self.layout.verify(self.slot(slot), page_hash, self.digest)

    def commit(self, hashes: list[bytes], slots: list[int], rectangles: list[protocol.Rectangle] | None = None) -> None:
        self.send(protocol.Commit(b"".join(hashes), slots, rectangles or []))

    def store(self, hashes: list[bytes]) -> None:
        """Write pages with granted slots, as they come, and wait until they are visible."""
        at = 0
        while at < len(hashes):
            self.until(lambda: self.credits)
            batch = hashes[at : at + len(self.credits)]
            slots = [self.credits.pop(0) for _ in batch]
            for page_hash, slot in zip(batch, slots, strict=True):
                self.fill(slot, page_hash)
            self.commit(batch, slots)
            at += len(batch)
        self.until(lambda: self.stats()["sealing"] == 0)

    def lookup(self, hashes: list[bytes]) -> int:
        request = self.next_request()
        self.send(protocol.Lookup(request, b"".join(hashes)))
        return self.wait_for(protocol.Hits, request).pages

    def lookup_tiers(self, hashes: list[bytes]) -> dict[str, int]:
        request = self.next_request()
        self.send(protocol.Lookup(request, b"".join(hashes)))
        return self.wait_for(protocol.Hits, request).tiers

    def start_fetch(self, hashes: list[bytes], limit: int = 0, deadline_ms: int = 0) -> int:
        request = self.next_request()
        self.send(protocol.Fetch(request, b"".join(hashes), limit, deadline_ms=deadline_ms))
        return request

    def finish_fetch(self, request: int) -> list[int]:
        slots: list[int] = []
        self.tiers = []
        while True:
            staged = self.wait_for(protocol.Staged, request)
            slots += staged.slots
            self.tiers += [staged.tier] * len(staged.slots)
            if staged.done:
                return slots

    def fetch(self, hashes: list[bytes], limit: int = 0) -> tuple[int, list[int]]:
        request = self.start_fetch(hashes, limit)
        return request, self.finish_fetch(request)

    def release(self, request: int) -> None:
        self.send(protocol.Release(request))

    def check(self, hashes: list[bytes], expected: int | None = None) -> list[str]:
        """Fetch, look at every byte of what came, and release. Returns the tier of each page."""
        request, slots = self.fetch(hashes)
        assert all(self.holds(slot, page) for slot, page in zip(slots, hashes, strict=False))
        assert expected is None or len(slots) == expected, (len(slots), expected)
        self.release(request)
        return list(self.tiers)

    def tier(self, name: str = "ssd") -> dict[str, Any]:
        return self.stats()["tiers"][name]

    def written(self, name: str = "ssd") -> int:
        """Pages that the tier has been given, once nothing is on its way to it."""
        self.until(lambda: self.stats()["sealing"] == 0 and self.tier(name)["queued_bytes"] == 0)
        return self.tier(name)["pages_written"]

    def quiet(self) -> dict[str, Any]:
        """Wait until nothing is leased, read or written any more. Every slot of the arena is accounted for then."""

        def is_quiet() -> bool:
            stats = self.stats()
            queued = any(tier.get("queued_bytes") for tier in stats["tiers"].values())
            return not (stats["leased_pages"] or stats["reading"] or stats["sealing"] or queued)

        self.until(is_quiet, 2 * WAIT_S)
        self.settle(0.05)
        stats = self.stats()
        slot = self.layout.slot_bytes
        held = stats["granted_slots"] * slot
        assert stats["free_bytes"] + stats["pages"] * slot + held == stats["arena_bytes"], stats
        assert stats["bad_frees"] == 0
        return stats

    def reserve(self, hashes: list[bytes]) -> list[int]:
        request = self.next_request()
        self.send(protocol.Reserve(request, b"".join(hashes)))
        return self.wait_for(protocol.Reserved, request).slots

    def ping(self) -> None:
        request = self.next_request()
        self.send(protocol.Ping(request))
        self.wait_for(protocol.Done, request)

    def stats(self) -> dict[str, Any]:
        request = self.next_request()
        self.send(protocol.Stats(request))
        return self.wait_for(protocol.StatsReply, request).stats
