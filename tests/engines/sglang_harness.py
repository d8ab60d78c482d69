"""Real SGLang engines for tests, beside vLLM's in harness.

Promises: those of harness. An engine stores pages after it has answered: wait for them (judge.PageReader) before it is stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mooncake_kv.common.identity import KVNamespace
from tests.engines.harness import RUN_TIMEOUT_S, START_TIMEOUT_S, Driven, Result

LOADED = "MOONCAKE_KV_TEST_LOADED"
# Threads that wait for others of their team sleep: on a busy machine, spinning makes everything many times slower.
ASLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}
DRIVER = Path(__file__).with_name("sglang_driver.py")


class SGLangRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request. `sampling` goes to SGLang's sampling parameters (temperature is 0), `lora_path` is an adapter's name."""

    ids: list[int]
    sampling: dict[str, Any] = {}
    cache_salt: str | None = None
    extra_key: str | None = None
    lora_path: str | None = None


class SGLangResult(msgspec.Struct, kw_only=True):
    """`cached`: prompt tokens that were not computed; `tiers` says where they came from (`device`, `host`, `storage`)."""

    output: list[int]
    cached: int
    tiers: dict[str, Any] = {}
    finish: str
    ttft_s: float | None = None

    @property
    def stored(self) -> int:
        """Tokens that came from the storage backend."""
        return int(self.tiers.get("storage", 0))


class SGLangEngine(Driven):
    """`settings` configures our storage backend, by the name `mooncake`; None: an engine without hierarchical cache (or with what
    `engine_arguments` say)."""

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
            "device": "cpu",
            "dtype": "bfloat16",
            "attention_backend": "torch_native",
            "mem_fraction_static": 0.3,
            "max_total_tokens": 8192,
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "disable_custom_all_reduce": True,
            "skip_tokenizer_init": True,
            "page_size": 64,
            "log_level": "info",
            "random_seed": 0,
        }
        if settings is not None:
            arguments |= cache_arguments(settings)
        variables = {**ASLEEP, **(environment or {})}
        super().__init__(DRIVER, log, {**arguments, **engine_arguments}, variables, start_timeout_s)

    def generate(self, ids: Sequence[int], max_tokens: int = 16, *, timeout_s: float = RUN_TIMEOUT_S, **more: Any) -> SGLangResult:
        """One request, alone. `more` are fields of SGLangRequest."""
        sampling = {"max_new_tokens": max_tokens, **more.pop("sampling", {})}
        return self.run([SGLangRequest(ids=list(ids), sampling=sampling, **more)], timeout_s=timeout_s)[0]

    def run(self, requests: Sequence[SGLangRequest], *, together: bool = False, timeout_s: float = RUN_TIMEOUT_S) -> list[SGLangResult]:
        answer = self._ask(timeout_s, do="together" if together else "run", requests=msgspec.to_builtins(requests))
        return msgspec.convert(answer, list[SGLangResult])

    def traffic(
        self, requests: Mapping[str, SGLangRequest], seconds: float, *, at_once: int = 1, timeout_s: float = RUN_TIMEOUT_S
    ) -> list[Result]:
        """See sglang_driver.Driver.traffic. Blocks; to do something meanwhile, call it on another thread."""
        asked = msgspec.to_builtins(dict(requests))
        answer = self._ask(seconds + timeout_s, do="traffic", requests=asked, seconds=seconds, at_once=at_once)
        return msgspec.convert(answer, list[Result])

    def metrics(self) -> dict[str, float]:
        """Of an engine with `enable_metrics`."""
        return dict(self._ask(30, do="metrics"))

    def flush(self) -> bool:
        """Empty the engine's own caches, on device and host."""
        return bool(self._ask(30, do="flush"))


def namespace_in(folder: Path) -> KVNamespace:
    """Of an engine that was started with LOADED = folder."""
    return KVNamespace.decode(bytes.fromhex((folder / "namespace").read_text()))


def cache_arguments(settings: Mapping[str, Any], backend: str = "mooncake") -> dict[str, Any]:
    """SGLang's arguments for a storage backend with these settings. Short prompts are looked up too: 64 tokens, by default SGLang asks its
    storage from 256 on."""
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_storage_backend": backend,
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": 64, **settings}),
    }
