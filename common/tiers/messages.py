"""Messages between the node and a tier's process, beside Map, Unmap and Space (node/child_side.py).

Promise: every job is answered once by a Result. The other messages to a tier have no answer.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..node.child_side import Map, Message, Space, Unmap

Kind = Literal["leading", "read", "write", "drop", "probe"]

# Hashes of one `leading` or `touch`: 64 KiB, far below what a message may have.
MAX_HASHES = 2048


class Open(Message, tag=True):
    """First message: which tier this process is, and its settings. Answered with Opened."""

    tier: str
    settings: dict[str, Any]


class TierJob(Message, tag=True, kw_only=True):
    """`leading`: how many leading pages are probably there. `read` pages into slots. `write` pages from slots. `drop` the namespace.
    `probe`: does the tier work again? Hash i belongs to slot i."""

    job: int
    kind: Kind
    digest: str
    hashes: bytes = b""
    slots: list[int] = []
    why: str = ""


class Touch(Message, tag=True):
    """These pages are in use, in memory."""

    digest: str
    hashes: bytes


class Opened(Message, tag=True):
    """`down`: why the tier cannot be used; the process ends then."""

    down: str = ""


class Result(Message, tag=True):
    """`count` is the answer to `leading`, and how many leading pages of a `read` are there and verified; `good` says for each page of a
    `write` whether the tier has it, and to a `drop` that it was done. `down`: the tier cannot be used, and why. `error`: a mistake of ours,
    for the log."""

    job: int
    count: int = 0
    good: list[bool] = []
    down: str = ""
    error: str = ""


class Report(Message, tag=True):
    """What the tier counts, about once a second while something changes."""

    stats: dict[str, int | float | str]


ToTier = Open | Map | Unmap | Space | TierJob | Touch
FromTier = Opened | Result | Report

decode_to_tier = msgspec.msgpack.Decoder(ToTier).decode
decode_from_tier = msgspec.msgpack.Decoder(FromTier).decode
