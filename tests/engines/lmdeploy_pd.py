"""LMDeploy's prefill and decode servers with our migration backend, and its proxy: `Cluster`.

Promises: those of harness. Servers keep their ports over restarts, so their names for each other stay the same; settings come from the
environment; the proxy keeps its state in memory.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from tests.engines.harness import EngineError, HttpServer, free_port
from tests.engines.lmdeploy_harness import ENVIRONMENT, LMDeployServer
from tests.models import SMOLLM2

STATE = "MOONCAKE_KV_TEST_STATE"
UNMENDED = "MOONCAKE_KV_TEST_UNMENDED"
SETTINGS = {
    "MOONCAKE_MIGRATION_TIMEOUT_MS": "4000",
    "MOONCAKE_MIGRATION_HOLD_S": "20",
    "MOONCAKE_MIGRATION_PREFILL_S": "8",
    "MOONCAKE_KV_STRICT": "1",
}


class Answer(msgspec.Struct):
    """`ids` of the tokens where the API gives them."""

    text: str
    prompt: int
    completion: int


class Proxy(HttpServer):
    health = "/nodes/status"

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "lmdeploy", "serve", "proxy", "--serving-strategy", "DistServe", "--disable-cache-status"]
        super().__init__(command, log, environment={**ENVIRONMENT, **environment}, address=("--server-name", "--server-port"))

    def roles(self) -> dict[str, int]:
        return {url: node["role"] for url, node in json.loads(self.get("/nodes/status")).items()}


class Cluster:
    """One server of each role behind a proxy. `unmended` names what is LMDeploy's own, see mooncake_kv_cpu_engines.lmdeploy."""

    def __init__(self, folder: Path, *, prefill_blocks: int = 120, unmended: str = "", **settings: str) -> None:
        self.folder = folder
        self._blocks = {"Prefill": prefill_blocks, "Decode": 400}
        self._environment = {**SETTINGS, **settings, **({UNMENDED: unmended} if unmended else {})}
        self._ports = {role: free_port() for role in self._blocks}
        self.servers: dict[str, LMDeployServer] = {}
        self.proxy = Proxy(folder / "proxy.log", self._environment)
        try:
            for role in self._blocks:
                self.start(role)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for server in [*self.servers.values(), self.proxy]:
            server.kill()

    def start(self, role: str) -> None:
        arguments = ["--role", role, "--migration-backend", "Mooncake", "--proxy-url", f"http://127.0.0.1:{self.proxy.port}"]
        arguments += ["--num-gpu-blocks", str(self._blocks[role]), "--logprobs-mode", "raw_logprobs"]
        environment = {**self._environment, STATE: str(self.folder / f"{role}.state")}
        for last in (False, False, True):
            try:
                self.servers[role] = LMDeployServer(
                    SMOLLM2, self.folder / f"{role}.log", *arguments, environment=environment, port=self._ports[role]
                )
                break
            except EngineError as error:
                # Its process waits for the engine's with a lock that is taken down when it sees the engine's port, and the engine's
                # process may not have let go of it by then.
                if last or "EOFError" not in (self.folder / f"{role}.log").read_text():
                    raise error
        url = f"http://127.0.0.1:{self._ports[role]}"
        wait_for(lambda: url in self.proxy.roles(), 30, f"{role} is not known to the proxy")

    def kill(self, role: str) -> None:
        self.servers[role].kill()

    def signal(self, role: str, number: signal.Signals) -> None:
        for process in self.servers[role].processes():
            process.send_signal(number)

    def state(self, role: str) -> dict[str, Any]:
        """ "free": blocks; "results": prompts by what became of them (migration.engine.RESULTS)."""
        found: dict[str, Any] = json.loads((self.folder / f"{role}.state").read_text())
        return found

    def chat(self, content: str, tokens: int = 8, *, server: HttpServer | None = None, **more: Any) -> Answer:
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": 0, **more}
        reply = (server or self.proxy).post("/v1/chat/completions", body, timeout_s=120)
        return Answer(reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"])

    def complete(self, prompt: str, tokens: int = 8, *, server: HttpServer | None = None, **more: Any) -> Answer:
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
        reply = (server or self.proxy).post("/v1/completions", body, timeout_s=120)
        return Answer(reply["choices"][0]["text"], reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"])


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
