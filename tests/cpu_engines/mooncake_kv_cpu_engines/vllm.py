"""General plugin for vLLM's CPU build: what a GPU engine or another CPU would do, on request.

- `MOONCAKE_KV_TEST_ASYNC=1`: asynchronous scheduling, the default on GPUs, which the CPU platform forces off though it runs there.
- `MOONCAKE_KV_TEST_ISA=vec`: the attention layout of a CPU without AMX. Only replaces `amx`: a head size or block size that already
  leads to another layout keeps it.
- `MOONCAKE_KV_TEST_FAULT=FILE`, `MOONCAKE_KV_TEST_UNPROTECTED=WHAT`: see `faults`.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from . import faults
from .faults import FAULT, UNPROTECTED

ASYNC = "MOONCAKE_KV_TEST_ASYNC"
ISA = "MOONCAKE_KV_TEST_ISA"


def register() -> None:
    """Idempotent; called by vLLM in each of its processes."""
    if os.environ.get(ASYNC) == "1":
        _force_async_scheduling()
    if isa := os.environ.get(ISA):
        if isa != "vec":
            raise ValueError(f"{ISA}={isa!r}: only 'vec' can stand in for 'amx' on every x86 CPU")
        _replace_amx(isa)
    if os.environ.get(FAULT):
        _plant_faults()


def _plant_faults() -> None:
    """In a worker, once it knows its rank."""
    from mooncake_kv.vllm_plugin.connector import MooncakeKVConnector

    original = MooncakeKVConnector.register_kv_caches
    if getattr(original, "mooncake_kv_test", False):
        return

    def register_kv_caches(self: Any, kv_caches: Any) -> None:
        if what := os.environ.get(UNPROTECTED):
            faults.unprotect(what)
        faults.install(self._vllm_config.parallel_config.rank)
        original(self, kv_caches)

    register_kv_caches.mooncake_kv_test = True  # type: ignore[attr-defined]
    MooncakeKVConnector.register_kv_caches = register_kv_caches  # type: ignore[method-assign]


def _force_async_scheduling() -> None:
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config
    if getattr(original, "mooncake_kv_test", False):
        return

    def check_and_update_config(cls: type[CpuPlatform], vllm_config: Any) -> None:
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    check_and_update_config.mooncake_kv_test = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _replace_amx(isa: str) -> None:
    from vllm.v1.attention.backends import cpu_attn

    original = cpu_attn._get_attn_isa
    if getattr(original, "mooncake_kv_test", False):
        return

    @functools.wraps(original)  # the plugin checks the parameters
    def _get_attn_isa(*args: Any, **kwargs: Any) -> str:
        chosen = original(*args, **kwargs)
        return isa if chosen == "amx" else chosen

    _get_attn_isa.mooncake_kv_test = True  # type: ignore[attr-defined]
    cpu_attn._get_attn_isa = _get_attn_isa
