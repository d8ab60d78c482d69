"""The engines that soak.py puts under load, each in a way in which an answer is the same whether its KV was loaded or computed.

Promises: with what `judge` and `alone` ask for, no answer can come from what a fault has touched: the first computes under a salt whose
pages nobody has read or been disturbed at, the second likewise or without reading at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from mooncake_kv.common.identity import KVNamespace
from tests.engines.harness import ONE_THREAD, Engine, Request, Result
from tests.engines.judge import EXACT, Judged, PageReader, judge_pages
from tests.engines.sglang_harness import LOADED, SGLangEngine, SGLangRequest, namespace_in
from tests.engines.test_sglang_faults import Plain
from tests.engines.test_vllm_hits import INSECURE
from tests.models import TINY_LLAMA, generated_llama


class VLLM:
    """Without a prefix cache of its own."""

    at_once = 3

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        environment = {**INSECURE, **ONE_THREAD, **EXACT}
        more: dict[str, Any] = {"max_model_len": 2048, "enable_prefix_caching": False}
        self.engine = Engine(generated_llama(TINY_LLAMA), folder / "engine.log", settings=settings, environment=environment, **more)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.engine.__exit__(kind, error, trace)

    def processes(self) -> list[psutil.Process]:
        return self.engine.processes()

    def namespace(self) -> KVNamespace:
        return KVNamespace.decode(bytes.fromhex(self.engine.call("tests.engines.judge:namespace")))

    def alone(self, ids: list[int], tokens: int) -> Result:
        return self.engine.generate(ids, tokens, sampling={"ignore_eos": True, "skip_reading_prefix_cache": True})

    def traffic(self, prompts: Sequence[tuple[str, list[int]]], tokens: int, seconds: float, timeout_s: float) -> list[Result]:
        requests = [Request(ids=ids, id=name, sampling={"max_tokens": tokens, "ignore_eos": True}) for name, ids in prompts]
        return self.engine.traffic(requests, seconds, at_once=self.at_once, timeout_s=timeout_s)

    def metrics(self) -> dict[str, float]:
        return self.engine.metrics()

    def at_work(self, stats: dict[str, Any]) -> bool:
        """Whether the node has all of the engine, and the engine what it needs to save (it saves nothing without granted slots)."""
        return bool(stats["clients"] == 2 and stats["granted_slots"])

    def judge(self, reader: PageReader, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Judged:
        return judge_pages(self.engine, reader, pairs)


class SGLang(VLLM):
    """With so little memory on device and host that most of a prompt has to come from the storage."""

    at_once = 2

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder = folder
        memory = {"max_total_tokens": 2560, "hicache_ratio": 1.1, "enable_metrics": True}
        environment = {**EXACT, "OMP_NUM_THREADS": "1", LOADED: str(folder)}
        self.sglang = SGLangEngine(generated_llama(TINY_LLAMA), folder / "engine.log", settings=settings, environment=environment, **memory)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.sglang.__exit__(kind, error, trace)

    def processes(self) -> list[psutil.Process]:
        return self.sglang.processes()

    def namespace(self) -> KVNamespace:
        return namespace_in(self._folder)

    def alone(self, ids: list[int], tokens: int) -> Result:
        answer = self.sglang.generate(ids, tokens, sampling={"ignore_eos": True}, cache_salt="alone")
        return Result(
            id="", output=answer.output, token_times=[], cached=answer.cached, finish=answer.finish, ttft_s=answer.ttft_s, added=0.0
        )

    def traffic(self, prompts: Sequence[tuple[str, list[int]]], tokens: int, seconds: float, timeout_s: float) -> list[Result]:
        requests = {name: SGLangRequest(ids=ids, sampling={"max_new_tokens": tokens, "ignore_eos": True}) for name, ids in prompts}
        return self.sglang.traffic(requests, seconds, at_once=self.at_once, timeout_s=timeout_s)

    def metrics(self) -> dict[str, float]:
        return self.sglang.metrics()

    def at_work(self, stats: dict[str, Any]) -> bool:
        return bool(stats["clients"] == 1)

    def judge(self, reader: PageReader, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Judged:
        return judge_pages(Plain(self.sglang), reader, pairs)


ENGINES: dict[str, type[VLLM]] = {"vllm": VLLM, "sglang": SGLang}
