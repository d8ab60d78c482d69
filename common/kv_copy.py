"""Copies between an engine's KV tensors and the pages of a namespace.

Promises:
- Bytes are moved, never interpreted: all copies run on unsigned integers, so NaNs and denormals pass unchanged, and
  `scatter(gather(x)) == x` for any layout, token slots, page size and rectangle.
- `gather` writes this rank's rectangle of the pages it is given and nothing else, `scatter` the token slots it is given and nothing else.
  Arguments that do not fit are refused before the first byte is copied.
- Every tensor that a view was made of is kept alive by it.

A layout is described to this module as planes: strided arrays over K, V or the MLA latent in which a token range of a block is a slice.
Consecutive layers share one plane wherever they lie at equal distances, because a copy costs about 1.5 us before it moves a byte: one
assignment moves a token range of all layers at once. Ranges are cut only at block ends, page ends and where slots jump.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from . import kv_amx
from .errors import UnsupportedError
from .page import PageLayout, Piece

# Below this a second thread costs more (about 50 us to wake it) than it saves.
PARALLEL_BYTES = 1 << 20
# Layers are taken a few at a time, so that what one assignment reads and writes stays in the L2 cache while it walks across both in an
# order that suits only one of them (up to 1.25 times as fast), and so that several threads end together.
WORK_BYTES = 1 << 19

# With fewer pages than this for each thread, pages are split among threads.
PAGES_PER_THREAD = 4

SLICE = slice(None)


class Plane(NamedTuple):
    """K, V or the MLA latent of some layers and heads of a rank, inside the engine's memory.

    `array` (numpy, or torch for memory that numpy cannot address) has shape [layers, blocks, block_size, heads, *dims] and any strides.
    With `tile` > 1 the token axis does not have one stride: [layers, blocks, block_size / tile, tile, heads, *dims]. Its items are
    unsigned integers (torch: signed) of the KV dtype's size or a multiple of it; `dims` flattened is the head's vector, in order, or the
    part of it that begins at item `start`.
    """

    component: int  # 0: K or latent, 1: V
    first_layer: int  # of the rank
    array: Any
    tile: int = 1
    start: int = 0


class Run(NamedTuple):
    """Consecutive tokens in one page and one block: `tokens` of them from `page_start` in page `page` and from `start` in `block`."""

    page: int
    page_start: int
    block: int
    start: int
    tokens: int


class Part(NamedTuple):
    """What one thread copies at a time: runs of one page in some regions. `first`: the page is checked with it."""

    page: int
    runs: list[Run]
    regions: list[Region]
    first: bool


class Region(NamedTuple):
    """Some layers of a plane, and the same elements in a page.

    Heads are [groups, heads in group] on both sides, so that objects that lie at equal distances in a page are one strided array. The last
    axes are missing where their bytes are one item (see _whole_runs).
    """

    array: Any  # [layers, blocks, ..., groups, heads in group, *dims], as in Plane
    tile: int
    shape: tuple[int, ...]  # in the page: [layers, page_tokens, groups, heads in group, *dims]
    strides: tuple[int, ...]
    offset: int  # in the slot, bytes
    dtype: np.dtype


class PagedKVView:
    """One rank's KV tensors of an engine, as planes. See kv_views for the layouts.

    `block_size` is in tokens, `token_slots` the number of tokens that the tensors hold; a token slot is
    `block id * block_size + offset in the block`. MLA counts as one head of the latent plus RoPE dims. `tiles`: the same tensors, for
    compiled copies.
    """

    def __init__(
        self,
        planes: Sequence[Plane],
        owners: Sequence[object],
        *,
        head_dim: int,
        item_bytes: int,
        mla: bool = False,
        tiles: kv_amx.Tiles | None = None,
    ) -> None:
        self.mla = mla
        self.head_dim = head_dim
        self.item_bytes = item_bytes
        self.num_layers = max(plane.first_layer + plane.array.shape[0] for plane in planes)
        self.num_heads: int = planes[0].array.shape[_heads_axis(planes[0])]
        blocks, tokens = planes[0].array.shape[1:3]
        self.block_size: int = tokens * planes[0].tile
        self.token_slots: int = blocks * self.block_size
        # Where a block's last token is followed by the next block's first, block ends need not be cut at.
        self._planes = list(planes)
        self._run_limit = self.block_size
        if all(plane.tile == 1 and _stride(plane.array, 1) == plane.array.shape[2] * _stride(plane.array, 2) for plane in planes):
            self._run_limit = self.token_slots
            self._planes = [plane._replace(array=_flatten_blocks(plane.array)) for plane in planes]
        self._owners = list(owners)
        self._tiles = tiles

    def bind(self, layout: PageLayout, first_layer: int, first_head: int, *, threads: int = 1) -> BoundView:
        """Prepare copies for pages of `layout`. This rank holds layers [first_layer, first_layer + num_layers) of the model and its KV
        heads [first_head, first_head + num_heads).

        `threads` is how many threads a large copy uses, the caller's included. Raises UnsupportedError for sizes that differ from the
        namespace's, ValueError for a rectangle outside the model.
        """
        namespace = layout.namespace
        for name, ours, theirs in (
            ("mla", self.mla, namespace.mla),
            ("head_dim", self.head_dim, namespace.k_head_dim),
            ("bytes per item", self.item_bytes, layout.item.itemsize),
        ):
            if ours != theirs:
                raise UnsupportedError(f"the engine's KV tensors have {name} {ours}, the namespace has {theirs}")
        regions = list(self._regions(layout, first_layer, first_head))
        compiled = self._tiles.bind(layout, first_layer, first_head, self.num_heads) if self._tiles is not None else None
        return BoundView(self, layout, regions, self._run_limit, threads, compiled)

    def _regions(self, layout: PageLayout, first_layer: int, first_head: int) -> Iterator[Region]:
        # The page format is asked where things lie, on a slot that is never touched.
        slot = np.empty(layout.slot_bytes, np.uint8)
        objects = layout.arrays(slot)
        pieces = layout.rectangle(first_layer, first_layer + self.num_layers, first_head, first_head + self.num_heads)
        for equal in _equal_pieces(layout, pieces):
            piece, last = equal[0], equal[-1]
            groups = len(equal)
            distance = (objects[last.object_index].ctypes.data - objects[piece.object_index].ctypes.data) // max(1, groups - 1)
            page = objects[piece.object_index][piece.object_layers]
            page = page[:, None, :, None] if self.mla else page[:, :, :, piece.object_heads]  # [layers, K V, page_tokens, heads, dim]
            for plane in self._planes:
                axis = _heads_axis(plane)
                for layers in _chunks(_overlap(piece.rank_layers, plane), WORK_BYTES // (page[0, 0].nbytes * groups)):
                    array = plane.array[(_within(layers, plane.first_layer), *[SLICE] * (axis - 1))]
                    array = array[(*[SLICE] * axis, slice(piece.rank_heads.start, last.rank_heads.stop))]
                    array = array.reshape(*array.shape[:axis], groups, -1, *array.shape[axis + 1 :])
                    view = page[_within(layers, piece.rank_layers.start), plane.component].view(_dtype(array))
                    view = view[..., plane.start : plane.start + math.prod(array.shape[axis + 2 :])]
                    view = view.reshape(*view.shape[:-1], *array.shape[axis + 2 :])
                    shape = (*view.shape[:2], groups, *view.shape[2:])
                    strides = (*view.strides[:2], distance, *view.strides[2:])
                    yield _whole_runs(Region(array, plane.tile, shape, strides, view.ctypes.data - slot.ctypes.data, view.dtype))


class BoundView:
    """Copies between the engine's KV and the pages of one layout. Stateless between calls: several threads may use it at once, on
    different token slots and pages.

    Both calls return when the copy is complete. They wait for nothing but memory copies, on this thread and on the threads of the pool,
    which cannot be abandoned half-way; hence no deadline.
    """

    def __init__(
        self,
        view: PagedKVView,
        layout: PageLayout,
        regions: list[Region],
        block_size: int,
        threads: int,
        compiled: Callable[[Run, np.ndarray, bool], bool] | None = None,
    ) -> None:
        self.view = view
        self.layout = layout
        self._regions = regions
        self._block_size = block_size
        # array[:, 0, 0] is one token of the region, or one tile.
        self._token_bytes = sum(math.prod(r.array[:, 0, 0].shape) * r.dtype.itemsize // r.tile for r in regions)
        self._threads = threads
        self._compiled = compiled
        self._pool = ThreadPoolExecutor(threads - 1, "mooncake-kv-copy", _spread) if threads > 1 else None

    def gather(self, token_slots: np.ndarray, first_token: int, pages: Sequence[np.ndarray]) -> None:
        """Copy engine -> pages.

        Token i of the range is position `first_token + i` of the sequence and lies at `token_slots[i]` (int64) in the engine; `pages[j]`
        is the slot (uint8, layout.slot_bytes) of page `first_token // page_tokens + j`. Raises ValueError if slots or pages do not fit.
        """
        self._copy(token_slots, first_token, pages, False, None)

    def scatter(
        self,
        token_slots: np.ndarray,
        first_token: int,
        pages: Sequence[np.ndarray],
        check: Callable[[int], bool] | None = None,
    ) -> int:
        """Copy pages -> engine, for the same arguments as `gather`. `check(j)` says whether pages[j] is good; it is called on any of the
        threads, for a page that is about to be copied and so is in the cache. Returns how many leading pages are good. The token slots of
        all others hold anything afterwards."""
        return self._copy(token_slots, first_token, pages, True, check)

    def close(self) -> None:
        """End the pool's threads. The view must not be used afterwards."""
        if self._pool is not None:
            self._pool.shutdown()

    def _copy(
        self, token_slots: np.ndarray, first_token: int, pages: Sequence[np.ndarray], to_engine: bool, check: Callable[[int], bool] | None
    ) -> int:
        slots = np.asarray(token_slots, np.int64)
        runs = find_runs(slots, first_token, self.layout.namespace.page_tokens, self._block_size)
        if first_token < 0:
            raise ValueError(f"the first token is {first_token}, which is no position")
        touched = runs[-1].page + 1 if runs else 0
        if touched != len(pages):
            raise ValueError(f"tokens [{first_token}, {first_token + len(slots)}) lie in {touched} pages, not in {len(pages)}")
        if not runs:
            return 0
        if slots.min() < 0 or slots.max() >= self.view.token_slots:
            raise ValueError(f"token slots {slots.min()} to {slots.max()} are not all within the engine's {self.view.token_slots}")
        for page in pages:
            if page.dtype != np.uint8 or page.shape != (self.layout.slot_bytes,) or not page.flags.c_contiguous:
                raise ValueError(f"a slot is {self.layout.slot_bytes} contiguous uint8, not {page.dtype} of shape {page.shape}")
        bad: list[int] = []

        def copy(part: Part) -> None:
            page = part.page
            if bad and page > min(bad):
                return
            if check is not None and part.first and not check(page):
                bad.append(page)
                return
            self._copy_part(part, pages[page], to_engine)

        parallel = self._pool is not None and len(slots) * self._token_bytes >= PARALLEL_BYTES
        # A page that is checked is copied by one thread at once; few pages leave threads without work, so they are checked before.
        whole = not parallel or len(pages) >= PAGES_PER_THREAD * self._threads
        if check is not None and not whole:
            good = next((i for i in range(len(pages)) if not check(i)), len(pages))
            runs, check = [run for run in runs if run.page < good], None
        else:
            good = len(pages)
        parts = list(self._parts(runs, whole))
        if parallel:
            self._share(parts, copy)
        else:
            for part in parts:
                copy(part)
        return min(bad, default=good)

    def _parts(self, runs: list[Run], whole: bool) -> Iterator[Part]:
        for page, group in itertools.groupby(runs, lambda run: run.page):
            of_page = list(group)
            if whole:
                yield Part(page, of_page, self._regions, True)
            elif self._compiled is not None:
                yield from (Part(page, [run], self._regions, False) for run in of_page)
            else:
                yield from (Part(page, of_page, [region], False) for region in self._regions)

    def _copy_part(self, part: Part, page: np.ndarray, to_engine: bool) -> None:
        runs = part.runs
        if self._compiled is not None:
            runs = [run for run in runs if not self._compiled(run, page, to_engine)]
        if runs:
            for region in part.regions:
                view = _page_view(region, page)
                for run in runs:
                    _copy_run(region, view, run, to_engine)

    def _share(self, parts: list[Part], copy: Callable[[Part], None]) -> None:
        """Do all parts on all threads."""
        assert self._pool is not None
        # next() on one shared count is atomic under the GIL: each part is taken once, and a thread that was held up takes fewer.
        turn = itertools.count()

        def drain() -> None:
            while (i := next(turn)) < len(parts):
                copy(parts[i])

        helpers = [self._pool.submit(drain) for _ in range(self._threads - 1)]
        try:
            drain()
        finally:
            for helper in helpers:
                helper.result()


def find_runs(slots: np.ndarray, first_token: int, page_tokens: int, block_size: int) -> list[Run]:
    """Cut a token range into runs that are consecutive in one page and one block. Pages count from the one of `first_token`."""
    if not len(slots):
        return []
    positions = np.arange(first_token, first_token + len(slots))
    cuts = (slots[1:] - slots[:-1] != 1) | (slots[1:] % block_size == 0) | (positions[1:] % page_tokens == 0)
    starts = np.concatenate(([0], np.flatnonzero(cuts) + 1))
    tokens = np.diff(starts, append=len(slots))
    page, page_start = np.divmod(positions[starts], page_tokens)
    block, start = np.divmod(slots[starts], block_size)
    columns = (page - first_token // page_tokens, page_start, block, start, tokens)
    return [Run(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def stack_layers(tensors: Sequence[Any]) -> list[tuple[int, Any]]:
    """Join per-layer arrays of equal shape into arrays with a leading layer axis: [(first layer, array)], one where possible.

    Layers at equal distances in memory (one allocation, usually) are described by a stride; nothing is copied. Torch tensors on the CPU
    become numpy arrays of unsigned integers; on other devices they become torch tensors of signed integers of the same size. Raises
    UnsupportedError for layers that differ.
    """
    layers = [_integers(tensor) for tensor in tensors]
    for number, layer in enumerate(layers):
        if layer.shape != layers[0].shape or layer.dtype != layers[0].dtype:
            raise UnsupportedError(
                f"the KV tensor of layer {number} has shape {tuple(layer.shape)} of {layer.itemsize} bytes an item, "
                f"that of layer 0 {tuple(layers[0].shape)} of {layers[0].itemsize}; layers that differ are not supported"
            )
    result: list[tuple[int, Any]] = []
    first = 0
    while first < len(layers):
        distance = _distance(layers[first], layers[first + 1]) if first + 1 < len(layers) else None
        last = first + 1
        while last < len(layers) and distance is not None and _distance(layers[last - 1], layers[last]) == distance:
            last += 1
        base = layers[first]
        if isinstance(base, np.ndarray):
            shape, strides = (last - first, *base.shape), (distance or 0, *base.strides)
            result.append((first, np.lib.stride_tricks.as_strided(base, shape, strides)))
        else:
            shape, strides = (last - first, *base.shape), ((distance or 0) // base.itemsize, *base.stride())
            result.append((first, base.as_strided(shape, strides, base.storage_offset())))
        first = last
    return result


def _integers(tensor: Any) -> Any:
    size = tensor.itemsize
    if isinstance(tensor, np.ndarray):
        return tensor.view(np.dtype(f"u{size}"))
    import torch

    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    integers = tensor.detach().view(signed)
    return integers.numpy().view(np.dtype(f"u{size}")) if tensor.device.type == "cpu" else integers


def _distance(one: Any, other: Any) -> int | None:
    """Bytes from one layer to the next, None if they do not have the same strides. numpy addresses any memory by strides; torch only
    within a storage."""
    if isinstance(one, np.ndarray):
        return other.ctypes.data - one.ctypes.data if one.strides == other.strides else None
    distance = other.data_ptr() - one.data_ptr()
    same = one.stride() == other.stride() and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return distance if same and distance > 0 else None


def _heads_axis(plane: Plane) -> int:
    return 3 if plane.tile == 1 else 4


def _stride(array: Any, axis: int) -> int:
    return array.strides[axis] if isinstance(array, np.ndarray) else array.stride(axis)


def _flatten_blocks(array: Any) -> Any:
    layers, blocks, tokens, *rest = array.shape
    return array.reshape(layers, 1, blocks * tokens, *rest)


def _dtype(array: Any) -> np.dtype:
    return array.dtype if isinstance(array, np.ndarray) else np.dtype({1: "u1", 2: "i2", 4: "i4"}[array.itemsize])


def _overlap(rank_layers: slice, plane: Plane) -> range:
    return range(max(rank_layers.start, plane.first_layer), min(rank_layers.stop, plane.first_layer + plane.array.shape[0]))


def _within(layers: range, first: int) -> slice:
    return slice(layers.start - first, layers.stop - first)


def _chunks(layers: range, at_most: int) -> Iterator[range]:
    """Parts of nearly equal length, `at_most` layers each but at least one."""
    parts = -(-len(layers) // max(1, at_most))
    for i in range(parts):
        yield layers[len(layers) * i // parts : len(layers) * (i + 1) // parts]


def _equal_pieces(layout: PageLayout, pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Join neighbours that are whole objects with the same layers: they are equally large and lie at equal distances."""
    result: list[list[Piece]] = []
    joins = False
    for piece in pieces:
        spec = layout.objects[piece.object_index]
        whole = piece.object_heads == slice(0, spec.last_head - spec.first_head)
        if joins and whole and result[-1][0].rank_layers == piece.rank_layers:
            result[-1].append(piece)
        else:
            result.append([piece])
        joins = whole
    return result


def _whole_runs(region: Region) -> Region:
    """The region with the last axes that are contiguous on both sides as one item of opaque bytes: numpy then moves item after item in one
    loop, and does not start a loop for each (8B-like pages in the layouts of SGLang and LMDeploy, 256 bytes an item: up to 1.15 times as
    fast; neighbouring items still become one copy)."""
    array, shape, strides = region.array, region.shape, region.strides
    if not isinstance(array, np.ndarray):
        return region
    run, axes = region.dtype.itemsize, 0
    while axes < len(shape) - 2 and (shape[-1 - axes] == 1 or array.strides[-1 - axes] == strides[-1 - axes] == run):
        run *= shape[-1 - axes]
        axes += 1
    if run == region.dtype.itemsize:
        return region
    item = np.dtype(f"V{run}")
    array = array.reshape(*array.shape[:-axes], -1).view(item)[..., 0]
    return region._replace(array=array, shape=shape[:-axes], strides=strides[:-axes], dtype=item)


def _page_view(region: Region, slot: np.ndarray) -> Any:
    view: np.ndarray = np.ndarray(region.shape, region.dtype, slot, region.offset, region.strides)
    if isinstance(region.array, np.ndarray):
        return view
    import torch

    return torch.from_numpy(view)


def _copy_run(region: Region, page: Any, run: Run, to_engine: bool) -> None:
    array, tile = region.array, region.tile
    _, page_start, block, start, tokens = run
    if tile == 1:
        _assign(array[:, block, start : start + tokens], page[:, page_start : page_start + tokens], to_engine)
        return
    stop = start + tokens
    shift = page_start - start  # from a token's place in the block to its place in the page
    # [start, head) and [tail, stop) lie within a tile each, [head, tail) is whole tiles.
    head = min(-(-start // tile) * tile, stop)
    tail = max(stop // tile * tile, head)
    if head < tail:
        whole = page[:, head + shift : tail + shift]
        whole = whole.reshape(whole.shape[0], (tail - head) // tile, tile, *whole.shape[2:])
        inside = array[:, block, head // tile : tail // tile]
        if tile == 2:  # as two assignments the inner loop is 16 items long and not 2: twice as fast
            _assign(inside[:, :, 0], whole[:, :, 0], to_engine)
            _assign(inside[:, :, 1], whole[:, :, 1], to_engine)
        else:
            _assign(inside, whole, to_engine)
    for begin, end in ((start, head), (tail, stop)):
        if begin < end:
            offset = begin % tile
            part = array[:, block, begin // tile, offset : offset + end - begin]
            _assign(part, page[:, begin + shift : end + shift], to_engine)


def _assign(engine: Any, page: Any, to_engine: bool) -> None:
    target, source = (engine, page) if to_engine else (page, engine)
    if isinstance(target, np.ndarray):
        np.copyto(target, source)
    else:
        target.copy_(source)


def _spread() -> None:
    """Let a pool thread run on every CPU that some thread of this process may use.

    A thread inherits the CPUs of the one that starts it, and engines pin their threads (vLLM's CPU worker: one core each), so that two
    copying threads would share one core.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cpus: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            cpus |= os.sched_getaffinity(int(thread))
        except ProcessLookupError:  # it has ended since
            continue
    os.sched_setaffinity(0, cpus)
