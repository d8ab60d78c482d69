"""What an engine holds of work that the node does for it.

Promises: fields are written by the client's own thread, or once by the engine's thread when the request could not be sent, and reading
them takes no lock. `done` is set last, so whoever sees it sees the rest. A handle never blocks, and `expired` tells that nothing came even
if the client's thread itself gets no time to run.
"""

from __future__ import annotations

import time
from typing import NamedTuple


class Slots(NamedTuple):
    """Slots granted ahead, and the node's epoch and the generation that they belong to."""

    epoch: int
    generation: int
    slots: list[int]


class Pending:
    """A request to the node. `failed` (then `done` too): the node stopped answering, went away or could not be asked; it is a miss.

    `epoch` and `generation` belong to the connection that it was sent over. `started`, `heard`: time.monotonic() of the call and of the
    node's last message about this request.
    """

    __slots__ = ("done", "epoch", "failed", "generation", "heard", "released", "request", "started", "timeout_s")

    def __init__(self, request: int, epoch: int, generation: int, timeout_s: float) -> None:
        self.request = request
        self.epoch = epoch
        self.generation = generation
        self.started = self.heard = time.monotonic()
        self.timeout_s = timeout_s
        self.failed = False
        self.released = False
        self.done = False

    def expired(self, now: float) -> bool:
        """Not done, and the node has said nothing about this request for the fetch timeout. `now` is time.monotonic()."""
        return not self.done and now - self.heard > self.timeout_s

    def fail(self) -> None:
        if not self.done:
            self.failed = True
            self.done = True


class Fetch(Pending):
    """Staging of pages. `slots[i]` is the slot of the i-th page asked for, verified and leased; the list grows until `done`. `tiers[i]`
    says where page i came from. `slow`: the node has said that it goes on in slower tiers than memory; from then on the fetch has until
    `deadline_s` after its start, and only a node that says nothing at all ends it earlier. The leases last until `NodeClient.release`, also
    for what a failed fetch had staged, or until the connection ends: then no worker of the engine can pin (epoch, generation) any more."""

    __slots__ = ("deadline_s", "slots", "slow", "tiers")

    def __init__(self, request: int, epoch: int, generation: int, timeout_s: float, deadline_s: float) -> None:
        super().__init__(request, epoch, generation, timeout_s)
        self.deadline_s = deadline_s
        self.slow = False
        self.slots: list[int] = []
        self.tiers: list[str] = []

    def expired(self, now: float) -> bool:
        if self.slow:
            return not self.done and now - self.started > self.deadline_s
        return super().expired(now)


class Lookup(Pending):
    """`pages`: how many leading pages are stored, `tiers` how many of them each tier has; valid once `done` and not `failed`. No lease is
    taken."""

    __slots__ = ("pages", "tiers")

    def __init__(self, request: int, epoch: int, generation: int, timeout_s: float) -> None:
        super().__init__(request, epoch, generation, timeout_s)
        self.pages = 0
        self.tiers: dict[str, int] = {}


class Reserve(Pending):
    """`slots[i]` is the slot reserved for hash i, -1 if that page is stored already, -2 if there was no room; valid once `done` and not
    `failed`."""

    __slots__ = ("slots",)

    def __init__(self, request: int, epoch: int, generation: int, timeout_s: float) -> None:
        super().__init__(request, epoch, generation, timeout_s)
        self.slots: list[int] = []
