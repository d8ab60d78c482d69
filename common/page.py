"""The bytes of a page: one slot holds all objects of a page (head groups x layer groups), each with a trailer that proves what it is.

Promises:
- Payload, C order: `[layer][K, V][token][head in group][dim]`, MLA `[layer][token][dim]`. It follows from the KVNamespace alone, so engines
  with other layouts, block sizes or TP sizes write the same bytes.
- Objects lie back to back in order of (layers, heads), each starting at a multiple of 4096, so a tier can read or write one with direct
  I/O. Bytes between a trailer and the next object mean nothing.
- `verify` is true only for what `seal` has written for the same namespace digest, page hash, place in the page and key, with every byte
  intact.

Trailer, 64 bytes, little-endian: magic `MKVP`, format version (2 bytes), flags (2 bytes, bit 0: keyed), payload length (8), checksum (16),
namespace digest (16), first half of the page hash (16). The checksum is xxh3-128 of the payload, seeded with the object's first layer and
head so that objects of a page cannot be taken for each other; keyed, it is BLAKE2b of place, trailer fields and payload, so that a valid
payload cannot be passed off as another page. Both free the GIL on buffers of this size.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from .errors import UnsupportedError
from .hashing import HASH_BYTES
from .identity import ITEM_BYTES, KVNamespace

TRAILER_BYTES = 64
ALIGNMENT = 4096
MAGIC = b"MKVP"
FORMAT = 1
KEYED = 1

_TRAILER = struct.Struct("<4sHHQ16s16s16s")
_PLACE = struct.Struct("<4I")
_ITEMS: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def _nothing() -> None:
    pass


class ObjectSpec(NamedTuple):
    """One object of a page: layers [first_layer, last_layer) x KV heads [first_head, last_head), `payload_bytes` at `offset` in the
    slot."""

    first_layer: int
    last_layer: int
    group: int
    first_head: int
    last_head: int
    offset: int
    payload_bytes: int


class Piece(NamedTuple):
    """Where a rank's rectangle meets one object: the same elements, as slices of the object's layers and heads and of the rank's."""

    object_index: int
    object_layers: slice
    object_heads: slice
    rank_layers: slice
    rank_heads: slice


class PageLayout:
    """Sizes, places, trailers and array views of the pages of a namespace. Immutable and free of I/O; safe to use from any thread."""

    def __init__(self, namespace: KVNamespace, key: bytes = b"") -> None:
        """`key`: `identity.trailer_key` of the pool secret, for the trailers of this layout's pages."""
        if not namespace.mla and namespace.k_head_dim != namespace.v_head_dim:
            raise UnsupportedError(
                f"the KV heads have k_head_dim {namespace.k_head_dim} and v_head_dim {namespace.v_head_dim}: unequal dims are not supported"
            )
        self.namespace = namespace
        self.key = key
        item_bytes = ITEM_BYTES[namespace.kv_dtype]
        self.item = np.dtype(_ITEMS[item_bytes])
        self.payload_bytes = namespace.page_bytes
        objects: list[ObjectSpec] = []
        shapes: list[tuple[int, ...]] = []
        offset = 0
        token_bytes = (namespace.k_head_dim + namespace.v_head_dim) * item_bytes
        for first_layer in range(0, namespace.num_layers, namespace.layers_per_group):
            last_layer = min(first_layer + namespace.layers_per_group, namespace.num_layers)
            for group, first_head in enumerate(range(0, namespace.num_kv_heads, namespace.heads_per_group)):
                last_head = first_head + namespace.heads_per_group
                layers, heads = last_layer - first_layer, last_head - first_head
                size = layers * namespace.page_tokens * heads * token_bytes
                objects.append(ObjectSpec(first_layer, last_layer, group, first_head, last_head, offset, size))
                if namespace.mla:
                    shapes.append((layers, namespace.page_tokens, namespace.k_head_dim))
                else:
                    shapes.append((layers, 2, namespace.page_tokens, heads, namespace.k_head_dim))
                offset += -(-(size + TRAILER_BYTES) // ALIGNMENT) * ALIGNMENT
        self.objects: tuple[ObjectSpec, ...] = tuple(objects)
        self.slot_bytes = offset
        self._shapes: tuple[tuple[int, ...], ...] = tuple(shapes)

    def arrays(self, slot: np.ndarray) -> list[np.ndarray]:
        """Views of the payloads in a slot (uint8, slot_bytes, contiguous), one for each object.

        Shape [layers, 2, page_tokens, heads, dim], MLA [layers, page_tokens, dim]; unsigned integers of the size of the KV dtype.
        """
        self._check_slot(slot)
        return [
            slot[spec.offset : spec.offset + spec.payload_bytes].view(self.item).reshape(shape)
            for spec, shape in zip(self.objects, self._shapes, strict=True)
        ]

    def rectangle(self, first_layer: int, last_layer: int, first_head: int, last_head: int) -> tuple[Piece, ...]:
        """The objects that layers [first_layer, last_layer) x KV heads [first_head, last_head) overlap, in order. MLA: heads [0, 1).

        A rank may hold part of a head group or several. Raises ValueError for a rectangle that is empty or not within the model.
        """
        namespace = self.namespace
        if not (0 <= first_layer < last_layer <= namespace.num_layers and 0 <= first_head < last_head <= namespace.num_kv_heads):
            raise ValueError(
                f"layers [{first_layer}, {last_layer}) x KV heads [{first_head}, {last_head}) is no rectangle within "
                f"{namespace.num_layers} layers x {namespace.num_kv_heads} KV heads"
            )
        pieces = []
        for index, spec in enumerate(self.objects):
            layers = max(first_layer, spec.first_layer), min(last_layer, spec.last_layer)
            heads = max(first_head, spec.first_head), min(last_head, spec.last_head)
            if layers[0] < layers[1] and heads[0] < heads[1]:
                pieces.append(
                    Piece(
                        index,
                        slice(layers[0] - spec.first_layer, layers[1] - spec.first_layer),
                        slice(heads[0] - spec.first_head, heads[1] - spec.first_head),
                        slice(layers[0] - first_layer, layers[1] - first_layer),
                        slice(heads[0] - first_head, heads[1] - first_head),
                    )
                )
        return tuple(pieces)

    def seal(
        self, slot: np.ndarray, page_hash: bytes, digest: str, key: bytes | None = None, between: Callable[[], object] = _nothing
    ) -> None:
        """Write the trailers of all objects of a slot. `digest` is the namespace's (32 hex digits); `key`, at most 64 bytes, replaces the
        layout's; `between` is called before each object."""
        key = self.key if key is None else key
        self._check_slot(slot)
        identity = _identity(page_hash, digest)
        data = slot.data
        for spec in self.objects:
            between()
            end = spec.offset + spec.payload_bytes
            checksum = _hasher(spec, identity, key)
            checksum.update(data[spec.offset : end])
            _TRAILER.pack_into(data, end, MAGIC, FORMAT, KEYED if key else 0, spec.payload_bytes, checksum.digest(), *identity)

    def verify(
        self, slot: np.ndarray, page_hash: bytes, digest: str, key: bytes | None = None, between: Callable[[], object] = _nothing
    ) -> bool:
        """Whether every object of the slot is this page, whole and unchanged, sealed with the same key. `between` as in `seal`."""
        key = self.key if key is None else key
        self._check_slot(slot)
        data = slot.data
        for spec in self.objects:
            between()
            check = Check(spec, page_hash, digest, key)
            end = spec.offset + spec.payload_bytes
            check.update(data[spec.offset : end])
            if not check.passes(data[end : end + TRAILER_BYTES]):
                return False
        return True

    def object_key(self, digest: str, page_hash: bytes, spec: ObjectSpec) -> str:
        """Name of an object in the slow tiers: `digest/page hash/L{first}-{last}/H{group}`, last layer exclusive, no H for MLA."""
        name = f"{digest}/{page_hash.hex()}/L{spec.first_layer}-{spec.last_layer}"
        return name if self.namespace.mla else f"{name}/H{spec.group}"

    def _check_slot(self, slot: np.ndarray) -> None:
        if slot.dtype != np.uint8 or slot.shape != (self.slot_bytes,) or not slot.flags.c_contiguous:
            raise ValueError(f"a slot is {self.slot_bytes} contiguous uint8, not {slot.dtype} of shape {slot.shape}")


class Check:
    """What `PageLayout.verify` does with one object, for a reader that has its payload piece by piece, each still in the processor's cache.
    A check is used once."""

    def __init__(self, spec: ObjectSpec, page_hash: bytes, digest: str, key: bytes) -> None:
        """`key`: that of the layout."""
        identity = _identity(page_hash, digest)
        self._expected = (MAGIC, FORMAT, KEYED if key else 0, spec.payload_bytes, *identity)
        self._hasher = _hasher(spec, identity, key)

    def update(self, data: memoryview) -> None:
        """The next bytes of the payload."""
        self._hasher.update(data)

    def passes(self, trailer: memoryview) -> bool:
        """Whether this trailer is that of the payload."""
        magic, version, flags, length, checksum, *identity = _TRAILER.unpack(trailer)
        if (magic, version, flags, length, *identity) != self._expected:
            return False
        return hmac.compare_digest(checksum, self._hasher.digest())


def _identity(page_hash: bytes, digest: str) -> tuple[bytes, bytes]:
    """(namespace digest, half of the page hash) as they stand in a trailer."""
    if len(page_hash) != HASH_BYTES:
        raise ValueError(f"a page hash has {HASH_BYTES} bytes, not {len(page_hash)}")
    raw = bytes.fromhex(digest)
    if len(raw) != 16:
        raise ValueError(f"a namespace digest has 32 hex digits, not {digest!r}")
    return raw, page_hash[:16]


class _Hasher(Protocol):
    def update(self, data: memoryview, /) -> object: ...

    def digest(self) -> bytes: ...


def _hasher(spec: ObjectSpec, identity: tuple[bytes, bytes], key: bytes) -> _Hasher:
    if not key:
        return xxhash.xxh3_128(seed=spec.first_layer << 32 | spec.first_head)
    mac = hashlib.blake2b(_PLACE.pack(spec.first_layer, spec.last_layer, spec.first_head, spec.last_head), digest_size=16, key=key)
    mac.update(_TRAILER.pack(MAGIC, FORMAT, KEYED, spec.payload_bytes, bytes(16), *identity))
    return mac
