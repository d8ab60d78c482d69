"""Checking and sealing of pages, off the event loop.

Promises:
- A page is reported as staged only after its trailers matched while it was leased; pages are reported in order and at most once. One that
  does not match is dropped at once, counted, and ends the run.
- A page becomes visible only after it was sealed, and not at all if its namespace was dropped or its extent drained in between.
- While a thread works on a slot, a lease or a pin of its own keeps the slot where it is, whatever clients do.
- Fetches take turns: each has at most two batches of BATCH_BYTES in the queue.

The threads run a little Python around native calls (xxh3 over objects of a mebibyte) that free the GIL. They have a lower priority than the
event loop, which otherwise waits for the scheduler's time slice wherever there are fewer cores than threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np

from ..page import PageLayout
from .arena import Arena
from .index import Entry, Index, Namespace
from .metrics import Counters
from .protocol import HASH_BYTES, SLOT_SHIFT, Staged
from .session import ProtocolError, Session

log = logging.getLogger("mooncake_kv.node")

T = TypeVar("T")
Item = tuple[np.ndarray, bytes]

BATCH_BYTES = 8 << 20
BATCHES_IN_FLIGHT = 2


class Pool:
    """Threads whose results come back to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, threads: int, nice: int) -> None:
        self._loop = loop
        self._executor = ThreadPoolExecutor(threads, f"mooncake-kv-{name}", lambda: _be_nice(nice))
        self._closed = False
        self.pending = 0

    def submit(self, work: Callable[[], T], done: Callable[[T | None], object]) -> None:
        """Run `work` in a thread, then `done` with its result in the event loop; with None if it raised, which is logged."""
        self.pending += 1

        def finish(future: Future[T]) -> None:
            try:
                self._loop.call_soon_threadsafe(self._finish, future, done)
            except RuntimeError:  # the loop is closed: the node is leaving
                return

        self._executor.submit(work).add_done_callback(finish)

    def _finish(self, future: Future[T], done: Callable[[T | None], object]) -> None:
        self.pending -= 1
        if self._closed:
            return
        if error := future.exception():
            log.error("a background task failed", exc_info=error)
            done(None)
        else:
            done(future.result())

    def close(self) -> None:
        """Waits for what is running; what is not done yet is forgotten. Nothing may be submitted after this."""
        self._closed = True
        self._executor.shutdown(wait=True, cancel_futures=True)


def _be_nice(nice: int) -> None:
    # On Linux each thread has a nice value of its own.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def _count_good(layout: PageLayout, digest: str, items: list[Item]) -> int:
    """Length of the leading run of items that verify."""
    for i, (slot, page_hash) in enumerate(items):
        if not layout.verify(slot, page_hash, digest):
            return i
    return len(items)


def _verify_each(layout: PageLayout, digest: str, items: list[Item]) -> list[bool]:
    return [layout.verify(slot, page_hash, digest) for slot, page_hash in items]


def _seal(layout: PageLayout, digest: str, items: list[Item]) -> bool:
    for slot, page_hash in items:
        layout.seal(slot, page_hash, digest)
    return True


class Batch:
    """Pages [start, end) of a run; `good` is how many of them, from the first, are verified, None while that is not known."""

    def __init__(self, start: int, end: int, good: int | None) -> None:
        self.start = start
        self.end = end
        self.good = good


class Run:
    """One fetch: leased pages, of which the first `staged` are reported. `asked` is how many pages were asked for."""

    def __init__(self, request: int, asked: int, entries: list[Entry]) -> None:
        self.request = request
        self.asked = asked
        self.entries = entries
        self.staged = 0
        self.submitted = 0
        self.batches: deque[Batch] = deque()
        self.ended = False


class Stager:
    """Answers fetches."""

    def __init__(self, index: Index, pool: Pool, counters: Counters) -> None:
        self._index = index
        self._pool = pool
        self._counters = counters

    def fetch(self, session: Session, request: int, hashes: bytes, limit: int) -> None:
        if request in session.runs:
            raise ProtocolError(f"request {request} is already a fetch of this connection")
        engine = session.engine
        entries = self._index.lease_run(engine.space, hashes, engine.usable, limit)
        run = Run(request, len(hashes) // HASH_BYTES, entries)
        session.chains.expect(hashes, len(entries))
        self._counters.fetches += 1
        self._counters.pages_asked += run.asked
        if entries:
            session.runs[request] = run
        self._pump(session, run)

    def release(self, session: Session, request: int) -> None:
        """End a fetch's leases. One without pages had none, so a number that is not known is no mistake."""
        if run := session.runs.pop(request, None):
            self._index.unlease(self._take(run))

    def leave(self, session: Session) -> list[list[Entry]]:
        """The session is gone. Its leases, whose end is the caller's business now."""
        runs = [self._take(run) for run in session.runs.values()]
        session.runs.clear()
        return runs

    def suspect(self, space: Namespace, hashes: list[bytes]) -> None:
        """Check these pages again and drop those that do not match."""
        size = space.size_class.slot_bytes
        entries = [entry for page_hash in hashes if (entry := space.pages.get(page_hash))]
        for part in _parts(entries, size):
            for entry in part:
                self._index.lease(entry)
            items = [(entry.extent.view(entry.slot), entry.hash) for entry in part]

            def done(result: list[bool] | None, part: list[Entry] = part) -> None:
                for entry, good in zip(part, result or [False] * len(part), strict=True):
                    if not good:
                        self._drop_bad(entry)
                self._index.unlease(part)

            self._pool.submit(partial(_verify_each, space.layout, space.digest, items), done)

    def _take(self, run: Run) -> list[Entry]:
        run.ended = True
        entries, run.entries = run.entries, []
        return entries

    def _pump(self, session: Session, run: Run) -> None:
        """Put batches into the queue, then report what is verified."""
        size = session.space.size_class.slot_bytes
        step = max(1, BATCH_BYTES // size)
        while run.submitted < len(run.entries) and sum(batch.good is None for batch in run.batches) < BATCHES_IN_FLIGHT:
            start, end = run.submitted, min(run.submitted + step, len(run.entries))
            run.submitted = end
            part = run.entries[start:end]
            # Verified while another fetch holds a lease: nothing may have changed since.
            batch = Batch(start, end, end - start if all(entry.verified for entry in part) else None)
            run.batches.append(batch)
            if batch.good is None:
                self._submit(session, run, batch, part)
        self._report(session, run)

    def _submit(self, session: Session, run: Run, batch: Batch, part: list[Entry]) -> None:
        space = session.space
        for entry in part:
            self._index.lease(entry)
        items = [(entry.extent.view(entry.slot), entry.hash) for entry in part]

        def done(good: int | None) -> None:
            batch.good = good or 0
            for entry in part[: batch.good]:
                entry.verified = True
            if batch.good < len(part):
                self._drop_bad(part[batch.good])
            self._counters.bytes_verified += len(part) * space.size_class.slot_bytes
            self._index.unlease(part)
            if not run.ended:
                self._pump(session, run)

        self._pool.submit(partial(_count_good, space.layout, space.digest, items), done)

    def _report(self, session: Session, run: Run) -> None:
        slots: list[int] = []
        bad = False
        while run.batches and run.batches[0].good is not None and not bad:
            batch = run.batches.popleft()
            good = batch.good or 0
            slots += [entry.slot for entry in run.entries[batch.start : batch.start + good]]
            bad = good < batch.end - batch.start
        run.staged += len(slots)
        if bad:
            rest = run.entries[run.staged :]
            del run.entries[run.staged :]
            self._index.unlease(rest)
        done = bad or run.staged == len(run.entries)
        if done:
            run.ended = True
            self._counters.pages_missed += run.asked - run.staged
        if slots or done:
            self._counters.pages_staged += len(slots)
            self._counters.bytes_staged += len(slots) * session.space.size_class.slot_bytes
            session.send(Staged(run.request, slots, done))

    def _drop_bad(self, entry: Entry) -> None:
        self._counters.pages_bad += 1
        log.error("page %s of namespace %s failed its check and was dropped", entry.hash.hex()[:16], entry.space.digest)
        self._index.drop(entry)


class Sealer:
    """Turns committed slots into visible pages."""

    def __init__(self, arena: Arena, index: Index, pool: Pool, counters: Counters, changed: Callable[[], object]) -> None:
        self._arena = arena
        self._index = index
        self._pool = pool
        self._counters = counters
        self._changed = changed
        self.pending = 0

    def seal(self, session: Session, pages: list[tuple[bytes, int]]) -> None:
        """Slots that hold these pages, whole, and that nobody writes to any more. A page that is already there or on its way gives its new
        slot back."""
        space = session.space
        fresh = []
        for page_hash, slot in pages:
            if page_hash in space.pages or page_hash in space.claims or not self._arena.is_live(slot):
                self._counters.commits_superfluous += 1
                self._arena.give(slot)
            else:
                space.claims[page_hash] = None
                fresh.append((page_hash, slot))
        drops = space.drops
        for part in _parts(fresh, space.size_class.slot_bytes):
            extents = [self._arena.extents[slot >> SLOT_SHIFT] for _, slot in part]
            for extent in extents:
                extent.pins += 1
            self.pending += len(part)
            session.sealing += len(part)
            items = [(extent.view(slot), page_hash) for extent, (page_hash, slot) in zip(extents, part, strict=True)]

            def done(sealed: bool | None, part: list[tuple[bytes, int]] = part) -> None:
                self._done(session, part, bool(sealed) and drops == space.drops)

            self._pool.submit(partial(_seal, space.layout, space.digest, items), done)

    def _done(self, session: Session, part: list[tuple[bytes, int]], keep: bool) -> None:
        space = session.space
        self.pending -= len(part)
        session.sealing -= len(part)
        arrived = []
        for page_hash, slot in part:
            extent = self._arena.extents[slot >> SLOT_SHIFT]
            extent.pins -= 1
            del space.claims[page_hash]
            if keep and extent.state == "live":
                self._index.insert(space, page_hash, slot)
                arrived.append(page_hash)
                self._counters.pages_committed += 1
                self._counters.bytes_committed += extent.slot_bytes
            else:
                self._arena.give(slot)
                self._index.settle(extent)
        for joined in session.chains.arrived(arrived):
            self._index.touch(self._index.find(space, joined))
        self._changed()


def _parts(items: list[T], size: int) -> list[list[T]]:
    """Cut into batches of about BATCH_BYTES."""
    step = max(1, BATCH_BYTES // size)
    return [items[i : i + step] for i in range(0, len(items), step)]
