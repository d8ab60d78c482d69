"""Speed of the slow tiers behind the node, over its real socket.

`ssd`: a gigabyte of pages, not in memory, is fetched prompt by prompt, and a file of as many bytes is read from one end to the other, in
turns; once from the disk and once from the kernel's page cache. `lookup`: 1,000 pages are looked up while another client stores pages that
are written through to the disk and to a pool, whose segment and master lie on this machine, too. `pool`: what tiers_pool.py measures.

    python benchmarks/tiers.py [--rounds N] [--folder FOLDER] [--json FILE]"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from core_node import PAGES, SMALL, SMOLLM2, Client, hashes, running_node, times
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mooncake_kv.common.node import protocol

PROMPT_PAGES = 128  # 8,192 tokens, 190 MB
PROMPTS = 6
WRITTEN_BYTES = 1 << 30
WRITTEN_TO = ("ssd", "pool")
PAGE_BYTES = 1_475_584
CHUNK = 8 << 20
# Metric -> least or most it may be.
AT_LEAST = {"ssd_disk_ratio": 0.7, "ssd_cached_ratio": 0.7}
AT_LEAST |= {f"pool_{size}kib_{what}_ratio": 0.85 for size in (128, 1440, 2560) for what in ("write", "read")}
AT_MOST = {"lookup_written_p99_ms": 1.0}


class Writer(Client):
    """A client that maps memory, so that pages have bytes that no disk can guess."""

    def __init__(self, *arguments: Any) -> None:
        self._memory: dict[int, np.ndarray] = {}
        self._noise = np.random.default_rng(1).integers(0, 256, 64 << 20, dtype=np.uint8)
        super().__init__(*arguments)

    def take_extent(self, message: protocol.Extent, fd: int) -> None:
        self._memory[message.extent] = np.frombuffer(mmap.mmap(fd, message.size), np.uint8)
        super().take_extent(message, fd)

    def write(self, joined: bytes, limit_bytes: int) -> None:
        """Store pages, with at most so many bytes on their way to the disk."""
        step = 16
        self.lookup(joined)
        for start in range(0, len(joined), 32 * step):
            part = joined[start : start + 32 * step]
            while len(self.credits) < len(part) // 32:
                self.wait(protocol.Granted)
            slots = [self.credits.pop() for _ in range(len(part) // 32)]
            for slot in slots:
                offset = slot & ((1 << protocol.SLOT_SHIFT) - 1)
                noise = int(np.random.default_rng(slot).integers(0, len(self._noise) - self.slot_bytes))
                self._memory[slot >> protocol.SLOT_SHIFT][offset : offset + self.slot_bytes] = self._noise[noise : noise + self.slot_bytes]
            self.send(protocol.Commit(part, slots))
            settle_writes(self, limit_bytes)


def settle_writes(client: Client, limit_bytes: int, pause_s: float = 0.002) -> None:
    while (stats := client.stats())["sealing"] or max(tier.get("queued_bytes", 0) for tier in stats["tiers"].values()) > limit_bytes:
        time.sleep(pause_s)


def written_pages(client: Client) -> dict[str, int]:
    return {name: tier["pages_written"] for name, tier in client.stats()["tiers"].items() if name in WRITTEN_TO}


def wait_for_pool(client: Client) -> None:
    deadline = time.perf_counter() + 20
    while (tier := client.stats()["tiers"]["pool"])["state"] != "up":
        if time.perf_counter() > deadline:
            raise RuntimeError(f"the pool is not there: {tier['reason']}")
        time.sleep(0.05)


def forget(paths: list[Path]) -> None:
    """Out of the kernel's page cache."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def plain_read(path: Path, buffer: memoryview) -> float:
    """Seconds to read a file from one end to the other."""
    began = time.perf_counter()
    file = os.open(path, os.O_RDONLY)
    start = 0
    while read := os.readv(file, [buffer[start : start + CHUNK]]):
        start += read
    os.close(file)
    return time.perf_counter() - began


def ssd_files(folder: Path) -> list[Path]:
    return [Path(top, name) for top, _, names in os.walk(folder) for name in names]


def measure_reads(folder: Path, rounds: int) -> dict[str, Any]:
    prompts = [[hashes(f"{side}{i}", PROMPT_PAGES) for i in range(PROMPTS)] for side in "ab"]
    # Memory for one side: each side's fetch pushes the other out.
    dram = PAGE_BYTES * PROMPT_PAGES * (PROMPTS + 2)
    with running_node(dram, "--ssd-path", str(folder / "kv"), "--ssd-size", "16gb") as node:
        client = Writer(node, SMOLLM2, "reads")
        client.send(protocol.Want(32))
        for side in prompts:
            for prompt in side:
                client.write(prompt, 64 << 20)
        settle_writes(client, 0)
        size = PROMPTS * PROMPT_PAGES * client.slot_bytes
        plain = folder / "plain"
        with plain.open("wb") as file:
            while (left := size - file.tell()) > 0:
                file.write(client._noise[: min(len(client._noise), left)])
        os.sync()
        # As large as what is read: the node's memory is no small buffer that stays in the processor's cache either.
        buffer = memoryview(mmap.mmap(-1, -(-size // CHUNK) * CHUNK))
        for start in range(0, len(buffer), CHUNK):
            buffer[start : start + CHUNK] = bytes(CHUNK)
        results: dict[str, Any] = {}
        turn = 0
        for kind in ("disk", "cached"):
            speeds: list[tuple[float, float]] = []
            for _ in range(rounds):
                side = prompts[turn % 2]
                turn += 1
                if kind == "disk":
                    forget([plain, *ssd_files(folder / "kv")])
                else:
                    plain_read(plain, buffer)
                plain_s = plain_read(plain, buffer)
                before = client.stats()["tiers"]["ssd"]["hit_bytes"]
                began = time.perf_counter()
                for prompt in side:
                    if client.fetch(prompt) != PROMPT_PAGES:
                        raise RuntimeError("pages have gone")
                node_s = time.perf_counter() - began
                read = client.stats()["tiers"]["ssd"]["hit_bytes"] - before
                if read < 0.9 * size:
                    raise RuntimeError(f"only {read} bytes came from the disk")
                speeds.append((read / node_s / 1e9, size / plain_s / 1e9))
            ours, theirs = np.median([s[0] for s in speeds]), np.median([s[1] for s in speeds])
            results |= {f"ssd_{kind}_gb_per_s": float(ours), f"plain_{kind}_gb_per_s": float(theirs)}
            results[f"ssd_{kind}_ratio"] = float(np.median([a / b for a, b in speeds]))
        tier = client.stats()["tiers"]["ssd"]
        results |= {"ssd_write_gb_per_s": tier["write_bytes"] / tier["write_busy_s"] / 1e9, "ssd_read_p99_ms": tier["read_p99_ms"]}
        return results


def load(node: Path) -> None:
    """Stores pages as fast as they are written, until standard input ends. Runs in a process of its own."""
    client = Client(node, SMOLLM2, "load")
    client.send(protocol.Want(128))
    print("ready", flush=True)
    stopped = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stopped.set()), daemon=True).start()
    number = 0
    while not stopped.is_set():
        pages = hashes(f"load{number}", 64)
        client.lookup(pages)
        client.store(pages)
        settle_writes(client, 100 << 20, 0.03)
        number += 1


@contextmanager
def loaded(node: Path) -> Iterator[None]:
    loader = subprocess.Popen([sys.executable, __file__, "--load", str(node)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert loader.stdout is not None
        if loader.stdout.readline() != "ready\n":
            raise RuntimeError("the load did not start")
        yield
        if loader.poll() is not None:
            raise RuntimeError("the load ended early")
    finally:
        loader.communicate("", timeout=60)


def measure_lookups(folder: Path, rounds: int) -> dict[str, Any]:
    disk = ("--ssd-path", str(folder / "kv2"), "--ssd-size", "8gb")
    pool = ("--master-server-address", "embedded", "--global-segment-size", "2gb", "--write-policy", "all")
    with running_node(2 << 30, *disk, *pool) as node:
        client = Client(node, SMALL, "lookup")
        wait_for_pool(client)
        client.send(protocol.Want(2048))
        client.wait(protocol.Granted)
        pages = hashes("lookup", PAGES)
        client.lookup(pages)
        client.store(pages)
        client.settle()
        idle = times(lambda: client.lookup(pages), 100 * rounds, 0.0005)
        beyond = times(lambda: client.lookup(hashes("none", 16)), 30 * rounds, 0.0005)
        spent = []
        with loaded(node):
            before = now = written_pages(client)
            began = time.perf_counter()
            while min(now[name] - before[name] for name in WRITTEN_TO) * PAGE_BYTES < WRITTEN_BYTES:
                spent.append(times(lambda: client.lookup(pages), 100, 0.0005))
                now = written_pages(client)
                if time.perf_counter() - began > 60:
                    raise RuntimeError(f"too little was written: {now}")
            took = time.perf_counter() - began
            tiers = client.stats()["tiers"]
        under = np.concatenate(spent)
    return {
        "lookup_idle_p99_ms": float(np.percentile(idle, 99) * 1e3),
        "lookup_beyond_memory_ms": float(np.median(beyond) * 1e3),
        "lookup_written_ms": float(np.median(under) * 1e3),
        "lookup_written_p99_ms": float(np.percentile(under, 99) * 1e3),
        "lookup_written_max_ms": float(under.max() * 1e3),
        "lookups_written": len(under),
        **{f"written_{name}_gb_per_s": (now[name] - before[name]) * PAGE_BYTES / took / 1e9 for name in WRITTEN_TO},
        **{f"unwritten_{name}_pages": tiers[name]["pages_unwritten"] for name in WRITTEN_TO},
    }


def measure_pool(folder: Path, rounds: int) -> dict[str, Any]:
    """In a process of its own: Mooncake's client cannot be closed in order."""
    file = folder / "pool.json"
    program = Path(__file__).with_name("tiers_pool.py")
    command = [sys.executable, str(program), "--rounds", str(2 * rounds - 1), "--json", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=240)
    found = json.loads(file.read_text())
    lookup = found.pop("lookup")
    results = {"pool_lookup_ms": lookup["median_ms"], "pool_lookup_p99_ms": lookup["p99_ms"]}
    for row in found.values():
        if "object_bytes" in row:
            name = f"pool_{row['object_bytes'] // 1024}kib"
            results |= {f"{name}_{key}": value for key, value in row.items() if key.endswith(("_ratio", "_per_s"))}
    return results


def run(rounds: int, folder: Path | None, console: Console, only: str | None = None) -> dict[str, Any]:
    parts = {"reads": measure_reads, "lookups": measure_lookups, "pool": measure_pool}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mkv-tiers-", dir=folder) as top, Progress(console=console, transient=True) as progress:
        task = progress.add_task("tiers", total=len(parts))
        for name, measure in parts.items():
            if only in (None, name):
                results |= measure(Path(top), rounds)
            progress.advance(task)
    return results | {"targets": {"at_least": AT_LEAST, "at_most": AT_MOST}}


def show(results: dict[str, Any], console: Console) -> None:
    table = Table("tiers", "measured", "target")
    for name, value in results.items():
        if name == "targets":
            continue
        low, high = AT_LEAST.get(name), AT_MOST.get(name)
        missed = (low is not None and value < low) or (high is not None and value > high)
        target = f">= {low:g}" if low is not None else f"<= {high:g}" if high is not None else ""
        table.add_row(name, f"{value:.4g}", target, style="bold red" if missed else None)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the slow tiers.")
    parser.add_argument("--rounds", type=int, default=5, help="scales the number of measurements")
    parser.add_argument("--only", choices=["reads", "lookups", "pool"], help="measure only these")
    parser.add_argument("--folder", type=Path, help="where to put the files; otherwise the temporary directory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--load", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load(arguments.load)
        return
    results = run(arguments.rounds, arguments.folder, Console(stderr=True), arguments.only)
    show(results, Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
