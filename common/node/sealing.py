"""Sealing: committed slots become visible pages, and go on to the slow tiers.

Promises:
- A page becomes visible only after the helper process has sealed it, and not at all if its namespace was dropped or its extent drained in
  between. Fetches that come to it meanwhile wait for that, and lookups count it: whoever asks after its writer has told of it finds it.
- While the helper works on a slot, a pin keeps the slot where it is, whatever clients do.
"""

from __future__ import annotations

from collections.abc import Callable

from .arena import Arena
from .helper_link import HelperLink
from .index import Index, parts
from .metrics import Counters
from .protocol import HASH_BYTES, SLOT_SHIFT
from .session import Session
from .writing import WriteThrough


class Sealer:
    """Turns committed slots into visible pages."""

    def __init__(
        self, arena: Arena, index: Index, link: HelperLink, writes: WriteThrough, counters: Counters, changed: Callable[[], object]
    ) -> None:
        self._arena = arena
        self._index = index
        self._link = link
        self._writes = writes
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
        for part in parts(fresh, space):
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
            # A slow tier may have brought it meanwhile.
            if keep and extent.state == "live" and page_hash not in space.pages:
                arrived.append(self._index.insert(space, page_hash, slot))
                self._counters.pages_committed += 1
                self._counters.bytes_committed += extent.slot_bytes
            else:
                self._arena.give(slot)
                self._index.settle_if_leaving(extent)
        hashes = [entry.hash for entry in arrived]
        prefixes = session.chains.arrived(hashes)
        self._writes.offer(arrived, "")
        last = set(hashes)
        for joined in prefixes:
            run = self._index.find(space, joined)
            self._index.touch(run)
            self._writes.touch(space, joined)
            if joined[-HASH_BYTES:] in last:
                self._writes.offer(run, "prefix_end")
        for page_hash, _ in part:
            for waiter in space.sealings.pop(page_hash, ()):
                waiter()
        self._changed()
