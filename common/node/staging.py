"""Checking and sealing of pages, which the helper process does.

Promises:
- A page is reported as staged only after its trailers matched while it was leased, unless the fetch says that its reader checks it; pages
  are reported in order and at most once. One that does not match is dropped at once, counted, and ends the run.
- A page becomes visible only after it was sealed, and not at all if its namespace was dropped or its extent drained in between.
- While the helper works on a slot, a lease or a pin of its own keeps the slot where it is, whatever clients do.
- Fetches take turns: each has at most BATCHES_IN_FLIGHT batches of BATCH_BYTES in the queue.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from .arena import Arena
from .helper_link import MAX_JOB_PAGES, HelperLink
from .index import Entry, Index, Namespace
from .metrics import Counters
from .protocol import HASH_BYTES, SLOT_SHIFT, Staged
from .session import ProtocolError, Session

log = logging.getLogger("mooncake_kv.node")

T = TypeVar("T")

# Enough to keep two threads busy (26 GB/s; two batches gave 22, smaller ones 20), and little for another fetch to wait for.
BATCH_BYTES = 8 << 20
BATCHES_IN_FLIGHT = 4


class Batch:
    """Pages [start, end) of a run; `good` is how many of them, from the first, are verified, None while that is not known."""

    def __init__(self, start: int, end: int, good: int | None) -> None:
        self.start = start
        self.end = end
        self.good = good


class Run:
    """One fetch: leased pages, of which the first `staged` are reported. `asked` is how many pages were asked for, `check` whether they
    are verified."""

    def __init__(self, request: int, asked: int, entries: list[Entry], check: bool) -> None:
        self.request = request
        self.asked = asked
        self.entries = entries
        self.check = check
        self.staged = 0
        self.submitted = 0
        self.batches: deque[Batch] = deque()
        self.ended = False


class Stager:
    """Answers fetches."""

    def __init__(self, index: Index, link: HelperLink, counters: Counters) -> None:
        self._index = index
        self._link = link
        self._counters = counters

    def fetch(self, session: Session, request: int, hashes: bytes, limit: int, check: bool) -> None:
        if request in session.runs:
            raise ProtocolError(f"request {request} is already a fetch of this connection")
        engine = session.engine
        entries = self._index.lease_run(engine.space, hashes, engine.usable, limit)
        run = Run(request, len(hashes) // HASH_BYTES, entries, check)
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
        entries = [entry for page_hash in hashes if (entry := space.pages.get(page_hash))]
        for part in _parts(entries, space):
            for entry in part:
                entry.suspect += 1
                entry.verified = False  # other fetches have to look again, too
                self._index.lease(entry)

            def done(good: list[bool], part: list[Entry] = part) -> None:
                for i, entry in enumerate(part):
                    entry.suspect -= 1
                    if i >= len(good) or not good[i]:
                        self._drop_bad(entry)
                self._index.unlease(part)

            self._link.submit("each", space.digest, *_joined(part), done)

    def _take(self, run: Run) -> list[Entry]:
        run.ended = True
        entries, run.entries = run.entries, []
        return entries

    def _pump(self, session: Session, run: Run) -> None:
        """Put batches into the queue, then report what is verified."""
        step = _step(session.space)
        while run.submitted < len(run.entries) and sum(batch.good is None for batch in run.batches) < BATCHES_IN_FLIGHT:
            start, end = run.submitted, min(run.submitted + step, len(run.entries))
            run.submitted = end
            part = run.entries[start:end]
            # Verified while another fetch holds a lease: nothing may have changed since.
            known = not run.check or all(entry.verified for entry in part)
            batch = Batch(start, end, end - start if known else None)
            run.batches.append(batch)
            if batch.good is None:
                self._submit(session, run, batch, part)
        self._report(session, run)

    def _submit(self, session: Session, run: Run, batch: Batch, part: list[Entry]) -> None:
        space = session.space
        for entry in part:
            self._index.lease(entry)

        def done(good: list[bool]) -> None:
            batch.good = sum(good)  # it stops at the first that is not
            for entry in part[: batch.good]:
                entry.verified = True
            if batch.good < len(part):
                self._drop_bad(part[batch.good])
            self._counters.bytes_verified += len(part) * space.size_class.slot_bytes
            self._index.unlease(part)
            if not run.ended:
                self._pump(session, run)

        self._link.submit("check", space.digest, *_joined(part), done)

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
        if entry.dead:
            return  # another check was first
        self._counters.pages_bad += 1
        log.error("page %s of namespace %s failed its check and was dropped", entry.hash.hex()[:16], entry.space.digest)
        self._index.drop(entry)


class Sealer:
    """Turns committed slots into visible pages."""

    def __init__(self, arena: Arena, index: Index, link: HelperLink, counters: Counters, changed: Callable[[], object]) -> None:
        self._arena = arena
        self._index = index
        self._link = link
        self._counters = counters
        self._changed = changed
        self.pending = 0

    def seal(self, session: Session, pages: list[tuple[bytes, int]]) -> None:
        """Slots that hold these pages, whole, and that nobody writes to any more. A page that is already there or on its way gives its new
        slot back; one that is under suspicion gives way to the new one, which its finder has computed in its stead."""
        space = session.space
        fresh = []
        for page_hash, slot in pages:
            entry = space.pages.get(page_hash)
            if entry is not None and entry.suspect:
                self._index.drop(entry)
            if page_hash in space.pages or page_hash in space.claims or not self._arena.is_live(slot):
                self._counters.commits_superfluous += 1
                self._arena.give(slot)
            else:
                space.claims[page_hash] = None
                fresh.append((page_hash, slot))
        drops = space.drops
        for part in _parts(fresh, space):
            for _, slot in part:
                self._arena.extents[slot >> SLOT_SHIFT].pins += 1
            self.pending += len(part)
            session.sealing += len(part)

            def done(good: list[bool], part: list[tuple[bytes, int]] = part) -> None:
                self._done(session, part, len(good) == len(part) and drops == space.drops)

            hashes, slots = zip(*part, strict=True)
            self._link.submit("seal", space.digest, b"".join(hashes), list(slots), done)

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


def _step(space: Namespace) -> int:
    """Pages of one batch."""
    return min(max(1, BATCH_BYTES // space.size_class.slot_bytes), MAX_JOB_PAGES)


def _parts(items: list[T], space: Namespace) -> list[list[T]]:
    step = _step(space)
    return [items[i : i + step] for i in range(0, len(items), step)]


def _joined(part: list[Entry]) -> tuple[bytes, list[int]]:
    return b"".join([entry.hash for entry in part]), [entry.slot for entry in part]
