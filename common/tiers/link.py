"""The node's end of a tier's process: jobs with deadlines, the circuit breaker, and starting the process again.

Promises:
- Never blocks the event loop, which is the only thread that calls. Every callback is called once, in the event loop, never from within the
  call that it was given to.
- A job is answered, at the latest, soon after its deadline. A process that lets a job pass its deadline, or dies, is killed and replaced.
- `safe` of a job is called when nothing touches its slots any more: after its answer, or when the process is dead.
- While the breaker is open every job fails at once. It opens when the tier says that it is down, or its process is lost; after a growing
  pause (1 s to 30 s) one probe, or a new process, decides whether it closes.
- Nothing of a namespace is read between `drop` and the tier's answer to it, whatever happens to the process meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from ..node import child_side
from ..node.child import Child
from .base import Stats, TierDown
from .messages import MAX_HASHES, Kind, Open, Opened, Report, Result, TierJob, Touch, decode_from_tier

log = logging.getLogger("mooncake_kv.tiers")

HASH_BYTES = 32
IN_FLIGHT: dict[str, int] = {"leading": 8, "read": 8, "write": 2}
PAUSE_S = 1.0
PAUSE_MAX_S = 30.0
# A tier that was up for so long gets the short pause again.
STABLE_S = 30.0
TICK_S = 0.1
# An event loop that did not run for so long has not seen answers that are there.
STALL_S = 0.5
LOG_S = 60.0
# Touches are dropped while so many messages have not been taken.
TOUCH_BACKLOG = 16
MODULE = "mooncake_kv.common.tiers"

Done = Callable[[Result], object]
Safe = Callable[[], object]


def _nothing() -> None:
    """In place of a callback."""


@dataclass(frozen=True)
class TierSpec:
    """What the node has to know about a tier. `prepare` returns what `open_tier` gets, anew for each process; it may block, runs in a
    thread, and may raise TierDown or ConfigError. `close` ends what it started; called once, when the tier's processes are gone. `writes`:
    why a page is written to it (see base.Why); `touches`: whether it cares what is in use in memory; `awaited`: whether the node waits for
    it when it starts. Deadlines are seconds."""

    name: str
    prepare: Callable[[], Mapping[str, Any]]
    writes: frozenset[str]
    close: Callable[[], object] = _nothing
    touches: bool = False
    awaited: bool = False
    open_s: float = 10.0
    leading_s: float = 1.0
    read_s: float = 5.0
    write_s: float = 15.0


@dataclass(eq=False)
class _Job:
    queue: str
    message: TierJob
    limit_s: float
    done: Done
    safe: Safe
    sent: float = 0.0
    deadline: float = 0.0


@dataclass
class _Times:
    """Seconds from a job's submission to the process to its answer."""

    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=256))

    def add(self, seconds: float) -> None:
        self.recent_s.append(seconds)

    def percentiles_ms(self) -> tuple[float, float]:
        """Median and 99th percentile of the last ones."""
        ordered = sorted(self.recent_s) or [0.0]
        return round(ordered[len(ordered) // 2] * 1e3, 3), round(ordered[len(ordered) * 99 // 100] * 1e3, 3)


class TierLink:
    """`extents` gives (number, size, descriptor) of all there are, `spaces` (digest, encoding, key); both are asked when a process starts.
    `lost` is called when the breaker opens, after the jobs have been answered."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        spec: TierSpec,
        *,
        extents: Callable[[], Iterable[tuple[int, int, int]]],
        spaces: Callable[[], Iterable[tuple[str, bytes, bytes]]],
        lost: Callable[[], object],
    ) -> None:
        self._loop = loop
        self.spec = spec
        self.name = spec.name
        self._extents = extents
        self._spaces = spaces
        self._lost = lost
        self.state = "starting"
        self.reason = ""
        # Counts outages: what was written before one may have gone with it.
        self.era = 1
        self.opened = asyncio.Event()
        self._child: Child | None = None
        self._dying: set[Child] = set()
        self._waiting: dict[str, deque[_Job]] = {name: deque() for name in IN_FLIGHT}
        self._running: dict[str, int] = dict.fromkeys(IN_FLIGHT, 0)
        self._jobs: dict[int, _Job] = {}
        self._next = 0
        self._attempt = 0
        self._dropping: set[str] = set()
        self._failures = 0
        self._up_since = 0.0
        self._open_deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._ticked = 0.0
        self._closed = False
        self._said: tuple[str, float] = "", -LOG_S
        self._reported: Stats = {}
        self._times = {name: _Times() for name in IN_FLIGHT}
        self._counts = {"outages": 0, "processes_killed": 0, "processes_started": 0, "jobs_failed": 0}
        self._start()

    @property
    def pid(self) -> int:
        return self._child.pid if self._child is not None else 0

    @property
    def works(self) -> bool:
        return self.state in ("starting", "up")

    @property
    def mark(self) -> int:
        """1 to 255: stands for the present era."""
        return self.era % 255 + 1

    def add_space(self, digest: str, encoded: bytes, key: bytes) -> None:
        self._say(child_side.Space(digest, encoded, key))

    def map(self, extent: int, size: int, fd: int) -> None:
        self._say(child_side.Map(extent, size), fd)

    def unmap(self, extent: int) -> None:
        """No job works on the extent: jobs keep it by a pin until they are `safe`."""
        self._say(child_side.Unmap(extent))

    def leading(self, digest: str, hashes: bytes, done: Callable[[int], object]) -> None:
        """How many leading pages the tier probably has, of at most MAX_HASHES."""
        hashes = hashes[: MAX_HASHES * HASH_BYTES]
        refused = digest in self._dropping
        self._submit("leading", "leading", digest, lambda r: done(r.count), _nothing, self.spec.leading_s, refused, hashes=hashes)

    def read(self, digest: str, hashes: bytes, slots: list[int], done: Callable[[int], object], safe: Safe) -> None:
        """Read pages into slots. `done` gets the number of leading ones that are there and verified, before `safe`."""
        refused = digest in self._dropping
        self._submit("read", "read", digest, lambda r: done(r.count), safe, self.spec.read_s, refused, hashes=hashes, slots=slots)

    def write(self, digest: str, hashes: bytes, slots: list[int], why: str, done: Callable[[list[bool]], object], safe: Safe) -> None:
        """Write sealed pages. `done` gets for each whether the tier has it now, or nothing."""
        self._submit("write", "write", digest, lambda r: done(r.good), safe, self.spec.write_s, False, hashes=hashes, slots=slots, why=why)

    def touch(self, digest: str, hashes: bytes) -> None:
        if self.spec.touches and self.state == "up" and self._child is not None and self._child.backlog < TOUCH_BACKLOG:
            self._say(Touch(digest, hashes[: MAX_HASHES * HASH_BYTES]))

    def drop(self, digest: str) -> None:
        self._dropping.add(digest)
        if self.works:
            self._drop(digest)

    def stats(self) -> Stats:
        stats: Stats = {"state": self.state, "reason": self.reason, "pid": self.pid}
        for name, times in self._times.items():
            stats[f"{name}_p50_ms"], stats[f"{name}_p99_ms"] = times.percentiles_ms()
            stats |= {f"{name}_waiting": len(self._waiting[name]) + self._running[name]}
        return stats | self._counts | self._reported

    def hang_up(self) -> None:
        self._closed = True
        for timer in (self._timer, self._retry):
            if timer is not None:
                timer.cancel()
        if self._child is not None:
            self._child.hang_up()

    def wait(self, deadline: float) -> None:
        """For the end of the processes, until `deadline` (time.monotonic()), then for that of what belongs to the tier. A process in the
        kernel's hands is left to it."""
        for child in {self._child, *self._dying} - {None}:
            if child is not None and not child.wait(deadline):
                log.error("%s: process %d does not end", self.name, child.pid)
        self.spec.close()

    # ---- jobs

    def _submit(
        self,
        queue: str,
        kind: Kind,
        digest: str,
        done: Done,
        safe: Safe,
        limit_s: float,
        refused: bool,
        *,
        hashes: bytes = b"",
        slots: list[int] | None = None,
        why: str = "",
    ) -> None:
        self._next += 1
        message = TierJob(job=self._next, kind=kind, digest=digest, hashes=hashes, slots=slots or [], why=why)
        job = _Job(queue, message, limit_s, done, safe)
        if refused or self._closed or not (self.works or kind == "probe"):
            self._loop.call_soon(self._refuse, job)
            return
        job.deadline = time.monotonic() + limit_s + self.spec.open_s * (self.state == "starting")
        self._waiting[queue].append(job)
        self._pump(queue)
        self._watch()

    def _refuse(self, job: _Job) -> None:
        self._counts["jobs_failed"] += 1
        job.done(Result(job.message.job))
        job.safe()

    def _pump(self, queue: str) -> None:
        waiting = self._waiting[queue]
        while waiting and self._running[queue] < IN_FLIGHT[queue] and self._child is not None and self.state != "starting":
            job = waiting.popleft()
            job.sent = time.monotonic()
            job.deadline = job.sent + job.limit_s
            self._running[queue] += 1
            self._jobs[job.message.job] = job
            self._say(job.message)

    def _say(self, message: child_side.Message, fd: int = -1) -> None:
        if self._child is not None:
            self._child.send(child_side.encode(message), fd)

    def _received(self, data: bytes) -> None:
        message = decode_from_tier(data)
        if isinstance(message, Report):
            self._reported = message.stats
        elif isinstance(message, Opened):
            if message.down:
                self._lose(message.down)
            else:
                self._up()
                for queue in self._waiting:
                    self._pump(queue)
        else:
            self._finish(message)

    def _finish(self, result: Result) -> None:
        job = self._jobs.pop(result.job)
        self._running[job.queue] -= 1
        if result.error:
            log.error("a background task failed: %s: %s", self.name, result.error)
        if result.down or result.error:
            self._counts["jobs_failed"] += 1
            result.count, result.good = 0, []
        elif job.message.kind != "probe":
            self._times[job.queue].add(time.monotonic() - job.sent)
        if result.down:
            self._open_breaker(result.down)
        self._pump(job.queue)
        job.done(result)
        job.safe()

    def _drop(self, digest: str) -> None:
        def done(result: Result) -> None:
            if result.good:
                self._dropping.discard(digest)

        self._submit("write", "drop", digest, done, _nothing, self.spec.write_s, False)

    # ---- the process and the breaker

    def _start(self) -> None:
        self._retry = None
        self.state = "starting"
        self._drop_again()
        self._open_deadline = time.monotonic() + self.spec.open_s
        self._watch()
        self._attempt += 1
        # Not one of the loop's own threads, for whose end the loop would wait.
        threading.Thread(target=self._prepare, args=(self._attempt,), name=f"open-{self.name}", daemon=True).start()

    def _prepare(self, attempt: int) -> None:
        """In a thread of its own."""
        settings: Mapping[str, Any] = {}
        down = ""
        try:
            settings = self.spec.prepare()
        except (TierDown, ConfigError) as error:
            down = str(error)
        except Exception as error:
            log.exception("a bug: tier %s could not be prepared", self.name)
            down = repr(error)
        with suppress(RuntimeError):  # the loop is closed: the node has left
            self._loop.call_soon_threadsafe(self._prepared, attempt, dict(settings), down)

    def _prepared(self, attempt: int, settings: dict[str, Any], down: str) -> None:
        if self._closed or self.state != "starting" or attempt != self._attempt:
            return
        if down:
            self._lose(down)
            return
        self._counts["processes_started"] += 1
        try:
            child = Child(self._loop, MODULE, receive=self._received, ended=lambda: self._lose("its process has died"))
        except OSError as error:
            self._lose(f"no process could be started: {error}")
            return
        self._child = child
        self._open_deadline = time.monotonic() + self.spec.open_s
        self._say(Open(self.name, settings))
        for digest, encoded, key in self._spaces():
            self.add_space(digest, encoded, key)
        for number, size, fd in self._extents():
            self.map(number, size, fd)

    def _up(self) -> None:
        self.state, self.reason = "up", ""
        self._up_since = time.monotonic()
        self.opened.set()
        log.info("tier %s is up", self.name)

    def _drop_again(self) -> None:
        """What was dropped while the tier was away is still to be forgotten, before anything is written anew."""
        for digest in self._dropping:
            self._drop(digest)

    def _lose(self, why: str) -> None:
        """The process is of no use any more."""
        child, self._child = self._child, None
        jobs, self._jobs = list(self._jobs.values()), {}
        self._running = dict.fromkeys(IN_FLIGHT, 0)
        self._open_breaker(why, restart=child is None)
        if child is not None:
            self._counts["processes_killed"] += 1
            self._dying.add(child)

            def dead() -> None:
                self._dying.discard(child)
                for job in jobs:
                    job.safe()
                if not self._closed:
                    self._later(self._start)

            child.kill(dead)
        for job in jobs:
            self._counts["jobs_failed"] += 1
            job.done(Result(job.message.job))

    def _open_breaker(self, why: str, restart: bool = False) -> None:
        """Every job misses from now on. The process stays if there is one, and is asked again later."""
        first = self.works
        self.state, self.reason = "down", why
        self.opened.set()
        if first:
            self.era += 1
            self._counts["outages"] += 1
            if self._up_since and time.monotonic() - self._up_since > STABLE_S:
                self._failures = 0
            self._complain(why)
            for waiting in self._waiting.values():
                while waiting:
                    self._loop.call_soon(self._refuse, waiting.popleft())
            self._loop.call_soon(self._lost)
        if restart:
            self._later(self._start)
        elif self._child is not None and self._retry is None:
            self._later(self._probe)

    def _later(self, what: Callable[[], None]) -> None:
        if self._retry is not None:
            self._retry.cancel()
        pause = min(PAUSE_S * 2**self._failures, PAUSE_MAX_S)
        self._failures = min(self._failures + 1, 10)
        self._retry = self._loop.call_later(pause, what)

    def _probe(self) -> None:
        self._retry = None
        space = next(iter(self._spaces()), None)
        if self._child is None or self._closed:
            return
        if space is None:
            self._later(self._probe)
            return

        def done(result: Result) -> None:
            if self.state != "down" or self._child is None:
                return
            if result.down or result.error:
                self.reason = result.down or result.error
                if self._retry is None:
                    self._later(self._probe)
            else:
                self._up()
                self._drop_again()

        self._submit("leading", "probe", space[0], done, _nothing, self.spec.leading_s, False)

    def _watch(self) -> None:
        if self._timer is None and not self._closed:
            self._ticked = time.monotonic()
            self._timer = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic()
        waiting = [job for queue in self._waiting.values() for job in queue]
        if (stalled := now - self._ticked - TICK_S) > STALL_S:
            self._open_deadline += stalled
            for job in (*self._jobs.values(), *waiting):
                job.deadline += stalled
        elif late := next((job for job in self._jobs.values() if job.deadline < now), None):
            self._lose(f"it has not answered a {late.message.kind} for {now - late.sent:.1f} s")
        elif self.state == "starting" and self._open_deadline < now:
            self._lose(f"it has not opened within {self.spec.open_s:g} s")
        for name, queue in self._waiting.items():
            kept = deque(job for job in queue if job.deadline >= now)
            for job in queue:
                if job.deadline < now:
                    self._loop.call_soon(self._refuse, job)
            self._waiting[name] = kept
        if self._jobs or self.state == "starting" or any(self._waiting.values()):
            self._watch()

    def _complain(self, why: str) -> None:
        now = time.monotonic()
        text, said = self._said
        if text != why or now - said > LOG_S:
            self._said = why, now
            log.warning("tier %s is not used: %s", self.name, why)
