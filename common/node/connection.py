"""One client's socket: frames in, frames and descriptors out.

Promises:
- Never blocks the event loop. What cannot be sent waits in a queue of at most MAX_QUEUE bytes; a client that lets it fill up is ended.
- A frame above MAX_FRAME, or one that is no message, ends the connection.
- `gone` is called once, when the client has closed its end. That, and not our own `end`, says that the client touches no slot any more: a
  client closes only after it has unmapped everything, and the kernel closes a killed client's sockets after its mappings. Until then
  an ended connection is read on and what it says is ignored.

Raw sockets with add_reader and add_writer, because asyncio's transports cannot pass descriptors. Every wake-up reads until the socket has
nothing more: once a client that left messages unread has closed, uvloop wakes us a single time, since libuv takes POLLERR for the end of
polling, and what was said last, and the end itself, would never be read (measured with uvloop 0.23).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from .protocol import HEADER, MAX_FRAME, ToNode, decode_to_node

log = logging.getLogger("mooncake_kv.node")

MAX_QUEUE = 8 << 20
_RECEIVE = 256 << 10
_RECEIVES_A_CALL = 2
_FRAMES_A_CALL = 64
_FD = struct.Struct("i")


class Connection:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        *,
        receive: Callable[[ToNode], object],
        gone: Callable[[], object],
        broken: Callable[[str], object],
    ) -> None:
        """`receive` gets each message and returns None or raises ValueError (the client broke the protocol); `broken` is told why the node
        ended the connection, where the client was at fault."""
        self._loop = loop
        self._sock = sock
        self._receive: Callable[[ToNode], object] = receive
        self._gone: Callable[[], object] = gone
        self._broken: Callable[[str], object] = broken
        self._in = bytearray()
        self._out: deque[tuple[memoryview, int]] = deque()
        self._out_bytes = 0
        self._writing = False
        self._finish = False
        self._mute = False
        self.ended = False
        sock.setblocking(False)
        loop.add_reader(sock, self._readable)

    @property
    def queued_bytes(self) -> int:
        return self._out_bytes

    def send(self, data: bytes, fd: int = -1) -> None:
        """Queue one frame; `fd` travels beside its first byte and must stay open until the client has answered. Ignored after the end."""
        if self.ended or self._mute:
            return
        if self._out_bytes + len(data) > MAX_QUEUE:
            self.fail(f"it has left {self._out_bytes} bytes unread")
            return
        self._out.append((memoryview(data), fd))
        self._out_bytes += len(data)
        if not self._writing:
            self._flush()

    def end(self) -> None:
        """Send what is queued, then nothing more, and wait for the client to close."""
        if not self.ended:
            self.ended = True
            self._finish = True
            if not self._out:
                self._shut()

    def fail(self, reason: str) -> None:
        """The client is at fault: drop what is queued and wait for it to close."""
        if not self.ended:
            self.ended = True
            self._shut()
            self._broken(reason)

    def close(self) -> None:
        """Close at once. Only for clients that hold nothing, and when the node itself is leaving."""
        self.ended = True
        self._shut()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
        # They refer to our owner: without the collector this circle would stay.
        self._receive = self._broken = _ignore
        self._gone = _nothing

    def _shut(self) -> None:
        self._out.clear()
        self._out_bytes = 0
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock)
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def _readable(self) -> None:
        for _ in range(_RECEIVES_A_CALL):
            if self._sock.fileno() < 0:
                return
            try:
                data = self._sock.recv(_RECEIVE)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # reset: the client closed with our messages unread
                data = b""
            if not data:
                gone = self._gone
                self.close()
                gone()
                return
            self._take(data)
        self._loop.call_soon(self._readable)

    def _take(self, data: bytes) -> None:
        if self.ended:
            return
        self._in += data
        try:
            self._parse()
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._in.clear()
            self.fail(str(error))

    def _parse(self) -> None:
        buffer, start = self._in, 0
        while len(buffer) - start >= HEADER.size and not self.ended:
            (length,) = HEADER.unpack_from(buffer, start)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes")
            end = start + HEADER.size + length
            if end > len(buffer):
                break
            message = decode_to_node(buffer[start + HEADER.size : end])
            start = end
            self._receive(message)
        del buffer[:start]

    def _flush(self) -> None:
        try:
            while self._out:
                data, fd = self._out[0]
                if fd >= 0:
                    sent = self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))])
                else:
                    sent = self._sock.sendmsg(self._plain())
                self._sent(sent)
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock, self._flush)
            return
        except OSError:  # the client is closing; what it said before can still be read
            self._mute = True
            self._shut()
            return
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock)
        if self._finish:
            self._shut()

    def _plain(self) -> list[memoryview]:
        """The next frames without a descriptor."""
        frames: list[memoryview] = []
        for data, fd in self._out:
            if fd >= 0 or len(frames) == _FRAMES_A_CALL:
                break
            frames.append(data)
        return frames

    def _sent(self, count: int) -> None:
        self._out_bytes -= count
        while count:
            data, _ = self._out.popleft()
            if count < len(data):
                # Its descriptor has gone with the first byte.
                self._out.appendleft((data[count:], -1))
                return
            count -= len(data)


def _ignore(what: object) -> None:
    """In place of a callback after the end."""


def _nothing() -> None:
    """Likewise."""
