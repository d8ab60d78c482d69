"""Where free slots come from: free ones, a new extent, the oldest page, or an extent of another slot size.

Promises:
- `take` never blocks and looks at a bounded number of extents and pages. It prefers what costs nothing, then growth (waiting while an
  extent with free slots is being populated, or mapped by the engine), then eviction. So an engine that has just joined evicts nothing
  while there are free slots.
- An extent changes its slot size only by being emptied, unmapped by everybody, given back and made anew; leases run out first. That
  happens when an engine has no extent at all, or when the extent is colder on average than the page that would be evicted instead; one at
  a time, and not sooner than SETTLE_S after it was made while its engine is there.
- Memory of slot sizes that no engine and no page uses any more is given back.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence

from ..tiers.link import TierLink
from .arena import Arena, Extent, SizeClass
from .helper_link import HelperLink
from .index import Index
from .metrics import Counters
from .protocol import Retire
from .session import Engine, Session

log = logging.getLogger("mooncake_kv.node")

SETTLE_S = 10.0
RETRY_S = 1.0
# Extents whose warmth is estimated at a time: about 15 us each.
CANDIDATES = 32


class Room:
    """`announce` tells the clients about a new extent, `void` frees what is outstanding in one that is about to go, `changed` is called
    when there may be more room than before."""

    def __init__(
        self,
        arena: Arena,
        index: Index,
        link: HelperLink,
        tiers: Sequence[TierLink],
        counters: Counters,
        *,
        announce: Callable[[Extent], object],
        void: Callable[[Extent], object],
        changed: Callable[[], object],
    ) -> None:
        self._arena = arena
        self._index = index
        self._links: tuple[HelperLink | TierLink, ...] = (link, *tiers)
        self._counters = counters
        self._announce = announce
        self._void = void
        self._changed = changed
        self._grow_after = 0.0
        self._rebalance_after = 0.0
        # For whom an extent is being emptied: nobody else grows meanwhile.
        self._heir: SizeClass | None = None
        index.settle = self.settle

    def take(self, engine: Engine) -> int | None:
        """A slot that the engine can use, now owned by the caller; None if there is none at the moment."""
        size_class = engine.space.size_class
        for extent in size_class.roomy.values():
            if extent in engine.usable:
                return self._arena.take(extent)
        if self._is_coming(engine):
            return None
        # With free slots that this engine has not mapped for so long, one more extent would not help it.
        if not size_class.roomy and self.grow(size_class):
            return None
        self._rebalance(size_class, time.monotonic())
        slot = self._index.evict(size_class, engine.usable)
        self._counters.pages_evicted += slot is not None
        return slot

    def may_come(self, engine: Engine) -> bool:
        """After `take` gave nothing: may there be a slot soon although no lease ends?"""
        return self._is_coming(engine) or any(extent in engine.usable for extent in engine.space.size_class.roomy.values())

    @staticmethod
    def _is_coming(engine: Engine) -> bool:
        """Is memory being populated, or mapped by the engine?"""
        size_class = engine.space.size_class
        return bool(size_class.populating) or any(engine.is_mapping(extent) for extent in size_class.roomy.values())

    def grow(self, size_class: SizeClass) -> bool:
        """Start one more extent if the budget and the machine allow it."""
        now = time.monotonic()
        heir = self._heir
        if now < self._grow_after or (heir is not None and heir is not size_class and heir.sessions):
            return False
        count = self._arena.room_for_extent(size_class.slot_bytes)
        if not count:
            self._grow_after = now + RETRY_S
            return False
        try:
            extent = self._arena.add_extent(size_class, count)
        except OSError as error:
            self._grow_after = now + RETRY_S
            log.error("no new extent of %d bytes: %s", count * size_class.slot_bytes, error)
            return False
        if heir is size_class:
            self._heir = None
        extent.pins += 1  # until the helper has populated it
        size_class.populating += 1
        for link in self._links:
            link.map(extent.number, extent.size, extent.fd)
        self._announce(extent)
        return True

    def populated(self, number: int, end: int, last: bool, error: str) -> None:
        """The helper has allocated the first `end` bytes of an extent."""
        extent = self._arena.extents[number]
        self._arena.add_populated(extent, end)
        if last:
            extent.pins -= 1
            self._arena.classes[extent.slot_bytes].populating -= 1
            if error and extent.state == "live":
                self._arena.budget = max(self._arena.bytes - extent.size, 0)
                log.error("extent %d could not be populated (%s): the arena stays at %d bytes", number, error, self._arena.budget)
                self.drain(extent)
            self.settle(extent)
        self._changed()

    def _rebalance(self, size_class: SizeClass, now: float) -> None:
        """Take an extent from another slot size if that is better than evicting a page of this one."""
        if now < self._rebalance_after or any(extent.state != "live" for extent in self._arena.extents.values()):
            return
        self._rebalance_after = now + RETRY_S
        own = size_class.live()
        candidates = []
        for other in self._arena.classes.values():
            if other is not size_class:
                live = other.live()
                spare = len(live) > 1 or not own
                candidates += [e for e in live if not other.sessions or (spare and now - e.born > SETTLE_S)]
        if not candidates:
            return
        coldest = min(random.sample(candidates, min(len(candidates), CANDIDATES)), key=self._index.warmth)
        if not own or self._index.warmth(coldest) < self._index.oldest(size_class):
            self._counters.extents_recarved += 1
            self._heir = size_class
            self.drain(coldest)

    def drain(self, extent: Extent) -> None:
        """Drop an extent's pages; it is retired when the last lease in it has ended."""
        self._arena.drain(extent)
        self._index.drop_extent(extent)
        self.settle(extent)

    def settle(self, extent: Extent) -> None:
        """Take an extent that is no longer live one step further, if nothing keeps it."""
        if extent.state == "draining" and not extent.pins:
            extent.state = "retiring"
            extent.since = time.monotonic()
            for session in extent.told:
                session.send(Retire(extent.number))
        if extent.state == "retiring" and not extent.told:
            self._void(extent)
            for link in self._links:
                link.unmap(extent.number)
            self._arena.close(extent)
            self._grow_after = 0.0
            self._changed()

    def unmapped(self, extent: Extent, session: Session) -> None:
        extent.mapped.discard(session)
        extent.told.discard(session)
        self.settle(extent)

    def give_back_unused(self) -> None:
        """Retire the extents of slot sizes that nobody is connected with and that hold no page."""
        for size_class in list(self._arena.classes.values()):
            if size_class.sessions or size_class.lru or size_class.kept:
                continue
            for extent in size_class.live():
                self.drain(extent)
            if not size_class.extents:
                del self._arena.classes[size_class.slot_bytes]

    def report_slow(self, now: float, limit_s: float) -> None:
        """Log the extents that wait for a client to unmap them."""
        for extent in self._arena.extents.values():
            if extent.state == "retiring" and now - extent.since > limit_s:
                pids = sorted(session.pid for session in extent.told)
                log.warning("extent %d waits since %d s to be unmapped by pids %s", extent.number, now - extent.since, pids)
