"""One engine's API server process for the demo, started with the command line that a user types.

Promises: every wait has a deadline and ends in DemoFailed; the process and what it started are gone after the context.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from .engines import NODE, PAGE_TOKENS, SERVED, Engine, Series

START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 120.0
MAX_TOKENS = 40
RESET_TIMEOUT_S = 15.0


class DemoFailed(Exception):
    """The demo cannot go on; the message is one sentence."""


class _Refused(DemoFailed):
    """The engine answered with an error."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`ttft_s`: seconds from sending the request to the first character. `tokens_reused`: prompt tokens that were not computed.
    `sources`: tokens by where their KV came from, by our counters ("dram", "ssd", "pool") and the engine's ("engine": its own prefix
    cache). `load_s`: seconds of loading. `not_loaded`: why nothing was loaded, where the engine's metrics say so."""

    ttft_s: float
    prompt_tokens: int
    tokens_reused: int
    sources: dict[str, int]
    text: str
    load_s: float = 0.0
    not_loaded: str = ""

    @property
    def tier(self) -> str:
        """Where most of the reused tokens came from; "none" if none was reused."""
        return max(self.sources, key=self.sources.__getitem__, default="none") if self.tokens_reused else "none"


class Server:
    """A context manager: the process runs inside it. Raises DemoFailed. `hits`: pages that the node has handed out, by tier."""

    def __init__(self, engine: Engine, model: str, log: Path, settings: Mapping[str, Any], hits: Callable[[], Mapping[str, int]]) -> None:
        self._engine, self._model, self._log, self._settings, self._hits = engine, model, log, settings, hits

    def __enter__(self) -> Self:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._engine.command(self._model, self._settings, port),
                env=environment(self._engine, self._log.parent),
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
        body = {"model": SERVED, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0}
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

        def of(series: Series | None) -> dict[str, float]:
            return {label: count for (metric, label), count in grown.items() if series is not None and metric == series.metric}

        engine = self._engine
        sources = {tier: int(tokens) for tier, tokens in of(engine.loaded).items()}
        if own := sum(of(engine.own).get(value, 0) for value in engine.own_values):
            sources["engine"] = int(own)
        return Answer(
            ttft_s=ttft,
            prompt_tokens=usage["prompt_tokens"],
            tokens_reused=reused,
            sources=sources,
            text=text,
            load_s=of(engine.load_us).get(engine.load_value, 0) / 1e6,
            not_loaded=", ".join(of(engine.no_load)),
        )

    def reset(self) -> None:
        """Empty the engine's own prefix cache; the node keeps what it has. An engine refuses while it is still busy with what has been
        answered."""
        deadline = time.monotonic() + RESET_TIMEOUT_S
        while self._engine.reset_path:
            with suppress(_Refused), self._open(self._engine.reset_path, {}) as reply:
                text = reply.read().decode(errors="replace")
                if '"success":false' not in text.replace(" ", ""):
                    return
            if time.monotonic() > deadline:
                raise DemoFailed(f"the engine did not reset its prefix cache; see {self._log}")
            time.sleep(0.1)

    def _counts(self) -> dict[tuple[str, str], float]:
        """(metric, label) -> count, of the series that the engine names."""
        engine = self._engine
        if engine.loaded == NODE:
            return {(NODE.metric, tier): pages * PAGE_TOKENS for tier, pages in self._hits().items()}
        labels = {series.metric: series.label for series in (engine.loaded, engine.own, engine.load_us, engine.no_load) if series}
        counts: dict[tuple[str, str], float] = defaultdict(float)
        with self._open("/metrics") as reply:
            for family in text_string_to_metric_families(reply.read().decode()):
                for sample in family.samples:
                    if sample.name == f"{family.name}_total" and (label := labels.get(family.name)):
                        counts[family.name, sample.labels.get(label, "")] += sample.value
        return counts

    def _open(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise _Refused(
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


def environment(engine: Engine, folder: Path) -> dict[str, str]:
    """This process's, without cache settings that the demo's own would contradict. The node and what engines leave behind go into
    `folder`."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("MOONCAKE_") or k.startswith("MOONCAKE_KV_")}
    return {**engine.environment(), **ours, "TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder)}
