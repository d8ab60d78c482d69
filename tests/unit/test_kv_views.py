"""KV views: every layout against a per-token reference, round trips of any slots and rectangles, vLLM's own op, refusals."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_kv.common import kv_copy
from mooncake_kv.common.errors import UnsupportedError
from mooncake_kv.common.identity import KVNamespace
from mooncake_kv.common.kv_views import PagedKVView, lmdeploy_rows, sglang_host, vllm_cpu, vllm_gpu
from mooncake_kv.common.page import PageLayout

KV_DTYPE = {1: "fp8_e5m2", 2: "bfloat16", 4: "float32"}
TORCH_DTYPE = {1: torch.float8_e5m2, 2: torch.bfloat16, 4: torch.float32}
VLLM_LAYOUTS = ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
LAYOUTS = (
    "cpu-vec",
    "cpu-vec16",
    "cpu-amx",
    *(f"gpu-{order}" for order in VLLM_LAYOUTS),
    *(f"flashinfer-{order}" for order in VLLM_LAYOUTS),
    *(f"mla-{order}" for order in ("LBNHC", "BLNHC")),
    *(f"sglang-{name}" for name in ("layer_first", "page_first", "page_first_direct", "page_head")),
    *(f"sglang_mla-{name}" for name in ("layer_first", "page_first", "page_first_direct")),
    "lmdeploy",
    "lmdeploy_mla",
)


class Engine:
    """KV memory of an engine, filled with random bits, and where each item lies in it by the layout's published index arithmetic.

    `items` is the memory, flat; `index(layer, component, slot, head, dim)` (arrays that broadcast) gives places in it.
    """

    view: PagedKVView
    items: np.ndarray
    index: Callable[..., np.ndarray]

    def __init__(self, name: str, layers: int, heads: int, dim: int, block: int, blocks: int, item: int, seed: int = 0) -> None:
        family, _, order = name.partition("-")
        self.mla = "mla" in family
        if self.mla:
            heads = 1
        self.layers, self.heads, self.dim, self.item = layers, heads, dim, item
        rng = np.random.default_rng(seed)

        def memory(count: int) -> np.ndarray:
            self.items = rng.integers(0, 1 << 8 * item, count, dtype=np.dtype(f"u{item}"))
            return self.items

        def tensor(array: np.ndarray) -> torch.Tensor:
            signed = {1: np.uint8, 2: np.int16, 4: np.int32}[item]
            return torch.from_numpy(array.view(signed)).view(TORCH_DTYPE[item])

        if family == "cpu":
            array = memory(layers * blocks * heads * block * 2 * dim).reshape(layers, blocks, heads, block, 2 * dim)
            caches = tensor(array)
            self.view = vllm_cpu(list(caches), block, order)

            def index(layer: Any, kv: Any, slot: Any, head: Any, d: Any) -> Any:
                b, t = slot // block, slot % block
                if order == "amx":
                    k = t // 16 * 16 * dim + d // 2 * 32 + t % 16 * 2 + d % 2
                    v = d // 16 * 16 * block + t // 2 * 32 + d % 16 * 2 + t % 2
                else:
                    k, v = d * block + t, t * dim + d
                return (((layer * blocks + b) * heads + head) * 2 + kv) * block * dim + np.where(kv == 0, k, v)

        elif family in ("gpu", "flashinfer", "mla"):
            content = dim if self.mla else 2 * dim
            sizes = {"L": layers, "B": blocks, "H": heads, "N": block, "C": content}
            strides = {axis: int(np.prod([sizes[a] for a in order[i + 1 :]])) for i, axis in enumerate(order)}
            array = memory(layers * blocks * heads * block * content).reshape([sizes[axis] for axis in order])
            caches = tensor(array.transpose([order.index(axis) for axis in "LBHNC"]))
            if family == "flashinfer":
                caches = caches.unflatten(-1, (2, dim))
            self.view = vllm_gpu(list(caches), block, mla=self.mla)

            def index(layer: Any, kv: Any, slot: Any, head: Any, d: Any) -> Any:
                place = layer * strides["L"] + slot // block * strides["B"] + head * strides["H"] + slot % block * strides["N"]
                return place + kv * dim + d

        elif family in ("sglang", "sglang_mla"):
            size = blocks * block
            shape: tuple[int, ...] = {
                "layer_first": (layers, size, heads, dim),
                "page_first": (size, layers, heads, dim),
                "page_first_direct": (blocks, layers, block, heads, dim),
                "page_head": (blocks, heads, block, layers, dim),
            }[order]
            shape = shape if self.mla else (2, *shape)
            self.view = sglang_host(tensor(memory(int(np.prod(shape))).reshape(shape)), order, mla=self.mla)

            def index(layer: Any, kv: Any, slot: Any, head: Any, d: Any) -> Any:
                b, t = slot // block, slot % block
                place = {
                    "layer_first": (layer * size + slot) * heads + head,
                    "page_first": (slot * layers + layer) * heads + head,
                    "page_first_direct": ((b * layers + layer) * block + t) * heads + head,
                    "page_head": ((b * heads + head) * block + t) * layers + layer,
                }[order]
                return (kv * layers * size * heads + place) * dim + d

        else:
            part = block * heads * dim
            pitch = -(-part * item // 256) * 256 // item
            row = pitch if self.mla else 2 * pitch + 64 // item  # the rest stands for scales
            pool = memory(layers * blocks * row).view(np.uint8).reshape(layers, blocks, row * item)
            self.view = lmdeploy_rows(list(torch.from_numpy(pool)), block, heads, dim, item, mla=self.mla)

            def index(layer: Any, kv: Any, slot: Any, head: Any, d: Any) -> Any:
                return (layer * blocks + slot // block) * row + kv * pitch + (slot % block * heads + head) * dim + d

        self.index = index

    def places(self, slots: np.ndarray) -> np.ndarray:
        """Places of all items of tokens: [layers, components, tokens, heads, dim]."""
        parts = (np.arange(self.layers), np.arange(1 if self.mla else 2), slots, np.arange(self.heads), np.arange(self.dim))
        return self.index(*np.ix_(*parts))


def layout_for(engine: Engine, layers: int, heads: int, page: int, per_group: int = 0, heads_per_group: int = 0) -> PageLayout:
    """Pages of a model that has `layers` and `heads` in all, of which the engine's rank holds some."""
    namespace = KVNamespace.build(
        model="m",
        kv_dtype=KV_DTYPE[engine.item],
        num_layers=layers,
        num_kv_heads=heads,
        k_head_dim=engine.dim,
        v_head_dim=0 if engine.mla else engine.dim,
        mla=engine.mla,
        page_tokens=page,
        layers_per_group=per_group,
    )
    if heads_per_group:
        fields = {name: getattr(namespace, name) for name in namespace.__struct_fields__}
        namespace = KVNamespace(**{**fields, "heads_per_group": heads_per_group})
    return PageLayout(namespace)


def items_of(layout: PageLayout, page: np.ndarray) -> np.ndarray:
    """The page as [layers, components, tokens, heads, dim] of the whole model, by plain loops over its objects."""
    space = layout.namespace
    whole = np.zeros((space.num_layers, 1 if space.mla else 2, space.page_tokens, space.num_kv_heads, space.k_head_dim), layout.item)
    for spec, array in zip(layout.objects, layout.arrays(page), strict=True):
        if space.mla:
            whole[spec.first_layer : spec.last_layer, 0, :, 0] = array
        else:
            whole[spec.first_layer : spec.last_layer, :, :, spec.first_head : spec.last_head] = array
    return whole


def check(engine: Engine, layout: PageLayout, slots: np.ndarray, first_token: int, first_layer: int, first_head: int, threads: int) -> None:
    """Gather and scatter against copies of one token at a time; nothing else may change."""
    page_tokens = layout.namespace.page_tokens
    count = -(-(first_token % page_tokens + len(slots)) // page_tokens) if len(slots) else 0
    rng = np.random.default_rng(1)
    pages = [rng.integers(0, 256, layout.slot_bytes, dtype=np.uint8) for _ in range(count)]
    expected = np.stack([items_of(layout, page) for page in pages]) if count else np.zeros(0)
    filler = [page.copy() for page in pages]
    before = engine.items.copy()
    places = engine.places(slots)
    layers = slice(first_layer, first_layer + engine.layers)
    heads = slice(first_head, first_head + engine.heads)
    bound = engine.view.bind(layout, first_layer, first_head, threads=threads)
    try:
        bound.gather(slots, first_token, pages)
        assert np.array_equal(engine.items, before)
        for i in range(len(slots)):
            page, offset = divmod(first_token % page_tokens + i, page_tokens)
            expected[page, layers, :, offset, heads] = before[places[:, :, i]]
        payload = np.zeros(layout.slot_bytes, bool)
        for array in layout.arrays(payload.view(np.uint8)):
            array[...] = -1 % (1 << 8 * layout.item.itemsize)
        for page, old, want in zip(pages, filler, expected, strict=True):
            assert np.array_equal(items_of(layout, page), want)
            assert np.array_equal(page[~(payload.view(np.uint8) > 0)], old[~(payload.view(np.uint8) > 0)])

        other = [rng.integers(0, 256, layout.slot_bytes, dtype=np.uint8) for _ in range(count)]
        kept = [page.copy() for page in other]
        bound.scatter(slots, first_token, other)
        wanted = before.copy()
        for i in range(len(slots)):
            page, offset = divmod(first_token % page_tokens + i, page_tokens)
            wanted[places[:, :, i]] = items_of(layout, kept[page])[layers, :, offset, heads]
        assert np.array_equal(engine.items, wanted)
        assert all(np.array_equal(page, old) for page, old in zip(other, kept, strict=True))

        bound.scatter(slots, first_token, pages)
        assert np.array_equal(engine.items, before), "scatter(gather(x)) must be x"
    finally:
        bound.close()


@pytest.mark.parametrize(("name", "item"), [(name, item) for name in LAYOUTS for item in (1, 2, 4) if name != "cpu-amx" or item == 2])
def test_layout_agrees_with_the_reference(name: str, item: int) -> None:
    engine = Engine(name, layers=3, heads=2, dim=32, block=32, blocks=6, item=item)
    layout = layout_for(engine, layers=3, heads=engine.heads, page=64)
    blocks = np.array([4, 1, 2, 5])
    slots = (blocks[:, None] * 32 + np.arange(32)).ravel()
    check(engine, layout, slots, 0, 0, 0, threads=1)
    check(engine, layout, slots[5:101], 64 + 5, 0, 0, threads=1)
    check(engine, layout, np.random.default_rng(2).permutation(6 * 32)[:90], 3, 0, 0, threads=1)


@pytest.mark.parametrize("name", ["cpu-vec", "cpu-amx", "gpu-BHLNC", "sglang-page_head", "lmdeploy"])
@pytest.mark.parametrize(("first_head", "heads"), [(0, 6), (1, 5), (1, 4), (0, 1), (3, 1), (5, 1)])
def test_rectangle_of_parts_of_head_groups(name: str, first_head: int, heads: int) -> None:
    """Layers 1 to 3 of 5 in groups of 2, heads of 6 in groups of 2: whole objects, parts of objects and both together."""
    engine = Engine(name, layers=3, heads=heads, dim=32, block=32, blocks=6, item=2)
    layout = layout_for(engine, layers=5, heads=6, page=64, per_group=2, heads_per_group=2)
    slots = (np.array([4, 1, 2, 5])[:, None] * 32 + np.arange(32)).ravel()
    check(engine, layout, slots[3:], 3, 1, first_head, threads=1)


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_slots_and_rectangle(data: st.DataObject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_copy, "PARALLEL_BYTES", 0)
    monkeypatch.setattr(kv_copy, "WORK_BYTES", 4096)
    draw = data.draw
    name = draw(st.sampled_from(LAYOUTS))
    amx = name == "cpu-amx"
    item = draw(st.sampled_from([2] if amx else [1, 2, 4]))
    layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    dim = draw(st.sampled_from([32, 64] if amx else [1, 8, 48]))
    block = draw(st.sampled_from([32, 64] if amx else [1, 3, 16, 32]))
    blocks = draw(st.integers(1, 8))
    engine = Engine(name, layers, heads, dim, block, blocks, item, seed=draw(st.integers(0, 9)))
    first_layer, first_head = draw(st.integers(0, 3)), 0 if engine.mla else draw(st.integers(0, 3))
    all_layers = first_layer + layers + draw(st.integers(0, 2))
    all_heads = 1 if engine.mla else first_head + engine.heads + draw(st.integers(0, 2))
    per_group = draw(st.integers(0, all_layers))
    heads_per_group = draw(st.sampled_from([n for n in range(1, all_heads + 1) if all_heads % n == 0]))
    layout = layout_for(engine, all_layers, all_heads, draw(st.sampled_from([1, 7, 16, 64])), per_group, heads_per_group)
    total = blocks * block
    count = draw(st.integers(0, total))
    kind = draw(st.sampled_from(["blocks", "any", "consecutive"]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    if kind == "blocks":
        slots = (rng.permutation(blocks)[:, None] * block + np.arange(block)).ravel()
        skip = draw(st.integers(0, total - count))
        slots = slots[skip : skip + count]
    elif kind == "any":
        slots = rng.permutation(total)[:count]
    else:
        slots = np.arange(count) + draw(st.integers(0, total - count))
    check(engine, layout, slots.astype(np.int64), draw(st.integers(0, 200)), first_layer, first_head, draw(st.sampled_from([1, 2])))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if not name.startswith(("cpu", "sglang"))])
def test_device_tensors_take_the_torch_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not CPU memory is copied by torch. No accelerator is needed to run that code."""
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    monkeypatch.setattr(kv_copy, "_integers", lambda tensor: tensor.view(signed[tensor.itemsize]))
    engine = Engine(name, layers=3, heads=2, dim=32, block=16, blocks=8, item=2)
    assert all(isinstance(plane.array, torch.Tensor) for plane in engine.view._planes)
    layout = layout_for(engine, layers=4, heads=engine.heads, page=64, per_group=2)
    slots = (np.array([4, 1, 2, 7])[:, None] * 16 + np.arange(16)).ravel()
    check(engine, layout, slots[3:], 30, 1, 0, threads=1)


@pytest.mark.parametrize("gap", [(0, 1, 2, 5), (3, 2, 1, 0), (5, 0, 2, 3)])
def test_layers_anywhere_in_memory(gap: tuple[int, ...]) -> None:
    """Layers at unequal or falling addresses, as several allocations give them."""
    pool = np.random.default_rng(0).integers(0, 1 << 16, (6, 4, 2, 16, 16), dtype=np.uint16)
    caches = [torch.from_numpy(pool[i].view(np.int16)).view(torch.bfloat16) for i in gap]
    view = vllm_gpu(caches, 16)
    assert view.num_layers == 4
    namespace = KVNamespace.build(model="m", kv_dtype="bfloat16", num_layers=4, num_kv_heads=2, k_head_dim=8, v_head_dim=8)
    layout = PageLayout(namespace)
    bound = view.bind(layout, 0, 0)
    page = np.zeros(layout.slot_bytes, np.uint8)
    before = pool.copy()
    bound.gather(np.arange(64), 0, [page])
    content = pool[list(gap)].transpose(0, 1, 3, 2, 4).reshape(4, 64, 2, 2, 8)  # layer, token, head, K or V, dim
    assert np.array_equal(layout.arrays(page)[0], content.transpose(0, 3, 1, 2, 4))
    pool[list(gap)] = 0
    bound.scatter(np.arange(64), 0, [page])
    assert np.array_equal(pool, before)


def test_two_threads_move_a_large_range() -> None:
    engine = Engine("cpu-vec", layers=12, heads=4, dim=64, block=32, blocks=40, item=2)
    layout = layout_for(engine, layers=12, heads=4, page=64)
    slots = (np.random.default_rng(0).permutation(40)[:, None] * 32 + np.arange(32)).ravel()
    assert len(slots) * 12 * 2 * 4 * 64 * 2 > kv_copy.PARALLEL_BYTES
    check(engine, layout, slots[7:-9], 7, 0, 0, threads=2)


def test_pool_threads_leave_the_core_that_the_caller_is_pinned_to() -> None:
    cpus = os.sched_getaffinity(0)
    if len(cpus) < 2:
        pytest.skip("this process may use one CPU only")
    engine = Engine("cpu-vec", layers=2, heads=2, dim=64, block=32, blocks=64, item=2)
    layout = layout_for(engine, layers=2, heads=2, page=64)
    seen: list[set[int]] = []

    def pinned() -> None:
        os.sched_setaffinity(0, {min(cpus)})
        bound = engine.view.bind(layout, 0, 0, threads=2)
        pages = [np.zeros(layout.slot_bytes, np.uint8) for _ in range(32)]
        bound.gather(np.arange(64 * 32), 0, pages)
        for thread in threading.enumerate():
            if thread.name.startswith("mooncake-kv-copy") and thread.native_id:
                seen.append(os.sched_getaffinity(thread.native_id))
        bound.close()

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join(30)
    assert seen == [cpus]


def test_close_ends_the_threads() -> None:
    engine = Engine("cpu-vec", layers=2, heads=2, dim=64, block=32, blocks=64, item=2)
    layout = layout_for(engine, layers=2, heads=2, page=64)
    before = threading.active_count()
    bound = engine.view.bind(layout, 0, 0, threads=3)
    bound.gather(np.arange(64 * 32), 0, [np.zeros(layout.slot_bytes, np.uint8) for _ in range(32)])
    assert threading.active_count() > before
    bound.close()
    assert threading.active_count() == before


# ---- vLLM's own op -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def write_cache() -> Callable[..., None]:
    """vLLM's op that writes its CPU cache."""
    pytest.importorskip("vllm._custom_ops", reason="vLLM is not installed")
    import vllm._custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("vLLM is not the CPU build")
    return ops.cpu_attn_reshape_and_cache


# What vLLM can pick: vec16 and amx never for fp8 here, amx for bf16 with head dims and blocks in multiples of 32.
WRITTEN = [
    *(("vec", dtype, dim) for dtype in (torch.bfloat16, torch.float16, torch.float32) for dim in (64, 80, 128)),
    *(("vec", torch.float8_e5m2, dim) for dim in (64, 128)),
    *(("vec16", dtype, dim) for dtype in (torch.bfloat16, torch.float16, torch.float32) for dim in (64, 80, 128)),
    *(("amx", dtype, dim) for dtype in (torch.bfloat16, torch.float16) for dim in (64, 128)),
]


@pytest.mark.parametrize(("isa", "dtype", "dim"), WRITTEN)
@pytest.mark.parametrize("block", [32, 64, 128])
def test_pages_are_what_vllm_wrote(write_cache: Callable[..., None], isa: str, dtype: torch.dtype, dim: int, block: int) -> None:
    """Keys and values that the real op puts into a cache come out of it as canonical pages, and back as the same cache."""
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX")
    layers, heads, blocks, item = 2, 3, 7, dtype.itemsize
    fp8 = item == 1
    generator = torch.Generator().manual_seed(0)
    tokens = 5 * block - 3
    data = torch.randn(layers, 2, tokens, heads, dim, generator=generator).to(dtype)  # no subnormals of fp8, which the op may flush
    if fp8:
        data = torch.where(data.float().abs() < 2**-10, torch.ones_like(data.float()), data.float()).to(dtype)
    cache = torch.zeros(layers, blocks, heads, block, 2 * dim, dtype=torch.uint8 if fp8 else dtype)
    order = torch.randperm(blocks, generator=generator)[:5]
    slots = (order[:, None] * block + torch.arange(block)).flatten()[:tokens]
    source = data.to(torch.bfloat16) if fp8 else data
    for layer in range(layers):
        k, v = cache[layer].view(blocks, heads, 2 * block, dim).chunk(2, dim=2)
        args = (1.0, 1.0, "fp8_e5m2") if fp8 else ()
        write_cache(source[layer, 0], source[layer, 1], k, v, slots, isa, *args)

    namespace = KVNamespace.build(
        model="m", kv_dtype=str(dtype)[6:].replace("float8", "fp8"), num_layers=layers, num_kv_heads=heads, k_head_dim=dim, v_head_dim=dim
    )
    layout = PageLayout(namespace)
    bound = vllm_cpu(list(cache), block, isa).bind(layout, 0, 0)
    pages = [np.zeros(layout.slot_bytes, np.uint8) for _ in range(-(-tokens // 64))]
    bound.gather(slots.numpy(), 0, pages)
    content = np.concatenate([items_of(layout, page) for page in pages], axis=2)[:, :, :tokens]
    assert np.array_equal(content, data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[item]).numpy().view(f"u{item}"))

    original = cache.view(torch.uint8).clone()
    cache.zero_()
    bound.scatter(slots.numpy(), 0, pages)
    assert torch.equal(cache.view(torch.uint8), original)


# ---- refusals ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: vllm_cpu([torch.zeros(2, 1, 32, 64)], 32, "neon"), "'neon'"),
        (lambda: vllm_cpu([torch.zeros(2, 1, 32, 64)], 32, "amx"), "amx.*items of 2 bytes"),
        (lambda: vllm_cpu([torch.zeros(2, 1, 32, 160, dtype=torch.bfloat16)], 32, "amx"), "80"),
        (lambda: vllm_cpu([torch.zeros(2, 1, 32, 128, dtype=torch.uint8)], 32, "amx"), "64, 32, 1"),
        (lambda: vllm_cpu([torch.zeros(2, 1, 48, 128, dtype=torch.bfloat16)], 48, "amx"), "48"),
        (lambda: vllm_cpu([torch.zeros(2, 32, 1, 64).transpose(1, 2)[:, :, :, ::2]], 32, "vec"), "strides"),
        (lambda: vllm_gpu([torch.zeros(2, 1, 32, 64)], 48), "block size is 48"),
        (lambda: vllm_gpu([torch.zeros(2, 1, 32, 64), torch.zeros(2, 1, 32, 128)], 32), "layer 1 has shape"),
        (lambda: vllm_gpu([torch.zeros(2, 1, 32, 64), torch.zeros(2, 1, 32, 64, dtype=torch.half)], 32), "layer 1 .* 2 bytes"),
        (lambda: vllm_gpu([torch.zeros(2, 32, 64)], 32), "no known layout"),
        (lambda: vllm_gpu([torch.zeros(2, 2, 32, 576)], 32, mla=True), "no known layout"),
        (lambda: sglang_host(torch.zeros(2, 3, 4, 5, 6), "page_unified"), "'page_unified'"),
        (lambda: sglang_host(torch.zeros(2, 3, 4, 5, 6), "page_head", mla=True), "'page_head' with MLA"),
        (lambda: sglang_host(torch.zeros(2, 3, 4, 5, 6), "page_first_direct"), "'page_first_direct'"),
        (lambda: lmdeploy_rows([torch.zeros(4, 512, dtype=torch.uint8)], 64, 1, 8, 2), "LMDeploy's KV rows"),
    ],
)
def test_refused_by_name(make: Callable[[], PagedKVView], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        make()


def test_bind_refuses_what_is_not_the_namespace() -> None:
    engine = Engine("gpu-LBNHC", layers=2, heads=2, dim=16, block=16, blocks=4, item=2)
    for other, says in (
        (Engine("gpu-LBNHC", 2, 2, 8, 16, 4, 2), "head_dim 16"),
        (Engine("gpu-LBNHC", 2, 2, 16, 16, 4, 4), "bytes per item 2"),
        (Engine("mla-LBNHC", 2, 1, 16, 16, 4, 2), "mla False"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            engine.view.bind(layout_for(other, 2, 1 if other.mla else 2, 64), 0, 0)
    with pytest.raises(ValueError, match="no rectangle"):
        engine.view.bind(layout_for(engine, 3, 2, 64), 2, 0)


def test_wrong_arguments_copy_nothing() -> None:
    engine = Engine("cpu-vec", layers=2, heads=2, dim=16, block=16, blocks=4, item=2)
    layout = layout_for(engine, 2, 2, 16)
    bound = engine.view.bind(layout, 0, 0)
    pages = [np.full(layout.slot_bytes, 7, np.uint8) for _ in range(2)]
    before = engine.items.copy()
    for slots, given_pages, says in (
        (np.arange(32) + 40, pages, "within the engine's 64"),
        (np.arange(32) - 1, pages, "within the engine's 64"),
        (np.arange(32), pages[:1], "in 2 pages, not in 1"),
        (np.arange(16), pages, "in 1 pages, not in 2"),
        (np.arange(0), pages, "in 0 pages"),
        (np.arange(32), [pages[0], pages[1][:-1]], "a slot is"),
    ):
        for copy in (bound.gather, bound.scatter):
            with pytest.raises(ValueError, match=says):
                copy(slots, 0, given_pages)
    assert np.array_equal(engine.items, before)
    assert all((page == 7).all() for page in pages)
    with pytest.raises(ValueError, match="first token is -1"):
        bound.gather(np.arange(17), -1, pages)
    bound.gather(np.arange(0), 5, [])
