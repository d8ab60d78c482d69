"""Child process of harness.Engine: one real vLLM engine, driven by JSON lines.

Reads one command a line from stdin and answers each with one line on what was stdout when it started: `{"ok": ...}` or `{"error": "..."}`.
Everything that vLLM and its processes print goes to stderr. Commands: start (first), run, reset_prefix_cache, metrics, call, stop.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

Json = dict[str, Any]


class Driver:
    """Keeps the engine; each public method is a command and returns what JSON can carry."""

    def __init__(self) -> None:
        self.llm: Any = None

    def start(self, engine: Json) -> Json:
        started = time.monotonic()
        from vllm import LLM

        self.llm = LLM(**engine)
        return {"start_s": time.monotonic() - started, "pid": os.getpid()}

    def run(self, requests: list[Json]) -> list[Json]:
        """Run the requests to their ends and report on each. A request starts at once, or when another (`after`: its id) has given
        `after_tokens` tokens; it is aborted once it has given `abort_after_tokens`."""
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        engine = self.llm.llm_engine
        waiting = {r["id"]: r for r in requests}
        results: dict[str, Json] = {}

        def admit() -> None:
            for name, request in list(waiting.items()):
                before = request.get("after")
                if before is not None and len(results.get(before, {}).get("token_times", ())) < request.get("after_tokens", 1):
                    continue
                del waiting[name]
                prompt: Json = {"prompt_token_ids": request["ids"]}
                if salt := request.get("cache_salt"):
                    prompt["cache_salt"] = salt
                lora = LoRARequest(**request["lora"]) if request.get("lora") else None
                sampling = SamplingParams(temperature=0, output_kind=RequestOutputKind.CUMULATIVE, **request["sampling"])
                results[name] = {"id": name, "output": [], "token_times": [], "cached": None, "finish": None, "added": time.perf_counter()}
                engine.add_request(name, prompt, sampling, lora_request=lora)

        admit()
        while engine.has_unfinished_requests():
            outputs = engine.step()
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
                limit = waiting_limit(requests, output.request_id)
                if limit is not None and len(result["output"]) >= limit and result["finish"] is None:
                    engine.abort_request([output.request_id])
                    result["finish"] = "abort"
            admit()
        for result in results.values():
            result["ttft_s"] = result["token_times"][0] if result["token_times"] else None
        return [results[r["id"]] for r in requests]

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=reset_connector))

    def metrics(self) -> dict[str, float]:
        """Every sample of this process's Prometheus registry, `name{label="value",...}` -> value."""
        from prometheus_client import REGISTRY

        found = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    def call(self, target: str, arguments: Json) -> Any:
        """`module:function(llm, **arguments)`, for what a single test needs from inside the engine's process."""
        module, _, name = target.partition(":")
        return getattr(import_module(module), name)(self.llm, **arguments)


def waiting_limit(requests: list[Json], name: str) -> int | None:
    return next(r.get("abort_after_tokens") for r in requests if r["id"] == name)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    driver = Driver()
    for line in sys.stdin:
        command: Json = json.loads(line)
        name = command.pop("do")
        if name == "stop":
            break
        try:
            answer = {"ok": getattr(driver, name)(**command)}
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    driver.llm = None  # vLLM shuts its processes down when the engine is collected


if __name__ == "__main__":
    main()
