"""The engines that the demo can start, each with the command line that a user types: one entry in ENGINES for each.

Promises: nothing of an engine is imported here; what a row of the demo says about where pages came from is read from that engine's own
`/metrics`. Where an engine runs on a CPU only with help that users do not have (the test-only package that `make setup` installs), it is
refused with one sentence if that help is missing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

PAGE_TOKENS = 64
MAX_MODEL_LEN = 4096
CPU_SHIMS = "mooncake_kv_cpu_engines"
SERVED = "demo"


class Series(NamedTuple):
    """A counter of an engine's /metrics and the label that tells its parts apart."""

    metric: str
    label: str


# Not an engine's: the tokens that the node has handed out, by tier.
NODE = Series("node", "tier")


class Engine:
    """What differs between engines. `reset_path`: empties the engine's own cache, "" if it has none that would have to be. `loaded`: tokens
    loaded by us, by tier. `own`: tokens found in the engine's own cache, and the label's values that mean so. `load_us`: microseconds of
    loading, and the label's value. `no_load`: requests that loaded nothing, by reason. None: not counted, or too late."""

    name: str
    package: str
    reset_path: str
    loaded: Series
    own: Series | None = None
    own_values: tuple[str, ...] = ()
    load_us: Series | None = None
    load_value: str = ""
    no_load: Series | None = None

    def command(self, model: str, settings: Mapping[str, Any], port: int) -> list[str]:
        """A server of OpenAI's chat API on this port of the loopback, that calls the model SERVED."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Variables that it wants beside those of all engines, unless the user has set them."""
        return {}

    def missing(self) -> str:
        """Why it cannot be started here, "" if it can."""
        return "" if find_spec(self.package) else f"{self.name} is not installed in this environment"

    @property
    def ttft_tells(self) -> bool:
        """Whether the time to the first token says anything about hits."""
        return True


class VLLM(Engine):
    name, package = "vllm", "vllm"
    reset_path = "/reset_prefix_cache"
    loaded = Series("vllm:mooncake_kv_loaded_tokens", "tier")
    own, own_values = Series("vllm:prompt_tokens_cached_by_source", "source"), ("device",)
    load_us, load_value = Series("vllm:mooncake_kv_copy_microseconds", "direction"), "in"
    no_load = Series("vllm:mooncake_kv_no_load", "reason")

    def command(self, model: str, settings: Mapping[str, Any], port: int) -> list[str]:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", SERVED]
        command += ["--kv-connector", "mooncake", "--moon-cache-config", json.dumps(settings)]
        # Blocks as long as our pages, so that the engine's own hit and ours have the same length.
        command += ["--enforce-eager", "--block-size", str(PAGE_TOKENS), "--max-model-len", str(MAX_MODEL_LEN)]
        return [*command, "--enable-prompt-tokens-details", "--host", "127.0.0.1", "--port", str(port)]

    def environment(self) -> dict[str, str]:
        """The VLLM_CPU variables matter on CPUs only: there a connector makes vLLM keep one more core free unless the cores are named. The
        development mode adds /reset_prefix_cache."""
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        bind = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores}
        return {**bind, "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}


class SGLang(Engine):
    name, package = "sglang", "sglang"
    reset_path = "/flush_cache"
    loaded = Series("sglang:mooncake_kv_loaded_tokens", "tier")
    own, own_values = Series("sglang:cached_tokens", "cache_source"), ("device", "host")
    load_us, load_value = Series("sglang:mooncake_kv_call_microseconds", "call"), "get"

    def command(self, model: str, settings: Mapping[str, Any], port: int) -> list[str]:
        command = [str(Path(sys.executable).with_name("sglang")), "serve", "--model-path", model, "--served-model-name", SERVED]
        command += ["--enable-hierarchical-cache", "--hicache-storage-backend", "mooncake"]
        command += ["--hicache-storage-backend-extra-config", json.dumps(settings), "--page-size", str(PAGE_TOKENS)]
        command += ["--hicache-storage-prefetch-policy", "wait_complete", "--hicache-ratio", "2"]
        command += ["--max-total-tokens", str(2 * MAX_MODEL_LEN)]
        command += ["--context-length", str(MAX_MODEL_LEN), "--enable-metrics", "--enable-cache-report", "--skip-server-warmup"]
        if on_cpu():
            command += ["--device", "cpu", "--dtype", "bfloat16", "--attention-backend", "torch_native", "--mem-fraction-static", "0.3"]
            command += ["--disable-cuda-graph", "--disable-overlap-schedule"]
        return [*command, "--host", "127.0.0.1", "--port", str(port)]

    def environment(self) -> dict[str, str]:
        # Threads that wait for others of their team sleep: on a busy machine, spinning makes everything many times slower.
        return {"OMP_WAIT_POLICY": "PASSIVE"} if on_cpu() else {}

    def missing(self) -> str:
        return super().missing() or _without_shims(self.name, "sglang.srt.plugins")

    @property
    def ttft_tells(self) -> bool:
        """Its attention on a CPU computes the whole prompt anew, also for a hit in its own cache."""
        return not on_cpu()


class LMDeploy(Engine):
    """With its own prefix cache off, which is its default: it has no call that empties it. So what it answers when asked again comes from
    our pages, too. Its server's metrics are ten seconds late; the node knows at once what it has handed out."""

    name, package = "lmdeploy", "lmdeploy"
    reset_path = ""
    loaded = NODE

    def command(self, model: str, settings: Mapping[str, Any], port: int) -> list[str]:
        transfer = {"kv_connector": "mooncake", "kv_role": "kv_both", "kv_connector_extra_config": dict(settings)}
        command = [str(Path(sys.executable).with_name("lmdeploy")), "serve", "api_server", model, "--model-name", SERVED]
        command += ["--backend", "pytorch", "--kv-transfer-config", json.dumps(transfer), "--session-len", str(MAX_MODEL_LEN)]
        if on_cpu():
            command += ["--dtype", "bfloat16", "--eager-mode", "--num-gpu-blocks", str(2 * MAX_MODEL_LEN // PAGE_TOKENS)]
        return [*command, "--server-name", "127.0.0.1", "--server-port", str(port)]

    def environment(self) -> dict[str, str]:
        return {"OMP_WAIT_POLICY": "PASSIVE", "MOONCAKE_KV_TEST_CUDA": "cpu"} if on_cpu() else {}

    def missing(self) -> str:
        return super().missing() or _without_shims(self.name, "torch.backends")


ENGINES: dict[str, Engine] = {engine.name: engine for engine in (VLLM(), SGLang(), LMDeploy())}


def on_cpu() -> bool:
    """Whether this environment's torch can only compute on the CPU."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True


def _without_shims(name: str, group: str) -> str:
    if not on_cpu() or any(point.name == CPU_SHIMS for point in entry_points(group=group)):
        return ""
    return f"{name} does not run on a CPU by itself; `make demo` has what it lacks"
