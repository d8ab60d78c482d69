"""Damage between the moment a page was staged and the moment a worker copies it in: what the node's own check cannot see.

`MOONCAKE_KV_TEST_FAULT=FILE`: as long as FILE exists, each load of a worker meets the fault it describes, as JSON {"kind": ..., "ranks":
[...]}: `flip` one bit, `truncate` (the last 4 KiB of the page are zero), `drop` (the page is gone), `error` (the copy raises). The page hit
is the middle one of the load. A node killed or an extent unmapped in between looks the same to the worker, but cannot be timed to the
microsecond; hence this stand-in.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FAULT = "MOONCAKE_KV_TEST_FAULT"


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
            page = pinned.slot(load.slots[middle])
            if fault["kind"] == "flip":
                page[self._layout.slot_bytes // 3] ^= 16
            else:
                page[-4096:] = 0
        return original(self, load, digest)

    _load.mooncake_kv_test = True  # type: ignore[attr-defined]
    WorkerHalf._load = _load  # type: ignore[method-assign]
