"""What the engine's threads and the client's thread share about one connection to the node.

Promises:
- Engine threads do nothing here but change local state, append to a queue and ring a doorbell. The only lock covers the addition of a
  number, and the client's thread never takes it.
- Everything belongs to one connection: credits, requests and queue die with it, so nothing of one epoch or generation is ever sent to
  another. A call works on the Link that it read once, whatever replaces it meanwhile.
- The queue has a byte limit. What may be missed is not queued any more at half of it; if what must be sent (commit, discard, release)
  passes it, node and client would disagree about slots, so the connection ends and both start anew.
- A slot is in at most one of `credits` and `taken`; what is committed or discarded must be in `taken`, so no slot is used twice whatever
  the caller does.
"""

from __future__ import annotations

import threading
from collections import deque

from . import protocol
from .handles import Pending
from .mapping import Doorbell

# 40 bytes a committed page, 32 a page that is asked for. Below protocol.MAX_FRAME, so that merged commits always fit a frame.
QUEUE_BYTES = 8 << 20
# What a message takes beside its hashes.
MESSAGE_BYTES = 64


def unique_generation(epoch: int, generation: int) -> int:
    """A node counts generations from 1, so the next node's would repeat them. With some bits of the epoch they do not. 0 stays 0."""
    return (epoch & 0x7FFFFFFF) << 32 | generation if generation else 0


class Link:
    """One connection, from Welcome to its end; `Link()` stands for none."""

    def __init__(
        self,
        epoch: int = 0,
        generation: int = 0,
        slot_bytes: int = 0,
        dram_bytes: int = 0,
        node_pid: int = 0,
        doorbell: Doorbell | None = None,
    ) -> None:
        self.epoch = epoch
        self.generation = unique_generation(epoch, generation)
        self.slot_bytes = slot_bytes
        self.dram_bytes = dram_bytes
        self.node_pid = node_pid
        self.over = doorbell is None
        self.ready = False  # connected and the node answers
        self.overflow = False
        self.requests: dict[int, Pending] = {}  # sent or about to be, and not answered
        self.credits: deque[int] = deque()
        self.taken: set[int] = set()
        self.named: set[int] = set()  # slots in `taken` that were reserved by hash: they cannot become credits
        self.retired: set[int] = set()  # extents whose slots are void
        self.unsent = 0  # bytes that left the queue and that the socket has not taken yet; the client's thread counts
        self._doorbell = doorbell
        self._queue: deque[tuple[protocol.Message, int]] = deque()
        self._lock = threading.Lock()
        self._pushed = 0
        self._pulled = 0

    # ---- engine threads ----------------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Bytes on their way to the node, roughly."""
        return self._pushed - self._pulled + self.unsent

    def ask(self, handle: Pending, message: protocol.Message, size: int) -> bool:
        """Queue a request whose answer goes to `handle`. False where the node does not answer or the queue is half full: a miss."""
        if not self._answering() or self.queued + size > QUEUE_BYTES // 2:
            return False
        self.requests[handle.request] = handle
        self.push(message, size)
        if not self._answering():
            # The breaker opened, or the connection ended, after the look above: nobody else would end this request.
            self.requests.pop(handle.request, None)
            handle.fail()
        return True

    def _answering(self) -> bool:
        return self.ready  # a call, because type checkers take it that an attribute stays as it was

    def push(self, message: protocol.Message, size: int) -> None:
        """Queue a message that the node must see as long as the connection lives."""
        if self.over or self.overflow or self._doorbell is None:
            return
        with self._lock:
            self._pushed += size
        if self.queued > QUEUE_BYTES:
            self.overflow = True
        else:
            self._queue.append((message, size))
        self._doorbell.ring()

    # ---- the client's thread -----------------------------------------------------------------------------------------------------

    def pull(self) -> list[protocol.Message]:
        """Everything queued. Commits come first, merged into one message for each kind of rectangles; never across a Drop or a Suspect,
        which must not hit pages that were committed after it."""
        messages: list[protocol.Message] = []
        rest: list[protocol.Message] = []
        commits: dict[tuple[protocol.Rectangle, ...], list[protocol.Commit]] = {}
        while self._queue:
            message, size = self._queue.popleft()
            self._pulled += size
            if type(message) is protocol.Commit:
                commits.setdefault(tuple(message.rectangles), []).append(message)
                continue
            rest.append(message)
            if type(message) in (protocol.Drop, protocol.Suspect):
                messages += [_merge(same) for same in commits.values()] + rest
                commits, rest = {}, []
        return messages + [_merge(same) for same in commits.values()] + rest

    def retire(self, extent: int) -> None:
        """Forget the credits that lie in this extent. A slot that is taken comes to nothing: no worker maps it, the node ignores its
        commit."""
        self.retired.add(extent)
        for _ in range(len(self.credits)):
            try:
                slot = self.credits.popleft()
            except IndexError:
                return
            if slot >> protocol.SLOT_SHIFT != extent:
                self.credits.append(slot)

    def fail_requests(self) -> int:
        """End everything that is awaited as failed. `ready` is False by then. Returns how many there were."""
        count = 0
        for request in list(self.requests):
            handle = self.requests.pop(request, None)
            if handle is not None:
                handle.fail()
                count += 1
        return count

    def end(self) -> int:
        """The connection is gone. Returns how many requests it takes along."""
        self.over = True
        self.ready = False
        self._queue.clear()
        self.credits.clear()
        return self.fail_requests()


def _merge(commits: list[protocol.Commit]) -> protocol.Commit:
    if len(commits) == 1:
        return commits[0]
    return protocol.Commit(
        hashes=b"".join(commit.hashes for commit in commits),
        slots=[slot for commit in commits for slot in commit.slots],
        rectangles=commits[0].rectangles,
    )
