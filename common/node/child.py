"""A process of the node's own, started as `python -P -m MODULE FD`, and messages to and from it over a pair of sockets.

Promises: never blocks the event loop. A message is one datagram; a descriptor travels beside the message it belongs to. `ended` is called
once, in the event loop, when the process has closed its end, unless we did so before. The process ends when `hang_up` was called or the
node has died.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable

from .child_side import MAX_MESSAGE

_RECEIVES_A_CALL = 16


class Child:
    """`receive` gets each datagram, in the event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, module: str, *, receive: Callable[[bytes], object], ended: Callable[[], object]
    ) -> None:
        """Raises OSError where no process can be started."""
        self._loop = loop
        self._receive = receive
        self._ended = ended
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
        try:
            # In our session, because nice values compare only within one where Linux groups processes by session; out of the way of Ctrl-C.
            self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, process_group=0)
        except OSError:
            self._sock.close()
            raise
        finally:
            theirs.close()
        self._out: deque[tuple[bytes, int]] = deque()
        self._open = True
        loop.add_reader(self._sock, self._readable)

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, data: bytes, fd: int = -1) -> None:
        """Queue a message. A descriptor is duplicated at once. Ignored after the end."""
        if not self._open:
            return
        self._out.append((data, os.dup(fd) if fd >= 0 else -1))
        if len(self._out) == 1:
            self._flush()

    def hang_up(self) -> None:
        """Close our end: nothing comes any more, `ended` is not called, and the process leaves."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock)
        self._drop()
        self._sock.close()

    def kill(self, dead: Callable[[], object]) -> None:
        """Hang up and end the process at once. `dead` is called, in the event loop, when it touches nothing any more: a process that the
        kernel is doing I/O for outlives its SIGKILL."""
        self.hang_up()
        handle = os.pidfd_open(self.pid)  # also of one that is dead, as nobody has waited for it
        self.process.kill()

        def gone() -> None:
            self._loop.remove_reader(handle)
            os.close(handle)
            self.process.wait()
            dead()

        self._loop.add_reader(handle, gone)

    @property
    def backlog(self) -> int:
        """Messages that the process has not taken yet, beyond what the kernel holds."""
        return len(self._out)

    def wait(self, deadline: float) -> bool:
        """Wait for the process until `deadline` (time.monotonic()), kill it then. False: not even that has ended it within a second."""
        for _ in range(2):
            try:
                self.process.wait(max(deadline - time.monotonic(), 0.0))
                return True
            except subprocess.TimeoutExpired:
                self.process.kill()
                deadline = time.monotonic() + 1.0
        return False

    def _drop(self) -> None:
        if self._out:
            self._loop.remove_writer(self._sock)
        while self._out:
            _, fd = self._out.popleft()
            if fd >= 0:
                os.close(fd)

    def _flush(self) -> None:
        try:
            while self._out:
                data, fd = self._out[0]
                socket.send_fds(self._sock, [data], [fd] if fd >= 0 else [])
                if fd >= 0:
                    os.close(fd)
                self._out.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._flush)
            return
        except OSError:  # it has died, which `_readable` reports
            self._drop()
        self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        for _ in range(_RECEIVES_A_CALL):
            if not self._open:
                return
            try:
                data = self._sock.recv(MAX_MESSAGE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.hang_up()
                self._ended()
                return
            self._receive(data)
