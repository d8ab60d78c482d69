"""KV layouts of the engines, as views that gather pages from them and scatter pages into them.

Promises: a layout is either described exactly, item by item, or refused by name with UnsupportedError; no factory copies or moves
anything. Factories take torch tensors or numpy arrays of any KV dtype; the copies themselves are in kv_copy. All K is stored after RoPE,
heads in model order (measured for the three engines).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import kv_amx
from .errors import UnsupportedError
from .kv_copy import BoundView, PagedKVView, Plane, stack_layers

__all__ = ["BoundView", "PagedKVView", "lmdeploy_rows", "sglang_host", "vllm_cpu", "vllm_gpu"]

# LMDeploy aligns K and V within a row to this many bytes (pytorch/engine/cache_engine/schema.py).
LMDEPLOY_ALIGNMENT = 256
# Rows of an AMX tile: 16 rows of 4 bytes (vLLM, csrc/cpu/cpu_attn_amx.hpp; found by writing unique values through its op).
AMX_ROWS = 16


def vllm_cpu(kv_caches: Sequence[Any], block_size: int, isa: str) -> PagedKVView:
    """vLLM's CPU attention cache: one tensor [blocks, heads, block tokens, 2 * head dim] per layer, in layer order.

    The logical shape says nothing about the content. Per (block, head) there is a K half and a V half, as its op
    `cpu_attn_reshape_and_cache` of version 0.32 writes them:
    - isa `vec`, `vec16`: K [dim][token], V [token][dim];
    - isa `amx`: K [token / 16][dim / 2][16 tokens][2 dims], V [dim / 16][token / 2][16 dims][2 tokens].
    Other isas (`neon`, `rvv`, `vxe`, `vsx`) were not checked and are refused, and so is fp8 with amx: the op has a path of its own for
    CPUs with AMX-FP8. `block_size` is the one that token slots count in; the tensors' blocks may be a fraction of it.
    """
    if isa not in ("vec", "vec16", "amx"):
        raise UnsupportedError(f"vLLM's CPU attention uses the isa {isa!r}; known KV layouts are vec, vec16 and amx")
    stacks = stack_layers(kv_caches)
    _check_blocks(kv_caches[0].shape[2], block_size)
    planes: list[Plane] = []
    for first_layer, array in stacks:
        layers, blocks, heads, tokens, content = array.shape
        dim, item = content // 2, array.dtype.itemsize
        if array.strides[3:] != (content * item, item):
            raise UnsupportedError(f"vLLM's CPU KV cache has strides {array.strides[3:]} within a head, expected {(content * item, item)}")
        halves = array.reshape(layers, blocks, heads, 2, tokens * dim)
        k, v = halves[:, :, :, 0], halves[:, :, :, 1]
        if isa != "amx":
            k = k.reshape(layers, blocks, heads, dim, tokens).transpose(0, 1, 4, 2, 3)
            v = v.reshape(layers, blocks, heads, tokens, dim).transpose(0, 1, 3, 2, 4)
            planes += [Plane(0, first_layer, k), Plane(1, first_layer, v)]
            continue
        if item != 2 or dim % 32 or tokens % 32:
            raise UnsupportedError(
                f"vLLM's amx layout is known for head dim and block size in multiples of 32, items of 2 bytes; not {dim}, {tokens}, {item}"
            )
        k = k.view(np.uint32).reshape(layers, blocks, heads, tokens // AMX_ROWS, dim // 2, AMX_ROWS).transpose(0, 1, 3, 5, 2, 4)
        v = v.reshape(layers, blocks, heads, dim // AMX_ROWS, tokens // 2, AMX_ROWS, 2).transpose(0, 1, 4, 6, 2, 3, 5)
        planes += [Plane(0, first_layer, k, AMX_ROWS), Plane(1, first_layer, v, 2)]
    tiles = None
    if isa == "amx" and len({array.strides[1:] for _, array in stacks}) == 1:
        addresses = [array[layer].ctypes.data for _, array in stacks for layer in range(len(array))]
        block_bytes, head_bytes = stacks[0][1].strides[1:3]
        tiles = kv_amx.Tiles(addresses, block_bytes, head_bytes, dim, tokens)
    return PagedKVView(planes, kv_caches, head_dim=dim, item_bytes=item, tiles=tiles)


def vllm_gpu(kv_caches: Sequence[Any], block_size: int, *, mla: bool = False) -> PagedKVView:
    """vLLM's GPU caches: one tensor per layer, in layer order, with any strides (LBNHC, LBHNC, LHBNC, BLHNC, BLNHC, BHLNC).

    Logical shape [blocks, heads, block tokens, K dim + V dim], FlashInfer [blocks, heads, block tokens, 2, dim], and with `mla`
    [blocks, 1, block tokens, latent + RoPE dims]. `block_size` as in `vllm_cpu`.
    """
    shape = tuple(kv_caches[0].shape)
    if (len(shape) != 4 or shape[1] != 1) if mla else len(shape) not in (4, 5):
        raise UnsupportedError(f"vLLM's KV cache has shape {shape}, which is no known layout")
    _check_blocks(shape[2], block_size)
    dim = shape[-1] if mla or len(shape) == 5 else shape[-1] // 2
    planes: list[Plane] = []
    for first_layer, array in stack_layers(kv_caches):
        tokens_first = _permute(array, (0, 1, 3, 2, *range(4, len(array.shape))))
        if mla:
            parts = [tokens_first]
        elif len(shape) == 5:
            parts = [tokens_first[:, :, :, :, 0], tokens_first[:, :, :, :, 1]]
        else:
            parts = [tokens_first[..., :dim], tokens_first[..., dim:]]
        planes += [Plane(component, first_layer, part) for component, part in enumerate(parts)]
    return PagedKVView(planes, kv_caches, head_dim=dim, item_bytes=kv_caches[0].itemsize, mla=mla)


def sglang_host(kv_buffer: Any, layout: str, *, mla: bool = False) -> PagedKVView:
    """SGLang's HiCache host pool (`mem_pool_host.kv_buffer`, `.layout`). Token slots are its host indices.

    Shapes (K and V first): `layer_first` [2, layers, size, heads, dim], `page_first` [2, size, layers, heads, dim], `page_first_direct`
    [2, pages, layers, page, heads, dim], `page_head` [2, pages, heads, page, layers, dim]. MLA: without the first axis, 1 head, and no
    `page_head`.
    """
    # Where (layers, pages, page tokens, heads, dim) are among the axes behind the first; `size` counts as one block.
    axes = {
        "layer_first": (0, None, 1, 2, 3),
        "page_first": (1, None, 0, 2, 3),
        "page_first_direct": (1, 0, 2, 3, 4),
        "page_head": (3, 0, 2, 1, 4),
    }.get(layout)
    if axes is None or (mla and layout == "page_head"):
        raise UnsupportedError(f"SGLang's host memory layout {layout!r}{' with MLA' if mla else ''} is not supported")
    ((_, whole),) = stack_layers([kv_buffer])
    parts = [whole[0]] if mla else [whole[0][0], whole[0][1]]
    planes = []
    for component, part in enumerate(parts):
        order = [axis for axis in axes if axis is not None]
        if len(part.shape) != len(order):
            raise UnsupportedError(f"SGLang's host KV buffer has shape {tuple(kv_buffer.shape)}, which is not its layout {layout!r}")
        array = _permute(part, order)
        planes.append(Plane(component, 0, array if axes[1] is not None else array[:, None]))
    return PagedKVView(planes, [kv_buffer], head_dim=kv_buffer.shape[-1], item_bytes=kv_buffer.itemsize, mla=mla)


def lmdeploy_rows(
    rows: Sequence[Any], block_size: int, num_heads: int, head_dim: int, item_bytes: int, mla: bool = False, scale_bytes: int = 0
) -> PagedKVView:
    """LMDeploy's cache pool: one uint8 tensor [blocks, row bytes] per layer, in layer order.

    A row is K [block tokens, heads, dim], then V, each aligned to 256 bytes. MLA: K alone, with 1 head of latent plus RoPE dims. Quantised
    KV (`item_bytes` 1): then K's scales and zero points [block tokens, heads, `scale_bytes`] and V's, aligned alike; the view's head vector
    is the `head_dim` bytes of values followed by them.
    """
    size = block_size * num_heads * head_dim * item_bytes
    offset = _aligned(size)
    scales = block_size * num_heads * scale_bytes
    parts = [(0, 0, size, head_dim)] if mla else [(0, 0, size, head_dim), (1, offset, size, head_dim)]
    if scale_bytes:
        parts += [(0, 2 * offset, scales, scale_bytes), (1, 2 * offset + _aligned(scales), scales, scale_bytes)]
    end = max(start + length for _, start, length, _ in parts)
    if rows[0].itemsize != 1 or rows[0].shape[1] < end:
        raise UnsupportedError(
            f"LMDeploy's KV rows have {rows[0].shape[1]} items of {rows[0].itemsize} bytes: no room for K and V of {size} bytes each"
        )
    planes = []
    for first_layer, array in stack_layers(rows):
        for number, (component, start, length, dim) in enumerate(parts):
            part = _as_items(array[:, :, start : start + length], item_bytes)
            part = part.reshape(*array.shape[:2], block_size, num_heads, dim)
            planes.append(Plane(component, first_layer, part, start=head_dim if number > 1 else 0))
    return PagedKVView(planes, rows, head_dim=head_dim + scale_bytes, item_bytes=item_bytes, mla=mla)


def _aligned(size: int) -> int:
    return math.ceil(size / LMDEPLOY_ALIGNMENT) * LMDEPLOY_ALIGNMENT


def _check_blocks(tokens: int, block_size: int) -> None:
    if block_size % tokens:
        raise UnsupportedError(f"the block size is {block_size}, which is no multiple of the {tokens} tokens in the KV cache's blocks")


def _permute(array: Any, order: Sequence[int]) -> Any:
    return array.permute(*order) if hasattr(array, "permute") else array.transpose(*order)


def _as_items(array: Any, item_bytes: int) -> Any:
    if not hasattr(array, "permute"):
        return array.view(f"u{item_bytes}")
    import torch

    return array.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[item_bytes])
