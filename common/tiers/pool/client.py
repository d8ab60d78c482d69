"""Mooncake's store client, made safe to call.

Promises:
- No call before a setup that has succeeded and been probed, or after `close`, which waits for calls to end. The native client is never
  closed: calls during and after that are a SIGSEGV, and it takes seconds. The process ends without its destructor (os._exit).
- Every result is a code of this process's own table; a master that is dead or frozen (-900, -901) raises TierDown from every call. After
  that the next call first asks by a plain connection: Mooncake's own needs 4.3 s to find a dead master dead.
- Every call frees the GIL and may be made by any thread.

Codes, measured with 0.3.13.post1: -200 no space, -600 bad parameters, -703 not ready (being written), -704 not found, -705 exists,
-706 leased, -707 lease expired, -712 replica gone, -800 transfer failed, -900 RPC failed, -901 RPC timeout, -1700 tenant quota.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..base import TierDown
from . import wheel
from .checks import PoolSettings, check_master, check_metadata_server

log = logging.getLogger(__name__)

EXISTS = -705
LEASE_LOST = frozenset({-706, -707})
FULL = frozenset({-101, -200, -1700})
TRANSFER_FAILED = -800
AWAY = -900
_MASTER_AWAY = frozenset({AWAY, -901})
RECONNECT_S = 0.1
CLOSE_S = 2.0
_PROBE_BYTES = 64


class Replicas(NamedTuple):
    """Of one object: `size` in bytes (-1: not known, it lies on disk) and the owners of its complete replicas in memory."""

    size: int
    owners: tuple[str, ...]


class PoolClient:
    """One native client. `segment_bytes`: memory that it contributes to the pool; only the keeper's client does."""

    def __init__(self, settings: PoolSettings, segment_bytes: int) -> None:
        """Checks, sets up and proves with an object of its own that data can be stored and read. Raises ConfigError or TierDown; either way
        the native client of a failed setup is never called again."""
        self._source = settings.sources.get("master_server_address", "default")
        self._master = settings.master
        check_master(self._master, self._source)
        check_metadata_server(settings)
        module = wheel.load()
        self._module = module
        self._complete = module.ReplicaStatus.COMPLETE
        self._config = module.ReplicateConfig()
        self._config.replica_num = settings.replicas
        if settings.soft_pin:
            self._config.soft_pin_action = module.SoftPinAction.ENABLE
        self._lock = threading.Condition()
        self._calls = 0
        self._open = False
        self._away = False
        store = module.MooncakeDistributedStore()
        begin = time.monotonic()
        code = store.setup(
            settings.hostname,
            settings.metadata,
            0,
            settings.buffer_bytes,
            settings.protocol,
            settings.device,
            self._master,
        )
        if code != 0:
            # Not deleted either: its destructor would run on a half-made client.
            _abandoned.append(store)
            raise TierDown(
                f"Mooncake's client does not start (code {code} after {time.monotonic() - begin:.1f} s): master {self._master}, "
                f"protocol {settings.protocol}, hostname {settings.hostname}"
            )
        self._store: Any = store
        self._segments: list[str] = []
        if segment_bytes:
            # Not by setup: a segment of that can only be taken away by the client's close, which first waits 1 to 5 s for its own threads.
            mounted = store.allocate_and_mount_segment(segment_bytes, settings.protocol)
            self._segments = list(mounted.get("segment_ids", ()))
            if mounted["ret"] != 0 or mounted.get("allocated_size") != segment_bytes:
                _abandoned.append(store)
                raise TierDown(f"Mooncake does not take a segment of {segment_bytes} bytes (global_segment_size): {mounted}")
        self._open = True
        wheel.silence()

    @property
    def endpoint(self) -> str:
        with self._use():
            return str(self._store.get_hostname())

    def probe(self, segment: str) -> None:
        """Store a small object on this node's own segment, read and remove it: others reach the segment by the same address. Raises
        TierDown with the reason; no room there is no failure. Never on any other segment: one whose owner is frozen takes 62 s."""
        key = f"mooncake-kv-probe/{os.getpid()}-{time.monotonic_ns()}"
        written = np.frombuffer(os.urandom(_PROBE_BYTES), np.uint8)
        read = np.zeros(_PROBE_BYTES, np.uint8)
        config = self._module.ReplicateConfig()
        config.preferred_segment = segment
        with self._use():
            self.register(written)
            self.register(read)
            try:
                code = self._checked(self._store.batch_put_from([key], [_address(written)], [_PROBE_BYTES], config))[0]
                if code in FULL:
                    log.info("the pool has no room at this moment (code %d)", code)
                    return
                if code == 0:
                    code = self.get([key], [_address(read)], [_PROBE_BYTES])[0]
                    self.remove([key])
                if code != _PROBE_BYTES and code != 0:
                    raise TierDown(f"a probe object cannot be stored and read at Mooncake's master {self._master}: code {code}")
                if not np.array_equal(written, read):
                    raise TierDown(f"a probe object read at Mooncake's master {self._master} is not what was stored: is an address wrong?")
            finally:
                self.unregister(_address(written))
                self.unregister(_address(read))

    # ---- calls; all raise TierDown ------------------------------------------------------------------------------------------------

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Grants a lease to those that exist."""
        with self._use() as until:
            codes = self._store.batch_is_exist(list(keys))
            while AWAY in codes and time.monotonic() < until:
                codes = self._store.batch_is_exist(list(keys))
            codes = self._checked(codes)
        return [code == 1 for code in codes]

    def replicas(self, keys: Sequence[str]) -> list[Replicas | None]:
        """Where each object lies; None if it has no complete replica. Grants leases, like `exists`."""
        with self._use():
            found = self._store.batch_get_replica_desc(list(keys))
            if not found:
                # What a dead master says, too.
                self._checked(self._store.batch_is_exist([keys[0]]))
        return [self._replicas(found.get(key, ())) for key in keys]

    def _replicas(self, descriptors: Sequence[Any]) -> Replicas | None:
        size, owners, some = -1, [], False
        for descriptor in descriptors:
            if descriptor.status != self._complete:
                continue
            some = True
            if descriptor.is_memory_replica():
                buffer = descriptor.get_memory_descriptor().buffer_descriptor
                size = buffer.size
                owners.append(buffer.transport_endpoint)
        return Replicas(size, tuple(owners)) if some else None

    def get(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Bytes read or a negative code for each. What is longer than its size gives -600."""
        with self._use():
            return self._checked(self._store.batch_get_into(list(keys), list(addresses), list(sizes)))

    def claim(self, keys: Sequence[str], sizes: Sequence[int]) -> list[int]:
        """What a put would meet: 0 nothing, EXISTS an object or somebody who is writing it, or another code. Unlike `put`, whose 0 also
        means "somebody has that key, nothing was stored", and unlike `exists` it grants no lease, which would keep new pages from being
        evicted. Leaves nothing behind."""
        with self._use():
            codes = self._checked(self._store.batch_put_session_start(list(keys), list(sizes), self._config))
            if mine := [key for key, code in zip(keys, codes, strict=True) if code == 0]:
                self._checked(self._store.batch_put_session_revoke(mine))
        return codes

    def put(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], *, replace: bool = False) -> list[int]:
        """0 or a negative code for each. 0 also where the key exists or is being written (see `claim`), except with `replace`, which takes
        over what a dead writer has left unfinished, too."""
        with self._use():
            call = self._store.batch_upsert_from if replace else self._store.batch_put_from
            return self._checked(call(list(keys), list(addresses), list(sizes), self._config))

    def remove(self, keys: Sequence[str]) -> None:
        """Also leased ones. Failures are the master's, and ignored: eviction removes them some day."""
        with self._use():
            self._checked(self._store.batch_remove(list(keys), True))

    def register(self, memory: np.ndarray) -> None:
        self.register_memory(_address(memory), memory.nbytes)

    def register_memory(self, address: int, size: int) -> None:
        """Once for each range that is not within another. RDMA cannot use memory that is not registered, TCP can."""
        with self._use():
            if code := self._store.register_buffer(address, size):
                raise TierDown(f"Mooncake does not take memory of {size} bytes for transfers (code {code})")

    def unregister(self, address: int) -> None:
        with self._use():
            self._store.unregister_buffer(address)

    # ---- end ----------------------------------------------------------------------------------------------------------------------

    def retire(self) -> None:
        """No call from now on. A client without a segment has nothing to unmount."""
        with self._lock:
            self._open = False

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Whether calls have ended in time, and the segments were unmounted: 1 ms. The native client is left to the end of the process. May
        be called twice."""
        with self._lock:
            if not self._open:
                return True
            self._open = False
            if not self._lock.wait_for(lambda: self._calls == 0, timeout_s):
                return False
        return not self._segments or self._store.unmount_and_free_segment(self._segments) == 0

    @contextmanager
    def _use(self) -> Iterator[float]:
        """Gives until when a call that fails is worth trying again: each connection to a master that has been away fails once."""
        until = 0.0
        with self._lock:
            if not self._open:
                raise TierDown("Mooncake's client is closed")
            self._calls += 1
        try:
            if self._away:
                check_master(self._master, self._source)
                self._away = False
                until = time.monotonic() + RECONNECT_S
            yield until
        finally:
            with self._lock:
                self._calls -= 1
                self._lock.notify_all()

    def _checked(self, codes: Sequence[int]) -> list[int]:
        """The codes of one call, unless they say that the master did not answer."""
        for code in codes:
            if code in _MASTER_AWAY:
                self._away = True
                what = "does not answer" if code == -901 else "cannot be reached"
                raise TierDown(f"the Mooncake master at {self._master} ({self._source}) {what} (code {code})")
        return list(codes)


_abandoned: list[Any] = []


def _address(memory: np.ndarray) -> int:
    return int(memory.__array_interface__["data"][0])
