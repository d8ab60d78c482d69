"""Write-through: sealed pages on their way to the slow tiers.

Promises:
- A page that waits or is being written is held, so its slot keeps its bytes; what waits and is written for one tier has at most LIMIT_SHARE
  of the arena and LIMIT_BYTES. What does not fit is dropped and counted; a later use offers it again.
- A page is given to a tier once in each of the tier's eras, unless writing it failed.
- Nothing is written of a page that was dropped before its turn came."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ..tiers.base import Why
from ..tiers.link import TierLink
from .index import Entry, Index, Namespace

LIMIT_BYTES = 256 << 20
LIMIT_SHARE = 8
IN_FLIGHT = 2
# Prefixes that wait for their pages to be written.
MAX_TOUCHES = 64


class Writer:
    """The queue of one tier, which has byte `place` of Entry.stored."""

    def __init__(self, index: Index, link: TierLink, place: int, limit: int) -> None:
        self._index = index
        self.link = link
        self._shift = 8 * place
        self._limit = limit
        self._queue: deque[tuple[Entry, Why]] = deque()
        self._touches: deque[tuple[str, bytes]] = deque()
        self._running = 0
        self.bytes = 0
        self.pages_written = 0
        self.pages_dropped = 0
        self.pages_failed = 0

    def has(self, entry: Entry) -> bool:
        return entry.stored >> self._shift & 255 == self.link.mark

    def mark(self, entry: Entry) -> None:
        """The tier has this page, or soon will."""
        entry.stored = entry.stored & ~(255 << self._shift) | self.link.mark << self._shift

    def unmark(self, entry: Entry) -> None:
        entry.stored &= ~(255 << self._shift)

    def offer(self, entries: Iterable[Entry], why: Why) -> None:
        """Queue what the tier wants and has not got."""
        if why not in self.link.spec.writes or not self.link.works:
            return
        for entry in entries:
            if self.has(entry) or entry.dead:
                continue
            size = entry.extent.slot_bytes
            if self.bytes + size > self._limit:
                self.pages_dropped += 1
                continue
            self.mark(entry)
            self._index.hold(entry)
            self.bytes += size
            self._queue.append((entry, why))
        self._pump()

    def touch(self, space: Namespace, hashes: bytes) -> None:
        """After what is queued, so that it finds what has just been offered."""
        if not self.link.spec.touches or not self.link.works:
            return
        if not self._queue and not self._running:
            self.link.touch(space.digest, hashes)
        elif len(self._touches) < MAX_TOUCHES:
            self._touches.append((space.digest, hashes))

    def lost(self) -> None:
        """The tier takes nothing now."""
        self._touches.clear()
        while self._queue:
            entry, _ = self._queue.popleft()
            self.pages_dropped += 1
            self._release(entry)

    def stats(self) -> dict[str, int]:
        return {
            "queued_bytes": self.bytes,
            "pages_written": self.pages_written,
            "pages_unwritten": self.pages_dropped,
            "pages_failed": self.pages_failed,
        }

    def _pump(self) -> None:
        while self._queue and self._running < IN_FLIGHT and self.link.works:
            part, why = self._next()
            if part:
                self._submit(part, why)

    def _next(self) -> tuple[list[Entry], Why]:
        """Pages of one namespace that go for the same reason."""
        first, why = self._queue[0]
        step = first.space.batch_pages
        part: list[Entry] = []
        while self._queue and len(part) < step:
            entry, reason = self._queue[0]
            if entry.space is not first.space or reason != why:
                break
            self._queue.popleft()
            if entry.space.pages.get(entry.hash) is entry:
                part.append(entry)
            else:
                self._release(entry)
        return part, why

    def _submit(self, part: list[Entry], why: Why) -> None:
        self._running += 1

        def done(good: list[bool]) -> None:
            self._running -= 1
            written = sum(good)
            self.pages_written += written
            self.pages_failed += len(part) - written
            for i, entry in enumerate(part):
                if i >= len(good) or not good[i]:
                    self.unmark(entry)

        def safe() -> None:
            for entry in part:
                self._release(entry)
            self._pump()
            while self._touches and not self._queue and not self._running:
                self.link.touch(*self._touches.popleft())

        hashes = b"".join([entry.hash for entry in part])
        self.link.write(part[0].space.digest, hashes, [entry.slot for entry in part], why, done, safe)

    def _release(self, entry: Entry) -> None:
        self.bytes -= entry.extent.slot_bytes
        self._index.unhold(entry)


class WriteThrough:
    """The writers of all tiers, in the order of the tiers."""

    def __init__(self, index: Index, links: Sequence[TierLink], dram_bytes: int) -> None:
        limit = min(LIMIT_BYTES, dram_bytes // LIMIT_SHARE)
        self.writers = [Writer(index, link, place, limit) for place, link in enumerate(links)]

    def lost(self, name: str) -> None:
        """The breaker of a tier has opened."""
        for writer in self.writers:
            if writer.link.name == name:
                writer.lost()

    def stats(self, name: str) -> dict[str, int]:
        """What is on its way to a tier, and what was not written for want of room (dropped) or because the tier failed."""
        return next(writer.stats() for writer in self.writers if writer.link.name == name)

    def touch(self, space: Namespace, hashes: bytes) -> None:
        """This prefix is in use."""
        for writer in self.writers:
            writer.touch(space, hashes)

    def offer(self, entries: list[Entry], why: Why) -> None:
        for writer in self.writers:
            writer.offer(entries, why)

    def promoted(self, entries: list[Entry], place: int) -> None:
        """These pages were read from a tier: it has them, and they are used a second time."""
        for entry in entries:
            self.writers[place].mark(entry)
        self.offer(entries, "second_use")
