"""The loop of a driver, the child process of harness.Driven.

Reads one command a line from stdin and answers each with one line on what was stdout when it started: `{"ok": ...}` or `{"error": "..."}`.
Everything else that the engine and its processes print goes to stderr. A command is `{"do": METHOD, ...arguments}`; `stop` ends the loop,
and every driver has `call` and `metrics`, below.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any


def serve(driver: Any) -> None:
    """`driver` has a method for each command, and its `engine`."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        name = command.pop("do")
        if name == "stop":
            break
        try:
            if name == "call":
                answer = {"ok": call(driver.engine, **command)}
            else:
                answer = {"ok": metrics() if name == "metrics" else getattr(driver, name)(**command)}
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def call(engine: Any, target: str, arguments: dict[str, Any]) -> Any:
    """`module:function(engine, **arguments)`, for what a single test needs from inside the driver's process."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)(engine, **arguments)


def metrics() -> dict[str, float]:
    """Every sample of this process's Prometheus registry, `name{label="value",...}` -> value."""
    from prometheus_client import REGISTRY

    found = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found
