"""The connector's numbers in vLLM's own `/metrics` and log line.

Promises: every number is a sum over an interval, so that adding intervals, ranks and halves is always right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ..connectors.calls import percentile_us
from ..connectors.metrics import HELP, METRICS


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
        shown: dict[str, int | float] = {name: value for name, value in self.data.items() if name in METRICS}
        if asked := percentile_us(self.data, "get_num_new_matched_tokens", 0.99):
            shown["ask_p99_us"] = round(asked)
        return shown

    def is_empty(self) -> bool:
        return not self.data


class MooncakeKVPromMetrics(KVConnectorPromMetrics):
    """Registers the counters once and adds each interval's sums."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        labels = {metric: label for metric, label, _ in METRICS.values()} | {"call_microseconds": "call"}
        counter = metric_types[Counter]
        self._counters = {
            metric: counter(name=f"vllm:mooncake_kv_{metric}", documentation=HELP[metric], labelnames=[*labelnames, label])
            for metric, label in labels.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if known := METRICS.get(name):
                metric, _, label = known
                self._counters[metric].labels(*values, label).inc(value)
            elif name.startswith("call_us/"):
                self._counters["call_microseconds"].labels(*values, name.removeprefix("call_us/")).inc(value)
