"""Real LMDeploy engines for tests, beside vLLM's in harness: `LMDeployEngine` (its Engine class, with Ray for several ranks) and
`LMDeployServer` (`lmdeploy serve api_server`).

Promises: those of harness. All of LMDeploy's processes run with the shims of mooncake_kv_cpu_engines.lmdeploy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.engines.harness import RUN_TIMEOUT_S, START_TIMEOUT_S, Driven, HttpServer, transfer_config
from tests.engines.sglang_harness import ASLEEP

LOADED = "MOONCAKE_KV_TEST_LOADED"
ENVIRONMENT = {
    **ASLEEP,
    "MOONCAKE_KV_TEST_CUDA": "cpu",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_raylet_start_wait_time_s": "60",
}
# What each process that imports LMDeploy's engine writes into the folder LOADED.
IN_EFFECT = {
    "connector": "mooncake_kv.lmdeploy_plugin.registration",
    "migration": "mooncake_kv.lmdeploy_plugin.registration",
    "shims": "mooncake_kv_cpu_engines.lmdeploy",
}
DRIVER = Path(__file__).with_name("lmdeploy_driver.py")
BLOCKS = 300


class LMDeployRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request. `sampling` goes to GenerationConfig (greedy). With `abort_after_tokens` it is cancelled once it has given so many."""

    ids: list[int]
    sampling: dict[str, Any] = {}
    abort_after_tokens: int = 1 << 30


class LMDeployResult(msgspec.Struct, kw_only=True):
    """`cached`: prompt tokens that were not computed, local and external hits together. `finish`: `finish`, `cancel`, or LMDeploy's name
    of an error."""

    output: list[int]
    cached: int
    finish: str
    ttft_s: float | None = None


class LMDeployEngine(Driven):
    """`settings` configures the connector `mooncake`; None: an engine without connector (or with the one in `engine_arguments`, which are
    the fields of PytorchEngineConfig). Prefix caching is off, as LMDeploy's default has it."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        **engine_arguments: Any,
    ) -> None:
        arguments: dict[str, Any] = {
            "model_path": str(model),
            "dtype": "bfloat16",
            "block_size": 64,
            "num_gpu_blocks": BLOCKS,
            "max_batch_size": 8,
            "session_len": 4096,
            "max_prefill_token_num": 4096,
            "eager_mode": True,
        }
        if settings is not None:
            arguments["kv_transfer_config"] = transfer_config(settings)
        super().__init__(DRIVER, log, {**arguments, **engine_arguments}, {**ENVIRONMENT, **(environment or {})}, start_timeout_s)

    def generate(self, ids: Sequence[int], max_tokens: int = 16, *, timeout_s: float = RUN_TIMEOUT_S, **more: Any) -> LMDeployResult:
        """One request, alone. `more` are fields of LMDeployRequest."""
        sampling = {"max_new_tokens": max_tokens, **more.pop("sampling", {})}
        return self.run([LMDeployRequest(ids=list(ids), sampling=sampling, **more)], timeout_s=timeout_s)[0]

    def run(self, requests: Sequence[LMDeployRequest], *, together: bool = False, timeout_s: float = RUN_TIMEOUT_S) -> list[LMDeployResult]:
        answer = self._ask(timeout_s, do="together" if together else "run", requests=msgspec.to_builtins(requests))
        return msgspec.convert(answer, list[LMDeployResult])


class LMDeployServer(HttpServer):
    """LMDeploy's OpenAI-compatible API, with `settings` for the connector as above, followed by `arguments` word for word."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *arguments: str,
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        command = [sys.executable, "-m", "lmdeploy", "serve", "api_server", str(model), "--backend", "pytorch", "--eager-mode"]
        command += ["--model-name", "m", "--dtype", "bfloat16", "--session-len", "4096", "--num-gpu-blocks", str(BLOCKS)]
        command += ["--max-prefill-token-num", "4096", "--max-batch-size", "8"]
        if settings is not None:
            command += ["--kv-transfer-config", json.dumps(transfer_config(settings))]
        variables = {**ENVIRONMENT, **(environment or {})}
        super().__init__([*command, *arguments], log, environment=variables, address=("--server-name", "--server-port"), **more)


def in_effect(folder: Path) -> dict[int, dict[str, str]]:
    """By process id, of an engine that was started with LOADED = folder."""
    return {int(file.name): json.loads(file.read_text()) for file in folder.glob("[0-9]*")}
