"""What runs in the driver of a LMDeploy engine: what the connector counted and holds, and an engine that has forgotten its own prefixes."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.engines import probes

# Contain the copying of pages, which takes as long as their bytes take.
COPYING = ("start_load_kv", "start_save_kv")
CALLS = (
    "on_new_request",
    "is_lookup_pending",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "cancel_lookup",
    "get_finished",
    *COPYING,
)


def counters(engine: Any) -> dict[str, int]:
    """Of the scheduler's half."""
    return dict(_connector(engine)._scheduler.counters)


def namespace(engine: Any) -> str:
    """In hex."""
    return str(_connector(engine)._namespace.encode().hex())


def node_pid(engine: Any) -> int:
    return int(_connector(engine)._client.node_pid)


def forget(engine: Any) -> int:
    """Evict LMDeploy's own prefix cache, and remember no failed keys. Returns how many blocks were freed."""
    scheduler = engine.scheduler
    half = _connector(engine)._scheduler
    half._failed.clear()
    return int(scheduler.block_trie.evict(1 << 20)) if scheduler.block_trie.enabled else 0


def held(engine: Any) -> dict[str, int]:
    """What an idle engine must not hold on to."""
    connector, scheduler = _connector(engine), engine.scheduler
    half = connector._scheduler
    return {
        "requests": len(half._requests) + len(connector._sequences) + len(connector._settled),
        "staged_bytes": half._staged_bytes,
        "steps": len(half._steps) + len(connector._saves) + len(half._loads),
        "slots_taken": int(connector._client.counters()["slots_taken"]),
        "leases": len(scheduler.kv_save_coordinator._leases) + len(scheduler.kv_load_coordinator._loads),
        "blocks": scheduler.block_manager.num_gpu_blocks - scheduler.block_manager.get_num_free_gpu_blocks(),
    }


def load_pages_a_step(engine: Any, pages: int) -> None:
    _connector(engine)._scheduler._load_step_pages = pages


def reset(engine: Any) -> bool:
    return bool(_connector(engine).reset_cache())


def _connector(engine: Any) -> Any:
    return engine.scheduler.kv_connector


def limit_loads(engine: Any, pages: int | None) -> None:
    """Loads get at most so many leading pages from now on; None: all."""
    client = _connector(engine)._client
    original = getattr(client, "unlimited_fetch", client.fetch)
    client.unlimited_fetch = original
    client.fetch = original if pages is None else lambda hashes, limit=0, check=True: original(hashes[:pages], limit, check=check)


def salt(engine: Any, salt: str) -> None:
    """Pages of requests from now on are other ones, which nobody loads; '' ends it. LMDeploy's own prefix cache knows nothing of it."""
    from mooncake_kv.common.hashing import storage_namespace_seed
    from mooncake_kv.lmdeploy_plugin import connector, requests

    _connector(engine)._consumes = not salt
    connector.seed_of = (lambda *_: storage_namespace_seed(None, salt)) if salt else requests.seed_of  # type: ignore[assignment]


def time_calls(engine: Any) -> None:
    from mooncake_kv.lmdeploy_plugin.connector import MooncakeConnector

    probes.time_calls(MooncakeConnector, CALLS)


def call_times(engine: Any) -> dict[str, dict[str, float]]:
    return probes.call_times(engine)


def sleep(engine: Any, level: int = 1) -> None:
    """Free the KV cache, and end the workers' halves of the connector."""
    loop = engine._loop_main.get_loop()
    asyncio.run_coroutine_threadsafe(engine.sleep(level), loop).result(60)


def wake(engine: Any) -> None:
    async def wakeup() -> None:
        engine.wakeup()

    asyncio.run_coroutine_threadsafe(wakeup(), engine._loop_main.get_loop()).result(60)
