"""What a slow tier (SSD, pool) does. It lives in a process of its own, because native calls may crash or hang.

Promises to whoever writes a tier: calls come from several threads at once, only for namespaces that `add_space` has announced, and with
slots that nobody else writes to until the call returns. What `read` has brought is checked by the caller before anybody sees it, unless the
tier does that. Slots lie in memory that `add_memory` has announced, until `drop_memory`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, Literal, Protocol, TypeVar, cast

import numpy as np

from ..page import PageLayout

T = TypeVar("T")
Why = Literal["", "second_use", "prefix_end"]
Stats = dict[str, int | float | str]


class TierDown(Exception):
    """The tier cannot be used at all now (master dead, folder gone). The message is one sentence for the operator."""


class Tier(Protocol):
    """`add_memory`, `drop_memory`, `touch` and `checks` need not be there. Any call may raise TierDown. Page hashes have 32 bytes, digests
    32 hex digits; slots are uint8 [layout.slot_bytes]."""

    name: str

    def add_space(self, digest: str, layout: PageLayout) -> None:
        """Before any other call for that namespace; may come twice."""

    def leading(self, digest: str, hashes: Sequence[bytes]) -> int:
        """How many leading pages the tier probably has. May be wrong either way: reading proves it."""

    def read(self, digest: str, hashes: Sequence[bytes], slots: Sequence[np.ndarray]) -> int:
        """Copy pages, with all their objects and trailers, into slots. Returns how many leading ones are complete."""

    def write(self, digest: str, hashes: Sequence[bytes], slots: Sequence[np.ndarray], why: Sequence[str]) -> list[bool]:
        """Store sealed pages; for each whether the tier has it now. `why`: '' (just computed), 'second_use', or 'prefix_end'."""

    def bad(self, digest: str, hashes: Sequence[bytes]) -> None:
        """These pages were read and did not match: remove them, or do not offer them again."""

    def drop(self, digest: str) -> None:
        """Forget a namespace, as far as the tier can."""

    def stats(self) -> Stats:
        """Numbers and facts for people; names end in their unit."""

    def close(self) -> None:
        """Leave tidily, within a second."""


class RegistersMemory(Protocol):
    """A tier that wants to know where slots lie."""

    def add_memory(self, address: int, size: int) -> None:
        """Slots may lie in these bytes from now on."""

    def drop_memory(self, address: int) -> None:
        """No slot lies there any more; the bytes are about to be unmapped."""


class Checks(Protocol):
    """A tier whose `read` counts only pages that it has checked as PageLayout.verify does; it knows `bad` by itself, then."""

    checks: bool


class NoticesUse(Protocol):
    """A tier that keeps what is in use."""

    def touch(self, digest: str, hashes: Sequence[bytes]) -> None:
        """These pages of one prefix are in use, though in memory: keep them."""


# Where `open_tier(settings) -> Tier` is, by name of the tier.
MODULES = {"ssd": "mooncake_kv.common.tiers.ssd", "pool": "mooncake_kv.common.tiers.pool"}


def with_low_priority(call: Callable[[], T], nice: int) -> T:
    """What `call` returns. It runs in a thread of its own that is so much nicer than this one, and so are all threads that it starts, which
    on Linux inherit that: a library's threads make way for the node's event loop."""
    with ThreadPoolExecutor(1, "nice", os.nice, (nice,)) as pool:
        return pool.submit(call).result()


def open_tier(name: str, settings: Mapping[str, Any]) -> Tier:
    """Raises TierDown where the tier cannot be used now."""
    opener = cast(Callable[[Mapping[str, Any]], Tier], import_module(MODULES[name]).open_tier)
    return opener(settings)
