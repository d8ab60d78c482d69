"""Damage between the moment a page was staged and the moment a worker copies it in: what the node's own check cannot see.

`MOONCAKE_KV_TEST_FAULT=FILE`: as long as FILE exists, each load of a worker meets the fault it describes, as JSON {"kind": ..., "ranks":
[...]}: `flip` one bit, `truncate` (the last 4 KiB of the page are zero), `swap` (the bytes of the page before, which match their own
checksum), `drop` (the page is gone), `error` (the copy raises). The page hit is the middle one of the load. A node killed or an extent
unmapped in between looks the same to the worker, but cannot be timed to the microsecond; hence this stand-in.

`MOONCAKE_KV_TEST_UNPROTECTED=report` or `verify`: a connector that does not tell the engine that a load failed, or one that does not check
pages when it loads them. For the proof that the tests of faults would catch either.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULT = "MOONCAKE_KV_TEST_FAULT"
UNPROTECTED = "MOONCAKE_KV_TEST_UNPROTECTED"


def install(rank: int) -> None:
    """Wrap the worker half's load in this process."""
    from mooncake_kv.connectors.store.worker import WorkerHalf

    if getattr(WorkerHalf._load, "mooncake_kv_test", False):
        return
    original = WorkerHalf._load

    def _load(self: Any, load: Any, digest: str) -> int:
        if fault := _fault(rank):
            _meet(fault, rank, self, load, load.slots, load.hashes, digest, load.generation)
        return original(self, load, digest)

    _load.mooncake_kv_test = True  # type: ignore[attr-defined]
    WorkerHalf._load = _load  # type: ignore[method-assign]


def install_hicache(rank: Callable[[], int]) -> None:
    """Wrap the copying of pages into SGLang's host memory in this process."""
    from mooncake_kv.connectors.hicache import HiCacheStore

    original = HiCacheStore._scatter
    if getattr(original, "mooncake_kv_test", False):
        return

    def _scatter(self: Any, fetched: Any, node_slots: Any, hashes: Any, *args: Any) -> Any:
        if fault := _fault(rank()):
            node_slots = list(node_slots)
            _meet(fault, rank(), self, fetched.fetch, node_slots, hashes, self._digest, 0)
        return original(self, fetched, node_slots, hashes, *args)

    _scatter.mooncake_kv_test = True  # type: ignore[attr-defined]
    HiCacheStore._scatter = _scatter  # type: ignore[method-assign]


def _fault(rank: int) -> str:
    """The kind of fault that a load of this rank meets now, "" for none."""
    try:
        fault = json.loads(Path(os.environ[FAULT]).read_text())
    except FileNotFoundError:
        return ""
    return str(fault["kind"]) if rank in fault["ranks"] else ""


def _meet(kind: str, rank: int, half: Any, load: Any, slots: list[int], hashes: Any, digest: str, generation: int) -> None:
    """Damage the page in the middle. `half` has a client and a layout, `load` the epoch of the slots."""
    middle = len(slots) // 2
    if kind == "error":
        raise RuntimeError("planted by a test")
    if kind == "drop":
        slots[middle] = (1 << 62) | (slots[middle] & 0xFFF)
        return
    with half._client.arena().pin(load.epoch, generation) as pinned:
        pages = zip(slots[:middle], hashes[:middle], strict=True)
        if not all(half._layout.verify(pinned.slot(slot), page_hash, digest) for slot, page_hash in pages):
            # A load that was staged before an earlier fault hit its pages. It ends before it would find this one.
            return
        page = pinned.slot(slots[middle])
        if kind == "flip":
            page[half._layout.slot_bytes // 3 + rank] ^= 16  # not the bit that another rank has flipped
        elif kind == "swap":
            page[:] = pinned.slot(slots[middle - 1])
        else:
            page[-4096:] = 0


def unprotect(what: str) -> None:
    """Take one protection away from the connector in this process."""
    from mooncake_kv.connectors.store.worker import WorkerHalf

    if what == "report":
        failing = WorkerHalf.load

        def silent(self: Any, plan: Any, report: Any) -> set[int]:
            failing(self, plan, report)
            return set()

        WorkerHalf.load = silent  # type: ignore[method-assign]
    elif what == "verify":
        load = WorkerHalf._load

        def _load(self: Any, planned: Any, digest: str) -> int:
            self._verify = False
            return load(self, planned, digest)

        WorkerHalf._load = _load  # type: ignore[method-assign]
    else:
        raise ValueError(f"{UNPROTECTED}={what!r}: 'report' or 'verify'")
