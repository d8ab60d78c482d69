"""Making the two halves: the same sizes, threads and waits in every engine that runs them.

Promises: an engine starts without a node as it does with one; each half that it makes waits NODE_START_S at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from ...common.config import CacheConfig
from ...common.identity import KVNamespace
from ...common.kv_copy import PagedKVView
from ...common.node.client import NodeClient
from ...common.page import PageLayout
from .scheduler import SchedulerHalf
from .worker import WorkerHalf

log = logging.getLogger("mooncake_kv.store")

# KV bytes that one step loads at most on each rank, while running requests wait: 20 to 40 ms of copying on a CPU, 10 ms over PCIe 5.
CPU_LOAD_STEP = 128 << 20
GPU_LOAD_STEP = 512 << 20
# How long an engine's start waits for the node; without it the engine starts all the same and the cache joins later.
NODE_START_S = 15.0
# Beyond that, one socket's memory bandwidth is used up (two threads give 1.7 to 2 times one).
MAX_COPY_THREADS = 8


def start_client(
    config: CacheConfig, namespace: KVNamespace, *, engine: str, role: Literal["scheduler", "worker"], credits: int = 0
) -> NodeClient:
    """Raises ConfigError where the node has other settings and `node_conflict` is "fail"."""
    client = NodeClient(config, namespace, engine=engine, role=role, credits=credits)
    client.start()
    if not client.wait_ready(NODE_START_S):
        log.warning("the engine starts without the cache, which joins when it can: %s", client.reason)
    return client


def credits_of(config: CacheConfig, layout: PageLayout, step_tokens: int) -> int:
    """Slots kept ahead: what two steps of `step_tokens` can fill, so that a step never waits for the node to grant."""
    if config.credits:
        return max(1, config.credits // layout.slot_bytes)
    return 2 * step_tokens // layout.namespace.page_tokens + 32


def verifies(config: CacheConfig, on_cpu: bool) -> bool:
    """Does each worker check the pages that it loads? On a CPU that is free: what is checked is in the cache when it is copied."""
    return on_cpu if config.verify_on_load == "auto" else config.verify_on_load == "true"


def scheduler_half(
    client: NodeClient, config: CacheConfig, layout: PageLayout, *, block_tokens: int, ranks: int, on_cpu: bool
) -> SchedulerHalf:
    """`on_cpu`: is the engine's KV in host memory?"""
    per_rank = config.load_step_bytes or (CPU_LOAD_STEP if on_cpu else GPU_LOAD_STEP)
    return SchedulerHalf(
        client,
        layout.namespace.digest(config.pool_secret),
        page_tokens=layout.namespace.page_tokens,
        block_tokens=block_tokens,
        ranks=ranks,
        slot_bytes=layout.slot_bytes,
        window_bytes=config.staging_window,
        save_decode=config.save_decode,
        checked_on_load=verifies(config, on_cpu),
        load_step_bytes=per_rank if layout.namespace.mla else per_rank * ranks,
    )


def worker_half(
    client: NodeClient,
    config: CacheConfig,
    layout: PageLayout,
    view: PagedKVView,
    *,
    first_layer: int,
    first_head: int,
    writes: bool,
    block_tokens: int,
    on_cpu: bool,
    threads: int,
    lacks: Callable[[str], bool] = lambda _: False,
) -> WorkerHalf:
    """`threads`: as many as the engine computes with on this rank, for while it copies, it does not compute. Raises UnsupportedError for a
    view that is not the namespace's."""
    bound = view.bind(layout, first_layer, first_head, threads=min(MAX_COPY_THREADS, threads) if on_cpu else 1)
    return WorkerHalf(client, bound, layout, block_tokens=block_tokens, writes=writes, verify=verifies(config, on_cpu), lacks=lacks)
