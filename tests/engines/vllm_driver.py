"""Child process of harness.Engine: one real vLLM engine, driven by JSON lines.

Commands (see driver_loop): start (first), run, traffic, reset_prefix_cache, metrics, call, stop.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

Json = dict[str, Any]

RESET_S = 10.0


class Driver:
    """Keeps the engine; each public method is a command and returns what JSON can carry."""

    def __init__(self) -> None:
        self.engine: Any = None

    def start(self, engine: Json) -> Json:
        started = time.monotonic()
        from vllm import LLM

        self.engine = LLM(**engine)
        return {"start_s": time.monotonic() - started, "pid": os.getpid()}

    def run(self, requests: list[Json], reset_every: int = 0) -> list[Json]:
        """Run the requests to their ends and report on each. A request starts at once, or when another (`after`: its id) has given
        `after_tokens` tokens; it is aborted once it has given `abort_after_tokens`, or the engine has made `abort_after_steps` since it
        began. Every `reset_every` steps (0: never) the prefix cache is reset, which preempts what is running. (vLLM complains when
        blocks are still in use then, as they may be with asynchronous scheduling and any connector; it has preempted all the same.)"""
        engine = self.engine.llm_engine
        waiting = {r["id"]: r for r in requests}
        results: dict[str, Json] = {}
        ages: dict[str, int] = {}
        steps = 0

        def admit() -> None:
            for name, request in list(waiting.items()):
                before = request.get("after")
                if before is None or len(results.get(before, {}).get("token_times", ())) >= request.get("after_tokens", 1):
                    del waiting[name]
                    results[name] = self._add(request)
                    ages[name] = 0

        admit()
        while engine.has_unfinished_requests():
            outputs = engine.step()
            steps += 1
            _note(outputs, results)
            for request in requests:
                result = results.get(request["id"])
                if result is None or result["finish"] is not None:
                    continue
                ages[request["id"]] += 1
                tokens, age = request.get("abort_after_tokens"), request.get("abort_after_steps")
                if (tokens is not None and len(result["output"]) >= tokens) or (age is not None and ages[request["id"]] >= age):
                    engine.abort_request([request["id"]])
                    result["finish"] = "abort"
            if reset_every and steps % reset_every == 0:
                with suppress(RuntimeError):
                    self.engine.reset_prefix_cache(reset_running_requests=True)
            admit()
        return [_reported(results[r["id"]]) for r in requests]

    def traffic(self, requests: list[Json], seconds: float, at_once: int = 1) -> list[Json]:
        """Keep `at_once` requests going, taken from `requests` in turn, for so many seconds; then let them end. One result for each, with
        ids ID/0, ID/1, ..."""
        engine = self.engine.llm_engine
        results: dict[str, Json] = {}
        until = time.perf_counter() + seconds
        while True:
            while time.perf_counter() < until and sum(r["finish"] is None for r in results.values()) < at_once:
                request = requests[len(results) % len(requests)]
                name = f"{request['id']}/{len(results) // len(requests)}"
                results[name] = self._add({**request, "id": name})
            if not engine.has_unfinished_requests():
                return [_reported(result) for result in results.values()]
            _note(engine.step(), results)

    def _add(self, request: Json) -> Json:
        """Give one request to the engine; returns its result so far."""
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        prompt: Json = {"prompt_token_ids": request["ids"]}
        if salt := request.get("cache_salt"):
            prompt["cache_salt"] = salt
        lora = LoRARequest(**request["lora"]) if request.get("lora") else None
        sampling = SamplingParams(temperature=0, output_kind=RequestOutputKind.CUMULATIVE, **request["sampling"])
        name, added = request["id"], time.perf_counter()
        self.engine.llm_engine.add_request(name, prompt, sampling, lora_request=lora)
        return {"id": name, "output": [], "token_times": [], "cached": None, "finish": None, "added": added}

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """vLLM refuses while blocks are in use, and those of a request whose last pages are saved are so for one more step."""
        deadline = time.monotonic() + RESET_S
        while not self.engine.reset_prefix_cache(reset_connector=reset_connector):
            if time.monotonic() > deadline:
                return False
            core = getattr(self.engine.llm_engine.engine_core, "engine_core", None)
            if core is not None and core.scheduler.has_requests():
                self.engine.llm_engine.step()  # nobody else makes steps here
            time.sleep(0.01)
        return True


def _note(outputs: list[Any], results: dict[str, Json]) -> None:
    """What one step gave."""
    now = time.perf_counter()
    for output in outputs:
        result = results[output.request_id]
        completion = output.outputs[0]
        fresh = len(completion.token_ids) - len(result["output"])
        result["output"] = list(completion.token_ids)
        result["token_times"] += [now - result["added"]] * fresh
        result["text"] = completion.text
        result["finish"] = completion.finish_reason
        result["cached"] = output.num_cached_tokens


def _reported(result: Json) -> Json:
    return {**result, "ttft_s": result["token_times"][0] if result["token_times"] else None}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.engines.driver_loop import serve

    driver = Driver()
    serve(driver)
    driver.engine = None  # vLLM shuts its processes down when the engine is collected
