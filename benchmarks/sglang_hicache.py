"""Our SGLang storage backend against SGLang's own Mooncake backend: exists, set and get of the same pages from the same host pool.

Both run in this process, as they do in SGLang's scheduler, on SGLang's own host pool, in batches of 128 pages as SGLang calls them; the
in-tree backend keeps its pages in a segment of this process, over TCP on loopback, with a real mooncake_master, ours keeps them in the
node. Rounds are interleaved, medians reported. `memcpy` copies the same bytes from the host pool to other memory, page by page, on one
thread. Everything read back is compared with what was written.

    python benchmarks/sglang_hicache.py [--pages N] [--rounds N] [--layout L] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.vllm_setups import Setups
from tests.engines import sglang_parts
from tests.engines.sglang_parts import storage_config
from tests.models import SMOLLM2

PAGE, LAYERS, HEADS, DIM = 64, 30, 3, 64  # SmolLM2-135M, bf16
BATCH = 128
OURS, IN_TREE = "ours", "in-tree"
READY_S = 30.0


@contextmanager
def backends(pool: Any, pages: int, rounds: int, folder: Path) -> Iterator[dict[str, Any]]:
    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

    from mooncake_kv.sglang_plugin.backend import MooncakeHiCache

    bytes_of_a_round = pages * pool.size_per_token * PAGE
    with Setups(SMOLLM2, folder).master() as master:
        stock = {"master_server_address": master, "metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "local_hostname": "127.0.0.1"}
        # What was read is leased and cannot be removed for a while, so each round has room of its own.
        theirs = MooncakeStore(storage_config({**stock, "global_segment_size": (rounds + 2) * bytes_of_a_round}), pool)
        theirs.register_mem_pool_host(pool)
        settings = {
            "kind": "Store",
            "node": "benchmark",
            "dram_size": 2 * bytes_of_a_round,
            "idle_exit_s": 5,
            "metrics_port": -1,
            "fetch_timeout_ms": 5000,
        }
        ours = MooncakeHiCache(storage_config(settings))
        ours.register_mem_pool_host(pool)
        until(lambda: ours.counters()["mapped_bytes"] > 0)
        try:
            yield {OURS: ours, IN_TREE: theirs}
        finally:
            ours.close()
            theirs.close()


def until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + READY_S
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError("the benchmark waited in vain")
        time.sleep(0.01)


def in_batches(call: Callable[[list[str], torch.Tensor], list[bool]], keys: list[str], first_page: int) -> float:
    """Seconds of one call after another."""
    begin = time.perf_counter()
    for at in range(0, len(keys), BATCH):
        part = keys[at : at + BATCH]
        start = (first_page + at) * PAGE
        done = call(part, torch.arange(start, start + len(part) * PAGE))
        if not all(done):
            raise RuntimeError(f"{call.__qualname__}: {done.count(False)} of {len(done)} pages failed")
    return time.perf_counter() - begin


def memcpy(pages: int, page_bytes: int) -> Callable[[], float]:
    source, target = np.ones((pages, page_bytes), np.uint8), np.ones((pages, page_bytes), np.uint8)

    def copy() -> float:
        begin = time.perf_counter()
        for i in range(pages):
            np.copyto(target[i], source[i])
        return time.perf_counter() - begin

    return copy


def measure(pages: int, rounds: int, layout: str, folder: Path) -> dict[str, Any]:
    """`pages` are written from the first half of the pool and read into the second."""
    pool = sglang_parts.host_pool(layout=layout, pages=2 * pages, page_tokens=PAGE, layers=LAYERS, heads=HEADS, dim=DIM)
    page_bytes = pool.size_per_token * PAGE
    halves = halves_of(pool, pages)
    copy = memcpy(pages, page_bytes)
    times: dict[str, list[float]] = {"memcpy": []}
    with backends(pool, pages, rounds, folder) as both:
        for number in range(rounds + 1):  # the first warms up
            halves[0][...] = np.random.default_rng(number).integers(0, 1 << 16, halves[0].shape, dtype=np.uint16)
            keys = [sha256(f"{number} {i}".encode()).hexdigest() for i in range(pages)]
            taken = {"memcpy": copy()}
            for name, backend in both.items():
                taken[f"{name} set"] = in_batches(backend.batch_set_v1, keys, 0)
                until(lambda backend=backend, keys=keys: backend.batch_exists(keys) == pages)
                time.sleep(0.1)
                begin = time.perf_counter()
                found = backend.batch_exists(keys)
                taken[f"{name} exists"] = time.perf_counter() - begin
                if found != pages:
                    raise RuntimeError(f"{name}: {found} of {pages} pages exist")
                halves[1][...] = 0
                taken[f"{name} get"] = in_batches(backend.batch_get_v1, keys, pages)
                if not np.array_equal(halves[0], halves[1]):
                    raise RuntimeError(f"{name}: what was read is not what was written")
            if number:
                for what, seconds in taken.items():
                    times.setdefault(what, []).append(seconds)
    medians = {what: statistics.median(values) for what, values in times.items()}
    copied = medians["memcpy"]
    return {
        "pages": pages,
        "bytes": pages * page_bytes,
        "layout": layout,
        "rounds": rounds,
        "seconds": medians,
        "gb_per_s": {what: pages * page_bytes / 1e9 / s for what, s in medians.items() if "exists" not in what},
        "get_over_memcpy": {name: medians[f"{name} get"] / copied for name in (OURS, IN_TREE)},
        "set_then_get_of_memcpy": {name: 2 * copied / (medians[f"{name} set"] + medians[f"{name} get"]) for name in (OURS, IN_TREE)},
    }


def halves_of(pool: Any, pages: int) -> list[Any]:
    """The two halves of a pool's pages, as bits."""
    buffer = pool.kv_buffer.view(torch.int16).numpy().view(np.uint16)
    axis, unit = {"layer_first": (2, PAGE), "page_first": (1, PAGE)}.get(pool.layout, (1, 1))
    parts = []
    for first in (0, pages):
        index = [slice(None)] * buffer.ndim
        index[axis] = slice(first * unit, (first + pages) * unit)
        parts.append(buffer[tuple(index)])
    return parts


def main() -> None:
    from transformers import AutoConfig

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layout", default="page_first_direct")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    state = sglang_parts.process(AutoConfig.from_pretrained(SMOLLM2), str(SMOLLM2), layers=LAYERS, heads=HEADS)
    sglang_parts.pretend(state, setattr)
    with tempfile.TemporaryDirectory(prefix="mkv-", dir="/tmp") as folder:
        os.chmod(folder, 0o700)
        result = measure(arguments.pages, arguments.rounds, arguments.layout, Path(folder))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    table = Table(title=f"{result['pages']} pages of SmolLM2, {result['bytes'] / 1e6:.0f} MB, host layout {result['layout']}")
    for column in ("", OURS, IN_TREE):
        table.add_column(column)
    for what in ("set", "get"):
        table.add_row(f"{what}, GB/s", *(f"{result['gb_per_s'][f'{name} {what}']:.2f}" for name in (OURS, IN_TREE)))
    table.add_row("exists, ms", *(f"{1e3 * result['seconds'][f'{name} exists']:.2f}" for name in (OURS, IN_TREE)))
    table.add_row("get, times as long as memcpy", *(f"{result['get_over_memcpy'][name]:.2f}" for name in (OURS, IN_TREE)))
    table.add_row("set then get, of memcpy", *(f"{result['set_then_get_of_memcpy'][name]:.2f}" for name in (OURS, IN_TREE)))
    console = Console()
    console.print(table)
    console.print(f"memcpy on one thread: {result['gb_per_s']['memcpy']:.2f} GB/s")


if __name__ == "__main__":
    main()
