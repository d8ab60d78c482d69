"""Pages between the node and an engine's host memory, for engines whose own threads ask for pages by hash (SGLang's HiCache).

Promises:
- A page is copied in only after it was verified where `verify` is on, and every page from the first bad, missing or late one on is reported
  as not read; the engine's memory of those holds anything.
- A page is committed only after all of it that this rank holds was copied out. Ranks write their rectangles independently; the node shows a
  page to readers when rectangles cover it.
- No call waits for the node longer than the fetch timeout after its last word, nor for room to write in longer than that.
- Several threads may call at once, on different pages. Nothing is copied outside a pin of the node's memory, nor after the connection over
  which its slots were leased or reserved.
- What `exists` staged is released when it was read, or STAGED_S after the last interest in it; more than `staged_bytes` of it at once is
  released oldest first. A page whose lease is gone is fetched anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from ..common.node.client import Arena, Fetch, NodeClient, Pending, Reserve
from ..common.node.protocol import HASH_BYTES, Rectangle
from ..common.page import PageLayout

log = logging.getLogger("mooncake_kv.hicache")

# Between the answer of `exists` and the reading lie one collective and one scheduling step of the engine.
STAGED_S = 5.0
# Pages are written in pieces, so that the first are sealed while the next are copied, and a small node has room for each piece.
WRITE_BYTES = 32 << 20
# Of the node's memory, at most this part is asked for at once: it keeps 1/8 for pages that are being written.
WRITE_SHARE = 32
# From the answer of the node's socket (60 us) to a millisecond.
FIRST_POLL_S = 5e-5
LAST_POLL_S = 1e-3
LOG_S = 10.0


class View(Protocol):
    """Copies between pages and the engine's memory, as kv_copy.BoundView does."""

    def gather(self, token_slots: np.ndarray, first_token: int, pages: Sequence[np.ndarray], /) -> None: ...

    def scatter(
        self, token_slots: np.ndarray, first_token: int, pages: Sequence[np.ndarray], check: Callable[[int], bool] | None = None, /
    ) -> int: ...

    def close(self) -> None: ...


class _Fetched(NamedTuple):
    """A fetch and the arena of its connection, taken before: of a later connection to the same node it would be another one, whose slots
    say nothing about these leases. When the connection is over, the arena cannot be pinned any more."""

    fetch: Fetch
    arena: Arena


class _Reserved(NamedTuple):
    """Likewise."""

    reserve: Reserve
    arena: Arena


class _Staged:
    """A fetch that `exists` began: `places[hash]` is the page's index in it. `read`: how many of them were read."""

    def __init__(self, fetched: _Fetched, hashes: Sequence[bytes], now: float) -> None:
        self.fetched = fetched
        self.fetch = fetched.fetch
        self.places = {page_hash: i for i, page_hash in enumerate(hashes)}
        self.read = 0
        self.readers = 0
        self.touched = now

    @property
    def over(self) -> bool:
        """Everything was read that there will be."""
        fetch = self.fetch
        return self.read >= (min(len(fetch.slots), len(self.places)) if fetch.done else len(self.places))


class HiCacheStore:
    """One rank. `view` is bound to this rank's rectangle, and copies between the engine's host memory and pages of `layout`, whose
    `page_tokens` is the engine's own page size. `writes` is False on all but the lowest rank of a group that holds the same heads: such a
    rank reports its pages as written without copying. `digest` is the namespace's, keyed if there is a pool secret."""

    def __init__(
        self,
        client: NodeClient,
        view: View,
        layout: PageLayout,
        *,
        digest: str,
        rectangle: Rectangle,
        writes: bool,
        verify: bool,
        timeout_s: float,
        staged_bytes: int = 0,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._client = client
        self._view = view
        self._layout = layout
        self._digest = digest
        self.page_tokens = layout.namespace.page_tokens
        whole = Rectangle(0, layout.namespace.num_layers, 0, layout.namespace.num_kv_heads)
        self._rectangles = [] if rectangle == whole else [rectangle]
        share = (rectangle.last_layer - rectangle.first_layer) * (rectangle.last_head - rectangle.first_head)
        self._part_bytes = layout.payload_bytes * share // (layout.namespace.num_layers * layout.namespace.num_kv_heads)
        self._writes = writes
        self._verify = verify
        self._timeout_s = timeout_s
        self._staged_bytes = staged_bytes
        self._lock = threading.Lock()  # for what follows and the counters; never held while copying or waiting
        self._staged: OrderedDict[int, _Staged] = OrderedDict()  # by request number, oldest interest first
        self._late: list[Reserve] = []  # nobody waits for these any more; their slots go back
        self._last_error = -LOG_S
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._keeper = threading.Thread(target=self._keep, name="mooncake-kv-hicache", daemon=True)
        self._keeper.start()

    # ---- the engine's threads ----------------------------------------------------------------------------------------------------

    def exists(self, hashes: Sequence[bytes]) -> int:
        """How many leading pages are stored; begins to stage them."""
        begin = time.perf_counter()
        if not hashes or not self._client.ready:
            return 0
        lookup = self._client.lookup(hashes)
        fetched = self._fetch(hashes)
        pages = lookup.pages if lookup is not None and self._answered(lookup) else 0
        if fetched is not None:
            if pages:
                self._keep_staged(fetched, hashes[:pages])
            else:
                self._client.release(fetched.fetch)
        self._count(asked_pages=len(hashes), found_pages=pages, look_us=_us_since(begin))
        return pages

    def get(self, hashes: Sequence[bytes], token_slots: np.ndarray, view: View | None = None) -> int:
        """Copy the leading run of these pages in. `token_slots`: where their tokens go, int64 [len(hashes) * page_tokens], in `view` if it
        is not the store's. Returns how many pages are there and good."""
        begin = time.perf_counter()
        good = 0
        try:
            good = self._get(hashes, np.asarray(token_slots, np.int64), view or self._view)
        except Exception as error:  # a fault at run time ends in recomputing, whatever it was
            self._complain("load", error)
        self._count(loaded_pages=good, missed_pages=len(hashes) - good, loaded_bytes=good * self._part_bytes, load_us=_us_since(begin))
        return good

    def set(self, hashes: Sequence[bytes], token_slots: np.ndarray, view: View | None = None) -> list[bool]:
        """Copy these pages out and commit them; for each, whether this rank's part is stored or on its way. Arguments as in `get`."""
        begin = time.perf_counter()
        if not self._writes:
            return [True] * len(hashes)
        done: list[bool] = []
        slots = np.asarray(token_slots, np.int64)
        try:
            self._set_all(hashes, slots, view or self._view, done)
        except Exception as error:
            self._complain("save", error)
        done += [False] * (len(hashes) - len(done))
        saved = sum(done)
        self._count(saved_pages=saved, unsaved_pages=len(done) - saved, save_us=_us_since(begin))
        return done

    def clear(self) -> None:
        """Forget all pages of the namespace in the node, nobody else's."""
        self._client.drop()

    def close(self) -> None:
        """Release what is staged and end the threads. No call may run or follow."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._keeper.join(2.0)
        with self._lock:
            staged = list(self._staged.values())
            self._staged.clear()
        for one in staged:
            self._client.release(one.fetch)
        self._view.close()

    # ---- reading -----------------------------------------------------------------------------------------------------------------

    def _get(self, hashes: Sequence[bytes], slots: np.ndarray, view: View) -> int:
        good = 0
        if staged := self._take_staged(hashes):
            try:
                first = staged.places[hashes[0]]
                good, bad = self._copy_in(staged.fetched, first, hashes, slots, view)
            finally:
                self._give_staged(staged, good)
            if bad:
                return good
        # Not staged, given up, or cut by a limit: ask again for the rest, as long as that leads anywhere.
        while good < len(hashes):
            fetched = self._fetch(hashes[good:])
            if fetched is None:
                break
            try:
                more, bad = self._copy_in(fetched, 0, hashes[good:], slots[good * self.page_tokens :], view)
            finally:
                self._client.release(fetched.fetch)
            good += more
            if bad or not more:
                break
        return good

    def _fetch(self, hashes: Sequence[bytes]) -> _Fetched | None:
        arena = self._client.arena()
        if arena is None:
            return None
        fetch = self._client.fetch(hashes, self._limit(), check=not self._verify)
        return None if fetch is None else _Fetched(fetch, arena)

    def _copy_in(self, fetched: _Fetched, first: int, hashes: Sequence[bytes], slots: np.ndarray, view: View) -> tuple[int, bool]:
        """Copy pages of a fetch, from its index `first` on, as they are staged. Returns how many, and whether it ended at one that was
        there and could not be read."""
        good, fetch = 0, fetched.fetch
        while good < len(hashes):
            wanted = first + good
            if not self._wait(partial(_has_more, fetch, wanted), fetch.expired):
                break
            ready = fetch.slots[wanted : first + len(hashes)]
            if not ready:
                break  # done, and no more came
            copied = self._scatter(fetched, ready, hashes[good : good + len(ready)], slots[good * self.page_tokens :], view)
            if copied is None:
                break  # the leases are gone
            good += copied
            self._count(**{f"loaded_tokens_{t}": n * self.page_tokens for t, n in Counter(fetch.tiers[wanted : wanted + copied]).items()})
            if copied < len(ready):
                return good, True
        return good, False

    def _scatter(self, fetched: _Fetched, node_slots: Sequence[int], hashes: Sequence[bytes], slots: np.ndarray, view: View) -> int | None:
        """How many leading pages were copied, None if none can be any more."""
        # Generation 0: the lease ends with this client's own connection, which outlives the pin.
        with fetched.arena.pin(fetched.fetch.epoch, 0) as pinned:
            if pinned is None:
                return None
            pages: list[np.ndarray] = []
            for slot in node_slots:
                page = pinned.slot(slot)
                if page is None:
                    break
                pages.append(page)
            mapped = len(pages)

            def check(i: int) -> bool:
                return self._layout.verify(pages[i], hashes[i], self._digest)

            good = view.scatter(slots[: mapped * self.page_tokens], 0, pages, check if self._verify else None)
            pages.clear()
        if good < mapped:
            self._client.suspect([hashes[good]])
            self._count(bad_pages=1)
        return good

    def _take_staged(self, hashes: Sequence[bytes]) -> _Staged | None:
        if not hashes:
            return None
        with self._lock:
            for staged in reversed(self._staged.values()):
                if hashes[0] in staged.places:
                    staged.readers += 1
                    return staged
        return None

    def _give_staged(self, staged: _Staged, pages: int) -> None:
        request, over = staged.fetch.request, False
        with self._changed:
            staged.readers -= 1
            staged.read += pages
            staged.touched = time.monotonic()
            over = not staged.readers and (staged.over or request not in self._staged)
            if over:
                self._staged.pop(request, None)
            elif request in self._staged:
                self._staged.move_to_end(request)
            self._changed.notify_all()
        if over:
            self._client.release(staged.fetch)

    def _keep_staged(self, fetched: _Fetched, hashes: Sequence[bytes]) -> None:
        with self._changed:
            self._staged[fetched.fetch.request] = _Staged(fetched, hashes, time.monotonic())
            held = sum(len(staged.places) for staged in self._staged.values()) * self._layout.slot_bytes
            over: list[_Staged] = []
            for request, staged in list(self._staged.items())[:-1]:
                if held <= self._limit():
                    break
                if not staged.readers:
                    over.append(self._staged.pop(request))
                    held -= len(staged.places) * self._layout.slot_bytes
            self._changed.notify_all()
        for staged in over:
            self._client.release(staged.fetch)

    def _limit(self) -> int:
        return self._staged_bytes or self._client.dram_bytes // 4

    # ---- writing -----------------------------------------------------------------------------------------------------------------

    def _write_step(self) -> int:
        """Pages written at once."""
        room = min(WRITE_BYTES, self._client.dram_bytes // WRITE_SHARE)
        return max(1, room // self._layout.slot_bytes)

    def _set_all(self, hashes: Sequence[bytes], slots: np.ndarray, view: View, done: list[bool]) -> None:
        step = self._write_step()
        parts = [hashes[first : first + step] for first in range(0, len(hashes), step)]
        ahead = self._reserve(parts[0]) if parts else None
        try:
            for i, part in enumerate(parts):
                # While this part is copied, the node answers for the next.
                reserved, ahead = ahead, self._reserve(parts[i + 1]) if i + 1 < len(parts) else None
                first = len(done) * self.page_tokens
                done += self._set(reserved, part, slots[first : first + len(part) * self.page_tokens], view)
                if not done[-1]:
                    break  # pages behind a gap are of little use, and there was no room
        finally:
            if ahead is not None:
                self._give_up(ahead.reserve)

    def _set(self, reserved: _Reserved | None, hashes: Sequence[bytes], slots: np.ndarray, view: View) -> list[bool]:
        done = [False] * len(hashes)
        left = list(range(len(hashes)))
        deadline = time.monotonic() + self._timeout_s
        poll = FIRST_POLL_S
        while left and reserved is not None:
            reserve = reserved.reserve
            if not self._answered(reserve):
                self._give_up(reserve)
                break
            given = [(i, slot) for i, slot in zip(left, reserve.slots, strict=True) if slot >= 0]
            stored = [i for i, slot in zip(left, reserve.slots, strict=True) if slot == -1]
            written = self._write(reserved, given, hashes, slots, view) if given else True
            for i in [*stored, *(i for i, _ in given if written)]:
                done[i] = True
            if not written:
                break
            left = [i for i in left if not done[i]]
            if left:
                # No room: what is being sealed gives its share back, 1 ms for 10 MB.
                if given or stored:
                    poll = FIRST_POLL_S
                if time.monotonic() > deadline:
                    self._count(no_room=1)
                    break
                time.sleep(poll)
                poll = min(2 * poll, 10 * LAST_POLL_S)
                reserved = self._reserve([hashes[i] for i in left])
        return done

    def _reserve(self, hashes: Sequence[bytes]) -> _Reserved | None:
        arena = self._client.arena()
        if arena is None:
            return None
        reserve = self._client.reserve(hashes)
        return None if reserve is None else _Reserved(reserve, arena)

    def _give_up(self, reserve: Reserve) -> None:
        """Its slots, should they come, go back."""
        with self._changed:
            self._late.append(reserve)
            self._changed.notify_all()

    def _write(self, reserved: _Reserved, given: Sequence[tuple[int, int]], hashes: Sequence[bytes], slots: np.ndarray, view: View) -> bool:
        """Copy pages (index, node's slot) out and commit them, all or none."""
        good, reserve = False, reserved.reserve
        try:
            good = self._gather(reserved, given, slots, view)
        finally:
            if good:
                self._client.commit(reserve.generation, [(hashes[i], slot) for i, slot in given], self._rectangles)
                self._count(saved_bytes=len(given) * self._part_bytes)
            else:
                self._client.discard(reserve.generation, [slot for _, slot in given])
        return good

    def _gather(self, reserved: _Reserved, given: Sequence[tuple[int, int]], slots: np.ndarray, view: View) -> bool:
        with reserved.arena.pin(reserved.reserve.epoch, 0) as pinned:
            if pinned is None:
                return False
            pages = [page for _, slot in given if (page := pinned.slot(slot)) is not None]
            if len(pages) < len(given):
                return False
            chosen = slots.reshape(-1, self.page_tokens)[[i for i, _ in given]].reshape(-1)
            view.gather(chosen, 0, pages)
            pages.clear()
        return True

    # ---- both --------------------------------------------------------------------------------------------------------------------

    def _answered(self, handle: Pending) -> bool:
        """Wait for the answer. False when there is none, or none in time."""
        return self._wait(lambda: handle.done, handle.expired) and not handle.failed

    @staticmethod
    def _wait(ready: Callable[[], bool], expired: Callable[[float], bool]) -> bool:
        poll = FIRST_POLL_S
        while not ready():
            if expired(time.monotonic()):
                return ready()
            time.sleep(poll)
            poll = min(1.5 * poll, LAST_POLL_S)
        return True

    def _keep(self) -> None:
        """Release what nobody came for, until the store is closed."""
        while True:
            over: list[_Staged] = []
            with self._changed:
                wait = STAGED_S if self._staged else None
                self._changed.wait(0.1 if self._late else wait)
                if self._closed:
                    return
                old = time.monotonic() - STAGED_S
                for request, staged in list(self._staged.items()):
                    if staged.touched <= old and not staged.readers:
                        over.append(self._staged.pop(request))
                late = [reserve for reserve in self._late if reserve.done]
                self._late = [reserve for reserve in self._late if not reserve.done]
            for staged in over:
                self._client.release(staged.fetch)
            for reserve in late:
                if not reserve.failed:
                    self._client.discard(reserve.generation, [slot for slot in reserve.slots if slot >= 0])

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self.counters.update(numbers)

    def _complain(self, what: str, error: Exception) -> None:
        now = time.monotonic()
        self._count(**{f"failed_{what}s": 1})
        if now - self._last_error > LOG_S:
            self._last_error = now
            log.exception("a %s failed and counts as a miss: %s", what, error)


def _us_since(begin: float) -> int:
    return int((time.perf_counter() - begin) * 1e6)


def _has_more(fetch: Fetch, pages: int) -> bool:
    return len(fetch.slots) > pages or fetch.done


def page_hash(key: str) -> bytes | None:
    """A storage key as a page hash, None if it is none."""
    try:
        raw = bytes.fromhex(key)
    except (TypeError, ValueError):
        return None
    return raw if len(raw) == HASH_BYTES else None
