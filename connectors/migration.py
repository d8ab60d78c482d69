"""Reads of another engine's KV blocks over Mooncake's transfer engine, for engines that hand over addresses of their own memory.

Promises:
- One transfer engine per process, whatever the number of peers. Registering the same memory again does nothing; memory that takes the
  place of memory registered before replaces it.
- Every read is checked first: the region is known on both sides, and offset and length lie within it there and here.
- No event loop waits for a native call. A read ends within its deadline, with all bytes in place or with MigrationError, also where the
  peer is dead or frozen. After an error nothing more is written into the engine's memory.
- A peer that failed is left alone for a while, so that one frozen peer holds at most READS_PER_PEER threads. Connecting again ends that.

"Nothing more is written" needs memory of our own. Measured with 0.3.13.post1 over TCP: a read from a frozen process returns -1 after 1 to
30 s, and when the process goes on, all bytes are still written to where they should have gone. So over TCP bytes arrive in staging buffers
and are copied when their read has ended well; a buffer whose read failed is never used again (at QUARANTINE_BYTES of them, reads end in
this process). It costs little: neighbouring blocks of the peer make one read wherever they go here, and copies overlap with the next
reads. RDMA reads go straight into the engine's memory, and the call ends only when the native one has: a failed queue pair delivers
nothing more.

Mooncake's transfer engine listens on every address of the machine and asks nobody who they are: whoever reaches its port reads and writes
registered memory. Firewalls must close it; docs/lmdeploy.md says so.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from ..common.config import CacheConfig
from ..common.errors import ConfigError
from ..common.tiers.pool import checks, wheel

log = logging.getLogger("mooncake_kv.migration")

CHUNK_BYTES = 8 << 20
# Over TCP each read is a message of its own; Mooncake's queue holds 65,535 a peer (see wheel.ENVIRONMENT).
CHUNK_READS = 1024
# Chunks of one call under way: one is copied while the next arrives.
DEPTH = 2
READS_PER_PEER = 2
THREADS = 8
# Calls waiting for a thread, all peers together.
WAITING = 256
QUARANTINE_BYTES = 256 << 20
BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)
# Seconds after which Mooncake gives up a transfer that makes no progress, 30 by default: it bounds how long a thread is held.
ENVIRONMENT = {"MC_TRANSFER_TIMEOUT": "5"}
_MAX_ADDRESS = (1 << 63) - 1
_Positive = Annotated[int, msgspec.Meta(ge=1, le=_MAX_ADDRESS)]


class MigrationError(RuntimeError):
    """A read that did not happen, or not in time; the engine's memory may hold some of its bytes, and gets no more of them."""


class Region(msgspec.Struct, frozen=True):
    """Registered memory: address and bytes."""

    address: _Positive
    length: _Positive


class Endpoint(msgspec.Struct, frozen=True):
    """What a peer needs in order to read from this process: the transfer engine's name and its regions."""

    session: Annotated[str, msgspec.Meta(pattern=r"^\S{1,255}:\d{1,5}$")]
    regions: Annotated[dict[str, Region], msgspec.Meta(max_length=4096)]


class Piece(NamedTuple):
    """One assignment: `length` bytes of the region `key`, from an offset in the peer's to an offset in ours."""

    key: str
    remote: int
    local: int
    length: int


class Chunk(NamedTuple):
    """What is read at once. reads: (remote address, address or offset here, bytes); copies: (offset in staging, local address, bytes)."""

    reads: list[tuple[int, int, int]]
    copies: list[tuple[int, int, int]]


def plan(pieces: Sequence[tuple[int, int, int]], *, chunk_bytes: int = CHUNK_BYTES, chunk_reads: int = CHUNK_READS) -> Iterator[Chunk]:
    """Cuts (remote address, local address, bytes) into chunks by way of staging. Neighbours in the peer's memory become one read."""
    chunk = Chunk([], [])
    used = 0
    for remote, local, length in sorted(pieces):
        while length:
            reads, copies = chunk
            joins = bool(reads) and sum(reads[-1][::2]) == remote
            if used == chunk_bytes or (not joins and len(reads) == chunk_reads):
                yield chunk
                chunk, used = Chunk([], []), 0
                continue
            n = min(length, chunk_bytes - used)
            if joins:
                reads[-1] = (reads[-1][0], reads[-1][1], reads[-1][2] + n)
            else:
                reads.append((remote, used, n))
            if copies and copies[-1][1] + copies[-1][2] == local:
                copies[-1] = (copies[-1][0], copies[-1][1], copies[-1][2] + n)
            else:
                copies.append((used, local, n))
            used, remote, local, length = used + n, remote + n, local + n, length - n
    if chunk.reads:
        yield chunk


class _Buffer:
    """One chunk of staging memory; `address` is registered."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, CHUNK_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


class _Staging:
    """Buffers of all reads of the process: at most DEPTH for each thread, and those in quarantine."""

    def __init__(self, register: Callable[[int, int], None]) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._free: list[_Buffer] = []
        self._quarantine: list[_Buffer] = []

    def take(self) -> _Buffer:
        with self._lock:
            if self._free:
                return self._free.pop()
            if len(self._quarantine) * CHUNK_BYTES >= QUARANTINE_BYTES:
                raise MigrationError(f"{QUARANTINE_BYTES >> 20} MiB wait for bytes of reads that failed: no more reads in this process")
        buffer = _Buffer()
        self._register(buffer.address, CHUNK_BYTES)
        return buffer

    def give(self, buffer: _Buffer, *, good: bool) -> None:
        with self._lock:
            (self._free if good else self._quarantine).append(buffer)


class Transfer:
    """The transfer engine of a process. `host` is the address under which peers reach it."""

    def __init__(self, config: CacheConfig, host: str, *, direct: bool | None = None) -> None:
        """Raises ConfigError and MigrationError. `direct`: read without staging, by default over RDMA only."""
        checks.check_protocol(config.protocol, config.device_name, config.sources)
        self.direct = config.protocol == "rdma" if direct is None else direct
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._engine: Any = wheel.load("mooncake.engine").TransferEngine()
        code = self._engine.initialize(_bracketed(host), "P2PHANDSHAKE", config.protocol, config.device_name)
        if code != 0:
            raise MigrationError(f"Mooncake's transfer engine does not start on {host} with protocol {config.protocol!r} (code {code})")
        wheel.silence()
        self.host = host
        self.session = f"{_bracketed(host)}:{self._engine.get_rpc_port()}"
        self._lock = threading.Lock()
        self._regions: dict[int, int] = {}
        self._staging = _Staging(self._register_native)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="mooncake-migration")
        self._count = threading.Lock()
        self._waiting = 0
        log.info("migration: transfer engine %s, protocol %s", self.session, config.protocol)

    def _register_native(self, address: int, length: int) -> None:
        code = self._engine.register_memory(address, length)
        if code != 0:
            raise MigrationError(f"Mooncake does not register {length} bytes at {address:#x} (code {code})")

    def register(self, address: int, length: int) -> None:
        """Raises MigrationError."""
        with self._lock:
            if self._regions.get(address) == length:
                return
            if not self.direct and not is_host_memory(address, length):
                raise MigrationError(
                    f"{length} bytes at {address:#x} are no host memory, which migration over TCP needs: set protocol to 'rdma'"
                )
            for start, size in list(self._regions.items()):
                if start < address + length and address < start + size:
                    self._engine.unregister_memory(start)
                    del self._regions[start]
            self._register_native(address, length)
            self._regions[address] = length

    def submit(self, session: str, pieces: Sequence[tuple[int, int, int]]) -> _Read:
        """Starts a read on one of the threads."""
        with self._count:
            if self._waiting >= WAITING:
                raise MigrationError(f"{WAITING} reads are waiting")
            self._waiting += 1
        read = _Read(self._engine, None if self.direct else self._staging, session, pieces)

        def run() -> None:
            with self._count:
                self._waiting -= 1
            read.run()

        self._threads.submit(run)
        return read


class _Read:
    """One call on a thread of its own. `result` ends with the last byte in place or the first error, `ended` with the last native call."""

    def __init__(self, engine: Any, staging: _Staging | None, session: str, pieces: Sequence[tuple[int, int, int]]) -> None:
        self._engine = engine
        self._staging = staging
        self._session = session
        self._pieces = pieces
        self._copying = threading.Lock()
        self._abandoned = False
        self.result: Future[None] = Future()
        self.ended: Future[None] = Future()

    def abandon(self) -> None:
        """With staging nothing is written into the engine's memory after this has returned."""
        with self._copying:
            self._abandoned = True

    def run(self) -> None:
        try:
            if self._staging is None:
                self._read_direct()
            else:
                self._read_staged(self._staging)
            self._end(None)
        except Exception as error:
            self._end(error if isinstance(error, MigrationError) else MigrationError(f"{type(error).__name__}: {error}"))
        finally:
            self.ended.set_result(None)

    def _end(self, error: MigrationError | None) -> None:
        if self.result.done():
            return
        if error is None:
            self.result.set_result(None)
        else:
            self.result.set_exception(error)

    def _start(self, reads: Sequence[tuple[int, int, int]], base: int) -> int:
        remote, here, length = zip(*reads, strict=True)
        batch = self._engine.batch_transfer_async_read(self._session, [base + at for at in here], list(remote), list(length))
        if batch <= 0:
            raise MigrationError(f"{self._session} cannot be reached")
        return batch

    def _wait(self, batch: int) -> None:
        if self._engine.get_batch_transfer_status([batch]) != 0:
            raise MigrationError(f"a read from {self._session} failed")

    def _read_direct(self) -> None:
        for start in range(0, len(self._pieces), CHUNK_READS):
            if self._abandoned:
                raise MigrationError("given up")
            self._wait(self._start(self._pieces[start : start + CHUNK_READS], 0))

    def _read_staged(self, staging: _Staging) -> None:
        chunks = plan(self._pieces)
        under_way: deque[tuple[Chunk, _Buffer, int]] = deque()
        try:
            while True:
                while len(under_way) < DEPTH and not self._abandoned and (chunk := next(chunks, None)):
                    buffer = staging.take()
                    try:
                        under_way.append((chunk, buffer, self._start(chunk.reads, buffer.address)))
                    except MigrationError:
                        staging.give(buffer, good=False)
                        raise
                if not under_way:
                    break
                chunk, buffer, batch = under_way.popleft()
                try:
                    self._wait(batch)
                except MigrationError:
                    staging.give(buffer, good=False)
                    raise
                with self._copying:
                    if not self._abandoned:
                        for offset, address, length in chunk.copies:
                            ctypes.memmove(address, buffer.address + offset, length)
                staging.give(buffer, good=True)
        except MigrationError as error:
            # Whoever waits need not wait for the rest.
            self.abandon()
            self._end(error)
            for _, buffer, batch in under_way:
                staging.give(buffer, good=self._engine.get_batch_transfer_status([batch]) == 0)
        if self._abandoned:
            raise MigrationError("given up")


class Link:
    """One peer. Belongs to one event loop."""

    def __init__(self, transfer: Transfer, name: str) -> None:
        self.name = name
        self._transfer = transfer
        self._local: dict[str, Region] = {}
        self._remote: Endpoint | None = None
        self._room = asyncio.Semaphore(READS_PER_PEER)
        self._failures = 0
        self._rest_until = 0.0

    def add(self, key: str, address: int, length: int) -> None:
        """Makes memory of this process known to the peer, and a destination of reads. Idempotent."""
        region = msgspec.convert({"address": address, "length": length}, Region)
        self._transfer.register(address, length)
        self._local[key] = region

    def endpoint(self) -> dict[str, Any]:
        """For the peer's `connect`; can be written as JSON."""
        return msgspec.to_builtins(Endpoint(self._transfer.session, self._local))

    def connect(self, endpoint: str) -> None:
        """`endpoint`: the peer's, as JSON. Raises MigrationError."""
        try:
            self._remote = msgspec.json.decode(endpoint, type=Endpoint)
        except msgspec.MsgspecError as error:
            raise MigrationError(f"{self.name} is no Mooncake endpoint of mooncake-kv: {error}") from None
        self._failures = 0
        self._rest_until = 0.0

    def _check(self, pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
        if self._remote is None:
            raise MigrationError(f"{self.name} is not connected")
        addresses = []
        for key, remote, local, length in pieces:
            there, here = self._remote.regions.get(key), self._local.get(key)
            if there is None or here is None:
                raise MigrationError(f"region {key} is not known {'here' if here is None else f'at {self.name}'}")
            if length <= 0 or remote < 0 or local < 0 or remote + length > there.length or local + length > here.length:
                raise MigrationError(
                    f"{length} bytes from offset {remote} of {there.length} to offset {local} of {here.length} lie outside region {key}"
                )
            addresses.append((there.address + remote, here.address + local, length))
        return addresses

    async def read(self, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Reads all pieces. Raises MigrationError, at the latest after timeout_s (without staging: when the native call has ended)."""
        addresses = self._check(pieces)
        deadline = time.monotonic() + timeout_s
        self._check_rest()
        try:
            async with asyncio.timeout(timeout_s):
                await self._room.acquire()
        except TimeoutError:
            raise MigrationError(f"no read from {self.name} could start within {timeout_s:.1f} s") from None
        read = None
        try:
            self._check_rest()
            assert self._remote is not None
            read = self._transfer.submit(self._remote.session, addresses)
            await self._finish(read, max(0.0, deadline - time.monotonic()), timeout_s)
        finally:
            if read is None or read.ended.done():
                self._room.release()
            else:
                loop = asyncio.get_running_loop()
                read.ended.add_done_callback(lambda _: _call_soon(loop, self._room.release))

    async def _finish(self, read: _Read, left_s: float, timeout_s: float) -> None:
        result = asyncio.wrap_future(read.result)
        try:
            await asyncio.wait({result}, timeout=left_s)
            if result.done():
                result.result()
            else:
                read.abandon()
                # A read without staging must not be left while it writes.
                if self._transfer.direct:
                    await asyncio.wait({asyncio.wrap_future(read.ended)})
                raise MigrationError(f"no answer from {self.name} within {timeout_s:.1f} s")
        except MigrationError:
            self._failures += 1
            rest = BACKOFF_S[min(self._failures, len(BACKOFF_S)) - 1]
            self._rest_until = time.monotonic() + rest
            raise
        finally:
            read.abandon()
            # What comes later is nobody's.
            result.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._failures = 0

    def _check_rest(self) -> None:
        left = self._rest_until - time.monotonic()
        if left > 0:
            raise MigrationError(f"{self.name} failed {self._failures} times and is left alone for {left:.1f} s more")


def host_for(config: CacheConfig, own: str | None, peer: str | None) -> str:
    """The address under which peers reach this process: `local_hostname` if given, else that of `own`, a host name by which this process is
    known to its peers, if it is one of this machine, else the address from which `peer` is reached. Raises ConfigError."""
    if config.local_hostname:
        return checks.own_address(config.local_hostname, config.sources)
    if own:
        with suppress(ConfigError):
            return checks.own_address(own, config.sources)
    if peer:
        with suppress(OSError):
            return checks.address_towards(peer, 1)
    raise ConfigError(f"local_hostname is '' (default): neither {own!r} nor the way to {peer!r} tells an address of this machine")


def is_host_memory(address: int, length: int, maps: Path = Path("/proc/self/maps")) -> bool:
    """Whether all of it is mapped for reading and writing by this process."""
    end = address + length
    for line in maps.read_text().splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
        if match and int(match[1], 16) <= address < int(match[2], 16):
            address = int(match[2], 16)
            if address >= end:
                return True
    return False


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function)


_shared: Transfer | None = None
_shared_lock = threading.Lock()


def shared(config: CacheConfig, own: str | None, peer: str | None) -> Transfer:
    """The transfer engine of this process, started by the first call. Arguments as for `host_for`. Raises ConfigError, MigrationError."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Transfer(config, host_for(config, own, peer))
        return _shared
