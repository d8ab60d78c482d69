"""Page format: byte order, places of objects, trailers that catch every change, rectangles that tile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kv.common.errors import UnsupportedError
from mooncake_kv.common.identity import KVNamespace
from mooncake_kv.common.page import ALIGNMENT, TRAILER_BYTES, PageLayout

HASH = bytes(range(32))
DIGEST = "0123456789abcdef" * 2


def layout_of(layers: int = 8, heads: int = 4, dim: int = 16, per_group: int = 0, dtype: str = "bfloat16", tokens: int = 64) -> PageLayout:
    return PageLayout(
        KVNamespace.build(
            model="m",
            kv_dtype=dtype,
            num_layers=layers,
            num_kv_heads=heads,
            k_head_dim=dim,
            v_head_dim=dim,
            layers_per_group=per_group,
            page_tokens=tokens,
        )
    )


def mla_layout(layers: int = 4, dim: int = 576, per_group: int = 0) -> PageLayout:
    return PageLayout(
        KVNamespace.build(
            model="m",
            kv_dtype="bfloat16",
            num_layers=layers,
            num_kv_heads=1,
            k_head_dim=dim,
            v_head_dim=0,
            mla=True,
            layers_per_group=per_group,
        )
    )


@st.composite
def layouts(draw: st.DrawFn) -> PageLayout:
    if draw(st.booleans()):
        return mla_layout(draw(st.integers(1, 9)), draw(st.sampled_from([64, 576])), draw(st.integers(0, 5)))
    dim = draw(st.sampled_from([16, 64, 128]))
    dtype = draw(st.sampled_from(["bfloat16", "float32", "fp8_e4m3"]))
    return layout_of(draw(st.integers(1, 20)), draw(st.integers(1, 8)), dim, draw(st.integers(0, 9)), dtype)


def filled(layout: PageLayout, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, layout.slot_bytes, np.uint8)


@given(layouts())
@settings(deadline=None)
def test_objects_tile_the_page_and_the_slot(layout: PageLayout) -> None:
    namespace = layout.namespace
    covered = np.zeros((namespace.num_layers, namespace.num_kv_heads), int)
    end = 0
    for spec in layout.objects:
        covered[spec.first_layer : spec.last_layer, spec.first_head : spec.last_head] += 1
        assert spec.offset == end and spec.offset % ALIGNMENT == 0
        assert spec.group == spec.first_head // namespace.heads_per_group
        end += -(-(spec.payload_bytes + TRAILER_BYTES) // ALIGNMENT) * ALIGNMENT
    assert (covered == 1).all()
    assert layout.slot_bytes == end
    assert layout.payload_bytes == sum(spec.payload_bytes for spec in layout.objects) == namespace.page_bytes


def test_byte_order() -> None:
    layout = layout_of(layers=3, heads=2, dim=16)
    slot = np.zeros(layout.slot_bytes, np.uint8)
    (array,) = layout.arrays(slot)
    assert array.shape == (3, 2, 64, 2, 16) and array.dtype == np.uint16
    array[...] = np.arange(array.size, dtype=np.uint16).reshape(array.shape)
    assert (slot[: layout.payload_bytes].view("<u2") == np.arange(array.size, dtype=np.uint16)).all()
    layer, kv, token, head, dim = 2, 1, 63, 1, 15
    place = (((layer * 2 + kv) * 64 + token) * 2 + head) * 16 + dim
    assert array[layer, kv, token, head, dim] == slot[: layout.payload_bytes].view("<u2")[place]


def test_arrays_of_each_kind() -> None:
    for dtype, item in (("bfloat16", np.uint16), ("float16", np.uint16), ("float32", np.uint32), ("fp8_e5m2", np.uint8)):
        layout = layout_of(dtype=dtype, per_group=3)
        slot = filled(layout)
        arrays = layout.arrays(slot)
        assert [a.shape[0] for a in arrays] == [3, 3, 2]
        assert all(a.dtype == layout.item == item and np.shares_memory(a, slot) for a in arrays)
    layout = mla_layout()
    assert [a.shape for a in layout.arrays(filled(layout))] == [(4, 64, 576)]
    layout = layout_of(32, 8, 128)
    assert [a.shape for a in layout.arrays(filled(layout))] == [(32, 2, 64, 1, 128)] * 8


@pytest.mark.parametrize("key", [b"", b"secret key"])
@pytest.mark.parametrize("layout", [layout_of(per_group=3), layout_of(4, 8, 128), mla_layout(per_group=2)], ids=["layers", "one", "mla"])
def test_verify_accepts_only_what_was_sealed(layout: PageLayout, key: bytes) -> None:
    slot = filled(layout)
    assert not layout.verify(slot, HASH, DIGEST, key)
    payload = slot.copy()
    layout.seal(slot, HASH, DIGEST, key)
    assert layout.verify(slot, HASH, DIGEST, key)
    for spec in layout.objects:  # sealing touches nothing but trailers
        end = spec.offset + spec.payload_bytes
        assert (slot[spec.offset : end] == payload[spec.offset : end]).all()
        slot[end + TRAILER_BYTES : spec.offset + -(-(spec.payload_bytes + TRAILER_BYTES) // ALIGNMENT) * ALIGNMENT] = 0
    assert layout.verify(slot, HASH, DIGEST, key)  # padding means nothing
    assert not layout.verify(slot, HASH[::-1], DIGEST, key)
    assert not layout.verify(slot, HASH, DIGEST[::-1], key)
    assert not layout.verify(slot, HASH, DIGEST, b"other")
    assert not layout.verify(slot, HASH, DIGEST, b"" if key else b"key")


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_every_changed_bit_is_found(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from([layout_of(2, 2, 16, 1, tokens=16), mla_layout(1, 64)]))
    key = data.draw(st.sampled_from([b"", b"k"]))
    slot = filled(layout)
    layout.seal(slot, HASH, DIGEST, key)
    spec = data.draw(st.sampled_from(layout.objects))
    in_trailer = data.draw(st.booleans())
    place = spec.offset + data.draw(
        st.integers(spec.payload_bytes, spec.payload_bytes + TRAILER_BYTES - 1) if in_trailer else st.integers(0, spec.payload_bytes - 1)
    )
    slot[place] ^= 1 << data.draw(st.integers(0, 7))
    assert not layout.verify(slot, HASH, DIGEST, key)


def test_objects_of_one_page_are_not_taken_for_each_other() -> None:
    for key in (b"", b"k"):
        layout = layout_of(per_group=4)
        slot = filled(layout)
        layout.seal(slot, HASH, DIGEST, key)
        half = layout.slot_bytes // 2
        swapped = np.concatenate([slot[half:], slot[:half]])
        assert not layout.verify(swapped, HASH, DIGEST, key)


def test_a_keyed_payload_cannot_be_passed_off_as_another_page() -> None:
    """With the key, rewriting the trailer's hash is found although the payload is untouched; without a key anybody can seal."""
    layout = layout_of()
    slot = filled(layout)
    layout.seal(slot, HASH, DIGEST, b"k")
    other = bytes(16) + HASH[16:]
    end = layout.objects[0].payload_bytes + TRAILER_BYTES
    slot[end - 16 : end] = 0
    assert not layout.verify(slot, other, DIGEST, b"k")


def test_trailer_bytes() -> None:
    layout = layout_of()
    slot = filled(layout)
    layout.seal(slot, HASH, DIGEST)
    size = layout.payload_bytes
    trailer = bytes(slot[size : size + TRAILER_BYTES])
    checksum = xxhash.xxh3_128_digest(bytes(slot[:size]))
    assert trailer == b"MKVP" + bytes([1, 0, 0, 0]) + size.to_bytes(8, "little") + checksum + bytes.fromhex(DIGEST) + HASH[:16]


@given(layouts(), st.data())
@settings(deadline=None)
def test_rectangle_writes_exactly_its_part(layout: PageLayout, data: st.DataObject) -> None:
    namespace = layout.namespace
    layers = sorted(data.draw(st.lists(st.integers(0, namespace.num_layers), min_size=2, max_size=2, unique=True)))
    heads = sorted(data.draw(st.lists(st.integers(0, namespace.num_kv_heads), min_size=2, max_size=2, unique=True)))
    seen = np.zeros((namespace.num_layers, namespace.num_kv_heads), int)
    rank = np.zeros((layers[1] - layers[0], heads[1] - heads[0]), int)
    for piece in layout.rectangle(layers[0], layers[1], heads[0], heads[1]):
        spec = layout.objects[piece.object_index]
        inside = seen[spec.first_layer : spec.last_layer, spec.first_head : spec.last_head][piece.object_layers, piece.object_heads]
        mine = rank[piece.rank_layers, piece.rank_heads]
        assert inside.shape == mine.shape and inside.size
        inside += 1
        mine += 1
        assert piece.object_layers.start + spec.first_layer == piece.rank_layers.start + layers[0]
        assert piece.object_heads.start + spec.first_head == piece.rank_heads.start + heads[0]
    assert (rank == 1).all()
    assert (seen[layers[0] : layers[1], heads[0] : heads[1]] == 1).all() and seen.sum() == rank.size


@pytest.mark.parametrize("bad", [(0, 0, 0, 1), (3, 2, 0, 1), (-1, 2, 0, 1), (0, 9, 0, 1), (0, 8, 0, 5), (0, 8, 2, 2)])
def test_rectangles_outside_the_model_are_refused(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="no rectangle"):
        layout_of().rectangle(*bad)


def test_object_keys() -> None:
    layout = layout_of(32, 8, 128, per_group=16)
    spec = layout.objects[5]
    assert layout.object_key(DIGEST, HASH, spec) == f"{DIGEST}/{HASH.hex()}/L16-32/H{spec.group}"
    keys = {layout.object_key(DIGEST, HASH, spec) for spec in layout.objects}
    assert len(keys) == len(layout.objects)
    mla = mla_layout()
    assert mla.object_key(DIGEST, HASH, mla.objects[0]) == f"{DIGEST}/{HASH.hex()}/L0-4"


def test_wrong_buffers_and_names_are_refused() -> None:
    layout = layout_of()
    good = filled(layout)
    for bad in (good[:-1], good.view(np.uint16), np.zeros((layout.slot_bytes, 2), np.uint8)[:, 0]):
        for call in (layout.arrays, lambda s: layout.seal(s, HASH, DIGEST), lambda s: layout.verify(s, HASH, DIGEST)):
            with pytest.raises(ValueError, match="a slot is"):
                call(bad)
    for page_hash, digest in ((HASH[:-1], DIGEST), (HASH, DIGEST[:-2]), (HASH, "x" * 32)):
        with pytest.raises(ValueError):
            layout.seal(good, page_hash, digest)


def test_unequal_dims_are_refused_by_name() -> None:
    namespace = KVNamespace.build(model="m", kv_dtype="bfloat16", num_layers=2, num_kv_heads=2, k_head_dim=192, v_head_dim=128)
    with pytest.raises(UnsupportedError, match="k_head_dim 192 and v_head_dim 128"):
        PageLayout(namespace)


def test_seal_and_verify_free_the_gil() -> None:
    """With switches between threads turned off, this thread gets on before the other has finished only if that gives the GIL up itself."""
    layout = layout_of(8, 1, 4096)
    slot = filled(layout)
    layout.seal(slot, HASH, DIGEST)
    for call in (layout.seal, layout.verify):
        done: list[int] = []

        def work(call: Callable[..., object] = call, done: list[int] = done) -> None:
            for i in range(500):
                call(slot, HASH, DIGEST)
                done.append(i)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)
        try:
            thread = threading.Thread(target=work)
            thread.start()
            seen = len(done)
            thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert seen < len(done) == 500
