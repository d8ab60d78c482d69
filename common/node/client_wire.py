"""The client's thread's side of one connection: frames, answers, the breaker, fences and extents.

Promises: only the client's thread runs this. Memory for unread frames is bounded by protocol.MAX_FRAME. The breaker opens when something
is awaited and the node has sent nothing at all for the fetch timeout; a Ping is sent at half of it, so that a fetch that takes long on a
living node does not open it. It closes when a Ping is answered within the timeout. One Ping at a time: a stopped node does not find a heap
of them when it goes on.
"""

from __future__ import annotations

import array
import os
import selectors
import socket
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from . import protocol
from .client_link import Link, unique_generation
from .handles import Fetch, Lookup, Pending, Reserve
from .mapping import Arena, Doorbell

PROBE_S = 0.1
PROBE_MAX_S = 1.0
_IDLE_S = 60.0
_FLUSH_S = 0.5
_READ_BYTES = 1 << 18
_FDS = 16

OnMap = Callable[[int, int, int], None]  # extent, address, size


class ConnectionLost(Exception):
    """The connection cannot go on; the message says why."""


class Wire:
    """Frames over a non-blocking Unix socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.unsent = bytearray()
        self._unread = bytearray()
        self._fds: deque[int] = deque()
        _wires.add(self)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popleft())
        self.socket.close()

    def send(self, *messages: protocol.Message) -> None:
        """Queue messages and send what the socket takes. Raises ConnectionLost."""
        for message in messages:
            self.unsent += protocol.frame(message)
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ConnectionLost(f"the node is gone: {error.strerror}") from None

    def receive(self) -> list[protocol.ToClient]:
        """The messages that are complete by now. Raises ConnectionLost at the end of the stream and for anything that is no message."""
        try:
            data, ancillary, flags, _ = self.socket.recvmsg(_READ_BYTES, socket.CMSG_SPACE(_FDS * 4), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionLost(f"the node is gone: {error.strerror}") from None
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds.extend(array.array("i", payload[: len(payload) // 4 * 4]))
        if flags & socket.MSG_CTRUNC:
            raise ConnectionLost("the node's memory could not be received: this process may have no free file descriptor")
        if not data:
            raise ConnectionLost("the node has ended the connection")
        self._unread += data
        messages: list[protocol.ToClient] = []
        begin = 0
        while len(self._unread) - begin >= protocol.HEADER.size:
            (size,) = protocol.HEADER.unpack_from(self._unread, begin)
            if size > protocol.MAX_FRAME:
                raise ConnectionLost(f"the node sent a frame of {size} bytes, the limit is {protocol.MAX_FRAME}")
            end = begin + protocol.HEADER.size + size
            if len(self._unread) < end:
                break
            try:
                messages.append(protocol.decode_to_client(bytes(self._unread[begin + protocol.HEADER.size : end])))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise ConnectionLost(f"the node sent something that is no message: {error}") from None
            begin = end
        del self._unread[:begin]
        return messages

    def take_fd(self) -> int:
        """The descriptor that came with the next Extent; the caller closes it. Descriptors arrive in the order of their messages."""
        if not self._fds:
            raise ConnectionLost("the node announced memory without passing it")
        return self._fds.popleft()


# A forked child must not hold a connection: the node would not see the end of the parent.
_wires: weakref.WeakSet[Wire] = weakref.WeakSet()


def _close_all() -> None:
    for wire in list(_wires):
        wire.close()


os.register_at_fork(after_in_child=_close_all)


class Connection:
    """A greeted connection. `arena` only for a worker. `report(reason)` is told when the breaker opens or closes ('' when it
    closes), `reap()` removes mappings and returns the extents to acknowledge."""

    def __init__(
        self,
        wire: Wire,
        link: Link,
        arena: Arena | None,
        *,
        doorbell: Doorbell,
        timeout_s: float,
        counters: Counter[str],
        report: Callable[[str], None],
        reap: Callable[[], list[int]],
        stop: Callable[[], bool],
        on_map: OnMap | None = None,
    ) -> None:
        self.link = link
        self._wire = wire
        self._arena = arena
        self._doorbell = doorbell
        self._timeout_s = timeout_s
        self._counters = counters
        self._report = report
        self._reap = reap
        self._stop = stop
        self._on_map = on_map
        self._selector = selectors.DefaultSelector()
        self._writing = False
        self._fence = 0  # wire generation to acknowledge when its pins have ended, 0: none
        self._heard = time.monotonic()
        self._since: float | None = None  # since when something is awaited
        self._ping: tuple[int, float] | None = None  # number and time of the Ping that is not answered yet
        self._pings = 0
        self._probe_at = 0.0
        self._probe_delay = PROBE_S

    def serve(self, messages: list[protocol.ToClient]) -> None:
        """Until `stop` says so; raises ConnectionLost. `messages` came together with the Welcome."""
        self._selector.register(self._wire.socket, selectors.EVENT_READ)
        self._selector.register(self._doorbell.fd, selectors.EVENT_READ)
        try:
            for message in messages:
                self._handle(message)
            while not self._stop():
                self._turn()
            self._flush()
        finally:
            self._selector.close()

    def _turn(self) -> None:
        readable = False
        for key, events in self._selector.select(self._timeout(time.monotonic())):
            if key.fd == self._doorbell.fd:
                self._doorbell.hear()
            else:
                readable = bool(events & selectors.EVENT_READ)
        self._send()
        if readable:
            messages = self._wire.receive()
            if messages:
                self._heard = time.monotonic()
            for message in messages:
                self._handle(message)
        for extent in self._reap():
            self._wire.send(protocol.Unmapped(extent))
        if self._fence and self._arena is not None and self._arena.fenced(unique_generation(self.link.epoch, self._fence)):
            self._wire.send(protocol.Fenced(self._fence))
            self._fence = 0
        # After the socket was read: if this thread had to wait for its turn, that is not the node's silence.
        self._watch(time.monotonic())
        self._count_unsent()

    def _send(self) -> None:
        if self.link.overflow:
            self._counters["overflows"] += 1
            raise ConnectionLost("the queue of messages to the node is full")
        if (messages := self.link.pull()) or self._wire.unsent:
            self._wire.send(*messages)
            self._count_unsent()

    def _flush(self) -> None:
        """Last words, such as commits, of a client that closes."""
        deadline = time.monotonic() + _FLUSH_S
        self._send()
        while self._wire.unsent and time.monotonic() < deadline:
            self._selector.select(0.01)
            self._wire.send()

    def _count_unsent(self) -> None:
        self.link.unsent = len(self._wire.unsent)
        if bool(self._wire.unsent) != self._writing:
            self._writing = not self._writing
            events = selectors.EVENT_READ | selectors.EVENT_WRITE if self._writing else selectors.EVENT_READ
            self._selector.modify(self._wire.socket, events)

    # ---- breaker -----------------------------------------------------------------------------------------------------------------

    def _timeout(self, now: float) -> float:
        """Seconds until `_watch` has something to do."""
        if self.link.ready:
            if self._since is None:
                return _IDLE_S
            quiet_since = max(self._heard, self._since)
            return max(0.0, quiet_since + (self._timeout_s if self._ping else self._timeout_s / 2) - now)
        return _IDLE_S if self._ping else max(0.0, self._probe_at - now)

    def _watch(self, now: float) -> None:
        link = self.link
        if not link.ready:
            if self._ping is None and now >= self._probe_at:
                self._send_ping(now)
            return
        if not link.requests and self._ping is None:
            self._since = None
            return
        if self._since is None:
            self._since = now
        quiet = now - max(self._heard, self._since)
        if quiet >= self._timeout_s:
            link.ready = False
            failed = link.fail_requests()
            self._counters["breaker_opened"] += 1
            self._counters["requests_failed"] += failed
            self._report(f"the node (pid {link.node_pid}) has not answered for {quiet * 1e3:.0f} ms")
            self._probe_delay = PROBE_S
            if self._ping is None:
                self._send_ping(now)
        elif quiet >= self._timeout_s / 2 and self._ping is None:
            self._send_ping(now)

    def _send_ping(self, now: float) -> None:
        # Negative: never the number of a request.
        self._pings -= 1
        self._ping = (self._pings, now)
        self._wire.send(protocol.Ping(self._pings))

    def _pong(self, number: int) -> None:
        if self._ping is None or self._ping[0] != number:
            return
        took, self._ping = self._heard - self._ping[1], None
        if self.link.ready:
            return
        if took <= self._timeout_s:
            self._since = None
            self.link.ready = True
            self._report("")
        else:
            self._probe_at = self._heard + self._probe_delay
            self._probe_delay = min(2 * self._probe_delay, PROBE_MAX_S)

    # ---- messages ----------------------------------------------------------------------------------------------------------------

    def _handle(self, message: protocol.ToClient) -> None:
        link = self.link
        match message:
            case protocol.Staged():
                fetch = link.requests.get(message.request)
                if not isinstance(fetch, Fetch):
                    # Given up meanwhile. Its Release is on the way, or comes when the caller lets go of it.
                    self._counters["answers_too_late"] += 1
                    return
                fetch.slow |= not message.slots and not message.done
                fetch.tiers.extend([message.tier] * len(message.slots))
                fetch.slots.extend(message.slots)
                fetch.heard = self._heard
                self._counters["pages_staged"] += len(message.slots)
                if message.done:
                    self._finish(fetch)
            case protocol.Granted():
                link.credits.extend(message.slots)
            case protocol.Hits():
                lookup = link.requests.get(message.request)
                if isinstance(lookup, Lookup):
                    lookup.pages, lookup.tiers = message.pages, message.tiers
                    self._finish(lookup)
            case protocol.Reserved():
                reserve = link.requests.get(message.request)
                if isinstance(reserve, Reserve):
                    given = {slot for slot in message.slots if slot >= 0}
                    link.named |= given
                    link.taken |= given
                    reserve.slots = message.slots
                    self._finish(reserve)
            case protocol.Done():
                if message.request < 0:
                    self._pong(message.request)
                elif (handle := link.requests.get(message.request)) is not None:
                    self._finish(handle)
            case protocol.Extent():
                self._map(message)
            case protocol.Retire():
                link.retire(message.extent)
                if self._arena is None or not self._arena.drop(message.extent):
                    self._wire.send(protocol.Unmapped(message.extent))
            case protocol.Fence():
                if self._arena is None:
                    self._wire.send(protocol.Fenced(message.generation))
                else:
                    self._arena.fence(unique_generation(link.epoch, message.generation))
                    self._fence = max(self._fence, message.generation)
            case protocol.Refused():
                raise ConnectionLost(message.reason)
            case _:
                raise ConnectionLost(f"the node sent a {type(message).__name__} that nobody asked for")

    def _finish(self, handle: Pending) -> None:
        self.link.requests.pop(handle.request, None)
        handle.done = True

    def _map(self, message: protocol.Extent) -> None:
        fd = self._wire.take_fd()
        try:
            if self._arena is not None:
                address = self._arena.map(message.extent, fd, message.size, self._stop)
                self._counters["extents_mapped"] += 1
                if self._on_map is not None:
                    self._on_map(message.extent, address, message.size)
        except (OSError, ValueError) as error:
            raise ConnectionLost(str(error)) from None
        finally:
            os.close(fd)
        self._wire.send(protocol.Mapped(message.extent))
