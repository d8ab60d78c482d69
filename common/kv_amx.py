"""Compiled copies between pages and the tiles of vLLM's amx layout (see kv_views.vllm_cpu).

Promises: moves the same bytes to the same places as numpy's strided copies in kv_copy do, for runs of whole tiles; where numba is missing
`load` returns None and numpy does it all. vLLM needs numba itself, so on its CPU builds it is there.

Why: a tile is a transposition in pieces of 2 and 4 bytes, at which numpy spends its time between inner loops of 16 items. On 2 cores with
AMX, 46 pages of SmolLM2 (67.8 MB) in and out: numpy 13.6 and 12.6 ms, this 9 and 9 ms with the check of every page included, and the
interpreter's lock is free all the time, so that more threads help more.

The compiler runs once per process, about a second, when an engine starts; nothing is cached on disk, since numba would unpickle it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .page import PageLayout

if TYPE_CHECKING:
    from .kv_copy import Run

TILE = 16  # tokens of a K tile, dims of a V tile


class Tiles:
    """The amx tensors of a rank: addresses of its layers, bytes of a block in each and of a head in a block, head dim, block tokens."""

    def __init__(self, addresses: list[int], block_bytes: int, head_bytes: int, dim: int, block_tokens: int) -> None:
        self._addresses = np.asarray(addresses, np.int64)
        self._sizes = block_bytes, head_bytes, dim, block_tokens

    def bind(self, layout: PageLayout, first_layer: int, first_head: int, heads: int) -> Callable[[Run, np.ndarray, bool], bool] | None:
        """A function (run, slot, into the engine?) that copies a run of all layers and heads if it consists of whole tiles, and says
        whether it did. None: there is no compiler."""
        compiled = load()
        if compiled is None:
            return None
        block_bytes, head_bytes, dim, block_tokens = self._sizes
        layers = len(self._addresses)
        slot = np.empty(layout.slot_bytes, np.uint8)
        objects = layout.arrays(slot)
        k_at, v_at = np.zeros((layers, heads), np.int64), np.zeros((layers, heads), np.int64)
        step = 0
        for piece in layout.rectangle(first_layer, first_layer + layers, first_head, first_head + heads):
            part = objects[piece.object_index][piece.object_layers, :, :, piece.object_heads]  # [layers, K V, page tokens, heads, dim]
            begin = part.ctypes.data - slot.ctypes.data
            by_layer, by_kind, step, by_head, _ = part.strides
            at = begin + by_layer * np.arange(part.shape[0])[:, None] + by_head * np.arange(part.shape[3])
            k_at[piece.rank_layers, piece.rank_heads] = at
            v_at[piece.rank_layers, piece.rank_heads] = at + by_kind

        def copy(run: Run, page: np.ndarray, to_engine: bool) -> bool:
            if run.start % TILE or run.tokens % TILE:
                return False
            where = run.block, run.start, run.page_start, run.tokens
            compiled(
                self._addresses, page.ctypes.data, k_at, v_at, step, block_bytes, head_bytes, dim, block_tokens, *where, to_engine
            )  # fmt: skip
            return True

        return copy


@cache
def load() -> Callable[..., None] | None:
    """The compiled copy, None without numba."""
    try:
        import numba
        from numba.core import cgutils, types
        from numba.extending import intrinsic
    except ImportError:
        return None
    u16, u32, u64 = np.uint16, np.uint32, np.uint64
    compiled = numba.njit(nogil=True, inline="always")

    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], cgutils.voidptr_t)

        return types.voidptr(types.intp), generate

    # Two tokens at a time, as one item of twice the size: the compiler turns the first and last loops into vector instructions, and the
    # transposition in between moves half as many items.

    @compiled
    def k_in(tile, row, step, words, pairs):  # type: ignore[no-untyped-def]
        for p in range(TILE // 2):
            even = numba.carray(pointer(row + 2 * p * step), (words,), u32)
            odd = numba.carray(pointer(row + (2 * p + 1) * step), (words,), u32)
            pair = pairs[p]
            for w in range(words):
                pair[w] = u64(even[w]) | (u64(odd[w]) << u64(32))
        out = numba.carray(pointer(tile), (words, TILE // 2), u64)
        for w in range(words):
            for p in range(TILE // 2):
                out[w, p] = pairs[p, w]

    @compiled
    def k_out(tile, row, step, words, pairs):  # type: ignore[no-untyped-def]
        source = numba.carray(pointer(tile), (words, TILE // 2), u64)
        for w in range(words):
            for p in range(TILE // 2):
                pairs[p, w] = source[w, p]
        for p in range(TILE // 2):
            even = numba.carray(pointer(row + 2 * p * step), (words,), u32)
            odd = numba.carray(pointer(row + (2 * p + 1) * step), (words,), u32)
            pair = pairs[p]
            for w in range(words):
                even[w] = u32(pair[w])
                odd[w] = u32(pair[w] >> u64(32))

    @compiled
    def v_in(tile, row, step):  # type: ignore[no-untyped-def]
        out = numba.carray(pointer(tile), (TILE,), u32)
        even = numba.carray(pointer(row), (TILE,), u16)
        odd = numba.carray(pointer(row + step), (TILE,), u16)
        for d in range(TILE):
            out[d] = u32(even[d]) | (u32(odd[d]) << u32(16))

    @compiled
    def v_out(tile, row, step):  # type: ignore[no-untyped-def]
        source = numba.carray(pointer(tile), (TILE,), u32)
        even = numba.carray(pointer(row), (TILE,), u16)
        odd = numba.carray(pointer(row + step), (TILE,), u16)
        for d in range(TILE):
            even[d] = u16(source[d])
            odd[d] = u16(source[d] >> u32(16))

    # `bases` and `page` are addresses, `k_at` and `v_at` [layers, heads] where K and V of the first token are in the page, `step` the bytes
    # from one token to the next there.
    def copy(bases, page, k_at, v_at, step, block_bytes, head_bytes, dim, block_tokens, block, start, page_start, tokens, to_engine):  # type: ignore[no-untyped-def]
        words = dim // 2
        pairs = np.empty((TILE // 2, words), u64)
        for layer in range(bases.shape[0]):
            for head in range(k_at.shape[1]):
                at = bases[layer] + block * block_bytes + head * head_bytes
                k = page + k_at[layer, head] + page_start * step
                for t in range(0, tokens, TILE):
                    tile = at + (start + t) * dim * 2
                    if to_engine:
                        k_in(tile, k + t * step, step, words, pairs)
                    else:
                        k_out(tile, k + t * step, step, words, pairs)
                at += head_bytes // 2
                v = page + v_at[layer, head] + page_start * step
                for d in range(0, dim, TILE):
                    for t in range(0, tokens, 2):
                        tile = at + (d * block_tokens + (start + t) * TILE) * 2
                        if to_engine:
                            v_in(tile, v + t * step + d * 2, step)
                        else:
                            v_out(tile, v + t * step + d * 2, step)

    signature = numba.void(
        numba.int64[::1], numba.int64, numba.int64[:, ::1], numba.int64[:, ::1], *[numba.int64] * 9, numba.boolean
    )  # fmt: skip
    result: Callable[..., None] = numba.njit(signature, nogil=True)(copy)
    return result
