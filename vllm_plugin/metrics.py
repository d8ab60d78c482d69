"""The connector's numbers in vLLM's own `/metrics` and log line.

Promises: every number is a sum over an interval, so that adding intervals, ranks and halves is always right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ..connectors.calls import percentile_us

# Counter of the two halves -> metric, its label, the label's value.
_METRICS: dict[str, tuple[str, str, str]] = {
    "prompt_tokens": ("tokens", "source", "prompt"),
    "local_tokens": ("tokens", "source", "local_hit"),
    "loaded_tokens": ("tokens", "source", "loaded"),
    "loaded_tokens_dram": ("loaded_tokens", "tier", "dram"),
    "loaded_tokens_ssd": ("loaded_tokens", "tier", "ssd"),
    "loaded_tokens_pool": ("loaded_tokens", "tier", "pool"),
    "misses": ("no_load", "reason", "miss"),
    "timeouts": ("no_load", "reason", "timeout"),
    "loads_cut": ("failures", "what", "load_slower_than_prefill"),
    "node_away": ("no_load", "reason", "node_away"),
    "window_full": ("no_load", "reason", "staging_window_full"),
    "failed_keys_avoided": ("no_load", "reason", "failed_before"),
    "skipped_prompt_embeds": ("no_load", "reason", "prompt_embeds"),
    "skipped_streaming_input": ("no_load", "reason", "streaming_input"),
    "skipped_lora_without_path": ("no_load", "reason", "lora_without_path"),
    "skipped_media_without_hash": ("no_load", "reason", "media_without_hash"),
    "skipped_lora_unreadable": ("no_load", "reason", "lora_unreadable"),
    "skipped_other_weights": ("no_load", "reason", "other_weights"),
    "skipped_worker_unable": ("no_load", "reason", "worker_unable"),
    "saved_pages": ("pages", "event", "saved"),
    "discarded_pages": ("pages", "event", "discarded"),
    "saves_without_slot": ("pages", "event", "no_free_slot"),
    "failed_loads": ("failures", "what", "load"),
    "failed_saves": ("failures", "what", "save"),
    "loaded_bytes": ("bytes", "direction", "in"),
    "saved_bytes": ("bytes", "direction", "out"),
    "load_us": ("copy_microseconds", "direction", "in"),
    "save_us": ("copy_microseconds", "direction", "out"),
}
_HELP = {
    "tokens": "Prompt tokens of started requests: all, found in the engine's own prefix cache, loaded by mooncake-kv.",
    "loaded_tokens": "Prompt tokens loaded by mooncake-kv, by the tier that had them.",
    "no_load": "Requests that loaded nothing, by reason.",
    "pages": "Pages saved, discarded before anybody could see them, and not saved for want of a slot (attempts).",
    "failures": "Copies that failed and were recomputed or dropped; loads cut because computing is faster.",
    "bytes": "KV bytes copied into (in) and out of (out) the engine's blocks.",
    "copy_microseconds": "Time spent copying on the engine's threads.",
    "call_microseconds": "Time spent inside the connector's calls on the engine's threads.",
}


@dataclass
class MooncakeKVStats(KVConnectorStats):
    """`data`: flat name -> sum."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        shown: dict[str, int | float] = {name: value for name, value in self.data.items() if name in _METRICS}
        if asked := percentile_us(self.data, "get_num_new_matched_tokens", 0.99):
            shown["ask_p99_us"] = round(asked)
        return shown

    def is_empty(self) -> bool:
        return not self.data


class MooncakeKVPromMetrics(KVConnectorPromMetrics):
    """Registers the counters once and adds each interval's sums."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        labels = {metric: label for metric, label, _ in _METRICS.values()} | {"call_microseconds": "call"}
        counter = metric_types[Counter]
        self._counters = {
            metric: counter(name=f"vllm:mooncake_kv_{metric}", documentation=_HELP[metric], labelnames=[*labelnames, label])
            for metric, label in labels.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if known := _METRICS.get(name):
                metric, _, label = known
                self._counters[metric].labels(*values, label).inc(value)
            elif name.startswith("call_us/"):
                self._counters["call_microseconds"].labels(*values, name.removeprefix("call_us/")).inc(value)
