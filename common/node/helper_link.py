"""The node's side of its second process (helper.py): starts it, sends jobs, brings results back to the event loop.

Promises: never blocks the event loop. Checks and seals wait here in two queues, and only a few are with the helper, so that neither has to
wait for the other; each job's `done` is called once, in the event loop. When the helper dies the node cannot go on and is told to leave.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from . import helper
from .helper import Job, Kind, Populated, Result

log = logging.getLogger("mooncake_kv.node")

Done = Callable[[list[bool]], object]

# With the helper at a time: enough to keep its threads busy.
IN_FLIGHT = {"check": 8, "seal": 2}
# Pages of one job: with 41 bytes each, far below what a message may have.
MAX_JOB_PAGES = 256
END_S = 2.0


class HelperLink:
    """`populated` is called with (extent, bytes so far, whether that was the last word, error) as extents are allocated, `lost` when the
    helper has died."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        populated: Callable[[int, int, bool, str], object],
        lost: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._populated = populated
        self._lost = lost
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        command = [sys.executable, "-P", "-m", helper.__name__, str(theirs.fileno())]
        # In our session, because nice values compare only within one where Linux groups processes by session; out of the way of Ctrl-C.
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, process_group=0)
        theirs.close()
        self._out: deque[tuple[bytes, int]] = deque()
        self._waiting: dict[str, deque[tuple[Job, Done]]] = {"check": deque(), "seal": deque()}
        self._running: dict[str, int] = {"check": 0, "seal": 0}
        self._jobs: dict[int, tuple[str, Done]] = {}
        self._next = 0
        self._closed = False
        loop.add_reader(self._sock, self._readable)

    @property
    def pid(self) -> int:
        return self._process.pid

    def pending(self, queue: str) -> int:
        """Jobs that are not done."""
        return len(self._waiting[queue]) + self._running[queue]

    def add_space(self, digest: str, encoded: bytes, key: bytes) -> None:
        self._send(helper.Space(digest, encoded, key))

    def map(self, extent: int, size: int, fd: int) -> None:
        self._send(helper.Map(extent, size), os.dup(fd))

    def unmap(self, extent: int) -> None:
        self._send(helper.Unmap(extent))

    def submit(self, kind: Kind, digest: str, hashes: bytes, slots: list[int], done: Done) -> None:
        """Pages to check or seal; at most MAX_JOB_PAGES. A page for which `done` gets no True has failed."""
        queue = "seal" if kind == "seal" else "check"
        self._next += 1
        self._waiting[queue].append((Job(self._next, kind, digest, hashes, slots), done))
        self._start(queue)

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._sock)
        if self._out:
            self._loop.remove_writer(self._sock)
        self._sock.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self, queue: str) -> None:
        waiting = self._waiting[queue]
        while waiting and self._running[queue] < IN_FLIGHT[queue]:
            job, done = waiting.popleft()
            self._running[queue] += 1
            self._jobs[job.job] = queue, done
            self._send(job)

    def _send(self, message: helper.ToHelper, fd: int = -1) -> None:
        if self._closed:
            return
        self._out.append((helper.encode(message), fd))
        if len(self._out) == 1:
            self._flush()

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
            self._out.clear()
        self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(helper.MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._sock)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
            self._lost(f"its helper process {self.pid} has died (exit code {self._process.returncode})")
            return
        message = helper.decode_from_helper(data)
        if isinstance(message, Populated):
            self._populated(message.extent, message.end, message.last, message.error)
        else:
            self._finish(message)

    def _finish(self, result: Result) -> None:
        queue, done = self._jobs.pop(result.job)
        self._running[queue] -= 1
        if result.error:
            log.error("a background task failed: %s", result.error)
        self._start(queue)
        done(result.good)
