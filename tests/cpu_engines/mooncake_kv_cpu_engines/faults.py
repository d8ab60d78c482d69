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
    control = Path(os.environ[FAULT])

    def _load(self: Any, load: Any, digest: str) -> int:
        try:
            fault = json.loads(control.read_text())
        except FileNotFoundError:
            return original(self, load, digest)
        if rank not in fault["ranks"]:
            return original(self, load, digest)
        middle = len(load.slots) // 2
        if fault["kind"] == "error":
            raise RuntimeError("planted by a test")
        if fault["kind"] == "drop":
            load.slots[middle] = (1 << 62) | (load.slots[middle] & 0xFFF)
            return original(self, load, digest)
        with self._client.arena().pin(load.epoch, load.generation) as pinned:
            pages = zip(load.slots[:middle], load.hashes[:middle], strict=True)
            if not all(self._layout.verify(pinned.slot(slot), page_hash, digest) for slot, page_hash in pages):
                # A load that was staged before an earlier fault hit its pages. It ends before it would find this one.
                return original(self, load, digest)
            page = pinned.slot(load.slots[middle])
            if fault["kind"] == "flip":
                page[self._layout.slot_bytes // 3 + rank] ^= 16  # not the bit that another rank has flipped
            elif fault["kind"] == "swap":
                page[:] = pinned.slot(load.slots[middle - 1])
            else:
                page[-4096:] = 0
        return original(self, load, digest)

    _load.mooncake_kv_test = True  # type: ignore[attr-defined]
    WorkerHalf._load = _load  # type: ignore[method-assign]


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
