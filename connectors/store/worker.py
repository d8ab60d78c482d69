"""Worker half: copies planned pages between the node's arena and the engine's blocks.

Promises: nothing is read from or written to a slot outside `Arena.pin`, so that a mapping cannot go away, and a slot cannot be reused,
under a copy; a page that is missing, unmapped or fails its check ends the load there, and every block from there on is reported invalid,
never left half-written and called good; no call waits for the node.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from ...common.kv_copy import BoundView
from ...common.node.client import NodeClient
from ...common.page import PageLayout
from .messages import Load, Plan, Report, Save

log = logging.getLogger("mooncake_kv.worker")


class WorkerHalf:
    """One rank. `view` is bound to this rank's rectangle of the page; `writes` is False on all but the lowest rank of a group that holds
    the same heads (MLA, TP > KV heads): such a rank reports its saves as done without copying. `verify` checks every page against its
    checksum before it is copied in. `lacks(weights)`: has the engine loaded other weights than a load or save stands for?"""

    def __init__(
        self,
        client: NodeClient,
        view: BoundView,
        layout: PageLayout,
        *,
        block_tokens: int,
        writes: bool = True,
        verify: bool = True,
        lacks: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._client = client
        self._view = view
        self._layout = layout
        self._page = layout.namespace.page_tokens
        self._block = block_tokens
        self._writes = writes
        self._verify = verify
        self._lacks = lacks
        self._last_error = 0.0

    def load(self, plan: Plan, report: Report) -> set[int]:
        """Before the forward pass: first what finished requests left to save, then the loads. Returns the blocks whose load failed."""
        self._save_all(plan.last_saves, report)
        invalid: set[int] = set()
        for load in plan.loads:
            begin = time.perf_counter()
            try:
                good = 0 if self._refuses(load, report) else self._load(load, plan.digest)
            except Exception as error:  # a fault at run time ends in recomputing, whatever it was
                self._complain("load", error)
                good = 0
            end = min((load.first_page + good) * self._page, load.last_token)
            if end < load.last_token:
                first_bad = max(end, load.first_token) // self._block - load.first_block
                invalid.update(load.block_ids[first_bad:])
                self.counters["failed_loads"] += 1
            self.counters["loads"] += 1
            self.counters["loaded_bytes"] += good * self._layout.payload_bytes
            self.counters["load_us"] += int((time.perf_counter() - begin) * 1e6)
        return invalid

    def save(self, plan: Plan, report: Report) -> None:
        """After the forward pass: copy the pages that this step completed."""
        self._save_all(plan.saves, report)

    def close(self) -> None:
        """End the copy threads; nothing may be copied afterwards."""
        self._view.close()

    def _save_all(self, saves: list[Save], report: Report) -> None:
        for save in saves:
            begin = time.perf_counter()
            try:
                done = not self._refuses(save, report) and (not self._writes or self._save(save))
            except Exception as error:
                self._complain("save", error)
                done = False
            if done:
                report.saved[save.op] = 1
                self.counters["saved_bytes"] += len(save.slots) * self._layout.payload_bytes
            else:
                self.counters["failed_saves"] += 1
            self.counters["save_us"] += int((time.perf_counter() - begin) * 1e6)

    def _refuses(self, copy: Load | Save, report: Report) -> bool:
        if not copy.weights or not self._lacks(copy.weights):
            return False
        report.refused.add(copy.weights)
        return True

    def _load(self, load: Load, digest: str) -> int:
        """Number of leading pages that were copied in."""
        arena = self._client.arena()
        if arena is None:
            return 0
        with arena.pin(load.epoch, load.generation) as pinned:
            if pinned is None:
                return 0
            pages: list[np.ndarray] = []
            for slot in load.slots:
                page = pinned.slot(slot)
                if page is None:
                    break
                pages.append(page)
            end = min((load.first_page + len(pages)) * self._page, load.last_token)
            if end <= load.first_token:
                return 0

            def check(i: int) -> bool:
                return self._layout.verify(pages[i], load.hashes[i], digest)

            slots = self._token_slots(load, load.first_token, end)
            return self._view.scatter(slots, load.first_token, pages, check if self._verify else None)

    def _save(self, save: Save) -> bool:
        arena = self._client.arena()
        if arena is None:
            return False
        with arena.pin(save.epoch, save.generation) as pinned:
            if pinned is None:
                return False
            pages = []
            for slot in save.slots:
                page = pinned.slot(slot)
                if page is None:
                    return False
                pages.append(page)
            first = save.first_page * self._page
            self._view.gather(self._token_slots(save, first, first + len(pages) * self._page), first, pages)
            return True

    def _token_slots(self, copy: Load | Save, first: int, last: int) -> np.ndarray:
        """Engine token slots (block id * block size + offset) of tokens [first, last), int64 [last - first]."""
        blocks = np.asarray(copy.block_ids, dtype=np.int64)
        slots = (blocks[:, None] * self._block + np.arange(self._block)).reshape(-1)
        begin = first - copy.first_block * self._block
        return slots[begin : begin + last - first]

    def _complain(self, what: str, error: Exception) -> None:
        now = time.monotonic()
        if now - self._last_error > 10:
            self._last_error = now
            log.exception("a %s failed and is recomputed: %s", what, error)
