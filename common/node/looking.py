"""Lookups that go beyond memory.

Promise: each is answered once, when every tier that had to be asked has answered or after LOOKUP_S, with what is known by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ..tiers.link import TierLink
from ..tiers.messages import MAX_HASHES
from .index import Index, Namespace
from .protocol import HASH_BYTES
from .staging import DRAM

LOOKUP_S = 0.1

Done = Callable[[dict[str, int]], object]


class Looker:
    """Asks the tiers in their order, anew at each page at which the one before and memory came up short."""

    def __init__(self, loop: asyncio.AbstractEventLoop, index: Index, links: Sequence[TierLink]) -> None:
        self._loop = loop
        self._index = index
        self._links = links

    def look(self, space: Namespace, hashes: bytes, found: int, done: Done) -> None:
        """`found` leading pages are in memory. `done` gets how many leading pages there are, by tier."""
        _Look(self._loop, self._index, self._links, space, hashes, found, done)


class _Look:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        index: Index,
        links: Sequence[TierLink],
        space: Namespace,
        hashes: bytes,
        found: int,
        done: Done,
    ) -> None:
        self._index = index
        self._links = links
        self._space = space
        self._hashes = hashes
        self._done = done
        self._place = 0
        self._asked = 0
        # By tier, the page that it has not got.
        self._lacks = [-1] * len(links)
        self._next = found
        self._counts = {DRAM: found}
        self._over = False
        self._timer = loop.call_later(LOOKUP_S, self._answer)
        self._ask()

    def _ask(self) -> None:
        if self._over:
            return
        rest = self._hashes[self._next * HASH_BYTES : (self._next + MAX_HASHES) * HASH_BYTES]
        place = next((i for i, link in enumerate(self._links) if link.works and self._lacks[i] != self._next), None)
        if rest and place is not None:
            self._place, self._asked = place, len(rest) // HASH_BYTES
            self._links[place].leading(self._space.digest, rest, self._found)
        else:
            self._answer()

    def _found(self, count: int) -> None:
        if self._over:
            return
        name = self._links[self._place].name
        self._counts[name] = self._counts.get(name, 0) + count
        self._next += count
        if count < self._asked:
            self._lacks[self._place] = self._next
        here = len(self._index.find(self._space, self._hashes[self._next * HASH_BYTES :]))
        self._counts[DRAM] += here
        self._next += here
        self._ask()

    def _answer(self) -> None:
        if not self._over:
            self._over = True
            self._timer.cancel()
            self._done(self._counts)
