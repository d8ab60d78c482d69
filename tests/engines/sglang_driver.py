"""Child process of sglang_harness.SGLangEngine: one real SGLang engine, driven by JSON lines.

Commands (see driver_loop): start (first), run, together, flush, call, stop.
"""

from __future__ import annotations

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
