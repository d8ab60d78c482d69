"""NodeClient: how an engine talks to the node without ever waiting for it.

Promises:
- No public call but `wait_ready` and `close` does I/O, waits for the node, or takes a lock that is held during either. A call changes local
  state, queues a message and wakes the client's own thread; that thread connects, spawns, sends, receives, maps and removes mappings.
- Whatever is wrong with the node, calls answer at once as if nothing were cached, and `ready` comes back by itself.
- What is handed out (Slots, Fetch, ...) carries the epoch and the generation of the connection it belongs to; what comes back for another
  one is dropped and counted.
- When the connection is lost, its socket is closed only after the last copy into that node's memory has ended and nothing of it is mapped:
  to the node, the end of the socket is the sign that the client is gone.
- In a forked child the client is inert: never ready, and the child keeps neither the connection nor the memory alive.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from ..config import CacheConfig
from ..errors import ConfigError
from ..identity import KVNamespace, trailer_key
from . import paths, protocol, spawn
from .client_hello import NodeRefuses, greet, own_version
from .client_link import MESSAGE_BYTES, Link, unique_generation
from .client_wire import Connection, ConnectionLost, OnMap, Wire
from .handles import Fetch, Lookup, Pending, Reserve, Slots
from .mapping import Arena, Doorbell, PinnedArena, Reaper
from .spawn import NodeUnavailable

__all__ = ["Arena", "Fetch", "Lookup", "NodeClient", "Pending", "PinnedArena", "Reserve", "Slots"]

log = logging.getLogger("mooncake_kv.node.client")

BACKOFF_S = 0.1
BACKOFF_MAX_S = 2.0
# A node that refuses us is asked again, so that an operator can replace it without restarting engines.
REFUSED_S = 30.0
# A connection that lasted so long was a good one: the next attempt comes soon again.
STABLE_S = 5.0
# How long the next hello waits for copies from the lost node's memory.
UNMAP_S = 5.0
LOG_S = 10.0
SAME_LOG_S = 300.0
# Credits where nobody says how many: several large steps, and nothing a small arena would notice.
CREDIT_BYTES = 256 << 20
MIN_CREDITS = 16


class NodeClient:
    """One half of an engine's connector. `engine` names the engine instance, alike in all its halves. `credits`: slots to hold ahead
    (scheduler; 0: from the configuration, or automatic). `host_pool_bytes`: see protocol.Hello. `spawn`: start a node where none runs.
    `on_map(extent, address, size)` is called on the client's thread when memory was mapped, `on_unmap(address, size)` before it is
    removed."""

    def __init__(
        self,
        config: CacheConfig,
        namespace: KVNamespace,
        *,
        engine: str,
        role: Literal["scheduler", "worker"],
        credits: int = 0,
        host_pool_bytes: int = 0,
        spawn: bool = True,
        on_map: OnMap | None = None,
        on_unmap: Callable[[int, int], None] | None = None,
    ) -> None:
        self._config = config
        self._namespace = namespace
        self._digest = namespace.digest(config.pool_secret)
        self._engine = engine
        self._role = role
        self._wanted = credits
        self._host_pool_bytes = host_pool_bytes
        self._spawn = spawn
        self._on_map = on_map
        self._on_unmap = on_unmap
        self._node = paths.node_paths(config.node)
        self._timeout_s = config.fetch_timeout_ms / 1e3
        self._deadline_ms = config.fetch_deadline_ms
        self._doorbell = Doorbell()
        self._reaper = Reaper(self._doorbell)
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._counters: Counter[str] = Counter()
        self._link = Link()
        self._arena: Arena | None = None
        self._stopping = False
        self._conflict = ""
        self._changed = threading.Condition()
        self._logged: dict[int, tuple[float, str]] = {}
        self._thread = threading.Thread(target=self._run, name="mooncake-kv-client", daemon=True)
        self.reason = "the client was not started"
        _clients.add(self)

    # ---- any engine thread -------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Connected, and the node answers."""
        return self._link.ready

    @property
    def epoch(self) -> int:
        """The connected node's epoch, 0 when there is none."""
        return self._link.epoch

    @property
    def generation(self) -> int:
        """Of the current connection of a scheduler, 0 when there is none. Unique over all nodes, so it alone tells connections apart. (Of a
        worker: the last one that was over when it connected.)"""
        return self._link.generation

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot as the node says, 0 when there is none."""
        return self._link.slot_bytes

    @property
    def dram_bytes(self) -> int:
        """The most memory that the node may use for pages, 0 when there is none."""
        return self._link.dram_bytes

    @property
    def node_pid(self) -> int:
        """The node's process, 0 when there is none."""
        return self._link.node_pid

    def start(self) -> None:
        self.reason = "the client is connecting"
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """For the start of an engine only: wait until the node is there. False, with a `reason`, after the timeout; the client goes on
        trying.
        Raises ConfigError when the node has other settings and `node_conflict` is "fail"."""
        if os.getpid() != self._pid:
            return False
        with self._changed:
            self._changed.wait_for(lambda: self.ready or self._conflict or self._stopping, timeout_s)
        if self._conflict and self._config.node_conflict == "fail":
            raise ConfigError(self._conflict)
        return self.ready

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued and leave. Copies that still run keep their memory."""
        if os.getpid() != self._pid or self._stopping:
            return
        self._stopping = True
        self._doorbell.ring()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self.reason = "the client was closed"

    def fetch(self, hashes: Sequence[bytes], limit_bytes: int = 0, *, check: bool = True) -> Fetch | None:
        """Ask for staging of the leading run of these pages; at most `limit_bytes` of them (0: no limit), and what comes within the fetch
        deadline. None is a miss at once. Every Fetch must be given to `release`. Without `check` the node does not verify pages that it has
        in DRAM: their reader must."""
        link = self._link
        handle = Fetch(next(self._numbers), link.epoch, link.generation, self._timeout_s, self._deadline_ms / 1e3)
        joined = _join(hashes)
        message = protocol.Fetch(request=handle.request, hashes=joined, limit_bytes=limit_bytes, check=check, deadline_ms=self._deadline_ms)
        return handle if self._ask(link, handle, message, len(joined)) else None

    def release(self, fetch: Fetch) -> None:
        """End the leases of a fetch, finished, failed or not."""
        link = self._link
        if fetch.released:
            return
        fetch.released = True
        if fetch.generation == link.generation:
            link.requests.pop(fetch.request, None)
            link.push(protocol.Release(request=fetch.request), MESSAGE_BYTES)

    def lookup(self, hashes: Sequence[bytes]) -> Lookup | None:
        """Ask how many leading pages are stored. None where the node does not answer."""
        link = self._link
        handle = Lookup(next(self._numbers), link.epoch, link.generation, self._timeout_s)
        joined = _join(hashes)
        return handle if self._ask(link, handle, protocol.Lookup(request=handle.request, hashes=joined), len(joined)) else None

    def reserve(self, hashes: Sequence[bytes]) -> Reserve | None:
        """Ask for slots by name. None where the node does not answer."""
        link = self._link
        handle = Reserve(next(self._numbers), link.epoch, link.generation, self._timeout_s)
        joined = _join(hashes)
        return handle if self._ask(link, handle, protocol.Reserve(request=handle.request, hashes=joined), len(joined)) else None

    def take(self, count: int) -> Slots:
        """Up to `count` of the slots granted ahead, with the epoch and generation they belong to. Each goes to `commit` or `discard`,
        once."""
        link = self._link
        slots: list[int] = []
        if link.ready:
            try:
                while len(slots) < count:
                    slots.append(link.credits.popleft())
            except IndexError:
                self._counters["slots_missing"] += count - len(slots)
            link.taken.update(slots)
        return Slots(link.epoch, link.generation, slots)

    def commit(self, generation: int, pages: Sequence[tuple[bytes, int]], rectangles: Sequence[protocol.Rectangle] = ()) -> None:
        """These (hash, slot) pairs hold whole pages, or with `rectangles` those parts of pages. Dropped and counted if the generation is
        over."""
        link = self._link
        if generation != link.generation or link.over:
            self._counters["pages_stale"] += len(pages)
            return
        hashes: list[bytes] = []
        slots: list[int] = []
        for page_hash, slot in pages:
            try:
                link.taken.remove(slot)
            except KeyError:
                self._counters["slots_misused"] += 1
            else:
                hashes.append(page_hash)
                slots.append(slot)
        if slots:
            message = protocol.Commit(hashes=_join(hashes), slots=slots, rectangles=list(rectangles))
            link.push(message, 40 * len(slots) + MESSAGE_BYTES)
            self._counters["pages_committed"] += len(slots)

    def discard(self, generation: int, slots: Sequence[int]) -> None:
        """These slots will not be committed and nobody writes to them any more. Slots granted ahead become credits again without a
        message."""
        link = self._link
        if generation != link.generation or link.over:
            self._counters["pages_stale"] += len(slots)
            return
        named: list[int] = []
        for slot in slots:
            try:
                link.taken.remove(slot)
            except KeyError:
                self._counters["slots_misused"] += 1
                continue
            if slot in link.named:
                link.named.discard(slot)
                named.append(slot)
            elif slot >> protocol.SLOT_SHIFT not in link.retired:
                link.credits.append(slot)
        if named:
            link.push(protocol.Discard(slots=named), 8 * len(named) + MESSAGE_BYTES)

    def suspect(self, hashes: Sequence[bytes]) -> None:
        """These pages failed a check: the node verifies them again."""
        joined = _join(hashes)
        self._link.push(protocol.Suspect(hashes=joined), len(joined) + MESSAGE_BYTES)

    def drop(self) -> None:
        """Forget all pages of the namespace."""
        link = self._link
        if link.over:
            return
        # The answer tells nobody anything, but as something that is awaited it shows whether the node lives.
        handle = Pending(next(self._numbers), link.epoch, link.generation, self._timeout_s)
        link.requests[handle.request] = handle
        link.push(protocol.Drop(request=handle.request), MESSAGE_BYTES)

    def arena(self) -> Arena | None:
        """The mapped memory of the current node (worker). Ask for it anew in each step: another node has another one."""
        return self._arena

    def counters(self) -> dict[str, int | float]:
        """Counts since the start, and the present numbers of credits, taken slots, awaited requests and mapped bytes."""
        link, arena = self._link, self._arena
        return {
            **self._counters,
            "ready": int(link.ready),
            "credits": len(link.credits),
            "slots_taken": len(link.taken),
            "requests_awaited": len(link.requests),
            "queued_bytes": link.queued,
            "mapped_bytes": arena.mapped_bytes if arena is not None else 0,
        }

    def _ask(self, link: Link, handle: Pending, message: protocol.Message, size: int) -> bool:
        sent = link.ask(handle, message, size + MESSAGE_BYTES)
        self._counters["requests" if sent else "requests_unasked"] += 1
        return sent

    # ---- the client's thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        delay = BACKOFF_S
        while not self._stopping:
            began = time.monotonic()
            wait: float | None = None
            try:
                if self._attempt() and time.monotonic() - began >= STABLE_S:
                    delay = BACKOFF_S
            except NodeRefuses as refused:
                self._report(str(refused), logging.ERROR)
                if self._conflict:
                    break
                wait = REFUSED_S
            except Exception as error:  # a mistake of ours costs the cache, not the engine
                self._report(f"the client of node {self._config.node!r} failed: {error!r}", logging.ERROR, trace=True)
            if wait is None:
                wait, delay = delay, min(2 * delay, BACKOFF_MAX_S)
            self._pause(wait)
        self._reap()
        # From here on, whoever drops the last view of a mapping removes it.
        self._reaper.closed = True
        self._reap()
        with self._changed:
            self._changed.notify_all()

    def _attempt(self) -> bool:
        """One connection from hello to its end. Returns whether there was one."""
        try:
            wire, welcome, rest = self._greet()
        except NodeUnavailable as error:
            self._counters["node_unavailable"] += 1
            self._report(str(error))
            return False
        link = Link(welcome.epoch, welcome.generation, welcome.slot_bytes, welcome.dram_bytes, welcome.pid, self._doorbell)
        arena = None
        if self._role == "worker":
            arena = Arena(welcome.epoch, welcome.slot_bytes, self._doorbell, self._reaper, wire)
            # These are over: a worker that connects late does not see their Fence.
            arena.fence(unique_generation(welcome.epoch, welcome.generation))
        why = "the client was closed"
        try:
            if self._role == "scheduler":
                wire.send(protocol.Want(self._credits(welcome.slot_bytes)))
            connection = Connection(
                wire,
                link,
                arena,
                doorbell=self._doorbell,
                timeout_s=self._timeout_s,
                counters=self._counters,
                report=self._report,
                reap=lambda: self._reap(arena),
                stop=lambda: self._stopping,
                on_map=self._on_map,
            )
            self._counters["connections"] += 1
            link.ready = True
            self._arena, self._link = arena, link
            self._report("")
            connection.serve(rest)
        except ConnectionLost as lost:
            why = f"node {self._config.node!r} (pid {welcome.pid}): {lost}"
        finally:
            self._counters["requests_failed"] += link.end()
            self._link, self._arena = Link(), None
            self._report(why)
            self._let_go(arena)
            if arena is None or not arena.live:
                wire.close()
        return True

    def _greet(self) -> tuple[Wire, protocol.Welcome, list[protocol.ToClient]]:
        """Connect, say hello and judge the answer. Returns what came after the Welcome too."""
        config = self._config
        settings = config.node_settings()
        sources = {key: config.sources.get(key, "default") for key in settings}
        if self._spawn:
            connection, spawned = spawn.connect_or_spawn(self._node, settings, sources, self._pause)
            self._counters["nodes_spawned"] += spawned
        else:
            found = spawn.connect(self._node)
            if found is None:
                raise NodeUnavailable(f"no node {config.node!r} is running; start it with `mooncake-kv node run {config.node}`")
            connection = found
        hello = protocol.Hello(
            major=protocol.MAJOR,
            minor=protocol.MINOR,
            version=own_version(),
            role=self._role,
            engine=self._engine,
            pid=os.getpid(),
            namespace=self._namespace.encode(),
            digest=self._digest,
            key=trailer_key(config.pool_secret),
            settings=settings,
            sources=sources,
            host_pool_bytes=self._host_pool_bytes,
        )
        wire = Wire(connection)
        welcome, rest = greet(wire, hello, config.node, lambda: self._stopping)
        if welcome.conflicts:
            self._conflict = f"node {config.node!r} runs with other settings: {'; '.join(welcome.conflicts)}"
            raise NodeRefuses(self._conflict)
        return wire, welcome, rest

    def _credits(self, slot_bytes: int) -> int:
        if self._wanted:
            return self._wanted
        return max((self._config.credits or CREDIT_BYTES) // max(slot_bytes, 1), 1 if self._config.credits else MIN_CREDITS)

    def _let_go(self, arena: Arena | None) -> None:
        """Wait until nothing views the lost node's memory, and remove it. What is viewed after the deadline keeps its memory and the
        socket."""
        if arena is None:
            return
        arena.close()
        deadline = time.monotonic() + UNMAP_S
        self._reap()
        while arena.live and (left := deadline - time.monotonic()) > 0:
            self._wait(left)
        if arena.live:
            self._log(logging.WARNING, f"copies have held {arena.live} extents of a lost node for {UNMAP_S:.0f} s; going on without them")

    def _reap(self, arena: Arena | None = None) -> list[int]:
        """Remove mappings that nobody views any more. Returns the extents among them that belonged to this arena."""
        extents: list[int] = []
        while self._reaper.gone:
            gone = self._reaper.gone.popleft()
            if self._on_unmap is not None:
                self._on_unmap(gone.address, gone.size)
            gone.unmap()
            if gone.arena is arena:
                extents.append(gone.extent)
        return extents

    def _pause(self, seconds: float) -> bool:
        """Let time pass; False as soon as the client is to stop."""
        deadline = time.monotonic() + seconds
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            self._wait(left)
        return not self._stopping

    def _wait(self, seconds: float) -> None:
        """Until the doorbell rings or the time is over; removes mappings."""
        poll = select.poll()
        poll.register(self._doorbell.fd, select.POLLIN)
        poll.poll(seconds * 1e3)
        self._doorbell.hear()
        self._reap()

    def _report(self, reason: str, level: int = logging.WARNING, *, trace: bool = False) -> None:
        """Ready ('') or not, and why; with `trace` the log shows where the exception that is being handled came from."""
        self.reason = reason
        with self._changed:
            self._changed.notify_all()
        if self._stopping:
            return
        if reason:
            self._log(level, f"{self._role}: no cache: {reason}", trace)
        else:
            self._log(logging.INFO, f"{self._role}: node {self._config.node!r} (pid {self._link.node_pid}) is ready")

    def _log(self, level: int, text: str, trace: bool = False) -> None:
        """At most one line of a level in LOG_S, and the same line again only after SAME_LOG_S."""
        now = time.monotonic()
        last, last_text = self._logged.get(level, (-SAME_LOG_S, ""))
        if now - last < (SAME_LOG_S if text == last_text else LOG_S):
            self._counters["log_lines_suppressed"] += 1
            return
        self._logged[level] = (now, text)
        log.log(level, "%s", text, exc_info=trace)

    def _forked(self) -> None:
        """In a forked child, whose thread does not exist."""
        link, arena = self._link, self._arena
        link.over = True
        link.ready = False
        self._link, self._arena = Link(), None
        self.reason = "this is a forked copy of the process that the client belongs to"
        if arena is not None:
            arena.forked()


def _join(hashes: Sequence[bytes]) -> bytes:
    joined = b"".join(hashes)
    if len(joined) != protocol.HASH_BYTES * len(hashes):
        raise ValueError(f"{len(hashes)} page hashes have {len(joined)} bytes, not {protocol.HASH_BYTES} each")
    return joined


_clients: weakref.WeakSet[NodeClient] = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client._forked()


os.register_at_fork(after_in_child=_after_fork)
