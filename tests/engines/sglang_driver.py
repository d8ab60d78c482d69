"""Child process of sglang_harness.SGLangEngine: one real SGLang engine, driven by JSON lines.

Commands (see driver_loop): start (first), run, together, traffic, metrics, flush, call, stop.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from pathlib import Path
from typing import Any

Json = dict[str, Any]

FLUSH_S = 10.0


class Driver:
    """Keeps the engine; each public method is a command and returns what JSON can carry."""

    def __init__(self) -> None:
        self.engine: Any = None

    def start(self, engine: Json) -> Json:
        started = time.monotonic()
        import sglang

        self.engine = sglang.Engine(**engine)
        return {"start_s": time.monotonic() - started}

    def run(self, requests: list[Json]) -> list[Json]:
        """One after another."""
        return [self._run(request) for request in requests]

    def _run(self, request: Json) -> Json:
        began = time.perf_counter()
        answers = iter(self.engine.generate(**_arguments(request), stream=True))
        answer = next(answers)
        first = time.perf_counter() - began
        for later in answers:
            answer = later
        return {**_reported(answer), "ttft_s": first}

    def traffic(self, requests: dict[str, Json], seconds: float, at_once: int) -> list[Json]:
        """Keep `at_once` requests going, taken from `requests` (by id) in turn, for so many seconds; then let them end. One result for
        each, with ids ID/0, ID/1, ..."""
        return self.engine.loop.run_until_complete(self._traffic(requests, seconds, at_once))

    async def _traffic(self, requests: dict[str, Json], seconds: float, at_once: int) -> list[Json]:
        results: list[Json] = []
        turns = ((f"{name}/{turn}", request) for turn in itertools.count() for name, request in requests.items())
        until = time.perf_counter() + seconds

        async def keep_going() -> None:
            while time.perf_counter() < until:
                name, request = next(turns)
                result: Json = {"id": name, "output": [], "token_times": [], "cached": None, "finish": None, "ttft_s": None}
                result["added"] = began = time.perf_counter()
                results.append(result)
                async for answer in await self.engine.async_generate(**_arguments(request), stream=True):
                    result |= {"output": list(answer["output_ids"]), "cached": answer["meta_info"]["cached_tokens"]}
                    result["token_times"] += [time.perf_counter() - began] * (len(result["output"]) - len(result["token_times"]))
                    result["finish"] = (answer["meta_info"]["finish_reason"] or {}).get("type")
                result["ttft_s"] = result["token_times"][0]

        await asyncio.gather(*(keep_going() for _ in range(at_once)))
        return results

    def metrics(self) -> dict[str, float]:
        """Every sample of all of the engine's processes, `name{label="value",...}` -> value; of an engine with `enable_metrics`."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        found = {}
        for sample in (sample for family in registry.collect() for sample in family.samples):
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = float(sample.value)
        return found

    def together(self, requests: list[Json]) -> list[Json]:
        """As one batch."""
        arguments = [_arguments(request) for request in requests]
        answers = self.engine.generate(
            input_ids=[a["input_ids"] for a in arguments], sampling_params=[a["sampling_params"] for a in arguments]
        )
        return [_reported(answer) for answer in answers]

    def flush(self) -> bool:
        """Empty the device's and the host's cache, not the storage. SGLang refuses while a request runs or a copy is under way."""
        deadline = time.monotonic() + FLUSH_S
        while not self.engine.flush_cache().success:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def _arguments(request: Json) -> Json:
    sampling = {"temperature": 0, **request.get("sampling", {})}
    more = {key: request[key] for key in ("cache_salt", "extra_key", "lora_path") if request.get(key) is not None}
    return {"input_ids": request["ids"], "sampling_params": sampling, **more}


def _reported(answer: Json) -> Json:
    meta = answer["meta_info"]
    return {
        "output": list(answer["output_ids"]),
        "cached": meta["cached_tokens"],
        "tiers": meta.get("cached_tokens_details") or {},
        "finish": meta["finish_reason"]["type"],
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.engines.driver_loop import serve

    driver = Driver()
    serve(driver)
    if driver.engine is not None:
        driver.engine.shutdown()
