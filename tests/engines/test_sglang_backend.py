"""Our backend in SGLang's own shapes, without an engine: real host pools, storage configuration, hashes and hooks, on a real node."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mooncake_kv.common.config import load_config
from mooncake_kv.common.errors import ConfigError, UnsupportedError
from mooncake_kv.common.hashing import page_hashes, storage_namespace_seed
from mooncake_kv.sglang_plugin import compat, facts, hooks
from tests.engines import sglang_parts
from tests.node.scripted_peer import until

P, LAYERS, HEADS, DIM, SLOTS = 16, 3, 2, 32, 256
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
KEYS = [page_hash.hex() for page_hash in page_hashes(list(range(P * 8)), P)]
SETTINGS = {"kind": "Store", "dram_size": "64mb", "extent_size": "16mb", "fetch_timeout_ms": 5000, "model_id": "test"}


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A SGLang process that can be changed. A real engine's answers are in test_cross_engine."""
    config = SimpleNamespace(to_dict=lambda: {"num_hidden_layers": LAYERS})
    state = sglang_parts.process(config, "/nowhere", layers=LAYERS, heads=HEADS)
    sglang_parts.pretend(state, monkeypatch.setattr)
    return state


def host_pool(layout: str = "page_first", heads: int = HEADS, seed: int | None = None) -> Any:
    pool = sglang_parts.host_pool(layout=layout, pages=SLOTS // P, page_tokens=P, layers=LAYERS, heads=heads, dim=DIM)
    if seed is not None:
        pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16))
    return pool


def storage_config(extra: dict[str, Any] | None = None, **more: Any) -> Any:
    return sglang_parts.storage_config({**SETTINGS, **(extra or {})}, **more)


@pytest.fixture
def attach(process: dict[str, Any], runtime_dir: Path) -> Iterator[Any]:
    from mooncake_kv.sglang_plugin.backend import MooncakeHiCache

    made: list[MooncakeHiCache] = []

    def make(pool: Any, config: Any = None) -> MooncakeHiCache:
        config = config or storage_config()
        backend = MooncakeHiCache(config)
        made.append(backend)
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, "kv")
        backend.on_host_pools_registered()
        if backend._client is not None:
            until(lambda: backend.counters()["mapped_bytes"] > 0)
        return backend

    yield make
    for backend in made:
        backend.close()


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * P, (page + 1) * P) for page in pages])


def same(one: Any, page: int, other: Any, place: int) -> bool:
    """Whether two pools of any layout hold the same page there."""
    return np.array_equal(tokens(one)[:, page * P : (page + 1) * P], tokens(other)[:, place * P : (place + 1) * P])


def tokens(pool: Any) -> np.ndarray:
    """[K and V, tokens, layers, heads, dim], as bits."""
    buffer = pool.kv_buffer.view(torch.int16)
    if pool.layout == "layer_first":
        buffer = buffer.permute(0, 2, 1, 3, 4)
    elif pool.layout == "page_first_direct":
        buffer = buffer.permute(0, 1, 3, 2, 4, 5).flatten(1, 2)
    elif pool.layout == "page_head":
        buffer = buffer.permute(0, 1, 3, 4, 2, 5).flatten(1, 2)
    return np.asarray(buffer.numpy())


def test_the_private_calls_are_those_of_this_sglang() -> None:
    compat.require(compat.HOOKS)
    compat.require(compat.BACKEND)


@pytest.mark.parametrize(("extra_key", "salt"), [(None, None), ("", None), (None, "a"), ("lora", "a\u00e9")])
def test_sglang_keys_are_our_page_hashes(extra_key: str | None, salt: str | None) -> None:
    from sglang.srt.mem_cache import utils

    ids = [int(x) for x in np.random.default_rng(3).integers(0, 1 << 32, 300)]
    seed = storage_namespace_seed(extra_key, salt)
    assert (utils.storage_namespace_seed(extra_key, salt) or "") == seed.hex()
    for page in (16, 64):
        keys = utils.get_hash_str(ids, seed.hex() or None, page_size=page)
        assert keys[: len(ids) // page] == [page_hash.hex() for page_hash in page_hashes(ids, page, seed)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_each_layout(attach: Any, layout: str) -> None:
    pool, other = host_pool(layout, seed=1), host_pool("page_first")
    writer, reader = attach(pool), attach(other)
    assert writer.batch_set_v1(KEYS[:3], indices(5, 2, 9)) == [True] * 3
    until(lambda: reader.batch_exists(KEYS) == 3)
    assert reader.exists(KEYS[2]) and not reader.exists(KEYS[3])
    assert reader.batch_get_v1(KEYS[:4], indices(0, 1, 2, 3)) == [True, True, True, False]
    assert all(same(pool, page, other, place) for place, page in enumerate((5, 2, 9)))
    stats = reader.get_stats()
    assert stats.prefetch_pgs == [3] and stats.prefetch_bandwidth[0] > 0 and reader.get_stats().prefetch_pgs == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_older_calls_move_the_same_bytes(attach: Any, layout: str) -> None:
    pool, other = host_pool(layout, seed=2), host_pool(layout)
    backend = attach(pool)
    assert backend.batch_set(KEYS[:2], [pool.get_data_page(page * P) for page in (4, 7)])
    assert backend.set(KEYS[2], pool.get_data_page(P))
    until(lambda: backend.batch_exists(KEYS) == 3)
    found = backend.batch_get(KEYS[:4], [other.get_dummy_flat_data_page() for _ in range(4)])
    assert [page is not None for page in found] == [True, True, True, False]
    for place, page in enumerate((4, 7, 1)):
        other.set_from_flat_data_page(place * P, found[place])
        assert same(pool, page, other, place)
    assert backend.get(KEYS[3], other.get_dummy_flat_data_page()) is None
    # and they are the pages of the newer calls
    reader = host_pool("page_head")
    assert attach(reader).batch_get_v1(KEYS[:1], indices(3)) == [True]
    assert same(pool, 4, reader, 3)


def test_pages_under_a_pool_secret(attach: Any) -> None:
    pool, other = host_pool(seed=1), host_pool()
    writer, reader = (attach(p, storage_config({"pool_secret": "s3cret"}, dp_rank=i)) for i, p in enumerate((pool, other)))
    assert writer.batch_set_v1(KEYS[:2], indices(0, 1)) == [True, True]
    until(lambda: reader.batch_exists(KEYS[:2]) == 2)
    assert reader.batch_get_v1(KEYS[:2], indices(0, 1)) == [True, True]
    assert same(pool, 1, other, 1)
    assert attach(host_pool(), storage_config({"pool_secret": "another"}, dp_rank=2)).batch_exists(KEYS[:2]) == 0


def test_ranks_of_one_engine_write_a_page_together(attach: Any) -> None:
    pools = [host_pool("page_first", 1, seed=rank) for rank in range(2)]
    ranks = [attach(pool, storage_config(tp_rank=i, tp_size=2)) for i, pool in enumerate(pools)]
    assert ranks[0].batch_set_v1(KEYS[:2], indices(0, 1)) == [True, True]
    assert ranks[1].batch_set_v1(KEYS[:2], indices(0, 1)) == [True, True]
    whole = host_pool()
    reader = attach(whole, storage_config(dp_rank=1))
    until(lambda: reader.batch_exists(KEYS[:2]) == 2)
    assert reader.batch_get_v1(KEYS[:2], indices(0, 1)) == [True, True]
    for head, pool in enumerate(pools):
        assert np.array_equal(tokens(whole)[:, : 2 * P, :, head], tokens(pool)[:, : 2 * P, :, 0])


def test_of_replicas_one_writes(attach: Any) -> None:
    ranks = [attach(host_pool(heads=1, seed=1), storage_config(tp_rank=rank, tp_size=4)) for rank in range(4)]
    assert [rank._rank.writes for rank in ranks] == [True, False, True, False]
    assert [rank._rank.rectangle.first_head for rank in ranks] == [0, 0, 1, 1]
    for rank in (ranks[0], ranks[1], ranks[3]):
        assert rank.batch_set_v1(KEYS[:1], indices(0)) == [True]
    assert ranks[0].batch_exists(KEYS[:1]) == 0
    ranks[2].batch_set_v1(KEYS[:1], indices(0))
    until(lambda: ranks[3].batch_exists(KEYS[:1]) == 1)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_mla_is_written_once_and_read_by_every_rank(attach: Any, layout: str) -> None:
    sizes = {"pages": SLOTS // P, "page_tokens": P, "layers": LAYERS, "latent": 48, "rope": 16}
    pools = [sglang_parts.mla_pool(layout=chosen, **sizes) for chosen in (layout, "page_first")]
    pools[0].kv_buffer.copy_(torch.randn(pools[0].kv_buffer.shape).to(torch.bfloat16))
    ranks = [attach(pool, storage_config(tp_rank=i, tp_size=2, is_mla_model=True)) for i, pool in enumerate(pools)]
    assert [rank._rank.writes for rank in ranks] == [True, False]
    assert ranks[1].batch_set_v1(KEYS[:2], indices(0, 1)) == [True, True], "nothing to do"
    assert ranks[0].batch_set_v1(KEYS[:2], indices(4, 3)) == [True, True]
    until(lambda: ranks[1].batch_exists(KEYS[:3]) == 2)
    assert ranks[1].batch_get_v1(KEYS[:2], indices(0, 1)) == [True, True]
    found = [
        torch.stack([ranks[i].mem_pool_host.get_data_page(page * P, flat=False).flatten() for page in pages])
        for i, pages in ((0, (4, 3)), (1, (0, 1)))
    ]
    axes = {"layer_first": (0, 1), "page_first": (1, 0), "page_first_direct": (0, 1)}
    shapes = {"layer_first": (LAYERS, P), "page_first": (P, LAYERS), "page_first_direct": (LAYERS, P)}
    alike = [
        page.reshape(2, *shapes[name], 64).permute(0, *(1 + a for a in axes[name]), 3)
        for page, name in zip(found, (layout, "page_first"), strict=True)
    ]
    assert torch.equal(*alike)


def test_one_bool_for_each_key_whatever_the_keys_are(attach: Any) -> None:
    backend = attach(host_pool(seed=1))
    odd = [KEYS[0], "not a hash", KEYS[1]]
    assert backend.batch_set_v1(odd, indices(0, 1, 2)) == [True, False, False]
    assert backend.batch_exists(odd) <= 1
    assert backend.batch_get_v1(["", *KEYS[:2]], indices(0, 1, 2)) == [False] * 3
    assert backend.batch_exists([]) == 0 and backend.batch_get_v1([], torch.arange(0)) == []


def test_clear_and_changed_weights(attach: Any) -> None:
    backend, other = attach(host_pool(seed=1)), attach(host_pool(), storage_config({"tenant": "other"}, dp_rank=1))
    for one in (backend, other):
        one.batch_set_v1(KEYS[:1], indices(0))
        until(lambda one=one: one.exists(KEYS[0]))
    backend.clear()
    until(lambda: not backend.exists(KEYS[0]))
    assert other.exists(KEYS[0])
    assert hooks._update_weights(lambda *args: "updated", object(), object()) == "updated"
    assert not other.exists(KEYS[0]) and other.batch_set_v1(KEYS[:1], indices(0)) == [False]
    with pytest.raises(UnsupportedError, match="weights that were changed at run time"):
        attach(host_pool())


UNSUPPORTED: dict[str, Any] = {
    "speculative decoding with EAGLE": lambda state, pool: setattr(state["spec"], "speculative_algorithm", "EAGLE"),
    "sliding window attention": lambda state, pool: setattr(state["model_config"], "sliding_window_size", 128),
    "chunked local attention": lambda state, pool: setattr(state["model_config"], "attention_chunk_size", 64),
    "several machines": lambda state, pool: setattr(state["parallel"], "nnodes", 2),
    "2 draft layers": lambda state, pool: setattr(pool, "target_layer_num", LAYERS - 2),
    "host page format": lambda state, pool: setattr(pool, "storage_format_tag", "packed"),
    "layers of the model": lambda state, pool: setattr(state["model_config"], "num_attention_layers", 9),
    "without memory": lambda state, pool: setattr(pool, "kv_buffer", None),
    "KV of dtype torch.int8": lambda state, pool: setattr(pool, "dtype", torch.int8),
    "layout 'page_unified'": lambda state, pool: setattr(pool, "layout", "page_unified"),
}


@pytest.mark.parametrize("what", list(UNSUPPORTED))
def test_refused_by_name(attach: Any, process: dict[str, Any], what: str) -> None:
    pool = host_pool()
    UNSUPPORTED[what](process, pool)
    with pytest.raises(UnsupportedError, match=what):
        attach(pool)
    backend = attach(pool, storage_config({"on_unsupported": "disable"}))
    assert backend.batch_exists(KEYS) == 0 and backend.batch_get_v1(KEYS[:2], indices(0, 1)) == [False, False]


@pytest.mark.parametrize(("name", "value"), [("attn_cp_size", 2), ("tp_size", 3)])
def test_topologies_refused_by_name(attach: Any, name: str, value: int) -> None:
    with pytest.raises(UnsupportedError, match="mooncake-kv does not serve"):
        attach(host_pool(), storage_config(**{name: value}))


def test_side_pools_are_refused_by_name(attach: Any) -> None:
    backend = attach(host_pool())
    with pytest.raises(UnsupportedError, match="'mamba'"):
        backend.register_mem_host_pool_v2(object(), "mamba")


def test_configuration_mistakes_are_named(attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"hicache-storage-backend-extra-config.*did you mean dram_size"):
        attach(host_pool(), storage_config({"dram_sise": 1}))
    with pytest.raises(ConfigError, match="--page-size 64"):
        attach(host_pool(), storage_config({"page_tokens": 64}))
    monkeypatch.setattr(hooks, "_installed", False)
    with pytest.raises(ConfigError, match="SGLANG_PLUGINS"):
        attach(host_pool())


def test_says_with_whom_it_does_not_share(attach: Any, process: dict[str, Any]) -> None:
    backend = attach(host_pool(), storage_config({"save_decode": False}))
    process["lora"].enable_lora = True
    said = "\n".join(facts.notes(backend._layout.namespace, backend.config))
    assert "16 tokens" in said and "--page-size 64" in said and "LoRA" in said and "save_decode" in said


def test_with_a_slow_tier_the_node_takes_little_memory(tmp_path: Path) -> None:
    from mooncake_kv.sglang_plugin.backend import STAGING_BYTES, _with_staging_size

    slow = {"ssd_path": str(tmp_path), "ssd_size": "1gb"}
    assert 0 < _with_staging_size(load_config(slow, environ={})).dram_size <= STAGING_BYTES
    assert _with_staging_size(load_config({**slow, "dram_size": "8gb"}, environ={})).dram_size == 8 << 30
    assert _with_staging_size(load_config({}, environ={})).dram_size == 0


def test_the_newer_calls_are_chosen_for_a_dynamic_backend(attach: Any) -> None:
    config = storage_config({"backend_name": "x", "module_path": "y", "class_name": "z", "file_storage_path": "w"})
    attach(host_pool(), config)
    assert config.extra_config["interface_v1"]


def test_the_stock_backend_stays_untouched(process: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "stock"

    stock = SimpleNamespace(extra_config={"master_server_address": "localhost:50051", "protocol": "tcp"})
    assert hooks._create_backend(original, "cls", "mooncake", stock, "pool", a=1) == "stock"
    assert calls == [(("cls", "mooncake", stock, "pool"), {"a": 1})]
    assert hooks._create_backend(original, "cls", "file", SimpleNamespace(extra_config=SETTINGS), "pool") == "stock"
    process["memory"].hicache_storage_backend_extra_config = json.dumps(stock.extra_config)
    assert hooks._allocator_type(lambda: "mooncake") == "mooncake"
    process["memory"].hicache_storage_backend_extra_config = json.dumps({**stock.extra_config, "kind": "Store"})
    assert hooks._allocator_type(lambda: "mooncake") == "default"


def test_the_transfer_engine_is_not_set_up_for_our_sake(process: dict[str, Any]) -> None:
    from sglang.srt.environ import envs

    def original(*, gpu_id: int) -> bool:
        return bool(envs.SGLANG_HICACHE_MOONCAKE_REUSE_TE.get())

    assert hooks._transfer_engine(original, gpu_id=0) is False
    process["memory"].hicache_storage_backend = "file"
    assert hooks._transfer_engine(original, gpu_id=0) is True


def test_an_adapter_is_known_by_its_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    def original(name: str, path: str) -> str:
        return uuid.uuid5(uuid.NAMESPACE_URL, f"{name}\0{path}").hex

    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"a": torch.zeros(8)}, tmp_path / "adapter_model.safetensors")
    first = hooks._lora_id(original, "a", str(tmp_path))
    assert first == hooks._lora_id(original, "a", str(tmp_path)) and len(first) == 32
    save_file({"a": torch.ones(16)}, tmp_path / "adapter_model.safetensors")
    assert hooks._lora_id(original, "a", str(tmp_path)) != first
    assert hooks._lora_id(original, "a", "/nowhere") != hooks._lora_id(original, "a", "/nowhere"), "nobody shares what is unknown"


@pytest.fixture
def encoder(process: dict[str, Any], runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from mooncake_kv.sglang_plugin.embeddings import MooncakeEmbeddings

    for key, value in SETTINGS.items():
        monkeypatch.setenv(f"MOONCAKE_{key.upper()}", str(value))
    made: list[MooncakeEmbeddings] = []

    def make(dtype: torch.dtype = torch.bfloat16) -> MooncakeEmbeddings:
        store = hooks._create_embeddings(lambda *args: pytest.fail("the stock store"), "cls", "mooncake")
        made.append(store)
        store.register_buffer(torch.zeros(1, dtype=dtype))
        until(lambda: store._client.counters()["mapped_bytes"] > 0)
        return store

    yield make
    for store in made:
        store.close()


def addresses(*pieces: torch.Tensor) -> tuple[list[int], list[int]]:
    return [piece.data_ptr() for piece in pieces], [piece.nbytes for piece in pieces]


def test_embeddings_come_back_in_other_pieces(encoder: Any) -> None:
    store, other = encoder(), encoder()
    generator = torch.Generator().manual_seed(1)
    written = {name: torch.randn((rows, 100), generator=generator) for name, rows in (("small", 3), ("large", 9001))}
    for name, tensor in written.items():
        assert store.batch_put([name], *([x] for x in (tensor.data_ptr(), tensor.nbytes))) == [True]
    until(lambda: other.batch_is_exist(["small", "large", "none"]) == [True, True, False])
    read = {name: torch.zeros_like(tensor) for name, tensor in written.items()}
    small, first, rest = read["small"], read["large"][:777], read["large"][777:]
    (a, b), (c, d) = addresses(small), addresses(first, rest)
    until(lambda: other.batch_get_into_multi_buffers(["small", "large"], [a, c], [b, d]) == [True, True])
    assert all(torch.equal(read[name], written[name]) for name in written)


def test_an_embedding_of_another_size_dtype_or_content_is_none(encoder: Any) -> None:
    store, other = encoder(), encoder(torch.float16)
    tensor = torch.ones((50, 100), dtype=torch.bfloat16)
    assert store.batch_put(["x"], [tensor.data_ptr()], [tensor.nbytes]) == [True]
    until(lambda: store.batch_is_exist(["x"]) == [True])
    target = torch.zeros_like(tensor)
    assert store.batch_get(["x"], [target.data_ptr()], [target.nbytes - 2]) == [False]
    assert store.batch_get(["y"], [target.data_ptr()], [target.nbytes]) == [False]
    assert other.batch_is_exist(["x"]) == [False] and other.batch_get(["x"], [target.data_ptr()], [target.nbytes]) == [False]
    assert not target.any()
    assert store.batch_get(["x"], [target.data_ptr()], [target.nbytes]) == [True] and torch.equal(target, tensor)


@pytest.fixture
def cache_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's own user of an encoder cache, an EmbeddingCacheController, on a store; its pools lie in ordinary memory."""
    from sglang.srt.managers.schedule_batch import Modality
    from sglang.srt.mem_cache import embedding_cache_controller as module

    parallel = SimpleNamespace(tp_size=1, tp_rank=0, tp_group=SimpleNamespace(cpu_group=None))
    monkeypatch.setattr(module, "get_parallel", lambda: parallel)
    create = module.EmbeddingPool.create
    monkeypatch.setattr(module.EmbeddingPool, "create", lambda *args: create(*args[:-1], pin_memory=False))
    made: list[Any] = []

    def make(store: Any) -> Any:
        made.append(module.EmbeddingCacheController(store, max_pool_size_gb=0.05, hidden_dims={Modality.IMAGE: 96}, dtype=torch.bfloat16))
        return made[-1]

    yield make
    for controller in made:
        assert controller.io_thread.is_alive()
        controller.stop_event.set()
        controller.io_thread.join(5)


def put(cache: Any, name: str, tensor: torch.Tensor) -> None:
    """What store_to_pool_async does from a GPU, then its insertion."""
    from sglang.srt.managers.schedule_batch import Modality
    from sglang.srt.mem_cache import embedding_cache_controller as module

    pool, runs = cache.vision_pool, cache._allocate_with_eviction(cache.vision_pool, len(tensor))
    entry = module.EmbeddingCacheEntry(
        hash=name, modality=Modality.IMAGE, num_tokens=len(tensor), dim=96, page_runs=runs, state=module.EntryState.FILLING
    )
    at = 0
    for run in runs:
        part = tensor[at : at + run.length * pool.page_size]
        pool.tensor[run.start * pool.page_size :][: len(part)] = part
        at += len(part)
    with cache.lock:
        cache.entries[name] = entry
        cache._mark_ready(entry)
    cache.insert_batch([name], Modality.IMAGE)
    cache.insert_queue.join()


def fetched(cache: Any, name: str, tokens: int) -> torch.Tensor | None:
    from sglang.srt.managers.schedule_batch import Modality

    cache.prefetch(f"r-{name}", [name], [tokens], Modality.IMAGE)
    until(lambda: cache.check_prefetch_progress(f"r-{name}"))
    (views,) = cache.get_pool_views([name])
    return None if views is None else torch.cat(views)


def test_the_encoder_cache_through_sglangs_controller(encoder: Any, cache_of: Any) -> None:
    writer, reader = cache_of(encoder()), cache_of(encoder())
    generator = torch.Generator().manual_seed(1)
    images = {f"h{rows}": torch.randn((rows, 96), generator=generator).to(torch.bfloat16) for rows in (1, 63, 500, 9000)}
    for name, image in images.items():
        put(writer, name, image)
    until(lambda: asyncio.run(reader.batch_is_exist([*images, "none"])) == [True] * 4 + [False])
    for name, image in images.items():
        found = fetched(reader, name, len(image))
        assert found is not None and torch.equal(found, image)
    assert fetched(reader, "none", 50) is None, "SGLang computes it"
    other = cache_of(encoder())
    assert fetched(other, "h500", 499) is None, "an image of another size is none"
    assert fetched(other, "h63", 63) is not None


def test_sglangs_encoder_cache_survives_its_node(encoder: Any, cache_of: Any) -> None:
    store = encoder()
    cache, image = cache_of(store), torch.ones((500, 96), dtype=torch.bfloat16)
    put(cache, "a", image)
    os.kill(store._client.node_pid, signal.SIGKILL)
    other = cache_of(encoder())
    assert fetched(other, "a", 500) is None
    until(lambda: store._client.ready, 30)
    put(cache, "b", image)
    until(lambda: asyncio.run(other.batch_is_exist(["b"])) == [True], 30)
    assert fetched(other, "b", 500) is not None


def test_the_stock_encoder_cache_stays_untouched() -> None:
    assert hooks._create_embeddings(lambda *args: ("stock", args), "cls", "mooncake") == ("stock", ("cls", "mooncake"))
