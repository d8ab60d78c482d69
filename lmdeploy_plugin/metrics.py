"""The connector's numbers on the `/metrics` of LMDeploy's API server, and in the engine's log.

LMDeploy gives connectors no place for metrics, and its server has the engine in a process of its own. But every ten seconds the server asks
the engine for its scheduler's metrics: our counters ride on the answer, and the server's process shows them in prometheus_client's default
registry. Workers in processes of their own (several ranks) are not asked: what they copied is in their own logs only.

Promise: numbers only grow, also when an engine is replaced.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily

from ..connectors import metrics as common

logger = logging.getLogger("mooncake_kv.lmdeploy")

LOG_S = 10.0
# Attributes of LMDeploy's ScheduleMetrics: (engine, counters) of the connector and of migrations.
ATTRIBUTE = "mooncake_kv_counts"
MIGRATIONS = "mooncake_kv_migrations"
METRICS = common.METRICS | {f"{MIGRATIONS}_{result}": ("migrations", "result", result) for result in ("migrated", "local", "not_fetched")}
HELP = common.HELP | {
    "migrations": "Prompts for a decode engine: migrated, computed there instead, or never fetched from the prefill engine.",
}

# In an engine's process: the counters of each engine's halves.
_halves: defaultdict[str, list[Counter[str]]] = defaultdict(list)
# In the server's: the last that each engine reported.
_reported: dict[str, Mapping[str, int]] = {}


def count(engine: str, counters: Counter[str]) -> None:
    """A half of this engine counts in `counters` from now on."""
    _halves[engine].append(counters)


def counts(engine: str) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counters in _halves[engine]:
        total.update(counters)
    return dict(total)


def read_schedule_metrics(stats: ModuleType) -> None:
    """Take our counters from what an engine reports, in the server's process."""
    plain = stats.SchedulerStats.update_from_schedule_metrics

    @functools.wraps(plain)
    def update_from_schedule_metrics(self: Any, scheduled_metrics: Any) -> Any:
        for attribute in (ATTRIBUTE, MIGRATIONS):
            if (found := getattr(scheduled_metrics, attribute, None)) is not None:
                if not _reported:
                    REGISTRY.register(_Collector())
                _reported[found[0]] = found[1]
        return plain(self, scheduled_metrics)

    stats.SchedulerStats.update_from_schedule_metrics = update_from_schedule_metrics


class _Collector:
    def collect(self) -> Iterator[CounterMetricFamily]:
        total: Counter[str] = Counter()
        for counters in list(_reported.values()):
            total.update(counters)
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
        new = self._counters - self._shown
        tiers = ", ".join(f"{name.removeprefix('loaded_tokens_')} {new[name]}" for name in sorted(new) if name.startswith("loaded_tokens_"))
        rest = ", ".join(
            f"{name} {new[name]}" for name in sorted(new) if name in METRICS and METRICS[name][0] in ("no_load", "failures", "pages")
        )
        if not new["prompt_tokens"] and not rest:
            return
        self._next = now + LOG_S
        self._shown = Counter(self._counters)
        logger.info(
            "of %d prompt tokens %d from LMDeploy's own cache, %d loaded%s%s",
            new["prompt_tokens"],
            new["local_tokens"],
            new["loaded_tokens"],
            f" ({tiers})" if tiers else "",
            f"; {rest}" if rest else "",
        )
