"""A scripted stand-in for the node, for what the real one cannot be made to do on demand: silence, late answers, other versions, broken
memory. It listens on a real Unix socket in the node's folder and speaks the real protocol; the test says each word.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mooncake_kv.common.config import CacheConfig, load_config
from mooncake_kv.common.identity import KVNamespace
from mooncake_kv.common.node import paths, protocol
from mooncake_kv.common.node.client import NodeClient

M = TypeVar("M")
Connect = Callable[..., NodeClient]
WAIT_S = 10.0
SLOT = 1 << 16


def namespace(model: str = "test", layers: int = 2) -> KVNamespace:
    return KVNamespace.build(model=model, kv_dtype="bfloat16", num_layers=layers, num_kv_heads=2, k_head_dim=32, v_head_dim=32)


def config(**settings: Any) -> CacheConfig:
    """A small node. The fetch timeout is long, so that a busy machine does not open the breaker where that is not the test."""
    defaults = {"dram_size": 64 << 20, "extent_size": 16 << 20, "metrics_port": -1, "fetch_timeout_ms": 3000}
    return load_config({**defaults, **settings}, environ={})


def hashes(count: int, start: int = 0) -> list[bytes]:
    return [(start + i).to_bytes(32, "little") for i in range(count)]


def until(what: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """Wait for something true and return it."""
    deadline = time.monotonic() + timeout_s
    while not (result := what()):
        assert time.monotonic() < deadline, f"nothing true came of it in {timeout_s} s"
        time.sleep(0.002)
    return result


def never_blocked(times: list[float], what: str) -> None:
    """None of these calls (seconds each) waited for the node or for slow work, which takes 100 ms and more. The bounds leave room for a
    machine that takes the processor away; what a quiet one shows is printed."""
    p50, p99 = np.percentile(times, [50, 99])
    assert p50 < 1e-3 and p99 < 0.05 and max(times) < 2, f"{what}: p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.1f} ms, max {max(times):.2f} s"


def memory(size: int, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> int:
    fd = os.memfd_create("mkv-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Peer:
    """One accepted connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(WAIT_S)

    def receive(self) -> Any:
        """The next message; None at the end of the stream."""
        header = self._exactly(protocol.HEADER.size)
        if header is None:
            return None
        body = self._exactly(protocol.HEADER.unpack(header)[0])
        assert body is not None
        return protocol.decode_to_node(body)

    def expect(self, kind: type[M]) -> M:
        message = self.receive()
        assert isinstance(message, kind), message
        return message

    def send(self, message: protocol.Message, fd: int = -1) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        self.connection.sendmsg([protocol.frame(message)], ancillary)

    def quiet(self, seconds: float) -> bool:
        """Whether nothing comes for so long."""
        self.connection.settimeout(seconds)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.connection.settimeout(WAIT_S)

    def close(self) -> None:
        self.connection.close()

    def _exactly(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            piece = self.connection.recv(count - len(data))
            if not piece:
                return None
            data += piece
        return data


class Listener:
    """Takes the place of a node called `name` in the current XDG_RUNTIME_DIR."""

    def __init__(self, name: str = "default") -> None:
        self.node = paths.node_paths(name)
        paths.create(self.node)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(self.node.socket))
        self.socket.listen(16)
        self.socket.settimeout(WAIT_S)
        self.peers: list[Peer] = []

    def accept(self) -> Peer:
        peer = Peer(self.socket.accept()[0])
        self.peers.append(peer)
        return peer

    def greet(self, *, epoch: int = 7, generation: int = 1, **welcome: Any) -> Peer:
        """Accept and answer Hello; for a scheduler, its Want is the next message."""
        peer = self.accept()
        self.hello = peer.expect(protocol.Hello)
        values = {"major": protocol.MAJOR, "minor": protocol.MINOR, "version": "test", "pid": os.getpid(), "slot_bytes": SLOT, **welcome}
        peer.send(protocol.Welcome(epoch=epoch, generation=generation, **values))
        return peer

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.socket.close()
        self.node.socket.unlink(missing_ok=True)
