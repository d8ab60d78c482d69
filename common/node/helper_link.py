"""The node's side of its second process (helper.py): starts it, sends jobs, brings results back to the event loop.

Promises: never blocks the event loop. Checks and seals wait here in two queues, and only a few are with the helper, so that neither has to
wait for the other; each job's `done` is called once, in the event loop. When the helper dies the node cannot go on and is told to leave.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from . import child_side, helper
from .child import Child
from .helper import Job, Kind, Populated, Result

log = logging.getLogger("mooncake_kv.node")

Done = Callable[[list[bool]], object]

# With the helper at a time: enough to keep its threads busy.
IN_FLIGHT = {"check": 8, "seal": 2}


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
        self._populated = populated
        self._lost = lost
        self._child = Child(loop, helper.__name__, receive=self._received, ended=self._ended)
        self._waiting: dict[str, deque[tuple[Job, Done]]] = {"check": deque(), "seal": deque()}
        self._running: dict[str, int] = {"check": 0, "seal": 0}
        self._jobs: dict[int, tuple[str, Done]] = {}
        self._next = 0

    @property
    def pid(self) -> int:
        return self._child.pid

    def pending(self, queue: str) -> int:
        """Jobs that are not done."""
        return len(self._waiting[queue]) + self._running[queue]

    def add_space(self, digest: str, encoded: bytes, key: bytes) -> None:
        self._child.send(child_side.encode(child_side.Space(digest, encoded, key)))

    def map(self, extent: int, size: int, fd: int) -> None:
        self._child.send(child_side.encode(child_side.Map(extent, size)), fd)

    def unmap(self, extent: int) -> None:
        self._child.send(child_side.encode(child_side.Unmap(extent)))

    def submit(self, kind: Kind, digest: str, hashes: bytes, slots: list[int], done: Done) -> None:
        """Pages to check or seal; at most Namespace.batch_pages. A page for which `done` gets no True has failed."""
        queue = "seal" if kind == "seal" else "check"
        self._next += 1
        self._waiting[queue].append((Job(self._next, kind, digest, hashes, slots), done))
        self._start(queue)

    def hang_up(self) -> None:
        self._child.hang_up()

    def wait(self, deadline: float) -> None:
        """For the end of the process, until `deadline` (time.monotonic())."""
        self._child.wait(deadline)

    def _start(self, queue: str) -> None:
        waiting = self._waiting[queue]
        while waiting and self._running[queue] < IN_FLIGHT[queue]:
            job, done = waiting.popleft()
            self._running[queue] += 1
            self._jobs[job.job] = queue, done
            self._child.send(child_side.encode(job))

    def _ended(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._child.process.wait(0.1)
        self._lost(f"its helper process {self.pid} has died (exit code {self._child.process.returncode})")

    def _received(self, data: bytes) -> None:
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
