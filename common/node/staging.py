"""Fetches: pages of a prefix are leased, read from slow tiers where memory has not got them, checked, and reported.

Promises:
- A page is reported as staged only after its trailers matched while it was leased, unless it was in memory and the fetch says that its
  reader checks it; pages are reported in order and at most once, with the tier they came from. One that does not match is dropped at once
  and counted.
- While the helper works on a page, a lease of its own keeps the slot where it is, whatever clients do.
- Fetches take turns: each has at most BATCHES_IN_FLIGHT batches of BATCH_BYTES in the queues of helper and tiers.
- What a fetch reads goes into slots that were free or hold pages nobody has leased. A fetch that ends early, for whatever reason, keeps
  nothing but what it has reported until its Release; what is still being read for it becomes an ordinary page.
- A fetch that waits for slow tiers ends at its deadline, with what is there.
- A page in memory that the engine is still mapping is waited for, at most MAPPING_S: that is no miss.

Order of tiers: memory first, then the slow tiers in their order, anew for each page at which the one before came up short, whether it said
so or gave less than it had said. So a prefix may be spread over all of them in any pattern. A run ends at the first page that nobody gives;
each tier is asked for a page once in a run, so it ends whatever the tiers say."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from ..tiers.messages import MAX_HASHES
from .helper_link import HelperLink
from .index import Entry, Index, Namespace, parts
from .metrics import Counters
from .protocol import HASH_BYTES, Fetch, Staged
from .reading import Reader
from .session import ProtocolError, Session
from .writing import WriteThrough

log = logging.getLogger("mooncake_kv.node")

DRAM = "dram"
BATCHES_IN_FLIGHT = 4


class Batch:
    """The next `count` pages of a run. `good` is how many of them, from the first, are verified, None while that is not known. `entries`
    are leased; of a batch from a slow tier they are there when it is."""

    def __init__(self, count: int, entries: list[Entry], place: int = -1, good: int | None = None) -> None:
        """`place`: of the tier, -1 for memory."""
        self.count = count
        self.entries = entries
        self.place = place
        self.good = good


class Run:
    """One fetch. Its pages, in order: `staged` are reported, `batches` under way, `ahead` leased; page `next` is the first behind those,
    and from page `end` on there is nothing more to come. `place` is the slow tier in use, which has `found` more pages; `lacks` holds
    (place of a tier, page that it has not got). `waiting`: for an answer of a tier, for a page that another fetch reads or that is being
    sealed, or for room; what comes for another `turn` than this one is not waited for any more. `final`: nothing is asked for again."""

    def __init__(self, message: Fetch, end: int, entries: list[Entry]) -> None:
        self.request = message.request
        self.hashes = message.hashes
        self.verify = message.check
        self.deadline_s = message.deadline_ms / 1e3
        self.asked = len(message.hashes) // HASH_BYTES
        self.staged: list[Entry] = []
        self.batches: deque[Batch] = deque()
        self.ahead = entries
        self.next = len(entries)
        self.end = end
        self.place = -1
        self.found = 0
        self.lacks: set[tuple[int, int]] = set()
        self.waiting = ""
        self.turn = 0
        self.final = False
        self.ended = False
        self.timer: asyncio.TimerHandle | None = None

    def hash(self, page: int) -> bytes:
        return self.hashes[page * HASH_BYTES : (page + 1) * HASH_BYTES]

    def take(self) -> list[Entry]:
        """End the run. Everything it has leased, in order."""
        self.ended = True
        if self.timer is not None:
            self.timer.cancel()
        entries = self.staged + [entry for batch in self.batches for entry in batch.entries] + self.ahead
        self.staged, self.ahead = [], []
        self.batches.clear()
        return entries


class Stager:
    """Answers fetches."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        index: Index,
        link: HelperLink,
        reader: Reader,
        writes: WriteThrough,
        counters: Counters,
    ) -> None:
        self._loop = loop
        self._index = index
        self._link = link
        self._reader = reader
        self._writes = writes
        self._counters = counters
        self._roomless: list[tuple[Session, Run, int]] = []
        # Pages and bytes reported, by tier.
        self.hits: dict[str, list[int]] = {name: [0, 0] for name in (DRAM, *(link.name for link in reader.links))}

    def fetch(self, session: Session, message: Fetch) -> None:
        if message.request in session.runs:
            raise ProtocolError(f"request {message.request} is already a fetch of this connection")
        engine, space = session.engine, session.space
        entries = self._index.lease_run(space, message.hashes, engine.usable, message.limit_bytes)
        asked = len(message.hashes) // HASH_BYTES
        end = min(asked, message.limit_bytes // space.size_class.slot_bytes) if message.limit_bytes else asked
        run = session.runs[message.request] = Run(message, end, entries)
        self._counters.fetches += 1
        self._counters.pages_asked += asked
        if not self._reader.links:
            session.chains.expect(message.hashes, len(entries))
        elif entries:
            self._writes.offer(entries, "second_use")
            self._writes.touch(space, message.hashes)
        self._pump(session, run)

    def release(self, session: Session, request: int) -> None:
        """End a fetch's leases. One that got no page has none, so a number that is not known is no mistake."""
        if run := session.runs.pop(request, None):
            self._index.unlease(run.take())

    def leave(self, session: Session) -> list[list[Entry]]:
        """The session is gone. Its leases, whose end is the caller's business now."""
        runs = [run.take() for run in session.runs.values()]
        session.runs.clear()
        return runs

    def room(self) -> None:
        """There may be more room than before."""
        roomless, self._roomless = self._roomless, []
        for session, run, turn in roomless:
            self._go_on(session, run, turn)

    def suspect(self, space: Namespace, hashes: list[bytes]) -> None:
        """Check these pages again and drop those that do not match."""
        entries = [entry for page_hash in hashes if (entry := space.pages.get(page_hash))]
        for part in parts(entries, space):
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

    # ---- one run

    def _pump(self, session: Session, run: Run) -> None:
        """Put batches into the queues, then report what is verified."""
        again = True
        while again and not run.ended:
            while sum(batch.good is None for batch in run.batches) < BATCHES_IN_FLIGHT:
                if run.ahead:
                    self._check(session, run)
                elif run.waiting or run.next >= run.end or not self._extend(session, run):
                    break
            again = self._report(session, run)

    def _go_on(self, session: Session, run: Run, turn: int) -> None:
        """What the run has waited for in that turn is there."""
        if turn == run.turn and not run.ended:
            run.waiting = ""
            self._pump(session, run)

    def _check(self, session: Session, run: Run) -> None:
        """The next batch of leased pages."""
        space = session.space
        part, run.ahead = run.ahead[: space.batch_pages], run.ahead[space.batch_pages :]
        # Verified while another fetch holds a lease: nothing may have changed since.
        known = not run.verify or all(entry.verified for entry in part)
        batch = Batch(len(part), part, good=len(part) if known else None)
        run.batches.append(batch)
        if batch.good is not None:
            return
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

    def _extend(self, session: Session, run: Run) -> bool:
        """Find out where page `next` is to come from. False: the run has to wait."""
        engine, space = session.engine, session.space
        page_hash = run.hash(run.next)
        if entry := space.pages.get(page_hash):
            if engine.is_mapping(entry.extent):
                self._wait_for_room(session, run)
                return False
            rest = run.hashes[run.next * HASH_BYTES : run.end * HASH_BYTES]
            run.ahead = self._index.lease_run(space, rest, engine.usable, 0)
            run.next += len(run.ahead)
            run.found = max(run.found - len(run.ahead), 0)
            if not run.ahead:
                run.end = run.next
            return True
        if space.being_sealed(page_hash):
            run.waiting, turn = "page", run.turn
            space.sealings.setdefault(page_hash, []).append(lambda: self._go_on(session, run, turn))
            return False
        if reading := space.reads.get(page_hash):
            run.waiting = "page"
            self._set_out(session, run)
            turn = run.turn
            reading.waiters.append(lambda: self._go_on(session, run, turn))
            # Ask then: the page may not have come.
            run.found = 0
            return False
        if run.found:
            return self._read(session, run)
        self._ask(session, run)
        return False

    def _ask(self, session: Session, run: Run) -> None:
        """The next tier that may have pages from `next` on."""
        links, asked = self._reader.links, run.next
        place = next((i for i, link in enumerate(links) if link.works and (i, asked) not in run.lacks), None)
        if place is None:
            run.end = asked
            if links:
                session.chains.expect(run.hashes, asked)
            return
        hashes = run.hashes[asked * HASH_BYTES : min(run.end, asked + MAX_HASHES) * HASH_BYTES]
        run.place, run.waiting, turn = place, "answer", run.turn
        self._set_out(session, run)

        def done(count: int) -> None:
            if turn == run.turn:
                run.found = count
                if count * HASH_BYTES < len(hashes):
                    run.lacks.add((place, asked + count))
            self._go_on(session, run, turn)

        links[place].leading(session.space.digest, hashes, done)

    def _set_out(self, session: Session, run: Run) -> None:
        """The run goes beyond memory: that may take longer, and has a deadline."""
        if run.timer is None:
            run.timer = self._loop.call_later(run.deadline_s or 3600.0, self._expire, session, run)
            session.send(Staged(run.request, [], False, self._reader.links[max(run.place, 0)].name))

    def _read(self, session: Session, run: Run) -> bool:
        space, place = session.space, run.place
        hashes: list[bytes] = []
        for page in range(run.next, min(run.end, run.next + min(run.found, space.batch_pages))):
            page_hash = run.hash(page)
            if page_hash in space.pages or page_hash in space.reads:
                break
            hashes.append(page_hash)
        slots = self._reader.slots(session.engine, len(hashes))
        if not slots:
            if self._reader.room_may_come(session.engine):
                self._wait_for_room(session, run)
            else:
                run.end = run.next
            return False
        batch = Batch(len(slots), [], place)
        run.batches.append(batch)
        run.next += len(slots)
        run.found -= len(slots)

        turn = run.turn

        def done(entries: list[Entry]) -> None:
            batch.good = len(entries)
            if run.ended or turn != run.turn:
                return
            for entry in entries:
                self._index.lease(entry)
                entry.verified = True
            batch.entries = entries
            self._pump(session, run)

        self._reader.read(space, place, hashes[: len(slots)], slots, done)
        return True

    def _wait_for_room(self, session: Session, run: Run) -> None:
        run.waiting = "room"
        self._roomless.append((session, run, run.turn))

    def _expire(self, session: Session, run: Run) -> None:
        """Time is over: what is not there by now does not come."""
        if run.ended:
            return
        self._counters.fetches_cut += 1
        whole = 0
        while whole < len(run.batches) and run.batches[whole].good is not None:
            whole += 1
        self._cut(run, whole)
        run.final, run.end = True, run.next
        self._report(session, run)

    def _cut(self, run: Run, batches: int) -> None:
        """Leave nothing behind so many batches, and wait for nothing."""
        rest: list[Entry] = []
        while len(run.batches) > batches:
            rest = run.batches.pop().entries + rest
        rest += run.ahead
        run.ahead = []
        run.waiting = ""
        run.turn += 1
        run.found = 0
        run.next = len(run.staged) + sum(batch.count for batch in run.batches)
        self._index.unlease(rest)

    def _report(self, session: Session, run: Run) -> bool:
        """Whether the run has to look elsewhere for a page that did not come."""
        slot_bytes = session.space.size_class.slot_bytes
        again = False
        news: list[Staged] = []
        while run.batches and (good := run.batches[0].good) is not None:
            batch = run.batches.popleft()
            entries = batch.entries[:good]
            run.staged += entries
            if entries:
                tier = DRAM if batch.place < 0 else self._reader.links[batch.place].name
                if not news or news[-1].tier != tier:
                    news.append(Staged(run.request, [], False, tier))
                news[-1].slots += [entry.slot for entry in entries]
                self.hits[tier][0] += good
                self.hits[tier][1] += good * slot_bytes
                self._counters.pages_staged += good
                self._counters.bytes_staged += good * slot_bytes
            if good < batch.count:
                self._index.unlease(batch.entries[good:])
                self._cut(run, 0)
                run.lacks.add((batch.place, run.next))
                again = not run.final
                if run.final:
                    run.end = run.next
        if not run.batches and not run.ahead and not run.waiting and run.next >= run.end:
            run.ended = True
            if run.timer is not None:
                run.timer.cancel()
            self._counters.pages_missed += run.asked - len(run.staged)
            if not run.staged:
                session.runs.pop(run.request, None)
            if not news:
                news.append(Staged(run.request, [], False))
            news[-1].done = True
        for message in news:
            session.send(message)
        return again

    def _drop_bad(self, entry: Entry) -> None:
        if entry.dead:
            return  # another check was first
        self._counters.pages_bad += 1
        log.error("page %s of namespace %s failed its check and was dropped", entry.hash.hex()[:16], entry.space.digest)
        self._index.drop(entry)


def _joined(part: list[Entry]) -> tuple[bytes, list[int]]:
    return b"".join([entry.hash for entry in part]), [entry.slot for entry in part]
