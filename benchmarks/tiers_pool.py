"""Speed of the pool tier against Mooncake's own calls on the same objects, in one process, alternating: reads against batch_get_into,
writes against batch_put_from; and lookups of 1,000 pages.

The segment lies in another process on this machine (the keeper), reached by TCP over loopback, as it does for a node. Each round writes and
reads the same pages under new keys with both; the order changes from round to round, and the ratio is that of the medians.

    python benchmarks/tiers_pool.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from core_node import namespace
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mooncake_kv.common.config import load_config
from mooncake_kv.common.page import TRAILER_BYTES, PageLayout
from mooncake_kv.common.tiers.pool import open_tier
from mooncake_kv.common.tiers.pool.keeper import Keeper

SEGMENT_BYTES = 1 << 30
ROUND_BYTES = 192 << 20
LOOKUP_PAGES = 1000
TARGET_RATIO = 0.85
LOOKUP_TARGET_MS = 1.0
# name -> layers, KV heads, head dim, tokens a page: one object of 1.4 MiB; eight of 2.5 MiB (Llama 3 70B); one of 128 KiB.
SHAPES = {"smollm2": (30, 3, 64, 64), "llama 70B": (80, 8, 128, 64), "tiny": (4, 4, 32, 64)}


class Bench:
    """One shape: the tier and Mooncake's client below it, on the same memory."""

    def __init__(self, tier: Any, shape: str) -> None:
        self.tier = tier
        self.raw = tier._client._store
        self.config = tier._client._config
        space = namespace(shape, *SHAPES[shape])
        self.digest = space.digest()
        self.layout = PageLayout(space)
        tier.add_space(self.digest, self.layout)
        self.page_bytes = self.layout.payload_bytes + TRAILER_BYTES * len(self.layout.objects)
        self.pages = max(1, ROUND_BYTES // self.page_bytes)
        self.memory = np.random.default_rng(1).integers(0, 255, (self.pages, self.layout.slot_bytes), np.uint8)
        tier.add_memory(self.memory.ctypes.data, self.memory.nbytes)

    def close(self) -> None:
        self.tier.drop(self.digest)
        self.tier.drop_memory(self.memory.ctypes.data)

    def hashes(self, name: str) -> list[bytes]:
        return [sha256(f"{name}/{i}".encode()).digest() for i in range(self.pages)]

    def round(self, number: int) -> dict[str, float]:
        """Seconds of each of the four."""
        ours, theirs = self.hashes(f"ours{number}"), self.hashes(f"raw{number}")
        objects = [(page, spec) for page in range(self.pages) for spec in self.layout.objects]
        keys = [self.layout.object_key(self.digest, theirs[page], spec) for page, spec in objects]
        addresses = [self.memory[page].ctypes.data + spec.offset for page, spec in objects]
        sizes = [spec.payload_bytes + TRAILER_BYTES for _, spec in objects]
        slots = list(self.memory)
        calls: dict[str, tuple[Callable[[], Any], Callable[[Any], bool]]] = {
            "write": (lambda: self.tier.write(self.digest, ours, slots, [""] * self.pages), all),
            "raw_put": (lambda: self.raw.batch_put_from(keys, addresses, sizes, self.config), lambda codes: not any(codes)),
            "read": (lambda: self.tier.read(self.digest, ours, slots), lambda count: count == self.pages),
            "raw_get": (lambda: self.raw.batch_get_into(keys, addresses, sizes), lambda codes: codes == sizes),
        }
        order = ["write", "raw_put", "read", "raw_get"] if number % 2 else ["raw_put", "write", "raw_get", "read"]
        spent = {}
        for name in order:
            call, good = calls[name]
            begin = time.perf_counter()
            result = call()
            spent[name] = time.perf_counter() - begin
            if not good(result):
                raise RuntimeError(f"{name} has not moved every page, so its time means nothing: {str(result)[:200]}")
        self.tier.drop(self.digest)
        self.raw.batch_remove(keys, True)
        return spent


def lookups(tier: Any, rounds: int) -> np.ndarray:
    """Seconds of lookups of LOOKUP_PAGES pages of which all are there."""
    bench = Bench(tier, "tiny")
    hashes: list[bytes] = []
    while len(hashes) < LOOKUP_PAGES:
        more = bench.hashes(f"lookup{len(hashes)}")
        if not all(tier.write(bench.digest, more, list(bench.memory), [""] * len(more))):
            raise RuntimeError("not all pages of the lookup were stored")
        hashes += more
    hashes = hashes[:LOOKUP_PAGES]
    spent = np.empty(40 * rounds)
    for i in range(len(spent)):
        begin = time.perf_counter()
        found = tier.leading(bench.digest, hashes)
        spent[i] = time.perf_counter() - begin
        if found != LOOKUP_PAGES:
            raise RuntimeError(f"{found} of {LOOKUP_PAGES} pages were found")
    bench.close()
    return spent


def run(rounds: int = 9, console: Console | None = None) -> dict[str, Any]:
    """All measurements; 9 rounds take about 15 seconds."""
    console = console or Console(stderr=True)
    given = {"master_server_address": "embedded", "write_policy": "all", "global_segment_size": SEGMENT_BYTES}
    config = load_config(given, environ={})
    with tempfile.TemporaryDirectory(prefix="mkv-bench-") as folder, Progress(console=console, transient=True) as progress:
        task = progress.add_task("pool", total=len(SHAPES) * (rounds + 1) + 1)
        keeper = Keeper(config.node_settings(), config.sources, Path(folder))
        try:
            tier = open_tier(keeper.ensure())
            result: dict[str, Any] = {"targets": {"ratio": TARGET_RATIO, "lookup_p99_ms": LOOKUP_TARGET_MS}}
            for shape in SHAPES:
                bench = Bench(tier, shape)
                spent = []
                for number in range(rounds + 1):
                    spent.append(bench.round(number))
                    progress.advance(task)
                result[shape] = _summary(bench, spent[1:])  # the first touches the segment's memory
                bench.close()
            times = lookups(tier, rounds)
            progress.advance(task)
            result["lookup"] = {
                "pages": LOOKUP_PAGES,
                "median_ms": float(np.median(times) * 1e3),
                "p99_ms": float(np.percentile(times, 99) * 1e3),
            }
            tier.close()
        finally:
            keeper.close()
    return result


def _summary(bench: Bench, spent: Sequence[dict[str, float]]) -> dict[str, float]:
    median = {name: float(np.median([turn[name] for turn in spent])) for name in spent[0]}
    size = bench.pages * bench.page_bytes
    return {
        "objects_a_page": len(bench.layout.objects),
        "object_bytes": bench.layout.objects[0].payload_bytes + TRAILER_BYTES,
        "bytes": size,
        **{f"{name}_gb_per_s": size / seconds / 1e9 for name, seconds in median.items()},
        "read_ratio": median["raw_get"] / median["read"],
        "write_ratio": median["raw_put"] / median["write"],
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table("objects", "size", "write GB/s", "raw put", "ratio", "read GB/s", "raw get", "ratio")
    for shape in SHAPES:
        row = result[shape]
        cells = [f"{shape}, {row['objects_a_page']} a page", f"{row['object_bytes'] / 1024:.0f} KiB"]
        for ours, theirs, ratio in (("write", "raw_put", "write_ratio"), ("read", "raw_get", "read_ratio")):
            style = "[bold red]" if row[ratio] < TARGET_RATIO else ""
            cells += [f"{row[f'{ours}_gb_per_s']:.2f}", f"{row[f'{theirs}_gb_per_s']:.2f}", f"{style}{row[ratio]:.2f}"]
        table.add_row(*cells)
    console.print(table)
    lookup = result["lookup"]
    figures = f"median {lookup['median_ms']:.2f} ms, p99 {lookup['p99_ms']:.2f} ms (at most {LOOKUP_TARGET_MS:g})"
    console.print(f"lookup of {lookup['pages']} pages: {figures}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the pool tier.")
    parser.add_argument("--rounds", type=int, default=9, help="scales the number of measurements")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    result = run(arguments.rounds)
    show(result, Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # not through Mooncake's destructors


if __name__ == "__main__":
    main()
