"""The connector's numbers on the `/metrics` of LMDeploy's API server, and in its log.

LMDeploy gives connectors no place for metrics, but its server shows prometheus_client's default registry, and the scheduler's half, with
one rank the worker's too, lives in the server's process.

Promises: numbers only grow, also when an engine of the process ends; reading them takes no lock that an engine's thread holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily

from ..connectors.metrics import HELP, METRICS

logger = logging.getLogger("mooncake_kv.lmdeploy")

LOG_S = 10.0

_lock = threading.Lock()
_halves: list[Counter[str]] = []


def show(counters: Counter[str]) -> None:
    """Show a half's counters from now on, added to those of others."""
    with _lock:
        if not _halves:
            REGISTRY.register(_Collector())
        _halves.append(counters)


class _Collector:
    def describe(self) -> list[Any]:
        return []  # names are known, but asking for them must not read anything

    def collect(self) -> Iterator[CounterMetricFamily]:
        total: Counter[str] = Counter()
        for counters in list(_halves):
            total.update(dict(counters))
        families = {
            metric: CounterMetricFamily(f"lmdeploy:mooncake_kv_{metric}", HELP[metric], labels=[label])
            for metric, label, _ in METRICS.values()
        }
        for name, (metric, _, value) in METRICS.items():
            families[metric].add_metric([value], total[name])
        yield from families.values()


class Summary:
    """A log line, at most every LOG_S, of what the scheduler's half did since the last one."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._shown: Counter[str] = Counter()
        self._next = 0.0

    def log(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LOG_S
        new = self._counters - self._shown
        if not new:
            return
        self._shown = Counter(self._counters)
        tiers = ", ".join(f"{name.removeprefix('loaded_tokens_')} {new[name]}" for name in sorted(new) if name.startswith("loaded_tokens_"))
        rest = ", ".join(
            f"{name} {new[name]}" for name in sorted(new) if name in METRICS and METRICS[name][0] in ("no_load", "failures", "pages")
        )
        logger.info(
            "of %d prompt tokens %d from LMDeploy's own cache, %d loaded%s%s",
            new["prompt_tokens"], new["local_tokens"], new["loaded_tokens"], f" ({tiers})" if tiers else "", f"; {rest}" if rest else "",
        )  # fmt: skip
