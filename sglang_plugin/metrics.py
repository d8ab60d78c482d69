"""The backend's numbers in SGLang's own `/metrics`, under `--enable-metrics`.

Promises: every metric is a sum since the process started, so adding intervals and ranks is always right; a backend attached later goes on
counting where the one before it ended. Nothing is registered in a process whose metrics nobody asked for.

SGLang collects metrics of several processes through files that prometheus_client writes (PROMETHEUS_MULTIPROC_DIR, set before its processes
start), so counters made in a scheduler's process show up in the server's answer.
"""

from __future__ import annotations

from collections import Counter as Sums
from collections.abc import Mapping
from functools import cache
from typing import Any

from prometheus_client import Counter

# Counter of the store -> metric, its label, the label's value.
_METRICS: dict[str, tuple[str, str, str]] = {
    "loaded_tokens_dram": ("loaded_tokens", "tier", "dram"),
    "loaded_tokens_ssd": ("loaded_tokens", "tier", "ssd"),
    "loaded_tokens_pool": ("loaded_tokens", "tier", "pool"),
    "asked_pages": ("pages", "event", "asked"),
    "found_pages": ("pages", "event", "found"),
    "loaded_pages": ("pages", "event", "loaded"),
    "missed_pages": ("pages", "event", "not_loaded"),
    "bad_pages": ("pages", "event", "damaged"),
    "saved_pages": ("pages", "event", "saved"),
    "unsaved_pages": ("pages", "event", "not_saved"),
    "failed_loads": ("failures", "what", "load"),
    "failed_saves": ("failures", "what", "save"),
    "no_room": ("failures", "what", "no_room"),
    "look_us": ("call_microseconds", "call", "exists"),
    "load_us": ("call_microseconds", "call", "get"),
    "save_us": ("call_microseconds", "call", "set"),
    "loaded_bytes": ("bytes", "direction", "in"),
    "saved_bytes": ("bytes", "direction", "out"),
}
_HELP = {
    "loaded_tokens": "Tokens whose KV was copied into the host pool, by the tier that had it.",
    "pages": "Pages that SGLang asked about and that were found; pages read, not read, damaged, written, not written.",
    "failures": "Reads and writes that ended in an error; writes for which the node had no room in time.",
    "bytes": "KV bytes copied into (in) and out of (out) the host pool by this rank.",
    "call_microseconds": "Time that SGLang's storage threads spent in our calls, with the time they waited for the node.",
}


class Metrics:
    """Of one rank. `labels` are those of SGLang's own storage metrics."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._seen: Sums[str] = Sums()

    def collect(self, counters: Mapping[str, int]) -> None:
        """Add what the store's counters have grown by since the last time."""
        for name, (metric, label, value) in _METRICS.items():
            grown = counters.get(name, 0) - self._seen[name]
            if grown > 0:
                self._seen[name] += grown
                counter = _counter(metric, (*self._labels, label))
                counter.labels(**self._labels, **{label: value}).inc(grown)


@cache
def _counter(metric: str, labels: tuple[str, ...]) -> Any:
    """Registered once a process, however often a backend is attached."""
    return Counter(f"sglang:mooncake_kv_{metric}", _HELP[metric], labels)
