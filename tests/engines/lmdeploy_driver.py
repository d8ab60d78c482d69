"""Child process of lmdeploy_harness.LMDeployEngine: one real LMDeploy engine, driven by JSON lines.

Its loop runs on a thread of its own, so that it goes on between commands, as in a server. Commands (see driver_loop): start (first), run,
together, call, metrics, stop.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

Json = dict[str, Any]

CLOSE_S = 20.0


class Driver:
    """Keeps the engine; each public method is a command and returns what JSON can carry."""

    def __init__(self) -> None:
        self.engine: Any = None
        self._sessions = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def start(self, engine: Json) -> Json:
        started = time.monotonic()
        from lmdeploy import PytorchEngineConfig
        from lmdeploy.pytorch.engine import Engine
        from transformers import AutoConfig

        model = engine.pop("model_path")
        eos = AutoConfig.from_pretrained(model).eos_token_id
        self._stop = [eos] if isinstance(eos, int) else list(eos or ())
        self.engine = Engine.from_pretrained(model, engine_config=PytorchEngineConfig(**engine))
        self._do(self._start())
        return {"start_s": time.monotonic() - started}

    def run(self, requests: list[Json]) -> list[Json]:
        """One after another."""
        return [self._do(self._run(request)) for request in requests]

    def together(self, requests: list[Json]) -> list[Json]:
        """All at once."""

        async def run() -> list[Json]:
            return await asyncio.gather(*(self._run(request) for request in requests))

        return self._do(run())

    def close(self) -> None:
        if self.engine is None:
            return

        async def close() -> None:
            self.engine.close()
            await self.engine.wait_tasks()

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(CLOSE_S)

    async def _start(self) -> None:
        self.engine.start_loop()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _run(self, request: Json) -> Json:
        from lmdeploy.messages import GenerationConfig

        self._sessions += 1
        session, instance = self._sessions, self.engine.create_instance()
        sampling = {"top_k": 1, "do_sample": True, **request.get("sampling", {})}
        if not sampling.get("ignore_eos"):
            sampling.setdefault("stop_token_ids", self._stop)
        result: Json = {"output": [], "cached": 0, "finish": "", "ttft_s": None}
        began = time.perf_counter()
        async for piece in instance.async_stream_infer(session, request["ids"], gen_config=GenerationConfig(**sampling)):
            if piece.token_ids and result["ttft_s"] is None:
                result["ttft_s"] = time.perf_counter() - began
            result["output"] += list(piece.token_ids)
            result["finish"] = piece.status.name.lower()
            if piece.req_metrics is not None:
                result["cached"] = piece.req_metrics.cached_tokens
            if result["finish"] == "success" and len(result["output"]) >= request.get("abort_after_tokens", 1 << 30):
                await instance.async_cancel(session)
        return result


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.engines.driver_loop import serve

    driver = Driver()
    serve(driver)
    driver.close()
