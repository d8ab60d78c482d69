"""MooncakeHiCache: SGLang's storage backend interface, translated to `connectors.hicache`.

Promises: it holds no logic of its own beyond SGLang's shapes and calls; whatever goes wrong at run time makes SGLang compute, never fail,
and one bool comes back for each key; with `on_unsupported: "disable"` an engine that the cache does not serve runs as if nothing were
stored. What is refused is refused when the backend is attached.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.observability.metrics_collector import StorageMetrics

from ..common import kv_views
from ..common.config import CacheConfig, load_config
from ..common.errors import ConfigError, UnsupportedError
from ..common.identity import trailer_key
from ..common.kv_copy import BoundView
from ..common.node.client import NodeClient
from ..common.node.memory import auto_size
from ..common.page import PageLayout
from ..connectors.hicache import HiCacheStore, page_hash
from . import FLAG, compat, hooks
from .facts import Rank, namespace_of, notes, rank_of, refuse_side_pool
from .metrics import Metrics

logger = logging.getLogger("mooncake_kv.sglang")

# Keys of SGLang's own in the extra configuration, which it does not take out before it hands it over.
SGLANG_KEYS = frozenset({"allocator", "backend_name", "class_name", "file_storage_path", "interface_v1", "module_path"})
# How long an engine's start waits for the node; without it the engine starts all the same and the cache joins later.
NODE_START_S = 15.0
# A request waits for a load, and a few milliseconds on several cores disturb less than many on one.
MAX_COPY_THREADS = 4
# SGLang's host pool is a cache in memory already. With something slower behind the node, its own memory is a place to pass through.
STAGING_BYTES = 4 << 30
# Of the numbers that SGLang's metrics collect at its leisure.
MAX_SAMPLES = 1000


class MooncakeHiCache(HiCacheStorage):
    """`--hicache-storage-backend mooncake` or `dynamic`. One object a rank; raises ConfigError or UnsupportedError when it is attached."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        compat.require(compat.BACKEND)
        compat.warn_if_untested()
        if not hooks.installed():
            raise ConfigError("SGLang did not load the plugin mooncake_kv in this process: SGLANG_PLUGINS, if set, has to name it")
        extra = storage_config.extra_config = dict(storage_config.extra_config or {})
        self.config: CacheConfig = load_config({k: v for k, v in extra.items() if k not in SGLANG_KEYS}, flag_source=FLAG)
        extra["interface_v1"] = 1  # without it SGLang copies each page once more, by calls that it has deprecated
        self._storage_config = storage_config
        self._client: NodeClient | None = None
        self._store: HiCacheStore | None = None
        self._layout: PageLayout | None = None
        self._rank: Rank | None = None
        self._samples = {name: deque[Any](maxlen=MAX_SAMPLES) for name in ("prefetch", "backup")}
        self._metrics = Metrics(compat.metric_labels(storage_config))
        hooks.backends.add(self)

    # ---- attaching ---------------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        try:
            self._attach(mem_pool_host)
        except UnsupportedError as error:
            if self.config.on_unsupported != "disable":
                raise
            self.stop(str(error))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if host_pool is self.mem_pool_host:
            return
        try:
            refuse_side_pool(str(host_pool_name))
        except UnsupportedError as error:
            if self.config.on_unsupported != "disable":
                raise
            self.stop(str(error))

    def _attach(self, pool: Any) -> None:
        config = self.config = _with_staging_size(self.config)
        namespace = namespace_of(pool, self._storage_config, config)
        self._layout = PageLayout(namespace, trailer_key(config.pool_secret))
        self._rank = rank_of(pool, self._storage_config, namespace)
        view = self._bind(pool.kv_buffer, self._threads())
        digest = namespace.digest(config.pool_secret)
        self._client = NodeClient(config, namespace, engine=self._engine_name(), role="worker", host_pool_bytes=pool.kv_buffer.nbytes)
        self._client.start()
        if not self._client.wait_ready(NODE_START_S):
            logger.warning("the engine starts without the cache, which joins when it can: %s", self._client.reason)
        self._store = HiCacheStore(
            self._client,
            view,
            self._layout,
            digest=digest,
            rectangle=self._rank.rectangle,
            writes=self._rank.writes,
            verify=self._verifies(),
            timeout_s=config.fetch_timeout_ms / 1e3,
            staged_bytes=config.staging_window,
        )
        if self._storage_config.tp_rank == 0 and self._storage_config.pp_rank == 0:
            logger.info("mooncake-kv serves namespace %s (node %r)", digest, config.node)
            for note in notes(namespace, config):
                logger.warning("mooncake-kv: %s", note)

    def _bind(self, buffer: torch.Tensor, threads: int = 1) -> BoundView:
        assert self._layout is not None and self._rank is not None
        view = kv_views.sglang_host(buffer, self.mem_pool_host.layout, mla=self._layout.namespace.mla)
        rectangle = self._rank.rectangle
        return view.bind(self._layout, rectangle.first_layer, rectangle.first_head, threads=threads)

    def _engine_name(self) -> str:
        """Alike in all ranks that together hold a page, in no others: ranks have one parent, and several engines of one parent differ in
        port or seed."""
        args = compat.server_args()
        return f"sglang-{os.getppid()}-{args.port}-{args.random_seed}-{self._storage_config.dp_rank}"

    def _threads(self) -> int:
        ranks = self._storage_config.tp_size * self._storage_config.pp_size
        return max(1, min(MAX_COPY_THREADS, len(os.sched_getaffinity(0)) // ranks))

    def _verifies(self) -> bool:
        wish = self.config.verify_on_load
        return compat.settings("device").device == "cpu" if wish == "auto" else wish == "true"

    def stop(self, reason: str) -> None:
        """Serve nothing from now on."""
        logger.error("runs without the cache: %s", reason)
        self._store = None  # calls that are under way end by themselves

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()
        if self._client is not None:
            self._client.close()

    # ---- pages, as SGLang's threads ask for them ---------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._store.exists(_leading(keys)) if self._store is not None else 0

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._get(keys, host_indices.numpy())

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._set(keys, host_indices.numpy())

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Forgets all pages of this engine's namespace in the node, nobody else's."""
        if self._store is not None:
            self._store.clear()

    def get_stats(self) -> StorageMetrics:
        """Pages and GB/s of each read and write since the last call, and time to show our own numbers: SGLang asks in every step of its
        scheduler, if it collects metrics at all."""
        metrics = StorageMetrics()
        if self._store is not None:
            self._metrics.collect(self._store.counters)
        for name, pages, rates in (
            ("prefetch", metrics.prefetch_pgs, metrics.prefetch_bandwidth),
            ("backup", metrics.backup_pgs, metrics.backup_bandwidth),
        ):
            samples = self._samples[name]
            while samples:
                count, rate = samples.popleft()
                pages.append(count)
                rates.append(rate)
        return metrics

    def counters(self) -> dict[str, int | float]:
        """Sums since the start."""
        return {**(self._store.counters if self._store is not None else {}), **(self._client.counters() if self._client else {})}

    def _get(self, keys: list[str], slots: np.ndarray, view: BoundView | None = None) -> list[bool]:
        hashes = _leading(keys)
        good = 0
        if self._store is not None and hashes:
            before = time.perf_counter()
            good = self._store.get(hashes, slots[: len(hashes) * self.mem_pool_host.page_size], view)
            self._sample("prefetch", good, time.perf_counter() - before)
        return [True] * good + [False] * (len(keys) - good)

    def _set(self, keys: list[str], slots: np.ndarray, view: BoundView | None = None) -> list[bool]:
        hashes = _leading(keys)
        done: list[bool] = []
        if self._store is not None and hashes:
            before = time.perf_counter()
            done = self._store.set(hashes, slots[: len(hashes) * self.mem_pool_host.page_size], view)
            self._sample("backup", sum(done), time.perf_counter() - before)
        return done + [False] * (len(keys) - len(done))

    def _sample(self, name: str, pages: int, seconds: float) -> None:
        if self._storage_config.enable_storage_metrics and self._layout is not None and pages:
            self._samples[name].append((pages, pages * self._layout.payload_bytes / 1e9 / max(seconds, 1e-9)))

    # ---- the older calls: one flat tensor a page, in the order of the host pool's layout -----------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        """Into the given tensors, which come back. None for a page that is not there."""
        found: list[torch.Tensor | None] = [None] * len(keys)
        self.batch_exists(keys)
        for i, (key, target) in enumerate(zip(keys, target_locations or (), strict=False)):
            if self._store is None or target is None or not self._get([key], self._one_page(), self._flat(target))[0]:
                break
            found[i] = target
        return found

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        return self._store is not None and all(
            self._set([key], self._one_page(), self._flat(value))[0] for key, value in zip(keys, values or (), strict=True)
        )

    def _one_page(self) -> np.ndarray:
        return np.arange(self.mem_pool_host.page_size)

    def _flat(self, page: torch.Tensor) -> BoundView:
        """A flat page as a host pool that holds nothing else."""
        pool = self.mem_pool_host
        shape = list(pool.kv_buffer.shape)
        axis = 0 if type(pool).__name__.startswith("MLA") else 1
        if pool.layout in ("layer_first", "page_first"):
            shape[axis + (pool.layout == "layer_first")] = pool.page_size
        else:
            shape[axis] = 1
        return self._bind(page.view(shape))


def _with_staging_size(config: CacheConfig) -> CacheConfig:
    """The same, unless the node has a slow tier and nobody has said how much memory it takes."""
    if config.sources.get("dram_size", "default") != "default" or not (config.ssd_path or config.master_server_address):
        return config
    return msgspec.structs.replace(config, dram_size=min(STAGING_BYTES, auto_size()))


def _leading(keys: Sequence[str]) -> list[bytes]:
    """Page hashes of the leading keys that are such."""
    hashes: list[bytes] = []
    for key in keys:
        found = page_hash(key)
        if found is None:
            break
        hashes.append(found)
    return hashes
