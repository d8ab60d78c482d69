"""What the scheduler half remembers: of each request, of what it has planned, and of keys whose loads failed.

Promises: nothing here decides anything; `FailedKeys` holds at most MAX_FAILED_KEYS.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...common.hashing import PageHasher
from ...common.node.client import Fetch, Lookup
from .messages import Load

# How long a key whose load failed is not asked for again, unless it is stored anew.
FAILED_KEY_S = 60.0
MAX_FAILED_KEYS = 65536


@dataclass(slots=True, eq=False)
class Request:
    """From its arrival to its end."""

    id: str
    hasher: PageHasher
    prompt_tokens: int
    skip: str
    weights: str
    lookup: Lookup | None = None
    fetch: Fetch | None = None
    fetch_first: int = 0  # page of fetch.slots[0]
    reserved: int = 0  # bytes of the staging window that the fetch counts for
    proven: int | None = None  # pages from the start that the node can have; staging found the next one missing or damaged
    waiting_since: float = 0.0
    cut: bool = False  # its load took longer than computing would
    gave_up: bool = False  # this round of asking ends in computing
    blind: bool = False  # the next ask comes without a local hit, because the engine was told that it need not compute it
    local: int = 0  # tokens of the engine's own prefix hit, as of the last ask
    load: PendingLoad | None = None
    loaded: Mapping[str, int] = field(default_factory=dict)  # tokens of the last load, by the tier they came from
    started: bool = False
    mark: int = 0  # pages below it need no save
    stored: tuple[int, int] = (0, 0)  # pages that this request loaded, hence stored already


@dataclass(slots=True, eq=False)
class PendingSave:
    """Was planned; its step has not been reported."""

    op: int
    generation: int
    request: Request
    first_page: int
    hashes: list[bytes]
    slots: list[int]


@dataclass(slots=True, eq=False)
class PendingLoad:
    """Tokens [next_token, end_token) are still to be planned."""

    request: Request
    fetch: Fetch
    reserved: int
    table: list[int]
    next_token: int
    end_token: int
    done: bool = False  # nothing more of it is to be planned
    failed: bool = False  # a block of it was not loaded, or the request was given up


@dataclass(slots=True)
class Step:
    """What has to be settled when the step has been reported."""

    saves: list[PendingSave] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    ended: list[PendingLoad] = field(default_factory=list)  # no later step reads their leases


class FailedKeys:
    """Page hashes whose loads failed of late."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, hashes: Iterable[bytes]) -> None:
        until = self._clock() + FAILED_KEY_S
        for page_hash in hashes:
            self._until[page_hash] = until
            self._until.move_to_end(page_hash)
        while len(self._until) > MAX_FAILED_KEYS:
            self._until.popitem(last=False)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """They were stored anew."""
        if self._until:
            for page_hash in hashes:
                self._until.pop(page_hash, None)

    def clear(self) -> None:
        self._until.clear()

    def before(self, hashes: Sequence[bytes]) -> int:
        """How many of these pages come before the first one whose load failed of late."""
        if not self._until:
            return len(hashes)
        now = self._clock()
        return next((i for i, page_hash in enumerate(hashes) if self._until.get(page_hash, 0.0) > now), len(hashes))
