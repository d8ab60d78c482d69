"""Which pages there are: one dict per namespace from page hash to entry, leases, and the order in which pages go.

Promises:
- A leased or held page is neither evicted nor is its slot given away, whatever happens to its entry: an entry that is dropped meanwhile
  vanishes from the namespace at once and gives its slot back when the last lease and hold ends.
- Eviction and every other step is O(1) a page. Order: least recently used first over all namespaces of a slot size; within a prefix,
  later pages before earlier ones, because a page is of no use without those before it.
- Leases, with what is being read for them, take at most `window` bytes of pages, each counted once.

Hashes come joined, 32 bytes a page. Runs on the event loop's thread only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ..page import PageLayout
from .arena import Arena, Extent, SizeClass
from .child_side import MAX_JOB_PAGES
from .protocol import SLOT_SHIFT

if TYPE_CHECKING:
    from .credits import Reservation
    from .reading import Reading
    from .session import Session

T = TypeVar("T")

# Enough to keep two threads busy (26 GB/s; two batches gave 22, smaller ones 20), and little for another fetch to wait for.
BATCH_BYTES = 8 << 20
# Twice as fast as slicing.
split_hashes = struct.Struct("32s").iter_unpack


class Entry(msgspec.Struct, eq=False, gc=False):
    """A page that is there. `holds`: slow tiers that are about to copy it or copying it. `verified`: checked since its first current lease
    began. `suspect`: how many checks are under way because a client has found it damaged. `dead`: not in its namespace any more. `stored`:
    one byte for each slow tier, which says whether the tier has it (writing.py)."""

    hash: bytes
    slot: int
    extent: Extent
    space: Namespace
    tick: int
    leases: int = 0
    holds: int = 0
    stored: int = 0
    verified: bool = False
    suspect: int = 0
    dead: bool = False


class Namespace:
    """Pages of one KVNamespace digest. `claims` are pages on their way: reserved by name, or being sealed (None). `reads` are pages
    that are being read from a slow tier. `drops` counts how often all of it was dropped, so that what was on its way then does not appear
    afterwards."""

    def __init__(self, digest: str, encoded: bytes, layout: PageLayout, size_class: SizeClass) -> None:
        self.digest = digest
        self.encoded = encoded
        self.layout = layout
        self.size_class = size_class
        self.pages: dict[bytes, Entry] = {}
        self.claims: dict[bytes, Reservation | None] = {}
        self.reads: dict[bytes, Reading] = {}
        # Who waits for pages that are being sealed.
        self.sealings: dict[bytes, list[Callable[[], object]]] = {}
        self.sessions: set[Session] = set()
        self.drops = 0
        grid = layout.namespace.num_layers * layout.namespace.num_kv_heads
        self.whole = (1 << grid) - 1
        # Pages of one job of the helper or a tier.
        self.batch_pages = min(max(1, BATCH_BYTES // size_class.slot_bytes), MAX_JOB_PAGES)

    def being_sealed(self, page_hash: bytes) -> bool:
        return page_hash in self.claims and self.claims[page_hash] is None


def parts(items: list[T], space: Namespace) -> list[list[T]]:
    """Cut into batches for one job each."""
    step = space.batch_pages
    return [items[i : i + step] for i in range(0, len(items), step)]


class Index:
    """All namespaces. `settle` is called when something that kept an extent in place has ended and the extent is no longer live."""

    def __init__(self, arena: Arena, window: int) -> None:
        self.arena = arena
        self.window = window
        self.leased_bytes = 0
        self.leased_pages = 0
        self.reading_bytes = 0
        self.spaces: dict[str, Namespace] = {}
        self.settle: Callable[[Extent], object] = lambda extent: None
        self._tick = 0

    def find(self, space: Namespace, joined: bytes) -> list[Entry]:
        """The leading run of pages that are there."""
        get = space.pages.get
        found = []
        for (page_hash,) in split_hashes(joined):
            entry = get(page_hash)
            if entry is None:
                break
            found.append(entry)
        return found

    def coming(self, space: Namespace, joined: bytes) -> int:
        """The length of the leading run of pages that are there or being sealed."""
        count = 0
        for (page_hash,) in split_hashes(joined):
            if page_hash not in space.pages and not space.being_sealed(page_hash):
                break
            count += 1
        return count

    def touch(self, run: list[Entry]) -> None:
        """These pages of one prefix were used now."""
        self._tick = tick = self._tick + 1
        if not run:
            return
        move = run[0].space.size_class.lru.move_to_end
        for entry in reversed(run):
            entry.tick = tick
            if not entry.leases and not entry.holds:
                move(entry.slot)

    def lease_run(self, space: Namespace, joined: bytes, usable: Container[Extent], limit: int) -> list[Entry]:
        """Lease as much of the leading run as lies in `usable` extents and fits the window and `limit` bytes (0: no limit)."""
        size = space.size_class.slot_bytes
        run = self.find(space, joined)
        if limit:
            del run[limit // size :]
        for i, entry in enumerate(run):
            if entry.extent not in usable or (not entry.leases and not self.has_window(size)):
                return run[:i]
            self.lease(entry)
        return run

    def has_window(self, size: int) -> bool:
        """May so many bytes more be leased or read?"""
        return self.leased_bytes + self.reading_bytes + size <= self.window

    def lease(self, entry: Entry) -> None:
        if not entry.leases:
            if not entry.holds:
                self._keep(entry)
            self.leased_pages += 1
            self.leased_bytes += entry.extent.slot_bytes
        entry.leases += 1

    def unlease(self, run: list[Entry]) -> None:
        """End one lease of each page of a prefix."""
        for entry in reversed(run):
            entry.leases -= 1
            if entry.leases:
                continue
            entry.verified = False
            self.leased_pages -= 1
            self.leased_bytes -= entry.extent.slot_bytes
            if not entry.holds:
                self._let_go(entry)

    def hold(self, entry: Entry) -> None:
        """Keep a page where it is, without the say of the leases' window."""
        if not entry.leases and not entry.holds:
            self._keep(entry)
        entry.holds += 1

    def unhold(self, entry: Entry) -> None:
        entry.holds -= 1
        if not entry.holds and not entry.leases:
            self._let_go(entry)

    def settle_if_leaving(self, extent: Extent) -> None:
        if extent.state != "live":
            self.settle(extent)

    def _keep(self, entry: Entry) -> None:
        size_class = entry.space.size_class
        del size_class.lru[entry.slot]
        size_class.kept[entry.slot] = entry
        entry.extent.pins += 1

    def _let_go(self, entry: Entry) -> None:
        extent, size_class = entry.extent, entry.space.size_class
        del size_class.kept[entry.slot]
        extent.pins -= 1
        if entry.dead:
            self.arena.give(entry.slot)
        else:
            size_class.lru[entry.slot] = entry
        self.settle_if_leaving(extent)

    def insert(self, space: Namespace, page_hash: bytes, slot: int) -> Entry:
        """A sealed page becomes visible. Its hash must not be there yet."""
        self._tick += 1
        entry = Entry(page_hash, slot, self.arena.extents[slot >> SLOT_SHIFT], space, self._tick)
        space.pages[page_hash] = entry
        space.size_class.lru[slot] = entry
        return entry

    def drop(self, entry: Entry) -> None:
        """Forget a page; its slot is free now or when its last lease ends."""
        if not entry.dead:
            self._forget(entry)
            if not entry.leases and not entry.holds:
                self.arena.give(entry.slot)

    def hide_all(self, space: Namespace) -> list[Entry]:
        """Make all pages of a namespace invisible at once, also those on their way. The caller drops what is returned, in steps that do
        not stall the event loop."""
        space.drops += 1
        entries = list(space.pages.values())
        space.pages = {}
        return entries

    def drop_extent(self, extent: Extent) -> None:
        """Forget all pages in an extent that is being drained."""
        size_class = self.arena.classes[extent.slot_bytes]
        for i in range(extent.count):
            slot = extent.number << SLOT_SHIFT | i * extent.slot_bytes
            if entry := size_class.lru.get(slot) or size_class.kept.get(slot):
                self.drop(entry)

    def evict(self, size_class: SizeClass, usable: Container[Extent], search: int = 256) -> int | None:
        """Drop the oldest unleased page that lies in a usable extent and return its slot, which has no owner now but the caller.

        Looks at `search` pages at most: more than a few are skipped only while a client has not mapped a new extent yet.
        """
        for slot, entry in size_class.lru.items():
            if entry.extent in usable:
                self._forget(entry)
                return slot
            search -= 1
            if not search:
                break
        return None

    def oldest(self, size_class: SizeClass) -> int:
        """When (in ticks) the next page to go was last used; now if there is none."""
        entry = next(iter(size_class.lru.values()), None)
        return self._tick if entry is None else entry.tick

    def warmth(self, extent: Extent, samples: int = 64) -> float:
        """About when (in ticks) the slots of an extent were last used, on average: free ones never, slots in other hands now."""
        free = set(extent.free)
        lru = self.arena.classes[extent.slot_bytes].lru
        total = seen = 0
        for i in range(0, extent.count, max(1, extent.count // samples)):
            slot = extent.number << SLOT_SHIFT | i * extent.slot_bytes
            seen += 1
            if slot not in free:
                entry = lru.get(slot)
                total += self._tick if entry is None else entry.tick
        return total / seen

    def _forget(self, entry: Entry) -> None:
        entry.dead = True
        space = entry.space
        if space.pages.get(entry.hash) is entry:
            del space.pages[entry.hash]
        if not entry.leases and not entry.holds:
            del space.size_class.lru[entry.slot]
