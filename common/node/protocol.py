"""Messages between the node and its clients.

Promises: every message is one msgspec struct, sent as a 4-byte little-endian length and that many bytes of msgpack over a Unix stream
socket; file descriptors travel as SCM_RIGHTS beside the first byte of the `Extent` message they belong to, and nowhere else. Nothing is
pickled. A frame longer than MAX_FRAME ends the connection. Both sides ignore fields that they do not know (minor versions), and refuse
another major version.

A slot is one integer, `extent << 40 | byte offset`, and holds a whole page: all its objects back to back, as `common.page.PageLayout`
lays them out. Page hashes travel as one byte string of 32 bytes a page.

The end of a client's connection says that it touches no slot any more: it closes only after its copies have ended and everything is
unmapped (the kernel does the same for a killed process). A node that ends a connection shuts down its own half and waits for that.

Three numbers guard against yesterday's slots:
- `epoch`: a random 63-bit number that the node draws when it starts. A slot means something within one epoch only.
- `generation`: counts up within a node with each scheduler connection. Slots granted to one generation and the leases it held are
  quarantined when its connection ends, until every worker of the same engine has acknowledged `Fence(generation)` or is gone: a worker
  of a dead scheduler may still be copying into or out of them. `engine` names one engine instance; a newer scheduler of it ends the
  older one's connection.
- `request`: a number that the client draws for each fetch, never reused within a connection.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

MAJOR = 1
MINOR = 2
MAX_FRAME = 16 << 20
HASH_BYTES = 32
SLOT_SHIFT = 40
HEADER = struct.Struct("<I")

Role = Literal["scheduler", "worker", "tool"]


class Message(msgspec.Struct, tag_field="t", omit_defaults=True):
    """Base of all messages; the tag is the class name."""


# ---- client to node ------------------------------------------------------------------------------------------------------------


class Hello(Message, tag=True, kw_only=True):
    """First message of a connection. `namespace` is the msgpack of a KVNamespace (empty for a tool), from which the node derives the page
    layout; `digest` is its digest as the client computed it, keyed if a pool secret is set, and `key` then keys the trailers of its pages
    (the node does not learn the secret itself).
    `settings` are the node settings this client was configured with, `sources` says for each where it came from. `host_pool_bytes`: memory
    of its own that this client's process keeps such pages in, for `stats` only."""

    major: int
    minor: int
    version: str
    role: Role
    engine: str = ""
    pid: int = 0
    namespace: bytes = b""
    digest: str = ""
    key: bytes = b""
    settings: dict[str, int | float | str | bool] = {}
    sources: dict[str, str] = {}
    host_pool_bytes: int = 0


class Mapped(Message, tag=True):
    """The client has mapped this extent; slots in it may be granted to its engine once all its clients have said so."""

    extent: int


class Unmapped(Message, tag=True):
    """The client has dropped its mapping of an extent after `Retire`: no copy of it touches the extent any more."""

    extent: int


class Want(Message, tag=True):
    """Scheduler: keep up to `count` nameless slots granted to me (credits). The node answers with `Granted` now and whenever it can."""

    count: int


class Fetch(Message, tag=True):
    """Stage the leading run of these pages: take leases, verify, report with `Staged`. At most `limit_bytes` are leased (0: no limit).
    Without `check` pages in DRAM are not verified, because whoever reads them does. What has not come from slow tiers `deadline_ms` after
    the node got this is left out (0: an hour)."""

    request: int
    hashes: bytes
    limit_bytes: int = 0
    check: bool = True
    deadline_ms: int = 0


class Release(Message, tag=True):
    """End the leases of a fetch, finished or not. A fetch that got no page has none; an unknown request is ignored."""

    request: int


class Rectangle(msgspec.Struct, frozen=True, array_like=True):
    """Layers [first_layer, last_layer) x KV heads [first_head, last_head) of a page that were written. MLA pages have one head."""

    first_layer: int
    last_layer: int
    first_head: int
    last_head: int


class Commit(Message, tag=True):
    """These slots now hold these pages (hash i belongs to slot i). Without rectangles each page is whole; with them, a page becomes visible
    once the union of the rectangles committed for its slot covers it. The node seals a page (writes its trailers) off the event loop
    before it becomes visible; if the hash already has a page, the new slot goes back to the free list. Nobody writes to the slots any
    more, with one exception: a nameless slot that is not covered yet stays with the scheduler, as a credit in use, until it is covered
    or discarded. A reserved slot is committed once by each client that asked for it, with all of that client's rectangles."""

    hashes: bytes
    slots: list[int]
    rectangles: list[Rectangle] = []


class Discard(Message, tag=True):
    """These granted or reserved slots will not be committed; no rank of the sender writes to them any more."""

    slots: list[int]


class Reserve(Message, tag=True):
    """Slots by name: the first client to ask for a hash gets a fresh slot, a later one of the same engine gets the same. -1: the page is
    stored, or another engine is storing it, or this client has committed its part; -2: there is no free slot. A reserved slot that is
    not covered 30 s after it was reserved is discarded, and reused when each client that asked for it has committed, discarded or gone."""

    request: int
    hashes: bytes


class Lookup(Message, tag=True):
    """How many leading pages are there? Takes no lease, but counts as a use of these pages. Asked with the whole prefix from its first page
    it also tells the node in which order the missing ones belong, should this connection commit them."""

    request: int
    hashes: bytes


class Suspect(Message, tag=True):
    """These pages failed a check on the client's side: verify them again and drop what does not match."""

    hashes: bytes


class Fenced(Message, tag=True):
    """Worker: no copy for generations up to and including this one is running or will start."""

    generation: int


class Drop(Message, tag=True):
    """Forget all pages of this connection's namespace (leased ones once their leases end)."""

    request: int


class Ping(Message, tag=True):
    request: int


class Stats(Message, tag=True):
    request: int


class Stop(Message, tag=True):
    """Tool: end the node. It answers `Done` and leaves within 5 s."""

    request: int


# ---- node to client ------------------------------------------------------------------------------------------------------------


class Welcome(Message, tag=True, kw_only=True):
    """`conflicts` has one sentence for each node setting that the client was given explicitly and that differs from the running node's:
    key, both values, both sources. The client decides (`node_conflict`); it has to leave if it does not accept the node's values.

    `generation` is a scheduler's own number. To a worker it says that this generation and all before it are over for its engine, like a
    `Fence` that needs no answer. `dram_bytes` is the most that the arena may grow to."""

    major: int
    minor: int
    version: str
    epoch: int
    generation: int
    pid: int
    slot_bytes: int = 0
    dram_bytes: int = 0
    conflicts: list[str] = []


class Refused(Message, tag=True):
    """The node will not serve this client (other major version, other user, bad namespace); the connection ends after it."""

    reason: str


class Extent(Message, tag=True):
    """A memfd travels with this message. `size` bytes, sealed against resizing."""

    extent: int
    size: int


class Retire(Message, tag=True):
    """Unmap this extent as soon as no copy uses it, and answer `Unmapped`. No page in it is leased. A scheduler also forgets its unused
    slots in it: the node takes them back when all clients have answered. Its number does not come back within this epoch."""

    extent: int


class Granted(Message, tag=True):
    """Fresh nameless slots, added to the client's credits. Their bytes are undefined."""

    slots: list[int]


class Staged(Message, tag=True):
    """Progress of a fetch: `slots` are the next pages of the leading run, verified and leased. `done` with the last one, also when the run
    ended early because a page was missing, failed its check, did not fit or did not come in time. `tier` names where these pages came from.
    One without slots that is not `done` says that the run goes on in that slow tier, which may take until the deadline."""

    request: int
    slots: list[int]
    done: bool
    tier: str = "dram"


class Reserved(Message, tag=True):
    request: int
    slots: list[int]


class Hits(Message, tag=True):
    """Answer to Lookup. `tiers`: how many of the leading pages each tier has, in its turn; none but memory if it is empty."""

    request: int
    pages: int
    tiers: dict[str, int] = {}


class Fence(Message, tag=True):
    """Worker: acknowledge with `Fenced` once no copy for generations up to and including this one is running, and refuse later ones."""

    generation: int


class Done(Message, tag=True):
    """Answer to Drop (count: pages dropped), Ping and Stop."""

    request: int
    count: int = 0


class StatsReply(Message, tag=True):
    request: int
    stats: dict


ToNode = (
    Hello | Mapped | Unmapped | Want | Fetch | Release | Commit | Discard | Reserve | Lookup | Suspect | Fenced | Drop | Ping | Stats | Stop
)
ToClient = Welcome | Refused | Extent | Retire | Granted | Staged | Reserved | Hits | Fence | Done | StatsReply

encoder = msgspec.msgpack.Encoder()
decode_to_node = msgspec.msgpack.Decoder(ToNode).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode


def frame(message: Message) -> bytes:
    """Length-prefixed bytes of one message."""
    body = encoder.encode(message)
    return HEADER.pack(len(body)) + body


def pack_hashes(hashes: list[bytes]) -> bytes:
    return b"".join(hashes)


def unpack_hashes(joined: bytes) -> list[bytes]:
    """Raises ValueError when the length is no multiple of 32."""
    if len(joined) % HASH_BYTES:
        raise ValueError(f"{len(joined)} bytes of page hashes are no multiple of {HASH_BYTES}")
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]
