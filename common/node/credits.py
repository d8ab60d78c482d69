"""Slots on their way to becoming pages: credits, reservations, commits, and the quarantine of what a dead scheduler left.

Promises:
- A slot is given to someone else only when nobody can still write to it: after its page was committed and found superfluous, after a
  Discard, when every client that asked for it has committed, discarded or gone, when every client has unmapped its extent, or, when a
  scheduler's connection ended, once every worker of its engine has fenced that generation off or is gone. The leases of that scheduler wait
  for the same, because a worker may still be reading.
- Nameless slots together hold at most 1/8 of the arena (or one slot for each scheduler, if that is more), reserved ones as much again.
- What a client names wrongly (slots it does not hold, rectangles outside the page, pages already there) changes nothing and is counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from .arena import Arena, Extent
from .index import Entry, Index, Namespace, split_hashes
from .metrics import Counters
from .protocol import SLOT_SHIFT, Commit, Fence, Granted, Rectangle
from .room import Room
from .sealing import Sealer
from .session import Engine, Partial, ProtocolError, Session

UNCOMMITTED_SHARE = 8
RESERVE_S = 30.0
GRANT_STEP = 512
MAX_RECTANGLES = 256
STORED, NO_SLOT = -1, -2


class Reservation:
    """A slot with a name. `holders` may still write to it, `asked` is everybody who ever got it; `dead` means it will not become a page."""

    def __init__(self, page_hash: bytes, slot: int, engine: Engine) -> None:
        self.hash = page_hash
        self.slot = slot
        self.engine = engine
        self.asked: set[Session] = set()
        self.holders: set[Session] = set()
        self.covered = 0
        self.deadline = time.monotonic() + RESERVE_S
        self.dead = False


class Quarantine:
    """Slots and leased runs of a scheduler that is gone, until the `waiting` workers cannot touch them any more."""

    def __init__(self, generation: int, waiting: set[Session], slots: list[int], runs: list[list[Entry]]) -> None:
        self.generation = generation
        self.waiting = waiting
        self.slots = slots
        self.runs = runs


class Credits:
    def __init__(self, arena: Arena, index: Index, room: Room, sealer: Sealer, counters: Counters) -> None:
        self._arena = arena
        self._index = index
        self._room = room
        self._sealer = sealer
        self._counters = counters
        self._schedulers: set[Session] = set()
        self._deadlines: deque[Reservation] = deque()
        self.reserved_bytes = 0
        self.quarantined = 0

    # ---- nameless slots

    def want(self, session: Session, count: int) -> None:
        if session.role != "scheduler":
            raise ProtocolError(f"a {session.role} cannot hold credits")
        session.want = max(0, count)
        self._schedulers.add(session)

    def refill(self) -> bool:
        """Grant every scheduler what it lacks, as far as there is room. True: there is more to grant, call again soon."""
        if not self._schedulers:
            return False
        more = False
        share = self._arena.budget // UNCOMMITTED_SHARE // len(self._schedulers)
        for session in self._schedulers:
            engine, size_class = session.engine, session.space.size_class
            # What is being sealed counts, so that a fast writer cannot push everything out before its own pages are there.
            held = len(session.granted) + session.sealing + sum(len(q.slots) for q in engine.quarantines)
            lacking = min(session.want, max(1, share // size_class.slot_bytes)) - held
            slots: list[int] = []
            while len(slots) < min(lacking, GRANT_STEP) and (slot := self._room.take(engine)) is not None:
                slots.append(slot)
            if slots:
                session.granted.update(dict.fromkeys(slots))
                session.send(Granted(slots))
            more |= len(slots) == GRANT_STEP
        return more

    # ---- slots by name

    def reserve(self, session: Session, joined: bytes) -> list[int]:
        return [self._reserve(session, session.space, page_hash) for (page_hash,) in split_hashes(joined)]

    def _reserve(self, session: Session, space: Namespace, page_hash: bytes) -> int:
        if page_hash in space.pages:
            return STORED
        size = space.size_class.slot_bytes
        reservation = space.claims.get(page_hash)
        if reservation is None:
            if page_hash in space.claims:
                return STORED  # being sealed
            held = self.reserved_bytes + session.sealing * size
            if held and held + size > self._arena.budget // UNCOMMITTED_SHARE:
                return NO_SLOT
            slot = self._room.take(session.engine)
            if slot is None:
                return NO_SLOT
            reservation = space.claims[page_hash] = Reservation(page_hash, slot, session.engine)
            self._deadlines.append(reservation)
            self.reserved_bytes += size
        elif not self._arena.is_live(reservation.slot):
            return NO_SLOT
        elif reservation.engine is not session.engine or (session in reservation.asked and session not in reservation.holders):
            return STORED  # in other hands, or this client has done its part
        reservation.asked.add(session)
        reservation.holders.add(session)
        session.reserved[reservation.slot] = reservation
        return reservation.slot

    def expire(self, now: float) -> None:
        """End the reservations whose time is over."""
        while self._deadlines and (self._deadlines[0].dead or self._deadlines[0].deadline <= now):
            reservation = self._deadlines.popleft()
            if not reservation.dead:
                self._counters.reservations_expired += 1
                self._kill(reservation)

    def _kill(self, reservation: Reservation) -> None:
        """It will not become a page; its slot is free when the last holder is done."""
        if not reservation.dead:
            reservation.dead = True
            claims = reservation.engine.space.claims
            if claims.get(reservation.hash) is reservation:
                del claims[reservation.hash]
        self._settle(reservation)

    def _settle(self, reservation: Reservation) -> None:
        if reservation.dead and not reservation.holders and reservation.slot >= 0:
            self._arena.give(reservation.slot)
            self._close(reservation)

    def _close(self, reservation: Reservation) -> None:
        """The slot is in other hands now."""
        for session in reservation.holders:
            session.reserved.pop(reservation.slot, None)
        reservation.holders.clear()
        reservation.slot = -1
        reservation.dead = True
        self.reserved_bytes -= reservation.engine.space.size_class.slot_bytes

    # ---- what clients say about their slots

    def commit(self, session: Session, message: Commit) -> None:
        hashes = [page_hash for (page_hash,) in split_hashes(message.hashes)]
        if len(hashes) != len(message.slots):
            raise ProtocolError(f"a commit of {len(hashes)} hashes and {len(message.slots)} slots")
        space = session.space
        covered = self._mask(space, message.rectangles) if message.rectangles else space.whole
        whole: list[tuple[bytes, int]] = []
        for page_hash, slot in zip(hashes, message.slots, strict=True):
            if slot in session.granted:
                done = self._commit_granted(session, page_hash, slot, covered, space.whole)
            elif slot in session.reserved:
                done = self._commit_reserved(session, page_hash, slot, covered, space.whole)
            else:
                self._counters.bad_slots += 1
                continue
            if done:
                whole.append((page_hash, slot))
        self._sealer.seal(session, whole)

    def _commit_granted(self, session: Session, page_hash: bytes, slot: int, covered: int, whole: int) -> bool:
        partial = session.granted[slot]
        if partial is not None and partial.hash != page_hash:
            self._counters.bad_slots += 1
            return False
        if partial is not None:
            covered |= partial.covered
        if covered == whole:
            del session.granted[slot]
            return True
        session.granted[slot] = Partial(page_hash, covered)
        return False

    def _commit_reserved(self, session: Session, page_hash: bytes, slot: int, covered: int, whole: int) -> bool:
        reservation = session.reserved[slot]
        if reservation.hash != page_hash:
            self._counters.bad_slots += 1
            return False
        self._let_go(session, reservation)
        reservation.covered |= covered
        if reservation.dead or reservation.covered != whole:
            return False
        del reservation.engine.space.claims[page_hash]
        self._close(reservation)
        return True

    def _mask(self, space: Namespace, rectangles: list[Rectangle]) -> int:
        if len(rectangles) > MAX_RECTANGLES:
            raise ProtocolError(f"a commit of {len(rectangles)} rectangles")
        namespace = space.layout.namespace
        mask = 0
        for r in rectangles:
            if not (
                0 <= r.first_layer < r.last_layer <= namespace.num_layers and 0 <= r.first_head < r.last_head <= namespace.num_kv_heads
            ):
                self._counters.bad_rectangles += 1
                continue
            row = (1 << r.last_head) - (1 << r.first_head)
            for layer in range(r.first_layer, r.last_layer):
                mask |= row << layer * namespace.num_kv_heads
        return mask

    def discard(self, session: Session, slots: Iterable[int]) -> None:
        for slot in slots:
            if slot in session.granted:
                del session.granted[slot]
                self._arena.give(slot)
            elif reservation := session.reserved.get(slot):
                self._let_go(session, reservation)
                self._kill(reservation)
            else:
                self._counters.bad_slots += 1

    def _let_go(self, session: Session, reservation: Reservation) -> None:
        """This client writes no more to the slot."""
        del session.reserved[reservation.slot]
        reservation.holders.discard(session)
        self._settle(reservation)

    # ---- what ends

    def leave(self, session: Session, runs: list[list[Entry]]) -> None:
        """The client is gone: its process is dead, or it has said by closing that it touches nothing any more. `runs` are its leases."""
        for reservation in list(session.reserved.values()):
            self._let_go(session, reservation)
            self._kill(reservation)
        self._schedulers.discard(session)
        engine = session.engine
        for quarantine in engine.quarantines:
            quarantine.waiting.discard(session)
        if session.role == "scheduler":
            waiting = {other for other in engine.sessions if other.role == "worker"}
            engine.quarantines.append(Quarantine(session.generation, waiting, list(session.granted), runs))
            self.quarantined += len(session.granted)
            for worker in waiting:
                worker.send(Fence(session.generation))
        else:
            for run in runs:
                self._index.unlease(run)
        self._end_quarantines(engine)

    def fenced(self, session: Session, generation: int) -> None:
        """No copy of this worker for generations up to and including this one is running or will start."""
        engine = session.engine
        for quarantine in engine.quarantines:
            if quarantine.generation <= generation:
                quarantine.waiting.discard(session)
        self._end_quarantines(engine)

    def _end_quarantines(self, engine: Engine) -> None:
        for quarantine in [q for q in engine.quarantines if not q.waiting]:
            engine.quarantines.remove(quarantine)
            self.quarantined -= len(quarantine.slots)
            for slot in quarantine.slots:
                self._arena.give(slot)
            for run in quarantine.runs:
                self._index.unlease(run)

    def forget(self, space: Namespace) -> None:
        """The namespace was dropped: what was reserved before does not become a page."""
        for reservation in list(space.claims.values()):
            if reservation is not None:
                self._kill(reservation)

    def void(self, extent: Extent, sessions: Iterable[Session]) -> None:
        """Nobody maps this extent any more, so slots in it are nobody's."""
        for session in sessions:
            for slot in [slot for slot in session.granted if slot >> SLOT_SHIFT == extent.number]:
                del session.granted[slot]
            for reservation in [r for slot, r in session.reserved.items() if slot >> SLOT_SHIFT == extent.number]:
                self._let_go(session, reservation)
                self._kill(reservation)
