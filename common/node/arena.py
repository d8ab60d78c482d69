"""The node's memory: extents, the slots carved out of them, and who maps them.

Promises:
- An extent is one memfd, sealed against resizing, so a client can never be killed by SIGBUS for touching what it has mapped. Its bytes are
  allocated before its slots can be taken. Its number is never used again.
- A slot has one owner at a time; freeing one twice, or one of an extent that is gone, changes nothing and is counted.
- An extent goes through live -> draining (nothing new in it; its leases run out) -> retiring (every client told about it has to unmap it)
  -> gone. Memory is given back only when no client maps it and the helper does not work on it.

Runs on the event loop's thread only.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Literal

from . import memory
from .protocol import SLOT_SHIFT

if TYPE_CHECKING:
    from .index import Entry
    from .session import Session

_OFFSET = (1 << SLOT_SHIFT) - 1
# An arena has at least this many extents, so that engines with different slot sizes can share a small one.
MIN_EXTENTS = 4

State = Literal["live", "draining", "retiring", "gone"]


class Extent:
    """One memfd, carved into `count` slots of `slot_bytes`. `told` are the sessions that may map it, `mapped` those that have said they
    do; `pins` counts its leased and held pages and what the helper and slow tiers are doing in it. The node itself does not map it."""

    def __init__(self, number: int, slot_bytes: int, count: int) -> None:
        self.number = number
        self.slot_bytes = slot_bytes
        self.count = count
        self.size = count * slot_bytes
        self.born = self.since = time.monotonic()
        self.state: State = "live"
        self.populated = 0
        self.free: list[int] = []
        self.pins = 0
        self.told: set[Session] = set()
        self.mapped: set[Session] = set()
        self._taken = bytearray(count)
        self.fd = os.memfd_create(f"mooncake-kv-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

    def add_populated(self, end: int) -> None:
        """The first `end` bytes are there: their slots are free to take."""
        first, last = self.populated // self.slot_bytes, end // self.slot_bytes
        self.populated = end
        base = self.number << SLOT_SHIFT
        # Taken from the end of the list: lowest offsets first.
        self.free[:0] = [base | i * self.slot_bytes for i in reversed(range(first, last))]

    def take(self) -> int:
        slot = self.free.pop()
        self._taken[(slot & _OFFSET) // self.slot_bytes] = 1
        return slot

    def give(self, slot: int) -> bool:
        index, rest = divmod(slot & _OFFSET, self.slot_bytes)
        if rest or index >= self.count or not self._taken[index]:
            return False
        self._taken[index] = 0
        self.free.append(slot)
        return True

    def close(self) -> None:
        self.state = "gone"
        os.close(self.fd)


class SizeClass:
    """All extents with one slot size, and by slot the pages in them: those that may go, the first to go first, and those that are
    leased or held. `roomy` are the
    live extents with a free slot."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.extents: dict[int, Extent] = {}
        self.roomy: dict[int, Extent] = {}
        self.lru: OrderedDict[int, Entry] = OrderedDict()
        self.kept: dict[int, Entry] = {}
        self.sessions: set[Session] = set()
        self.populating = 0

    def live(self) -> list[Extent]:
        return [extent for extent in self.extents.values() if extent.state == "live"]


class Arena:
    """At most `budget` bytes of extents of about `extent_size` bytes, and none that the machine has no memory for, whatever the budget: the
    kernel would kill a process for it, maybe an engine. With `auto` as much again is left to others."""

    def __init__(self, budget: int, extent_size: int, auto: bool) -> None:
        self.budget = budget
        self.extent_size = extent_size
        self.auto = auto
        self.bytes = 0
        self.bad_frees = 0
        self.extents: dict[int, Extent] = {}
        self.classes: dict[int, SizeClass] = {}
        self._next = 1

    def size_class(self, slot_bytes: int) -> SizeClass:
        return self.classes.setdefault(slot_bytes, SizeClass(slot_bytes))

    def room_for_extent(self, slot_bytes: int) -> int:
        """Slots that one more extent of this slot size could have now; 0 where the budget or the machine has no room."""
        wish = max(min(self.extent_size, self.budget // MIN_EXTENTS), slot_bytes)
        size = min(wish, self.budget - self.bytes)
        # A scrap that other slot sizes have left over is not worth a mapping in every client.
        if size < max(slot_bytes, wish // 8):
            return 0
        if (memory.available() < 2 * size) if self.auto else (memory.available(at_most=True) < size):
            return 0
        return size // slot_bytes

    def add_extent(self, size_class: SizeClass, count: int) -> Extent:
        """A new extent without slots to take yet. Raises OSError where the kernel refuses it."""
        extent = Extent(self._next, size_class.slot_bytes, count)
        self._next += 1
        self.bytes += extent.size
        self.extents[extent.number] = size_class.extents[extent.number] = extent
        return extent

    def add_populated(self, extent: Extent, end: int) -> None:
        if extent.state == "live":
            extent.add_populated(end)
            if extent.free:
                self.classes[extent.slot_bytes].roomy[extent.number] = extent

    def take(self, extent: Extent) -> int:
        slot = extent.take()
        if not extent.free:
            del self.classes[extent.slot_bytes].roomy[extent.number]
        return slot

    def give(self, slot: int) -> None:
        """A slot has no owner any more."""
        extent = self.extents.get(slot >> SLOT_SHIFT)
        if extent is None or not extent.give(slot):
            self.bad_frees += extent is not None
        elif extent.state == "live":
            self.classes[extent.slot_bytes].roomy[extent.number] = extent

    def is_live(self, slot: int) -> bool:
        extent = self.extents.get(slot >> SLOT_SHIFT)
        return extent is not None and extent.state == "live"

    def drain(self, extent: Extent) -> None:
        """Nothing new in this extent; its pages have to be dropped by the caller."""
        extent.state = "draining"
        self.classes[extent.slot_bytes].roomy.pop(extent.number, None)

    def close(self, extent: Extent) -> None:
        """Give the extent's memory back. The caller has made sure that nobody maps it and the helper does not work on it."""
        del self.extents[extent.number], self.classes[extent.slot_bytes].extents[extent.number]
        self.classes[extent.slot_bytes].roomy.pop(extent.number, None)
        self.bytes -= extent.size
        extent.close()
