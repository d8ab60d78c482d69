"""The loop of a driver, the child process of harness.Driven.

Reads one command a line from stdin and answers each with one line on what was stdout when it started: `{"ok": ...}` or `{"error": "..."}`.
Everything else that the engine and its processes print goes to stderr. A command is `{"do": METHOD, ...arguments}`; `stop` ends the loop.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def serve(driver: object) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
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
