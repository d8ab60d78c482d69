"""Who is connected: sessions (one client after its Hello) and engines (all sessions with one `engine` name).

Promises: `Engine.usable` holds exactly the live extents that every current session of the engine has mapped; slots are granted and pages
staged only in those. A session that the node has ended counts as a possible user of everything it was given until its client closes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from .arena import Extent
from .chains import Chains
from .connection import Connection
from .index import Namespace
from .protocol import Message, Role, frame

if TYPE_CHECKING:
    from .credits import Quarantine, Reservation
    from .staging import Run


# How long clients may take to map (and pin) an extent before the node goes on as if they never did.
MAPPING_S = 5.0


class Partial(msgspec.Struct):
    """What is committed so far of a nameless slot: bit `layer * heads + head` of `covered` is set for each part of page `hash`."""

    hash: bytes
    covered: int


class Engine:
    """One engine instance. At most one of its scheduler sessions is current: a newer one ends the older one."""

    def __init__(self, name: str, space: Namespace) -> None:
        self.name = name
        self.space = space
        self.sessions: set[Session] = set()
        self.joined = 0.0  # when the newest of them came
        self.scheduler: Session | None = None
        self.usable: set[Extent] = set()
        self.quarantines: list[Quarantine] = []

    def refresh(self, extent: Extent | None = None) -> None:
        """Compute `usable` again (for one extent only), after a session or a mapping came or went."""
        current = [session for session in self.sessions if not session.connection.ended]
        if extent is None:
            self.usable = {extent for extent in self.space.size_class.live() if extent.mapped.issuperset(current)}
        elif extent.state == "live" and extent.mapped.issuperset(current):
            self.usable.add(extent)
        else:
            self.usable.discard(extent)

    def is_mapping(self, extent: Extent) -> bool:
        """Not usable, but told so shortly ago that it may be soon?"""
        recent = time.monotonic() - max(extent.born, self.joined) < MAPPING_S
        return recent and extent.state == "live" and extent not in self.usable


class Session:
    """One client. `granted` are its nameless slots, None or what is committed of them so far; `reserved` those it asked for by name and
    still may write to; `runs` its fetches that hold leases, by request number;
    `sealing` counts the pages it has
    committed that are not visible yet; `chains` is what it is expected to store. `host_pool_bytes`: see Hello."""

    def __init__(self, connection: Connection, role: Role, pid: int, host_pool_bytes: int = 0) -> None:
        self.connection = connection
        self.role = role
        self.pid = pid
        self.host_pool_bytes = host_pool_bytes
        self.generation = 0
        self.want = 0
        self.granted: dict[int, Partial | None] = {}
        self.reserved: dict[int, Reservation] = {}
        self.runs: dict[int, Run] = {}
        self.sealing = 0
        self.chains = Chains()
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ProtocolError(f"a {self.role} without an engine cannot ask for pages")
        return self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def is_tool(self) -> bool:
        return self._engine is None

    @property
    def space(self) -> Namespace:
        return self.engine.space

    def send(self, message: Message, fd: int = -1) -> None:
        self.connection.send(frame(message), fd)


class ProtocolError(ValueError):
    """The client broke the protocol; its connection ends."""
