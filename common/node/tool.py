"""A short conversation with a running node, for the command line: its numbers, or its end.

Promises: never starts a node, maps no memory, and every wait ends within `timeout_s`.
"""

from __future__ import annotations

import os
import select
import socket
import time
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from . import protocol, spawn
from .paths import NodePaths
from .spawn import NodeUnavailable

_REQUEST = 1
Answer = TypeVar("Answer", bound=protocol.Message)


class NodeTool:
    """A connection in the role `tool`; use it as a context manager. Raises NodeUnavailable, here and from each call, with one sentence."""

    def __init__(self, node: NodePaths, *, version: str, timeout_s: float = 5.0) -> None:
        self._node = node
        connection = spawn.connect(node)
        if connection is None:
            raise NodeUnavailable(f"node {node.name!r} is not running ({node.folder})")
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._socket: socket.socket = connection
        try:
            hello = protocol.Hello(major=protocol.MAJOR, minor=protocol.MINOR, version=version, role="tool", pid=os.getpid())
            self.welcome = self._ask(hello, protocol.Welcome)
        except BaseException:
            connection.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()

    def stats(self) -> dict[str, Any]:
        return self._ask(protocol.Stats(_REQUEST), protocol.StatsReply).stats

    def stop(self) -> None:
        """Ask the node to end and wait until its process has. Raises NodeUnavailable if it does not within the timeout."""
        try:
            process = os.pidfd_open(self.welcome.pid)
        except ProcessLookupError:
            return
        try:
            self._ask(protocol.Stop(_REQUEST), protocol.Done)
            ended = select.poll()
            ended.register(process, select.POLLIN)
            if not ended.poll(self._timeout_s * 1000):
                raise NodeUnavailable(f"node {self._node.name!r} (pid {self.welcome.pid}) was asked to stop and has not ended yet")
        finally:
            os.close(process)

    def _ask(self, message: protocol.Message, kind: type[Answer]) -> Answer:
        """Send, and read on to the answer of that kind."""
        self._deadline = time.monotonic() + self._timeout_s
        try:
            self._socket.settimeout(self._timeout_s)
            self._socket.sendall(protocol.frame(message))
            while not isinstance(answer := self._receive(), kind):
                if isinstance(answer, protocol.Refused):
                    raise NodeUnavailable(f"node {self._node.name!r} refused: {answer.reason}")
        except TimeoutError:
            raise NodeUnavailable(f"node {self._node.name!r} does not answer") from None
        except OSError as error:
            raise NodeUnavailable(f"node {self._node.name!r} is gone: {error.strerror}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise NodeUnavailable(f"node {self._node.name!r} sent something that is no message: {error}") from None
        return answer

    def _receive(self) -> protocol.Message:
        (length,) = protocol.HEADER.unpack(self._exactly(protocol.HEADER.size))
        if length > protocol.MAX_FRAME:
            raise NodeUnavailable(f"node {self._node.name!r} sent a frame of {length} bytes, more than {protocol.MAX_FRAME}")
        return protocol.decode_to_client(self._exactly(length))

    def _exactly(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            if (left := self._deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            data = self._socket.recv(length - len(parts))
            if not data:
                raise NodeUnavailable(f"node {self._node.name!r} ended the connection")
            parts += data
        return bytes(parts)
