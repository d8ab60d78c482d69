"""What runs inside an engine started with `in_process`: how long the connector's calls kept the engine's thread, and what the store holds.

A call's wall time on a shared machine says little. So three are taken: wall time; CPU time of the thread; and the time in which the thread
neither ran nor was ready to run (wall less CPU less the run queue's delay of /proc/thread-self/schedstat). The last is what waiting for a
lock, a socket or a disk would show up in, however busy the machine is; what remains in it otherwise is Python's own lock.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

# Contain the copying of pages, which takes as long as their bytes take.
COPYING = ("start_load_kv", "wait_for_save")
CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
    *COPYING,
)

_times: dict[str, list[tuple[float, float, float]]] = defaultdict(list)


_thread = threading.local()


def _run_delay_ns() -> int:
    if not hasattr(_thread, "schedstat"):
        _thread.schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    return int(os.pread(_thread.schedstat, 64, 0).split()[1])


def install(llm: Any) -> None:
    """Time every call of the connector from now on. Once an engine."""
    from mooncake_kv.vllm_plugin.connector import MooncakeKVConnector

    time_calls(MooncakeKVConnector, CALLS)


def time_calls(connector: type, calls: Sequence[str]) -> None:
    """Each on the thread that makes it."""

    def timed(name: str, method: Any) -> Any:
        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            delay, cpu, wall = _run_delay_ns(), time.thread_time_ns(), time.perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                wall = time.perf_counter_ns() - wall
                cpu = time.thread_time_ns() - cpu
                waited = wall - cpu - (_run_delay_ns() - delay)
                _times[name].append((wall / 1e6, cpu / 1e6, max(0, waited) / 1e6))

        return wrapper

    for name in calls:
        setattr(connector, name, timed(name, getattr(connector, name)))


def call_times(llm: Any) -> dict[str, dict[str, float]]:
    """Per call since the last time: how many, and 99th percentile and maximum of the three times, in milliseconds."""
    found = {}
    for name, times in _times.items():
        columns = np.asarray(times).T
        found[name] = {"count": float(len(times))}
        for what, column in zip(("wall", "cpu", "waited"), columns, strict=True):
            found[name] |= {f"{what}_p99": float(np.quantile(column, 0.99)), f"{what}_max": float(column.max())}
    _times.clear()
    return found


def limit_loads(llm: Any, pages: int | None) -> None:
    """Loads get at most so many leading pages from now on; None: all."""
    client = _scheduler(llm)._client
    original = getattr(client, "unlimited_fetch", client.fetch)
    client.unlimited_fetch = original
    client.fetch = original if pages is None else lambda hashes, limit=0, check=True: original(hashes[:pages], limit, check=check)


def held(llm: Any) -> dict[str, int]:
    """What an idle engine must not hold on to. Lets the engine make the steps that finished requests still need."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    for _ in range(10):
        if not scheduler.has_requests():
            break
        llm.llm_engine.step()
    half = _scheduler(llm)
    return {
        "requests": len(half._requests) + len(scheduler.connector._requests),
        "staged_bytes": half._staged_bytes,
        "leases_to_end": len(half._loads) + sum(len(step.ended) for step in half._steps.values()),
        "saves_to_end": sum(len(step.saves) for step in half._steps.values()),
        "slots_taken": int(half._client.counters()["slots_taken"]),
        "blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1 - scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }


def asynchronous(llm: Any) -> bool:
    """Does the engine plan a step while the one before runs?"""
    return bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling)


def client_counters(llm: Any) -> dict[str, int | float]:
    return dict(_scheduler(llm)._client.counters())


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
