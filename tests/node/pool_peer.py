"""Processes for tests of the Mooncake pool: real masters, and peers that hold a PoolTier or Mooncake's own client.

Everything that calls Mooncake runs in a process of its own, so that a test can kill or freeze it, and so that a crash of native code fails
one test instead of ending pytest. A peer takes commands as JSON lines on its standard input and answers each with one line.

Pages are made from a name and a number: `page_hash` and the bytes follow from them, so that any process can check what it reads.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_kv.common.config import load_config
from mooncake_kv.common.identity import KVNamespace
from mooncake_kv.common.page import PageLayout
from mooncake_kv.common.tiers.base import TierDown
from mooncake_kv.common.tiers.pool.wheel import master_program

ANSWER_S = 60.0


def namespace(kind: str) -> KVNamespace:
    """ "small": one object of 128 KiB a page; "wide": four of 1 MiB."""
    layers, dim, tokens = {"small": (4, 32, 64), "wide": (8, 128, 256)}[kind]
    sizes = {"num_layers": layers, "num_kv_heads": 4, "k_head_dim": dim, "v_head_dim": dim, "page_tokens": tokens}
    return KVNamespace.build(model=sha256(kind.encode()).hexdigest(), kv_dtype="bfloat16", **sizes)


def page_hash(name: str, number: int) -> bytes:
    return sha256(f"{name}/{number}".encode()).digest()


def settings(master: str, **other: Any) -> dict[str, Any]:
    """What `open_tier` gets, without a folder unless one is given."""
    folder = other.pop("folder", None)
    config = load_config({"master_server_address": master, "write_policy": "all", **other}, environ={})
    return {**config.node_settings(), "sources": config.sources, **({"folder": str(folder)} if folder else {})}


class Failed(Exception):
    """A command of a peer raised; `kind` is the exception's name."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Peer:
    """One process. `call("method", ...)` runs a method of `_Served` there."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.log = tempfile.NamedTemporaryFile("w+", prefix="mkv-peer-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.node.pool_peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **(environment or {})},
        )
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, method: str, *arguments: Any, timeout_s: float = ANSWER_S, **named: Any) -> Any:
        self.send(method, *arguments, **named)
        return self.answer(timeout_s)

    def send(self, method: str, *arguments: Any, **named: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, arguments, named]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"no answer in {timeout_s} s")
            data = os.read(self.process.stdout.fileno(), 1 << 20)
            if not data:
                code = self.process.wait(10)
                raise AssertionError(f"the peer ended with {code}: {Path(self.log.name).read_text()[-2000:]}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        kind, value = json.loads(line)
        if kind:
            raise Failed(kind, value)
        return value

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        self.kill()
        assert self.process.stdin is not None and self.process.stdout is not None
        for stream in (self.process.stdin, self.process.stdout, self.log):
            try:
                stream.close()
            except OSError:
                continue


class Master:
    """A mooncake_master on loopback that can be killed and started again on its port."""

    def __init__(self, *options: str) -> None:
        self.options = options
        self.port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        for _ in range(5):
            port = self.port or free_port()
            command = [str(master_program()), f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}"]
            self.process = subprocess.Popen(
                [*command, "--metrics_host=127.0.0.1", *self.options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            if wait_for(lambda port=port: self.process.poll() is not None or accepts(port), 5) and self.process.poll() is None:
                self.port = port
                return
        raise AssertionError("mooncake_master does not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition: Callable[[], Any], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# ---- the peer's own process -----------------------------------------------------------------------------------------------------------


class _Served:
    """A tier, a PoolClient or Mooncake's raw client, and memory for pages."""

    def __init__(self) -> None:
        self.tier: Any = None
        self.client: Any = None
        self.raw: Any = None
        self._kept: list[Any] = []

    # -- a tier

    def open(self, given: dict[str, Any]) -> None:
        from mooncake_kv.common.tiers.pool import open_tier

        self.tier = open_tier(given)
        for kind in ("small", "wide"):
            space = namespace(kind)
            self.tier.add_space(space.digest(), PageLayout(space))

    def write(self, kind: str, name: str, numbers: Sequence[int], why: str = "") -> tuple[list[bool], float]:
        layout, digest, hashes, slots = self._pages(kind, name, numbers)
        for slot, number, found in zip(slots, numbers, hashes, strict=True):
            slot[:] = np.frombuffer(sha256(f"{name}/{number}".encode()).digest(), np.uint8).repeat(-(-layout.slot_bytes // 32))[
                : layout.slot_bytes
            ]
            layout.seal(slot, found, digest)
        begin = time.monotonic()
        return self.tier.write(digest, hashes, slots, [why] * len(hashes)), time.monotonic() - begin

    def read(self, kind: str, name: str, numbers: Sequence[int]) -> tuple[int, int, float]:
        """(pages the tier counts, leading ones of them that verify, seconds)"""
        layout, digest, hashes, slots = self._pages(kind, name, numbers)
        begin = time.monotonic()
        count = self.tier.read(digest, hashes, slots)
        spent = time.monotonic() - begin
        good = 0
        while good < count and layout.verify(slots[good], hashes[good], digest):
            good += 1
        return count, good, spent

    def leading(self, kind: str, name: str, numbers: Sequence[int]) -> tuple[int, float]:
        _, digest, hashes, _ = self._pages(kind, name, numbers, memory=False)
        begin = time.monotonic()
        return self.tier.leading(digest, hashes), time.monotonic() - begin

    def bad(self, kind: str, name: str, numbers: Sequence[int]) -> None:
        self.tier.bad(namespace(kind).digest(), [page_hash(name, number) for number in numbers])

    def drop(self, kind: str) -> None:
        self.tier.drop(namespace(kind).digest())

    def stats(self) -> Any:
        return self.tier.stats()

    def close(self) -> float:
        begin = time.monotonic()
        self.tier.close()
        return time.monotonic() - begin

    def together(self, kind: str, name: str, threads: int, rounds: int) -> list[str]:
        """That many threads write and read pages of their own and common ones; returns what went wrong."""
        wrong: list[str] = []

        def work(me: int) -> None:
            try:
                for turn in range(rounds):
                    for mine in (f"{name}-{me}-{turn}", f"{name}-common-{turn}"):
                        stored, _ = self.write(kind, mine, range(4))
                        count, good, _ = self.read(kind, mine, range(4))
                        if count != good or (all(stored) and count != 4):
                            wrong.append(f"thread {me}, {mine}: stored {stored}, read {count}, {good} of them right")
            except Exception as error:
                wrong.append(repr(error))

        running = [threading.Thread(target=work, args=(me,)) for me in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return wrong

    def _pages(
        self, kind: str, name: str, numbers: Sequence[int], memory: bool = True
    ) -> tuple[PageLayout, str, list[bytes], list[np.ndarray]]:
        space = namespace(kind)
        layout = PageLayout(space)
        pages = np.zeros((len(numbers), layout.slot_bytes), np.uint8) if memory else np.zeros((len(numbers), 0), np.uint8)
        return layout, space.digest(), [page_hash(name, number) for number in numbers], list(pages)

    # -- our client without the tier

    def connect(self, given: dict[str, Any], segment: int = 0) -> str:
        from mooncake_kv.common.tiers.pool.checks import PoolSettings
        from mooncake_kv.common.tiers.pool.client import PoolClient

        self.client = PoolClient(PoolSettings(given, given["sources"]), segment)
        return str(self.client.endpoint)

    def client_call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self.client, method)(*arguments, **named)

    def client_put(self, keys: list[str], sizes: list[int], replace: bool = False) -> list[int]:
        memory = self._memory(sum(sizes))
        memory[:] = 7
        return self.client.put(keys, self._addresses(memory, sizes), sizes, replace=replace)

    def client_get(self, keys: list[str], sizes: list[int]) -> list[int]:
        return self.client.get(keys, self._addresses(self._memory(sum(sizes)), sizes), sizes)

    def client_register_twice(self, size: int) -> str:
        """The sentence of the second time."""
        memory = self._memory(size)
        self.client.register(memory)
        try:
            self.client.register(memory)
        except TierDown as down:
            return str(down)
        return ""

    # -- Mooncake's own client, to plant things

    def raw_open(self, master: str, segment: int = 0) -> str:
        from mooncake_kv.common.tiers.pool import wheel

        self.module = wheel.load()
        self.raw = self.module.MooncakeDistributedStore()
        assert self.raw.setup("127.0.0.1", "P2PHANDSHAKE", segment, 16 << 20, "tcp", "", master) == 0
        return str(self.raw.get_hostname())

    def raw_put(self, key: str, size: int, segment: str = "", fill: int = 7) -> int:
        config = self.module.ReplicateConfig()
        if segment:
            config.preferred_segment = segment
        memory = self._memory(size)
        memory[:] = fill
        return int(self.raw.put_from(key, self._addresses(memory, [size])[0], size, config))

    def raw_call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.raw, method)(*arguments)

    def _memory(self, size: int) -> np.ndarray:
        memory = np.zeros(max(1, size), np.uint8)
        self._kept.append(memory)
        return memory[:size]

    @staticmethod
    def _addresses(memory: np.ndarray, sizes: Sequence[int]) -> list[int]:
        base = int(memory.__array_interface__["data"][0])
        return [base + int(sum(sizes[:i])) for i in range(len(sizes))]


def main() -> None:
    served = _Served()
    # Mooncake writes to standard output, too.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        method, arguments, named = json.loads(line)
        try:
            answer: tuple[str, Any] = ("", getattr(served, method)(*arguments, **named))
        except Exception as error:
            traceback.print_exc()
            answer = (type(error).__name__, str(error))
        out.write(json.dumps(answer) + "\n")
        out.flush()
    # Without close: what a crash leaves behind. Tests that want a clean end ask for it.
    os._exit(0)


if __name__ == "__main__":
    main()
