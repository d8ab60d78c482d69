"""Prefixes that a client has asked for and whose end is missing: it is about to compute and store that end.

Promise: when one of the missing pages arrives, the whole prefix up to it counts as used, first page last, so that no page of a prefix goes
before the pages behind it; without that, a prompt longer than the free memory would push out its own beginning. Remembers a bounded number
of pages for each client; a prefix that was forgotten is merely kept in the order of its arrival.
"""

from __future__ import annotations

from collections import deque

from .index import split_hashes

# About 10 MB for each client at most.
MAX_PAGES = 1 << 16


class Chains:
    def __init__(self) -> None:
        self._chains: deque[bytes] = deque()
        self._pages = 0
        self._missing: dict[bytes, bytes] = {}

    def expect(self, joined: bytes, found: int) -> None:
        """The client asked for this prefix, of which `found` pages are there."""
        missing = joined[found * 32 :]
        if not missing or self._missing.get(missing[:32]) == joined:
            return
        for (page_hash,) in split_hashes(missing):
            # An earlier question may have begun further in front.
            self._missing.setdefault(page_hash, joined)
        self._chains.append(joined)
        self._pages += len(joined) // 32
        while self._pages > MAX_PAGES and len(self._chains) > 1:
            oldest = self._chains.popleft()
            self._pages -= len(oldest) // 32
            for (page_hash,) in split_hashes(oldest):
                if self._missing.get(page_hash) is oldest:
                    del self._missing[page_hash]

    def arrived(self, hashes: list[bytes]) -> set[bytes]:
        """The prefixes that these pages, which are there now, belong to."""
        pop = self._missing.pop
        return {joined for page_hash in hashes if (joined := pop(page_hash, None)) is not None}
