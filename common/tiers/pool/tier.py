"""The pool as a tier: pages as objects in Mooncake's store, read into and written from slots without a copy of ours.

Promises:
- `read` counts a page only if every object of it was delivered in full length; its bytes are for the caller to verify. `write` says True
  only for a page of which each object was stored or is stored already with its size; the one exception is an object that somebody else
  begins to write in the 100 us between our look and our put.
- A key that said yes and gave nothing (owner dead or hung, evicted in between, wrong length, bytes that did not match) is not asked for
  again for a while.
- A key whose writer died in the middle (unwritable for 30 s, while Mooncake's put says that all is well) is taken over after
  TAKE_OVER_S.
- Waits are bounded: one native call each (ENVIRONMENT in wheel.py has their deadlines), FULL_S for room, TAKE_OVER_S for other writers.

An owner that has not been heard from lately is first asked whether it lives (owners.py). Never uses remove_by_regex, which can crash the
master."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...page import TRAILER_BYTES, PageLayout
from ..base import TierDown
from . import wheel
from .checks import P2P, PoolSettings
from .client import EXISTS, FULL, LEASE_LOST, TRANSFER_FAILED, PoolClient, Replicas
from .owners import Owners

log = logging.getLogger(__name__)

BATCH_BYTES = 64 << 20
# The master's default is 10 s; we are not told what it is set to, so this becomes less when one expires. A transfer may take a third.
LEASE_S = 5.0
FULL_S = 1.0
FULL_STEP_S = 0.1
TAKE_OVER_S = 1.0
TAKE_OVER_STEP_S = 0.05
# A dead owner's keys exist for about 11 s (client_ttl); what does not match its checksum has been removed.
GONE_S = 12.0
# Where another replica is left.
SPARE_S = 2.0
BAD_S = 60.0
WRITE_PAUSE_S = 1.0
WRITE_PAUSE_MAX_S = 16.0
MAX_NEGATIVE = 100_000
MAX_REMEMBERED = 100_000
# Keys that one round of a lookup asks for.
FAN_OUT = 16
_WRITES = {"auto": ("second_use", "prefix_end"), "second_use": ("second_use",), "prefix_end": ("prefix_end",)}
OWNERS_FILE = "pool-owners"


class _Objects(NamedTuple):
    """Of consecutive pages, each with `count` objects."""

    keys: list[str]
    addresses: list[int]
    sizes: list[int]


class PoolTier:
    """See `Tier`. May be used by any number of threads."""

    name = "pool"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: what Keeper.ensure() returned. Raises ConfigError or TierDown."""
        self._settings = PoolSettings(settings, settings.get("sources", {}))
        self.flavour = wheel.installed_flavour()
        self._client = PoolClient(self._settings, 0)
        try:
            if segment := settings.get("segment"):
                self._client.probe(segment)
        except TierDown:
            self._client.retire()
            raise
        folder = settings.get("folder")
        # With a metadata server the endpoints are names in that, and nothing to connect to.
        self._owners = Owners(Path(folder) / OWNERS_FILE if folder else None, asks=self._settings.metadata == P2P)
        policy = self._settings.write_policy
        self._writes = _WRITES.get(policy)
        self._layouts: dict[str, PageLayout] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        # (digest, page hash) -> when it may be asked for again.
        self._negative: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        # What was written or read lately, for `drop`.
        self._remembered: dict[str, OrderedDict[bytes, None]] = {}
        self._counts: Counter[str] = Counter()
        # Bytes per second; of both directions the mean over the last batches.
        self._rates = {"read": 1e9, "write": 1e9}
        self._lease_s = LEASE_S
        self._write_after = 0.0
        self._write_pause_s = WRITE_PAUSE_S

    # ---- memory and namespaces ----------------------------------------------------------------------------------------------------

    def add_memory(self, address: int, size: int) -> None:
        """Slots will lie in these bytes."""
        self._client.register_memory(address, size)

    def drop_memory(self, address: int) -> None:
        self._client.unregister(address)

    def add_space(self, digest: str, layout: PageLayout) -> None:
        self._layouts[digest] = layout

    # ---- lookup -------------------------------------------------------------------------------------------------------------------

    def leading(self, digest: str, hashes: Sequence[bytes]) -> int:
        """Galloping in few round trips: pages 1, 2, 4, ... in one, then FAN_OUT places between the last hit and the first miss. One object
        stands for a page."""
        layout = self._layouts[digest]
        first = layout.objects[0]
        low, high = 0, self._asked(digest, hashes)  # pages below `low` are there, page `high` is not
        begin = time.monotonic()
        places = [(1 << i) - 1 for i in range(high.bit_length()) if (1 << i) - 1 < high]
        if places and places[-1] != high - 1:
            places.append(high - 1)
        while places:
            found = self._client.exists([layout.object_key(digest, hashes[place], first) for place in places])
            self._counts["probes"] += len(places)
            hit = next((i for i, there in enumerate(found) if not there), len(places))
            low = places[hit - 1] + 1 if hit else low
            high = places[hit] if hit < len(places) else high
            step = max(1, -(-(high - low) // FAN_OUT))
            places = list(range(low + step - 1, high, step)) if high > low else []
        self._add(lookups=1, pages_found=low, lookup_us=round((time.monotonic() - begin) * 1e6))
        return low

    def _asked(self, digest: str, hashes: Sequence[bytes]) -> int:
        """How many pages come before the first that is not to be asked for."""
        if not self._negative:
            return len(hashes)
        now = time.monotonic()
        for i, page_hash in enumerate(hashes):
            until = self._negative.get((digest, page_hash))
            if until is not None and until > now:
                self._add(negative_hits=1)
                return i
        return len(hashes)

    # ---- read ---------------------------------------------------------------------------------------------------------------------

    def read(self, digest: str, hashes: Sequence[bytes], slots: Sequence[np.ndarray]) -> int:
        layout = self._layouts[digest]
        count = self._asked(digest, hashes)
        done = 0
        try:
            while done < count:
                pages = self._batch(layout, count - done, "read")
                good, more = self._read_batch(digest, layout, hashes[done : done + pages], slots[done : done + pages])
                done += good
                if not more:
                    break
        except TierDown:
            if not done:
                raise
        self._add(pages_read=done, bytes_read=done * _page_bytes(layout), read_calls=1, pages_missed=len(hashes) - done)
        self._remember(digest, hashes[:done])
        return done

    def _read_batch(self, digest: str, layout: PageLayout, hashes: Sequence[bytes], slots: Sequence[np.ndarray]) -> tuple[int, bool]:
        """(leading pages read, whether more may follow)"""
        objects = _objects(digest, layout, hashes, slots)
        per_page = len(layout.objects)
        found = self._client.replicas(objects.keys)
        self._owners.ask({owner for replicas in found if replicas for owner in replicas.owners})
        first_bad = next((i for i, size in enumerate(objects.sizes) if not self._usable(found[i], size)), len(found))
        pages = first_bad // per_page
        if pages < len(hashes):
            self._judge(digest, layout, hashes[pages], found[first_bad], objects.sizes[first_bad])
        good, more = self._transfer(digest, layout, hashes[:pages], objects, found) if pages else (0, False)
        return good, more and (good < pages or pages == len(hashes))

    def _transfer(
        self, digest: str, layout: PageLayout, hashes: Sequence[bytes], objects: _Objects, found: Sequence[Replicas | None]
    ) -> tuple[int, bool]:
        """Reads these pages, the first of `objects`. Returns how many leading ones came in full, and whether the next may be asked for; if
        not, remembers why."""
        per_page = len(layout.objects)
        start, end = 0, len(hashes) * per_page
        owners = {owner for replicas in found[:end] if replicas for owner in replicas.owners}
        for last_try in (False, True):
            begin = time.monotonic()
            self._owners.begin(owners)
            try:
                codes = self._client.get(objects.keys[start:end], objects.addresses[start:end], objects.sizes[start:end])
            finally:
                self._owners.end(owners)
            spent = time.monotonic() - begin
            bad = next((start + i for i, code in enumerate(codes) if code != objects.sizes[start + i]), end)
            if bad == end:
                self._owners.answered(owners)
                self._measure("read", sum(objects.sizes[start:end]), spent)
                return end // per_page, True
            code = codes[bad - start]
            if code not in LEASE_LOST or last_try:
                break
            # A get begins with asking again. It took longer than the lease, so less of it this time and from now on.
            self._add(leases_lost=1)
            self._lease_s = min(self._lease_s, spent) / 2
            page = bad // per_page
            start, end = page * per_page, (page + self._batch(layout, len(hashes) - page, "read")) * per_page
        page = bad // per_page
        replicas = found[bad]
        # Which replica it reads Mooncake decides, and may choose a dead one as long as the master believes in it.
        spare = code == TRANSFER_FAILED and replicas is not None and len(replicas.owners) > 1
        self._fail(digest, hashes[page], SPARE_S if spare else GONE_S)
        if code == TRANSFER_FAILED:
            self._owners.failed(replicas.owners if replicas and replicas.owners else owners)
            self._add(transfers_failed=1)
        elif code >= 0:
            self._add(short_objects=1)
            self._remove(digest, layout, [hashes[page]])
        else:
            self._add(objects_vanished=1)
        return page, False

    def _usable(self, replicas: Replicas | None, size: int) -> bool:
        if replicas is None or replicas.size not in (size, -1):
            return False
        return not replicas.owners or any(map(self._owners.usable, replicas.owners))

    def _judge(self, digest: str, layout: PageLayout, page_hash: bytes, replicas: Replicas | None, size: int) -> None:
        """Why a page is not read: missing, of another size, or its owner is not to be asked now."""
        if replicas is None:
            self._add(objects_missing=1)
        elif replicas.size not in (size, -1):
            self._add(short_objects=1)
            self._fail(digest, page_hash, BAD_S)
            self._remove(digest, layout, [page_hash])
        else:
            self._add(owners_avoided=1)
            self._fail(digest, page_hash, 1.0)

    # ---- write --------------------------------------------------------------------------------------------------------------------

    def write(self, digest: str, hashes: Sequence[bytes], slots: Sequence[np.ndarray], why: Sequence[str]) -> list[bool]:
        layout = self._layouts[digest]
        stored = [False] * len(hashes)
        wanted = [i for i in range(len(hashes)) if self._writes is None or why[i] in self._writes]
        self._add(pages_not_wanted=len(hashes) - len(wanted))
        begin = 0
        while begin < len(wanted):
            if time.monotonic() < self._write_after:
                self._add(pages_dropped_paused=len(wanted) - begin)
                break
            part = wanted[begin : begin + self._batch(layout, len(wanted) - begin, "write")]
            begin += len(part)
            objects = _objects(digest, layout, [hashes[i] for i in part], [slots[i] for i in part])
            good = self._write_batch(objects)
            per_page = len(layout.objects)
            written = []
            for place, i in enumerate(part):
                stored[i] = all(good[place * per_page : (place + 1) * per_page])
                if stored[i]:
                    written.append(hashes[i])
            self._add(pages_written=len(written), pages_dropped=len(part) - len(written), bytes_written=len(written) * _page_bytes(layout))
            self._remember(digest, written)
            self._forget_failures(digest, written)
        return stored

    def _write_batch(self, objects: _Objects) -> list[bool]:
        """For each object whether it is stored now."""
        good = [False] * len(objects.keys)
        # One thread at a time: claims are the process's, not the thread's.
        with self._writing:
            codes = self._client.claim(objects.keys, objects.sizes)
            lost = self._put(objects, [i for i, code in enumerate(codes) if code == 0 or code in FULL], good)
            if others := [i for i, code in enumerate(codes) if code == EXISTS] + lost:
                self._settle(objects, others, good)
        return good

    def _put(self, objects: _Objects, places: list[int], good: list[bool], *, replace: bool = False) -> list[int]:
        """Put these, as long as there is room and each segment answers. Marks those that were stored; returns those that another writer
        has taken from us meanwhile (codes of many kinds)."""
        deadline = time.monotonic() + FULL_S
        lost: list[int] = []
        failed_once = False
        while places:
            begin = time.monotonic()
            codes = self._client.put(*_select(objects, places), replace=replace)
            done = [place for place, code in zip(places, codes, strict=True) if code == 0]
            full = [place for place, code in zip(places, codes, strict=True) if code in FULL]
            failed = [place for place, code in zip(places, codes, strict=True) if code == TRANSFER_FAILED]
            for place in done:
                good[place] = True
            lost += set(places).difference(done, full, failed)
            spent = time.monotonic() - begin
            if done and not full and not failed:
                self._measure("write", sum(objects.sizes[place] for place in done), spent)
                self._write_pause_s = WRITE_PAUSE_S
            if failed:
                self._add(puts_failed=len(failed))
                if failed_once or spent > 0.5:
                    # New objects go to a dead segment, too, until the master has noticed; a frozen one costs a second an object.
                    self._write_after = time.monotonic() + self._write_pause_s
                    self._write_pause_s = min(self._write_pause_s * 2, WRITE_PAUSE_MAX_S)
                    return lost
                failed_once = True
            places = full + failed
            if full:
                self._add(puts_full=len(full))
                if time.monotonic() + FULL_STEP_S > deadline:
                    return lost
                # Eviction is asynchronous: it begins with the refusal.
                time.sleep(FULL_STEP_S)
        return lost

    def _settle(self, objects: _Objects, places: list[int], good: list[bool]) -> None:
        """Keys that somebody has: stored, of another size or with an owner that is gone, being written, or left by a writer that died."""
        deadline = time.monotonic() + TAKE_OVER_S
        useless: list[int] = []
        while True:
            found = self._client.replicas([objects.keys[place] for place in places])
            unfinished = []
            for place, replicas in zip(places, found, strict=True):
                if replicas is None:
                    unfinished.append(place)
                elif self._usable(replicas, objects.sizes[place]):
                    good[place] = True
                    self._add(puts_existed=1)
                else:
                    useless.append(place)
            places = unfinished
            if not places or time.monotonic() > deadline:
                break
            time.sleep(TAKE_OVER_STEP_S)
        if useless:
            # Not replaced in place, which would need the segment of an owner that is gone.
            self._client.remove([objects.keys[place] for place in useless])
            self._add(objects_replaced=len(useless))
        if places:
            self._add(keys_taken_over=len(places))
        # A live writer that is overtaken spoils the object at worst, and the checksum in its trailer says so.
        if lost := self._put(objects, useless + places, good, replace=True):
            found = self._client.replicas([objects.keys[place] for place in lost])
            for place, replicas in zip(lost, found, strict=True):
                good[place] = self._usable(replicas, objects.sizes[place])

    # ---- bad, drop, end -----------------------------------------------------------------------------------------------------------

    def bad(self, digest: str, hashes: Sequence[bytes]) -> None:
        self._add(pages_bad=len(hashes))
        for page_hash in hashes:
            self._fail(digest, page_hash, BAD_S)
        self._remove(digest, self._layouts[digest], hashes)

    def drop(self, digest: str) -> None:
        """Removes what this process has lately written or read of the namespace; the rest stays until the pool evicts it. Who needs all
        of it unreachable changes `weights_epoch`."""
        with self._lock:
            remembered = list(self._remembered.pop(digest, ()))
        layout = self._layouts.get(digest)
        if layout is not None and remembered:
            self._remove(digest, layout, remembered)

    def stats(self) -> dict[str, int | float | str]:
        with self._lock:
            counts: dict[str, int | float | str] = dict(self._counts)
        return counts | {
            "flavour": self.flavour,
            "read_bytes_per_s": round(self._rates["read"]),
            "write_bytes_per_s": round(self._rates["write"]),
            "owners_suspected": self._owners.suspects(),
            "negative": len(self._negative),
        }

    def close(self) -> None:
        self._client.retire()

    def _remove(self, digest: str, layout: PageLayout, hashes: Sequence[bytes]) -> None:
        keys = [layout.object_key(digest, page_hash, spec) for page_hash in hashes for spec in layout.objects]
        for begin in range(0, len(keys), 1000):
            self._client.remove(keys[begin : begin + 1000])

    # ---- memory of what happened --------------------------------------------------------------------------------------------------

    def _fail(self, digest: str, page_hash: bytes, seconds: float) -> None:
        with self._lock:
            self._negative[digest, page_hash] = time.monotonic() + seconds
            self._negative.move_to_end((digest, page_hash))
            if len(self._negative) > MAX_NEGATIVE:
                self._negative.popitem(last=False)

    def _forget_failures(self, digest: str, hashes: Sequence[bytes]) -> None:
        if self._negative:
            with self._lock:
                for page_hash in hashes:
                    self._negative.pop((digest, page_hash), None)

    def _remember(self, digest: str, hashes: Sequence[bytes]) -> None:
        with self._lock:
            remembered = self._remembered.setdefault(digest, OrderedDict())
            for page_hash in hashes:
                remembered[page_hash] = None
                remembered.move_to_end(page_hash)
            while len(remembered) > MAX_REMEMBERED:
                remembered.popitem(last=False)

    def _add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _measure(self, what: str, size: int, seconds: float) -> None:
        if size >= 1 << 20 and seconds > 0:
            self._rates[what] += 0.2 * (size / seconds - self._rates[what])

    def _batch(self, layout: PageLayout, pages: int, what: str) -> int:
        """Pages of one native call."""
        limit = min(BATCH_BYTES, self._rates[what] * self._lease_s / 3)
        return max(1, min(pages, int(limit // _page_bytes(layout))))


def _page_bytes(layout: PageLayout) -> int:
    """What of a page is stored: payloads and trailers."""
    return layout.payload_bytes + TRAILER_BYTES * len(layout.objects)


def _objects(digest: str, layout: PageLayout, hashes: Sequence[bytes], slots: Sequence[np.ndarray]) -> _Objects:
    keys, addresses, sizes = [], [], []
    page_sizes = [spec.payload_bytes + TRAILER_BYTES for spec in layout.objects]
    for page_hash, slot in zip(hashes, slots, strict=True):
        if slot.dtype != np.uint8 or slot.shape != (layout.slot_bytes,) or not slot.flags.c_contiguous:
            raise ValueError(f"a slot is {layout.slot_bytes} contiguous uint8, not {slot.dtype} of shape {slot.shape}")
        base = int(slot.__array_interface__["data"][0])
        keys += [layout.object_key(digest, page_hash, spec) for spec in layout.objects]
        addresses += [base + spec.offset for spec in layout.objects]
        sizes += page_sizes
    return _Objects(keys, addresses, sizes)


def _select(objects: _Objects, places: Sequence[int]) -> Iterator[list[Any]]:
    return iter([[column[place] for place in places] for column in objects])
