"""The process of a tier, its parts in this one: what cannot be mapped takes the tier out of use instead of ending its process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np

from mooncake_kv.common.identity import KVNamespace
from mooncake_kv.common.node.child_side import MAX_MESSAGE, Map, Message, Space, Unmap, encode
from mooncake_kv.common.node.protocol import SLOT_SHIFT
from mooncake_kv.common.page import PageLayout
from mooncake_kv.common.tiers.host import Host
from mooncake_kv.common.tiers.messages import Kind, Opened, Report, Result, TierJob, decode_from_tier
from mooncake_kv.common.tiers.messages import Open as OpenTier

SPACE = KVNamespace.build(
    model=sha256(b"m").hexdigest(), kv_dtype="float16", num_layers=2, num_kv_heads=2, k_head_dim=16, v_head_dim=16, page_tokens=16
)
LAYOUT, DIGEST = PageLayout(SPACE), SPACE.digest()
PAGE = sha256(b"p").digest()
EXTENT = 1 << 20


def test_an_extent_that_cannot_be_mapped(tmp_path: Path) -> None:
    node, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    node.settimeout(10)
    host = Host(ours)

    def say(message: Message, fds: list[int] | None = None) -> None:
        host._handle(encode(message), fds or [])

    def hear(kind: type) -> object:
        while isinstance(heard := decode_from_tier(node.recv(MAX_MESSAGE)), Report):
            continue
        assert isinstance(heard, kind)
        return heard

    def ask(kind: Kind, extent: int) -> Result:
        say(TierJob(job=1, kind=kind, digest=DIGEST, hashes=PAGE, slots=[extent << SLOT_SHIFT]))
        answer = hear(Result)
        assert isinstance(answer, Result)
        return answer

    memory = os.memfd_create("extent")
    os.ftruncate(memory, EXTENT)
    slot = np.zeros(LAYOUT.slot_bytes, np.uint8)
    LAYOUT.seal(slot, PAGE, DIGEST)
    os.pwrite(memory, slot.tobytes(), 0)
    again = os.dup(memory)
    unmappable: Callable[[], int] = lambda: os.open(tmp_path, os.O_RDONLY)  # noqa: E731
    with node, ours:
        (tmp_path / "ssd").mkdir(mode=0o700)
        say(OpenTier("ssd", {"path": str(tmp_path / "ssd"), "bytes": 1 << 20}))
        assert hear(Opened) == Opened()
        say(Space(DIGEST, SPACE.encode()))
        say(Map(1, EXTENT), [memory])
        say(Map(2, EXTENT), [unmappable()])
        assert ask("write", 1).good == [True]
        for kind in ("write", "read"):
            down = ask(kind, 2)  # type: ignore[arg-type]
            assert "bytes of the node's memory cannot be used" in down.down and not down.count and not down.good and not down.error
        assert ask("read", 1).count == 1
        say(Unmap(2))
        say(Map(2, EXTENT), [again])
        assert ask("read", 2).count == 1
        say(Unmap(2))
        say(Unmap(1))
        host._opened.close()
