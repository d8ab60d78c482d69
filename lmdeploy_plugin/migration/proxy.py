"""What LMDeploy's proxy does with a request for a prefill and a decode engine.

In force with `--serving-strategy DistServe`. Promises:
- A prefill engine that is dead, frozen (`migration_prefill_s`), gone or gives no blocks costs a request its migration: the decode engine
  gets the request as the client sent it. In LMDeploy the request fails.
- The chat endpoint works: LMDeploy takes the response's id for a number, which it is not there.
- A server that registers again, or is removed, is connected again before it is used. LMDeploy goes on with links of the old process.
- What a migration cannot give, a first token's log probabilities, is computed by the decode engine.
"""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

from .. import compat
from .backend import settings
from .engine import log_rarely

CONNECT_S = 10.0
# A prefill engine that failed is left alone so long.
REST_S = 2.0
_resting: dict[str, float] = {}


def _without() -> str:
    """The response of a prefill that there was not. LMDeploy keeps the ids of requests under way in a set, and fails one that it misses
    there: two with the same id must not meet."""
    return json.dumps({"id": str(secrets.randbits(60))})


def mend_proxy(module: ModuleType) -> None:
    """After `lmdeploy.serve.proxy.proxy`."""
    if not compat.mends(compat.MIGRATION_PROXY):
        return
    manager: Any = module.NodeManager
    pool: Any = module.PDConnectionPool
    roles = module.EngineRole
    disconnected = sys.modules[pool.__module__].PDConnectionStatus.Disconnected
    generate, stream, url, remove, connect = manager.generate, manager.stream_generate, manager.get_node_url, manager.remove, pool.connect

    def distributed(self: Any) -> bool:
        return bool(self.serving_strategy.name == "DistServe" and not self.dummy_prefill)

    async def prefill(self: Any, request: dict[str, Any], node_url: str, endpoint: str) -> str:
        """The response, with the number of the hold as its id."""
        node = self.nodes.get(node_url)
        if node is None or node.role != roles.Prefill or _resting.get(node_url, 0.0) > time.monotonic() or request.get("logprobs"):
            return _without()
        for key in ("stream_options", "stop"):  # for a whole answer; a first token that is one is left out of the response
            request.pop(key, None)
        try:
            async with asyncio.timeout(settings().migration_prefill_s):
                response = json.loads(await generate(self, request, node_url, endpoint))
            if "error_code" in response:
                raise ConnectionError(response.get("text"))
            if "cache_block_ids" not in response:  # the decode engine will refuse it in the same words
                return _without()
            return json.dumps({**response, "id": str(-response["cache_block_ids"][-1])})
        except (OSError, TimeoutError, ValueError, TypeError, LookupError) as error:
            _resting[node_url] = time.monotonic() + REST_S
            log_rarely("prefill", "%s gives no prefill: %s: %s", node_url, type(error).__name__, error)
            return _without()

    def decode(self: Any, request: dict[str, Any], node_url: str) -> dict[str, Any]:
        """Without the migration where there is nothing to migrate, or no way."""
        migration = request.get("migration_request") or {}
        if migration.get("remote_block_ids") and self.pd_connection_pool.is_connected(migration["remote_engine_id"], node_url):
            return request
        return {key: value for key, value in request.items() if key != "migration_request"}

    @functools.wraps(generate)
    async def ours_generate(self: Any, request: dict[str, Any], node_url: str, endpoint: str) -> Any:
        if not distributed(self):
            return await generate(self, request, node_url, endpoint)
        if request.get("preserve_cache"):
            return await prefill(self, request, node_url, endpoint)
        return await generate(self, decode(self, request, node_url), node_url, endpoint)

    @functools.wraps(stream)
    async def ours_stream(self: Any, request: dict[str, Any], node_url: str, endpoint: str) -> AsyncIterator[Any]:
        async for line in stream(self, decode(self, request, node_url) if distributed(self) else request, node_url, endpoint):
            yield line

    @functools.wraps(url)
    def ours_url(self: Any, model_name: str, role: Any = roles.Hybrid) -> Any:
        for wanted in (role, roles.Decode):
            try:
                return url(self, model_name, wanted)
            except (TypeError, ValueError, IndexError):  # there is none
                if not distributed(self):
                    raise
        return None

    @functools.wraps(remove)
    def ours_remove(self: Any, node_url: str) -> None:
        links = self.pd_connection_pool.pool
        for link in [link for link in list(links) if node_url in link]:
            links.pop(link, None)
        _resting.pop(node_url, None)
        remove(self, node_url)

    @functools.wraps(connect)
    async def ours_connect(self: Any, conn_req: Any) -> None:
        link = conn_req.p_url, conn_req.d_url
        if conn_req.p_url == conn_req.d_url or _resting.get(conn_req.p_url, 0.0) > time.monotonic():
            return
        try:
            async with asyncio.timeout(CONNECT_S):
                await connect(self, conn_req)
        except Exception as error:
            if link in self.pool:
                self.pool[link].set_status(disconnected)
            log_rarely("connect", "%s and %s do not connect: %s: %s", *link, type(error).__name__, error)

    manager.generate, manager.stream_generate, manager.get_node_url, manager.remove = ours_generate, ours_stream, ours_url, ours_remove
    pool.connect = ours_connect
