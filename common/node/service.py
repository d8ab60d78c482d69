"""What the node does for its clients: the parts, who belongs to which engine and namespace, and one handler for each message.

Promises: every handler returns within about a millisecond; longer work goes to the helper process or is cut into steps. A handler raises
ValueError where the client broke the protocol, and has changed nothing then that outlives the connection. Knows no sockets: a connection
is something to send messages to, and its end is reported by `gone`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ..identity import TRAILER_KEY_BYTES, KVNamespace
from ..page import PageLayout
from ..tiers.link import TierLink
from . import protocol
from .arena import Arena, Extent
from .connection import Connection
from .credits import Credits
from .helper_link import HelperLink
from .index import Entry, Index, Namespace, split_hashes
from .looking import Looker
from .memory import auto_size
from .metrics import Counters, Latency, Stats
from .protocol import HASH_BYTES
from .reading import Reader
from .room import Room
from .sealing import Sealer
from .session import Engine, ProtocolError, Session
from .settings import NodeSettings
from .staging import DRAM, Stager
from .writing import WriteThrough

log = logging.getLogger("mooncake_kv.node")

SLOW_S = 30.0
# How long our own processes may take to leave.
END_S = 2.0
# Leases may hold this share of the arena (1 / WINDOW_SHARE), so that saving goes on while prefixes are staged.
WINDOW_SHARE = 2
DROP_STEP = 2000


class Service:
    """`leave` is called with the reason when a client stops the node, `fail` when the node cannot go on. Runs on the thread of `loop`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        folder: Path,
        settings: NodeSettings,
        version: str,
        *,
        leave: Callable[[str], object],
        fail: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._name = name
        self._settings = settings
        self._version = version
        self._leave = leave
        self._epoch = secrets.randbits(63) | 1
        self._generation = 0
        self._refill_due = False
        self._closed = False
        self._collect_due = False
        self._engines: dict[str, Engine] = {}
        self._started = self.last_engine = time.monotonic()
        self.metrics_address = ""
        self.counters = Counters()
        self.lookups = Latency()
        budget = settings.dram_size or auto_size()
        self._arena = Arena(budget, settings.extent_size, auto=not settings.dram_size)
        self._index = Index(self._arena, budget // WINDOW_SHARE)
        self._link = HelperLink(loop, populated=lambda *news: self._room.populated(*news), lost=fail)
        self._tiers = [
            TierLink(loop, spec, extents=self._all_extents, spaces=self._all_spaces, lost=partial(self._tier_lost, spec.name))
            for spec in settings.tiers(folder)
        ]
        self._room = Room(
            self._arena,
            self._index,
            self._link,
            self._tiers,
            self.counters,
            announce=self._announce,
            void=self._void,
            changed=self._changed,
        )
        self._writes = WriteThrough(self._index, self._tiers, budget)
        self._reader = Reader(self._arena, self._index, self._room, self._tiers, self._writes, self._changed)
        self._looker = Looker(loop, self._index, self._tiers)
        self._stager = Stager(loop, self._index, self._link, self._reader, self._writes, self.counters)
        self._sealer = Sealer(self._arena, self._index, self._link, self._writes, self.counters, self._changed)
        self._credits = Credits(self._arena, self._index, self._room, self._sealer, self.counters)

    @property
    def dram_bytes(self) -> int:
        return self._arena.budget

    @property
    def has_engines(self) -> bool:
        return bool(self._engines)

    def close(self) -> None:
        self._closed = True
        links: tuple[HelperLink | TierLink, ...] = (self._link, *self._tiers)
        for link in links:
            link.hang_up()
        deadline = time.monotonic() + END_S
        for link in links:
            link.wait(deadline)

    async def wait_for_tiers(self, timeout_s: float) -> None:
        """Until the tiers that are worth it have opened, or failed to."""
        opened = [asyncio.ensure_future(tier.opened.wait()) for tier in self._tiers if tier.spec.awaited]
        if opened:
            _, late = await asyncio.wait(opened, timeout=timeout_s)
            for waiting in late:
                waiting.cancel()

    # ---- coming and going

    def hello(self, connection: Connection, pid: int, message: protocol.Hello) -> Session:
        """Let a client in. Raises ValueError, with a sentence for its user, for one that cannot be served."""
        if message.major != protocol.MAJOR:
            raise ValueError(
                f"node {self._name!r} (version {self._version}) speaks protocol {protocol.MAJOR}.{protocol.MINOR}, this client "
                f"(version {message.version}) {message.major}.{message.minor}: stop the node (kill {os.getpid()}) and a new one will start"
            )
        session = Session(connection, message.role, pid, message.host_pool_bytes)
        if message.role != "tool":
            session.engine = self._join(message)
        self._welcome(session, message)
        return session

    def gone(self, session: Session) -> None:
        """The client has closed its connection, so it touches no slot any more."""
        if session.is_tool:
            return
        engine, space = session.engine, session.space
        if engine.scheduler is session:
            engine.scheduler = None
        for members in (engine.sessions, space.sessions, space.size_class.sessions):
            members.discard(session)
        self._credits.leave(session, self._stager.leave(session))
        for extent in [extent for extent in space.size_class.extents.values() if session in extent.told]:
            self._room.unmapped(extent, session)
        if engine.sessions:
            engine.refresh()
        else:
            del self._engines[engine.name]
        self.last_engine = time.monotonic()
        self._collect_due = True
        self._changed()

    def handle(self, session: Session, message: protocol.ToNode) -> None:
        _HANDLERS[type(message)](self, session, message)

    def _join(self, message: protocol.Hello) -> Engine:
        """The engine of a new client. Raises ValueError for what cannot be served."""
        engine = self._engines.get(message.engine)
        if not message.engine:
            raise ValueError("the client does not name its engine")
        if engine is not None and engine.space.digest != message.digest:
            raise ValueError(f"engine {message.engine!r} has clients of two namespaces, {engine.space.digest} and {message.digest}")
        space = self._space(message.digest, message.namespace, message.key)
        if engine is None:
            engine = self._engines[message.engine] = Engine(message.engine, space)
        return engine

    def _space(self, digest: str, encoded: bytes, key: bytes) -> Namespace:
        if space := self._index.spaces.get(digest):
            if space.encoded != encoded or space.layout.key != key:
                raise ValueError(f"namespace digest {digest} stands for two namespaces")
            return space
        if len(digest) != 32 or digest.strip("0123456789abcdef"):
            raise ValueError(f"{digest[:80]!r} is no namespace digest of 32 hex digits")
        if len(key) not in (0, TRAILER_KEY_BYTES):
            raise ValueError(f"a trailer key has {TRAILER_KEY_BYTES} bytes, not {len(key)}")
        layout = PageLayout(KVNamespace.decode(encoded), key)
        if layout.slot_bytes > self._arena.budget:
            source = self._settings.sources["dram_size"]
            raise ValueError(f"one page has {layout.slot_bytes} bytes and the node's dram_size is {self._arena.budget} ({source})")
        space = Namespace(digest, encoded, layout, self._arena.size_class(layout.slot_bytes))
        self._index.spaces[digest] = space
        self._link.add_space(digest, encoded, key)
        for tier in self._tiers:
            tier.add_space(digest, encoded, key)
        return space

    def _all_spaces(self) -> list[tuple[str, bytes, bytes]]:
        return [(space.digest, space.encoded, space.layout.key) for space in self._index.spaces.values()]

    def _all_extents(self) -> list[tuple[int, int, int]]:
        return [(extent.number, extent.size, extent.fd) for extent in self._arena.extents.values()]

    def _tier_lost(self, name: str) -> None:
        self._writes.lost(name)

    def _welcome(self, session: Session, message: protocol.Hello) -> None:
        older = None
        if not session.is_tool:
            engine, space = session.engine, session.space
            if session.role == "scheduler":
                self._generation += 1
                session.generation = self._generation
                older, engine.scheduler = engine.scheduler, session
            elif engine.scheduler is not None:
                session.generation = engine.scheduler.generation - 1
            else:
                session.generation = self._generation
            for members in (engine.sessions, space.sessions, space.size_class.sessions):
                members.add(session)
            engine.joined = time.monotonic()
        conflicts = self._settings.conflicts(message.settings, message.sources)
        session.send(
            protocol.Welcome(
                major=protocol.MAJOR,
                minor=protocol.MINOR,
                version=self._version,
                epoch=self._epoch,
                generation=session.generation,
                pid=os.getpid(),
                slot_bytes=0 if session.is_tool else session.space.layout.slot_bytes,
                dram_bytes=self._arena.budget,
                conflicts=conflicts,
            )
        )
        if older is not None:
            log.warning("a newer scheduler of engine %s (pid %d) takes the place of pid %d", message.engine, session.pid, older.pid)
            older.connection.end()
        if not session.is_tool:
            log.info("pid %d joined as %s of engine %s, namespace %s", session.pid, session.role, message.engine, message.digest)
            for extent in session.space.size_class.live():
                self._tell(session, extent)
            session.engine.refresh()
            if not session.space.size_class.extents:
                # Let the first memory be there before the first request is.
                self._room.grow(session.space.size_class)

    def _mapped(self, session: Session, message: protocol.Mapped) -> None:
        extent = self._arena.extents.get(message.extent)
        if extent is not None and session in extent.told:
            extent.mapped.add(session)
            session.engine.refresh(extent)
            self._changed()

    def _unmapped(self, session: Session, message: protocol.Unmapped) -> None:
        extent = self._arena.extents.get(message.extent)
        if extent is not None and session in extent.told:
            self._room.unmapped(extent, session)
            session.engine.refresh(extent)

    def _want(self, session: Session, message: protocol.Want) -> None:
        self._credits.want(session, message.count)
        self._changed()

    def _fetch(self, session: Session, message: protocol.Fetch) -> None:
        _check_hashes(message.hashes)
        self._stager.fetch(session, message)

    def _release(self, session: Session, message: protocol.Release) -> None:
        self._stager.release(session, message.request)

    def _commit(self, session: Session, message: protocol.Commit) -> None:
        _check_hashes(message.hashes)
        self._credits.commit(session, message)
        self._changed()

    def _discard(self, session: Session, message: protocol.Discard) -> None:
        self._credits.discard(session, message.slots)
        self._changed()

    def _reserve(self, session: Session, message: protocol.Reserve) -> None:
        _check_hashes(message.hashes)
        session.send(protocol.Reserved(message.request, self._credits.reserve(session, message.hashes)))

    def _lookup(self, session: Session, message: protocol.Lookup) -> None:
        start = time.perf_counter()
        _check_hashes(message.hashes)
        space = session.space
        self._index.touch(self._index.find(space, message.hashes))
        found = self._index.coming(space, message.hashes)
        if self._tiers and found * HASH_BYTES < len(message.hashes):
            self._looker.look(space, message.hashes, found, partial(self._looked, session, message))
        else:
            self._looked(session, message, {DRAM: found})
        self.counters.lookups += 1
        self.lookups.add(time.perf_counter() - start)

    def _looked(self, session: Session, message: protocol.Lookup, tiers: dict[str, int]) -> None:
        pages = sum(tiers.values())
        session.chains.expect(message.hashes, pages)
        session.send(protocol.Hits(message.request, pages, tiers if self._tiers else {}))

    def _suspect(self, session: Session, message: protocol.Suspect) -> None:
        _check_hashes(message.hashes)
        self._stager.suspect(session.space, [page_hash for (page_hash,) in split_hashes(message.hashes)])

    def _fenced(self, session: Session, message: protocol.Fenced) -> None:
        self._credits.fenced(session, message.generation)
        self._changed()

    def _drop(self, session: Session, message: protocol.Drop) -> None:
        entries = self._index.hide_all(session.space)
        self._credits.forget(session.space)
        for tier in self._tiers:
            tier.drop(session.space.digest)
        self.counters.pages_dropped += len(entries)
        session.send(protocol.Done(message.request, len(entries)))
        self._drop_step(entries)

    def _drop_step(self, entries: list[Entry]) -> None:
        for entry in entries[-DROP_STEP:]:
            self._index.drop(entry)
        del entries[-DROP_STEP:]
        if entries:
            self._loop.call_soon(self._drop_step, entries)
        else:
            self._changed()

    def _ping(self, session: Session, message: protocol.Ping) -> None:
        session.send(protocol.Done(message.request))

    def _stats(self, session: Session, message: protocol.Stats) -> None:
        session.send(protocol.StatsReply(message.request, self.stats()))

    def _stop(self, session: Session, message: protocol.Stop) -> None:
        session.send(protocol.Done(message.request))
        self._leave(f"stopped by pid {session.pid}")

    # ---- extents and grants

    def _announce(self, extent: Extent) -> None:
        for session in self._arena.classes[extent.slot_bytes].sessions:
            if not session.connection.ended:
                self._tell(session, extent)

    def _tell(self, session: Session, extent: Extent) -> None:
        extent.told.add(session)
        session.send(protocol.Extent(extent.number, extent.size), extent.fd)

    def _void(self, extent: Extent) -> None:
        sessions = self._arena.classes[extent.slot_bytes].sessions
        self._credits.void(extent, sessions)
        for engine in {session.engine for session in sessions}:
            engine.usable.discard(extent)

    def _changed(self) -> None:
        """There may be something to grant: look once, after what is being done now."""
        if not self._refill_due:
            self._refill_due = True
            self._loop.call_soon(self._refill)

    def _refill(self) -> None:
        self._refill_due = False
        if self._closed:
            return
        if self._credits.refill():
            self._changed()
        self._stager.room()

    # ---- housekeeping

    def keep_house(self, now: float) -> None:
        """To be called every half second or so."""
        self._credits.expire(now)
        for digest, space in list(self._index.spaces.items()):
            if not (space.pages or space.claims or space.reads or space.sessions):
                del self._index.spaces[digest]
        self._room.give_back_unused()
        self._changed()
        if self._collect_due and not self._engines:
            # The collector is off while engines wait for answers.
            self._collect_due = False
            gc.collect()

    def report_slow(self, now: float) -> None:
        self._room.report_slow(now, SLOW_S)

    def stats(self) -> Stats:
        """A snapshot of facts, gauges and counters: flat, but for `tiers`, which has such a snapshot for each tier."""
        arena, index = self._arena, self._index
        sessions = [session for engine in self._engines.values() for session in engine.sessions]
        pages = sum(len(space.pages) for space in index.spaces.values())
        page_bytes = sum(len(space.pages) * space.size_class.slot_bytes for space in index.spaces.values())
        stats: Stats = {
            "name": self._name,
            "pid": os.getpid(),
            "helper_pid": self._link.pid,
            "version": self._version,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "metrics": self.metrics_address,
            "dram_bytes": arena.budget,
            "arena_bytes": arena.bytes,
            "extents": len(arena.extents),
            "free_bytes": sum(len(extent.free) * extent.slot_bytes for extent in arena.extents.values()),
            "pages": pages,
            "namespaces": len(index.spaces),
            "leased_pages": index.leased_pages,
            "leased_bytes": index.leased_bytes,
            "window_bytes": index.window,
            "granted_slots": sum(len(session.granted) for session in sessions),
            "quarantined_slots": self._credits.quarantined,
            "reserved_bytes": self._credits.reserved_bytes,
            "bad_frees": arena.bad_frees,
            "checking": self._link.pending("check"),
            "sealing": self._sealer.pending,
            "reading": self._reader.readings,
            "clients": len(sessions),
            "engines": len(self._engines),
            "host_pool_bytes": sum(session.host_pool_bytes for session in sessions),
            "unsent_bytes": sum(session.connection.queued_bytes for session in sessions),
        }
        tiers: dict[str, Stats] = {DRAM: {"pages": pages, "bytes": page_bytes, "limit_bytes": arena.budget}}
        tiers |= {tier.name: tier.stats() | self._writes.stats(tier.name) for tier in self._tiers}
        for name, (hit_pages, hit_bytes) in self._stager.hits.items():
            tiers[name] |= {"hit_pages": hit_pages, "hit_bytes": hit_bytes}
        return stats | msgspec.structs.asdict(self.counters) | {"tiers": tiers}


def _check_hashes(joined: bytes) -> None:
    if len(joined) % HASH_BYTES:
        raise ProtocolError(f"{len(joined)} bytes of page hashes are no multiple of {HASH_BYTES}")


def _second_hello(service: Service, session: Session, message: protocol.Hello) -> None:
    raise ProtocolError("a second Hello")


_HANDLERS: dict[type, Callable[[Service, Session, Any], None]] = {
    protocol.Hello: _second_hello,
    protocol.Mapped: Service._mapped,
    protocol.Unmapped: Service._unmapped,
    protocol.Want: Service._want,
    protocol.Fetch: Service._fetch,
    protocol.Release: Service._release,
    protocol.Commit: Service._commit,
    protocol.Discard: Service._discard,
    protocol.Reserve: Service._reserve,
    protocol.Lookup: Service._lookup,
    protocol.Suspect: Service._suspect,
    protocol.Fenced: Service._fenced,
    protocol.Drop: Service._drop,
    protocol.Ping: Service._ping,
    protocol.Stats: Service._stats,
    protocol.Stop: Service._stop,
}
