"""Speed of the node, over its real socket: round trips, lookups of 1,000 pages (idle, and while it checks and seals gigabytes), what grant
and commit cost a page.

Round trips are measured with client and node on one core, and on two beside a bare echo of as many bytes: on a virtual machine, waking a
core that sleeps takes some 25 us, twice a trip, and the kernel's choice of cores would decide what is measured.

The load is another client that fetches 700 pages of SmolLM2's size (1 GB to check) and commits as many (1 GB to seal), again and again.
Also called by core.py, as the section `node` of its report.

    python benchmarks/core_node.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mooncake_kv.common.identity import KVNamespace
from mooncake_kv.common.node import protocol

M = TypeVar("M")
PAGES = 1000
LOAD_PAGES = 700
LOADED_BYTES = 2 << 30
PROMPT_PAGES = 46  # 2,944 tokens
# Metric -> most it may be.
TARGETS = {"round_trip_us": 60.0, "lookup_idle_ms": 0.5, "lookup_loaded_p99_ms": 1.0, "grant_commit_us_a_page": 5.0}


def namespace(name: str, layers: int, heads: int, dim: int, tokens: int) -> KVNamespace:
    return KVNamespace.build(
        model=sha256(name.encode()).hexdigest(),
        kv_dtype="bfloat16",
        num_layers=layers,
        num_kv_heads=heads,
        k_head_dim=dim,
        v_head_dim=dim,
        page_tokens=tokens,
    )


SMALL = namespace("small", 2, 2, 16, 16)  # slots of 8 KiB: the lookups cost the same, and fit beside the load
SMOLLM2 = namespace("smollm2", 30, 3, 64, 64)


def hashes(name: str, count: int) -> bytes:
    return b"".join(sha256(f"{name}/{i}".encode()).digest() for i in range(count))


class Client:
    """One blocking scheduler client that maps nothing: it never touches the bytes of its slots."""

    def __init__(self, folder: Path, space: KVNamespace, engine: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(folder / "socket"))
        self.sock.settimeout(30)
        self.credits: list[int] = []
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._request = 0
        hello = protocol.Hello(
            major=protocol.MAJOR,
            minor=protocol.MINOR,
            version="benchmark",
            role="scheduler",
            engine=engine,
            pid=os.getpid(),
            namespace=space.encode(),
            digest=space.digest(),
        )
        self.send(hello)
        self.slot_bytes = self.wait(protocol.Welcome).slot_bytes

    def send(self, message: protocol.Message) -> None:
        self.sock.sendall(protocol.frame(message))

    def wait(self, kind: type[M]) -> M:
        """The next message of this kind; grants on the way are kept, extents acknowledged."""
        while True:
            while len(self._buffer) >= 4:
                (length,) = protocol.HEADER.unpack_from(self._buffer)
                if len(self._buffer) < 4 + length:
                    break
                message = protocol.decode_to_client(bytes(self._buffer[4 : 4 + length]))
                del self._buffer[: 4 + length]
                if isinstance(message, protocol.Granted):
                    self.credits += message.slots
                elif isinstance(message, protocol.Extent):
                    self.take_extent(message, self._fds.pop(0))
                if isinstance(message, kind):
                    return message
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 18, 16)
            if not data:
                raise ConnectionError("the node has ended the connection")
            self._fds += fds
            self._buffer += data

    def take_extent(self, message: protocol.Extent, fd: int) -> None:
        os.close(fd)
        self.send(protocol.Mapped(message.extent))

    def number(self) -> int:
        self._request += 1
        return self._request

    def ping(self) -> None:
        self.send(protocol.Ping(self.number()))
        self.wait(protocol.Done)

    def lookup(self, joined: bytes) -> int:
        self.send(protocol.Lookup(self.number(), joined))
        return self.wait(protocol.Hits).pages

    def stats(self) -> dict[str, Any]:
        self.send(protocol.Stats(self.number()))
        return self.wait(protocol.StatsReply).stats

    def store(self, joined: bytes) -> None:
        """Commit these pages, with whatever bytes their slots hold, as fast as slots are granted."""
        for start in range(0, len(joined), 32 * 64):
            part = joined[start : start + 32 * 64]
            while len(self.credits) < len(part) // 32:
                self.wait(protocol.Granted)
            slots = [self.credits.pop() for _ in range(len(part) // 32)]
            self.send(protocol.Commit(part, slots))

    def settle(self) -> None:
        while self.stats()["sealing"]:
            time.sleep(0.001)

    def fetch(self, joined: bytes) -> int:
        """Stage and release; returns how many pages there were."""
        request = self.number()
        self.send(protocol.Fetch(request, joined))
        count = 0
        while True:
            staged = self.wait(protocol.Staged)
            count += len(staged.slots)
            if staged.done:
                self.send(protocol.Release(request))
                return count


@contextmanager
def running_node(dram_size: int, *more: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mkv-bench-") as top:
        folder = Path(top) / "mooncake-kv" / "bench"
        folder.parent.mkdir(mode=0o700)
        arguments = ["--folder", str(folder), "--dram-size", str(dram_size), "--metrics-port", "-1", *more]
        process = subprocess.Popen([sys.executable, "-m", "mooncake_kv.common.node", *arguments], stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 30
            while True:
                with socket.socket(socket.AF_UNIX) as probe:
                    if probe.connect_ex(str(folder / "socket")) == 0:
                        break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the node did not start")
                time.sleep(0.01)
            yield folder
        finally:
            process.terminate()
            process.wait(10)


def load(folder: Path) -> None:
    """Keeps the node checking and sealing until standard input ends. Runs in a process of its own."""
    client = Client(folder, SMOLLM2, "load")
    client.send(protocol.Want(128))
    pages = hashes("load", LOAD_PAGES)
    client.lookup(pages)
    client.store(pages)
    client.settle()
    print("ready", flush=True)
    stopped = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stopped.set()), daemon=True).start()
    number = 0
    while not stopped.is_set():
        if client.fetch(pages) < LOAD_PAGES // 2:
            raise RuntimeError("the pages to be checked have gone")
        fresh = hashes(f"fresh{number}", LOAD_PAGES)
        client.lookup(pages)  # keeps them in front of the fresh ones
        client.store(fresh)
        number += 1


def times(run: Callable[[], object], count: int, pause_s: float = 0.0) -> np.ndarray:
    """Seconds of each call."""
    spent = np.empty(count)
    for i in range(count):
        begin = time.perf_counter()
        run()
        spent[i] = time.perf_counter() - begin
        if pause_s:
            time.sleep(pause_s)
    return spent


@contextmanager
def pinned(pids: list[int], cores: list[set[int]]) -> Iterator[None]:
    before = [os.sched_getaffinity(pid) for pid in pids]
    for pid, core in zip(pids, cores, strict=True):
        os.sched_setaffinity(pid, core)
    try:
        yield
    finally:
        for pid, core in zip(pids, before, strict=True):
            os.sched_setaffinity(pid, core)


def echo_trips(count: int, core: set[int]) -> np.ndarray:
    """Seconds of each round trip of a ping's bytes to a process on this core that does nothing but send them back."""
    here, there = socket.socketpair()
    message = protocol.frame(protocol.Ping(1))
    pid = os.fork()
    if not pid:
        here.close()
        os.sched_setaffinity(0, core)
        while data := there.recv(64):
            there.sendall(data)
        os._exit(0)
    there.close()
    try:
        return times(lambda: (here.sendall(message), here.recv(64)), count)
    finally:
        here.close()
        os.waitpid(pid, 0)


def round_trips(client: Client, count: int) -> dict[str, float]:
    """Medians in microseconds."""
    node, _, _ = struct.unpack("3i", client.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    here, *others = [{core} for core in sorted(os.sched_getaffinity(0))]
    with pinned([0, node], [here, here]):
        trips = times(client.ping, count)
    result = {"round_trip_us": float(np.median(trips) * 1e6), "round_trip_p99_us": float(np.percentile(trips, 99) * 1e6)}
    if others:
        with pinned([0, node], [here, others[0]]):
            result["round_trip_two_cores_us"] = float(np.median(times(client.ping, count)) * 1e6)
            result["echo_two_cores_us"] = float(np.median(echo_trips(count, others[0])) * 1e6)
    return result


def grant_and_commit(client: Client, rounds: int) -> float:
    """Median seconds a page from commit to the grant that replaces it, in batches of 64, without the time of sealing."""
    results = []
    for number in range(rounds):
        pages = hashes(f"batch{number}", 64 * 16)
        client.settle()
        begin = time.perf_counter()
        for start in range(0, len(pages), 64 * 32):
            while len(client.credits) < 64:
                client.wait(protocol.Granted)
            slots, client.credits = client.credits[:64], client.credits[64:]
            client.send(protocol.Commit(pages[start : start + 64 * 32], slots))
        client.ping()
        results.append((time.perf_counter() - begin) / (64 * 16))
    return float(np.median(results))


def run(rounds: int = 9, console: Console | None = None) -> dict[str, Any]:
    """All measurements. `rounds` scales their number: 9 takes about 15 seconds."""
    console = console or Console(stderr=True)
    with running_node(3 << 30) as folder, Progress(console=console, transient=True) as progress:
        task = progress.add_task("node", total=6)
        client = Client(folder, SMALL, "lookup")
        client.send(protocol.Want(2048))
        client.wait(protocol.Granted)
        pages = hashes("lookup", PAGES)
        client.lookup(pages)
        client.store(pages)
        client.settle()
        if client.lookup(pages) != PAGES:
            raise RuntimeError("not all pages were stored")
        progress.advance(task)

        trips = round_trips(client, 300 * rounds)
        idle = times(lambda: client.lookup(pages), 60 * rounds, 0.0005)
        progress.advance(task)
        commit = grant_and_commit(client, rounds)
        progress.advance(task)
        stager = Client(folder, SMOLLM2, "stage")
        stager.send(protocol.Want(64))
        prompt = hashes("prompt", PROMPT_PAGES)
        stager.store(prompt)
        stager.settle()
        staging = times(lambda: stager.fetch(prompt), 10 * rounds, 0.002)
        staged_bytes = PROMPT_PAGES * stager.slot_bytes
        stager.sock.close()
        progress.advance(task)

        command = [sys.executable, __file__, "--load", str(folder)]
        loader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert loader.stdout is not None
            if loader.stdout.readline() != "ready\n":
                raise RuntimeError("the load did not start")
            progress.advance(task)
            before = client.stats()
            loaded = [times(lambda: client.lookup(pages), 100 * rounds, 0.0005)]
            while min(_done(before, client.stats())) < LOADED_BYTES:
                loaded.append(times(lambda: client.lookup(pages), 100, 0.0005))
            checked, sealed = _done(before, client.stats())
            if loader.poll() is not None:
                raise RuntimeError("the load ended early")
        finally:
            loader.communicate("", timeout=60)
        progress.advance(task)
    under_load = np.concatenate(loaded)
    seconds = float(under_load.sum() + 0.0005 * len(under_load))
    return {
        **trips,
        "lookup_pages": PAGES,
        "lookup_idle_ms": float(np.median(idle) * 1e3),
        "lookup_idle_p99_ms": float(np.percentile(idle, 99) * 1e3),
        "lookup_loaded_ms": float(np.median(under_load) * 1e3),
        "lookup_loaded_p99_ms": float(np.percentile(under_load, 99) * 1e3),
        "lookup_loaded_max_ms": float(under_load.max() * 1e3),
        "lookups_loaded": len(under_load),
        "checked_gb_per_s": checked / seconds / 1e9,
        "sealed_gb_per_s": sealed / seconds / 1e9,
        "stage_46_pages_ms": float(np.median(staging) * 1e3),
        "stage_gb_per_s": float(staged_bytes / np.median(staging) / 1e9),
        "grant_commit_us_a_page": commit * 1e6,
        "targets": TARGETS,
    }


def _done(before: dict[str, Any], after: dict[str, Any]) -> tuple[int, int]:
    """Bytes checked and sealed in between."""
    return after["bytes_verified"] - before["bytes_verified"], after["bytes_committed"] - before["bytes_committed"]


def show(result: dict[str, Any], console: Console) -> None:
    table = Table("node", "measured", "target")
    for name, value in result.items():
        if name != "targets":
            target = TARGETS.get(name)
            missed = target is not None and value > target
            table.add_row(name, f"{value:.4g}", "" if target is None else f"{target:g}", style="bold red" if missed else None)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the node.")
    parser.add_argument("--rounds", type=int, default=9, help="scales the number of measurements")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--load", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load(arguments.load)
        return
    result = run(arguments.rounds)
    show(result, Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
