"""One vLLM API server process for the demo, started with the command line that a user types."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from prometheus_client.parser import text_string_to_metric_families

START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 120.0
MAX_TOKENS = 40
_CACHED, _LOADED = "vllm:prompt_tokens_cached_by_source_total", "vllm:mooncake_kv_loaded_tokens_total"
_REASONS = "vllm:mooncake_kv_no_load_total"
_LABELS = {metric.removesuffix("_total"): label for metric, label in ((_CACHED, "source"), (_LOADED, "tier"), (_REASONS, "reason"))}


class DemoFailed(Exception):
    """The demo cannot go on; the message is one sentence."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`ttft_s`: seconds from sending the request to the first character. `tokens_reused`: prompt tokens that were not computed.
    `sources`: tokens by where their KV came from, by the counters of the connector ("dram", "ssd", "pool") and of vLLM ("engine": its own
    prefix cache). `not_loaded`: why the connector loaded nothing, where it says so."""

    ttft_s: float
    prompt_tokens: int
    tokens_reused: int
    sources: dict[str, int]
    text: str
    not_loaded: str = ""

    @property
    def tier(self) -> str:
        """Where most of the reused tokens came from; "none" if none was reused."""
        return max(self.sources, key=self.sources.__getitem__, default="none") if self.tokens_reused else "none"


class Server:
    """A context manager: the process runs inside it. Raises DemoFailed."""

    def __init__(self, model: str, log: Path, settings: Mapping[str, Any]) -> None:
        self._model, self._log, self._settings = model, log, settings

    def __enter__(self) -> Self:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self._model, "--served-model-name", "demo"]
        command += ["--kv-connector", "mooncake", "--moon-cache-config", json.dumps(self._settings)]
        # Blocks as long as our pages, so that the engine's own hit and ours have the same length.
        command += ["--enforce-eager", "--block-size", "64", "--max-model-len", "4096", "--enable-prompt-tokens-details"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                env=environment(self._log.parent),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy(time.monotonic() + START_TIMEOUT_S)
        except BaseException:
            self._end(0)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(20)

    def ask(self, prompt: str, max_tokens: int = MAX_TOKENS) -> Answer:
        before = self._counts()
        body = {"model": "demo", "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        text, ttft, usage = "", None, None
        began = time.perf_counter()
        with self._open("/v1/chat/completions", body) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    if piece and ttft is None:
                        ttft = time.perf_counter() - began
                    text += piece
        if ttft is None or usage is None:
            raise DemoFailed(f"the engine gave no answer; see {self._log}")
        reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        grown = {key: count - before.get(key, 0) for key, count in self._counts().items() if count > before.get(key, 0)}
        sources = {label: int(tokens) for (metric, label), tokens in grown.items() if metric == _LOADED}
        if own := grown.get((_CACHED, "device")):
            sources["engine"] = int(own)
        return Answer(
            ttft_s=ttft,
            prompt_tokens=usage["prompt_tokens"],
            tokens_reused=reused,
            sources=sources,
            text=text,
            not_loaded=", ".join(label for metric, label in grown if metric == _REASONS),
        )

    def reset(self) -> None:
        """Empty the engine's own prefix cache; the node keeps what it has."""
        with self._open("/reset_prefix_cache", {}) as reply:
            if not json.load(reply)["success"]:
                raise DemoFailed(f"the engine did not reset its prefix cache; see {self._log}")

    def _counts(self) -> dict[tuple[str, str], float]:
        """(metric, label) -> count, of cached tokens by source, loaded ones by tier, and requests that loaded nothing by reason."""
        with self._open("/metrics") as reply:
            families = list(text_string_to_metric_families(reply.read().decode()))
        samples = [s for family in families for s in family.samples if family.name in _LABELS]
        return {(s.name, s.labels[_LABELS[s.name.removesuffix("_total")]]): s.value for s in samples if s.name.endswith("_total")}

    def _open(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise DemoFailed(
                f"the engine answered {path} with {error.code}: {error.read(500).decode(errors='replace')}; see {self._log}"
            ) from None
        except OSError as error:
            raise DemoFailed(f"the engine does not answer {path}: {error}; see {self._log}") from None

    def _wait_until_healthy(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                # The first error is the cause; vLLM's processes report it to one another afterwards.
                reason = re.search(r"^(?:\(.*\] )?(\w*[Ee]rror: .+)", self._log.read_text(errors="replace"), re.MULTILINE)
                raise DemoFailed(f"the engine did not start: {reason[1][:300] if reason else 'no reason given'}; see {self._log}")
            with suppress(DemoFailed):
                self._open("/health", timeout_s=2).close()
                return
            time.sleep(0.2)
        raise DemoFailed(f"the engine did not start within {START_TIMEOUT_S:.0f} s; see {self._log}")

    def _end(self, patience_s: float) -> None:
        """In order if it ends within `patience_s`, then its whole process group."""
        if self._process.poll() is None and patience_s:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)


def environment(folder: Path) -> dict[str, str]:
    """This process's, without cache settings that the demo's own would contradict. The VLLM_CPU variables matter on CPUs only: there a
    connector makes vLLM keep one more core free unless the cores are named. The node and what vLLM leaves behind go into `folder`."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("MOONCAKE_") or k.startswith("MOONCAKE_KV_")}
    cores = sorted(os.sched_getaffinity(0))
    defaults = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_NO_USAGE_STATS": "1"}
    # The development mode adds /reset_prefix_cache.
    return {**defaults, **ours, "TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder), "VLLM_SERVER_DEV_MODE": "1"}
