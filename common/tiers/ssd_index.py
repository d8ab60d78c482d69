"""What lies in the SSD tier's folder, and in which order it goes.

Promises: thread-safe, no I/O. Order: least recently used first; within a prefix that was touched as one, later pages before earlier ones. A
scan's result replaces what was known, except for what has changed since the scan began. A page's key is its digest (16 bytes) and its hash.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence


class SsdIndex:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: OrderedDict[bytes, int] = OrderedDict()
        self._stamps: dict[bytes, int] = {}
        self._added: dict[bytes, int] = {}
        self._removed: set[bytes] = set()
        self._scanning = False
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._pages)

    def has(self, key: bytes) -> bool:
        return key in self._pages

    def leading(self, keys: Sequence[bytes]) -> int:
        pages = self._pages
        return next((i for i, key in enumerate(keys) if key not in pages), len(keys))

    def add(self, key: bytes, size: int) -> None:
        """The page is there, and was used now."""
        with self._lock:
            self.bytes += size - self._pages.pop(key, 0)
            self._pages[key] = size
            if self._scanning:
                self._added[key] = size
                self._removed.discard(key)

    def remove(self, key: bytes) -> None:
        with self._lock:
            self.bytes -= self._pages.pop(key, 0)
            self._forget(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        """These pages of one prefix were used now. Their times are kept for `take_stamps`."""
        now = time.time_ns()
        with self._lock:
            for i in range(len(keys) - 1, -1, -1):
                if keys[i] in self._pages:
                    self._pages.move_to_end(keys[i])
                    self._stamps[keys[i]] = now - 1000 * i

    def take_stamps(self) -> list[tuple[bytes, int]]:
        """(page, time of last use in ns) of what was touched since the last call."""
        with self._lock:
            stamps, self._stamps = self._stamps, {}
        return list(stamps.items())

    def pop_oldest(self, needed: int, budget: int) -> list[bytes]:
        """Forget the oldest pages until `needed` bytes fit into the budget; they are the caller's to delete."""
        gone = []
        with self._lock:
            while self._pages and self.bytes + needed > budget:
                key, size = self._pages.popitem(last=False)
                self.bytes -= size
                self._forget(key)
                gone.append(key)
        return gone

    def forget_digest(self, digest: bytes) -> None:
        with self._lock:
            for key in [key for key in self._pages if key.startswith(digest)]:
                self.bytes -= self._pages.pop(key)
                self._forget(key)

    def begin_scan(self) -> None:
        with self._lock:
            self._scanning = True
            self._added, self._removed = {}, set()

    def end_scan(self, found: Iterable[tuple[bytes, int]]) -> None:
        """`found`: (page, bytes), the oldest first."""
        pages = OrderedDict(found)
        with self._lock:
            for key in self._removed:
                pages.pop(key, None)
            for key, size in self._added.items():
                pages[key] = size
                pages.move_to_end(key)
            for key, _ in sorted(self._stamps.items(), key=lambda item: item[1]):
                if key in pages:
                    pages.move_to_end(key)
            self._pages = pages
            self.bytes = sum(pages.values())
            self.abandon_scan()

    def abandon_scan(self) -> None:
        self._scanning = False
        self._added, self._removed = {}, set()

    def _forget(self, key: bytes) -> None:
        self._stamps.pop(key, None)
        if self._scanning:
            self._added.pop(key, None)
            self._removed.add(key)
