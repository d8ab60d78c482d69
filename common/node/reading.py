"""Pages that are being read from a slow tier into fresh slots.

Promises:
- A page is read once at a time, however many fetches want it.
- A slot that is read into belongs to the reading until nothing can write to it any more; pages that were not read give theirs back then.
- Bytes that are being read count for the window of leases. A page that came is an ordinary page, whether or not anybody still wants it.
- What was read for a namespace that was dropped meanwhile does not appear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..tiers.link import TierLink
from .arena import Arena
from .index import Entry, Index, Namespace
from .protocol import SLOT_SHIFT
from .room import Room
from .session import Engine
from .writing import WriteThrough

Done = Callable[[list[Entry]], object]


class Reading:
    """Pages of one job. `waiters` are called when it has ended."""

    def __init__(self, hashes: list[bytes], slots: list[int]) -> None:
        self.hashes = hashes
        self.slots = slots
        self.waiters: list[Callable[[], object]] = []


class Reader:
    """`changed` is called when there may be more room than before."""

    def __init__(
        self,
        arena: Arena,
        index: Index,
        room: Room,
        links: Sequence[TierLink],
        writes: WriteThrough,
        changed: Callable[[], object],
    ) -> None:
        self._arena = arena
        self._index = index
        self._room = room
        self.links = links
        self._writes = writes
        self._changed = changed
        self.readings = 0

    def slots(self, engine: Engine, count: int) -> list[int]:
        """At most `count` fresh slots, as far as there is room in memory and in the window."""
        size_class = engine.space.size_class
        slots: list[int] = []
        while (
            len(slots) < count
            and self._index.has_window((len(slots) + 1) * size_class.slot_bytes)
            and (slot := self._room.take(engine)) is not None
        ):
            slots.append(slot)
        return slots

    def room_may_come(self, engine: Engine) -> bool:
        """Without any lease ending?"""
        size_class = engine.space.size_class
        return self._index.has_window(size_class.slot_bytes) and self._room.may_come(engine)

    def read(self, space: Namespace, place: int, hashes: list[bytes], slots: list[int], done: Done) -> None:
        """Read pages, none of which is there or being read, from tier number `place`. `done` gets the leading ones that came."""
        reading, drops, size = Reading(hashes, slots), space.drops, space.size_class.slot_bytes
        self.readings += 1
        self._index.reading_bytes += len(slots) * size
        for page_hash, slot in zip(hashes, slots, strict=True):
            space.reads[page_hash] = reading
            self._arena.extents[slot >> SLOT_SHIFT].pins += 1
        left = set(slots)

        def ended(count: int) -> None:
            self._index.reading_bytes -= len(slots) * size
            for page_hash in hashes:
                del space.reads[page_hash]
            entries: list[Entry] = []
            for page_hash, slot in zip(hashes[:count] if drops == space.drops else (), slots, strict=False):
                # A page that was stored meanwhile has not been checked: the run ends before it.
                if page_hash in space.pages or not self._arena.is_live(slot):
                    break
                entries.append(self._index.insert(space, page_hash, slot))
                left.remove(slot)
            done(entries)
            self._writes.promoted(entries, place)
            for waiter in reading.waiters:
                waiter()

        def safe() -> None:
            self.readings -= 1
            for slot in slots:
                extent = self._arena.extents[slot >> SLOT_SHIFT]
                extent.pins -= 1
                if slot in left:
                    self._arena.give(slot)
                self._index.settle_if_leaving(extent)
            self._changed()

        self.links[place].read(space.digest, b"".join(hashes), slots, ended, safe)
