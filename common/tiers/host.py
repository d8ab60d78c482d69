"""The process in which one slow tier lives: takes jobs from the node, runs them in threads, checks what was read.

Promises:
- Every job is answered once, also one that failed, and only when no thread of ours touches its slots any more.
- A page that was read counts only after its trailers matched; what does not match is reported to the tier, unless that checks itself.
- A namespace is dropped after the writes that came before and before those that come after: one thread does all writes and drops.
- Ends at once when the node is gone; when the node closes the socket, after the tier's `close`, within CLOSE_S.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import cast

import numpy as np

from ..errors import ConfigError
from ..identity import KVNamespace
from ..node import child_side
from ..node.child_side import Extents, Map, Space, Unmap
from ..node.protocol import SLOT_SHIFT, unpack_hashes
from ..page import PageLayout
from .base import NoticesUse, RegistersMemory, Stats, Tier, TierDown, open_tier, with_low_priority
from .messages import Open, Opened, Report, Result, TierJob, Touch, decode_to_tier

READ_NICE = 10
WRITE_NICE = 15
POPULATE_NICE = 19
READ_THREADS = 4
REPORT_S = 1.0
CLOSE_S = 1.5
# Threads that copy and check need the lock rarely, but those that answer should not wait 5 ms for it.
SWITCH_S = 0.0005


class _Flow:
    """What has gone through in one direction. The rate counts the time during which at least one call was running."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._running = 0
        self._since = 0.0
        self._busy_s = 0.0
        self._calls = 0
        self._call_s = 0.0
        self._pages = 0
        self._bytes = 0

    def begin(self) -> float:
        now = time.perf_counter()
        with self._lock:
            if not self._running:
                self._since = now
            self._running += 1
        return now

    def end(self, began: float, pages: int, count: int) -> None:
        now = time.perf_counter()
        with self._lock:
            self._running -= 1
            if not self._running:
                self._busy_s += now - self._since
            self._calls += 1
            self._call_s += now - began
            self._pages += pages
            self._bytes += count

    def stats(self) -> Stats:
        with self._lock:
            return {
                f"{self._name}_pages": self._pages,
                f"{self._name}_bytes": self._bytes,
                f"{self._name}_busy_s": round(self._busy_s, 6),
                f"{self._name}_calls": self._calls,
                f"{self._name}_call_s": round(self._call_s, 6),
            }


class Host:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tier: Tier | None = None
        self._extents = Extents()
        self._layouts: dict[str, PageLayout] = {}
        # Extents that could not be mapped, and why.
        self._unusable: dict[int, str] = {}
        self._look = ThreadPoolExecutor(2, "look")
        # What moves bytes makes way for the node's event loop and for lookups, which have a tenth of a second; nobody waits for writes.
        self._read = ThreadPoolExecutor(READ_THREADS, "read", os.nice, (READ_NICE,))
        self._write = ThreadPoolExecutor(1, "write", os.nice, (WRITE_NICE,))
        self._populate = ThreadPoolExecutor(1, "populate", os.nice, (POPULATE_NICE,))
        self._flows = {"read": _Flow("read"), "write": _Flow("write")}
        self._pages_bad = 0

    def run(self) -> None:
        """Returns when the node has closed its end."""
        child_side.serve(self._sock, self._handle)
        if self._tier is not None:
            last = threading.Thread(target=self._tier.close, daemon=True)
            last.start()
            last.join(CLOSE_S)

    def _handle(self, data: bytes, fds: list[int]) -> None:
        message = decode_to_tier(data)
        if isinstance(message, TierJob):
            pool = self._read if message.kind == "read" else self._write if message.kind in ("write", "drop") else self._look
            pool.submit(self._work, message)
        elif isinstance(message, Touch):
            self._write.submit(self._touch, message)
        elif isinstance(message, Map):
            self._map(message, fds[0])
        elif isinstance(message, Unmap):
            if not self._unusable.pop(message.extent, "") and hasattr(self._tier, "drop_memory"):
                cast(RegistersMemory, self._tier).drop_memory(self._extents.address(message.extent))
            self._extents.unmap(message.extent)
        elif isinstance(message, Space):
            if message.digest not in self._layouts:
                self._layouts[message.digest] = PageLayout(KVNamespace.decode(message.encoded), message.key)
            self._opened.add_space(message.digest, self._layouts[message.digest])
        else:
            self._open(message)

    def _map(self, message: Map, fd: int) -> None:
        try:
            address = self._extents.map(message.extent, message.size, fd)
            if hasattr(self._tier, "add_memory"):
                cast(RegistersMemory, self._tier).add_memory(address, message.size)
        except (OSError, TierDown) as error:
            # No address space, no descriptor, or Mooncake does not take it.
            self._extents.unmap(message.extent)
            self._unusable[message.extent] = f"{message.size} bytes of the node's memory cannot be used: {error}"
        else:
            self._populate.submit(self._extents.populate, message.extent)
        finally:
            os.close(fd)

    def _slots(self, job: TierJob, layout: PageLayout) -> list[np.ndarray]:
        for slot in job.slots:
            if why := self._unusable.get(slot >> SLOT_SHIFT):
                raise TierDown(why)
        return [self._extents.slot(slot, layout.slot_bytes) for slot in job.slots]

    @property
    def _opened(self) -> Tier:
        if self._tier is None:
            raise TierDown("the tier is not open")
        return self._tier

    def _open(self, message: Open) -> None:
        try:
            # Mooncake's threads move bytes, too.
            self._tier = with_low_priority(lambda: open_tier(message.tier, message.settings), READ_NICE)
        except (TierDown, ConfigError) as down:
            child_side.send(self._sock, Opened(str(down)))
            return
        child_side.send(self._sock, Opened())
        threading.Thread(target=self._report, name="report", daemon=True).start()

    def _work(self, job: TierJob) -> None:
        try:
            result = _CALLS[job.kind](self, self._opened, job)
        except TierDown as down:
            result = Result(job.job, down=str(down) or "the tier is down")
        except Exception as error:
            result = Result(job.job, error=f"{job.kind}: {error!r}")
        child_side.send(self._sock, result)

    def _do_leading(self, tier: Tier, job: TierJob) -> Result:
        return Result(job.job, tier.leading(job.digest, unpack_hashes(job.hashes)))

    def _do_probe(self, tier: Tier, job: TierJob) -> Result:
        tier.leading(job.digest, [bytes(32)])
        return Result(job.job)

    def _do_read(self, tier: Tier, job: TierJob) -> Result:
        layout, flow = self._layouts[job.digest], self._flows["read"]
        hashes = unpack_hashes(job.hashes)
        slots = self._slots(job, layout)
        began, count = flow.begin(), 0
        try:
            count = tier.read(job.digest, hashes, slots)
            good = count
            if not getattr(tier, "checks", False):
                good = next((i for i in range(count) if not layout.verify(slots[i], hashes[i], job.digest)), count)
        finally:
            flow.end(began, count, count * layout.slot_bytes)
        if good < count:
            self._pages_bad += 1
            tier.bad(job.digest, hashes[good : good + 1])
        return Result(job.job, good)

    def _do_write(self, tier: Tier, job: TierJob) -> Result:
        layout, flow = self._layouts[job.digest], self._flows["write"]
        hashes = unpack_hashes(job.hashes)
        slots = self._slots(job, layout)
        began, good = flow.begin(), [False] * len(hashes)
        try:
            good = tier.write(job.digest, hashes, slots, [job.why] * len(hashes))
        finally:
            flow.end(began, sum(good), sum(good) * layout.slot_bytes)
        return Result(job.job, good=good)

    def _do_drop(self, tier: Tier, job: TierJob) -> Result:
        tier.drop(job.digest)
        return Result(job.job, good=[True])

    def _touch(self, message: Touch) -> None:
        # Whatever is wrong with the tier, the next job tells.
        with suppress(TierDown):
            cast(NoticesUse, self._opened).touch(message.digest, unpack_hashes(message.hashes))

    def _report(self) -> None:
        last: Stats = {}
        while True:
            try:
                stats = {"pages_bad": self._pages_bad} | self._opened.stats()
            except Exception as error:
                stats = {"stats_error": repr(error)}
            for flow in self._flows.values():
                stats |= flow.stats()
            if stats != last:
                child_side.send(self._sock, Report(stats))
                last = stats
            time.sleep(REPORT_S)


_CALLS: dict[str, Callable[[Host, Tier, TierJob], Result]] = {
    "leading": Host._do_leading,
    "probe": Host._do_probe,
    "read": Host._do_read,
    "write": Host._do_write,
    "drop": Host._do_drop,
}


def run(sock: socket.socket) -> None:
    os.umask(0o077)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    sys.setswitchinterval(SWITCH_S)
    Host(sock).run()
