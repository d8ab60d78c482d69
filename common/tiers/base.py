"""What a tier behind the node's memory is. Each lives in a process of its own, which may crash or hang without taking the node along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..page import PageLayout


class TierDown(Exception):
    """The tier cannot be used at all right now. The message is one sentence for the operator."""


class Tier(Protocol):
    """Called from several threads of the tier process at once; each method may raise TierDown. Slots are whole pages (uint8)."""

    name: str

    def add_space(self, digest: str, layout: PageLayout) -> None:
        """Before any other call for that namespace; may come twice."""

    def leading(self, digest: str, hashes: Sequence[bytes]) -> int:
        """How many leading pages the tier probably has; reading proves it."""

    def read(self, digest: str, hashes: Sequence[bytes], slots: Sequence[np.ndarray]) -> int:
        """Copy pages into slots; returns how many leading ones are complete. The caller verifies them."""

    def write(self, digest: str, hashes: Sequence[bytes], slots: Sequence[np.ndarray], why: Sequence[str]) -> list[bool]:
        """Store sealed pages. `why`: "", "second_use" or "prefix_end"."""

    def bad(self, digest: str, hashes: Sequence[bytes]) -> None:
        """These pages were read and did not match."""

    def drop(self, digest: str) -> None:
        """Forget a namespace, as far as the tier can."""

    def stats(self) -> dict[str, int | float | str]: ...

    def close(self) -> None: ...
