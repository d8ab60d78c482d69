"""What the node counts, and the Prometheus endpoint.

Promises: counting costs the event loop one integer addition. A scrape is rendered and served in a thread of its own; the event loop only
makes the snapshot, which takes some 20 us. Names and units are stable: they are what dashboards are built on.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

log = logging.getLogger("mooncake_kv.node")

LOOKUP_BOUNDS_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.02, 0.1)
SCRAPE_S = 1.0
Stats = dict[str, Any]


class Counters(msgspec.Struct):
    """Totals since the node started."""

    fetches: int = 0
    lookups: int = 0
    # Pages asked for in fetches; of these staged, and not there (or not staged for want of room).
    pages_asked: int = 0
    pages_staged: int = 0
    pages_missed: int = 0
    bytes_staged: int = 0
    # Fetches that ended at their deadline.
    fetches_cut: int = 0
    bytes_verified: int = 0
    # Pages whose bytes did not match their trailer.
    pages_bad: int = 0
    pages_committed: int = 0
    bytes_committed: int = 0
    # Committed, but already there, or their extent was on its way out.
    commits_superfluous: int = 0
    pages_evicted: int = 0
    pages_dropped: int = 0
    reservations_expired: int = 0
    extents_recarved: int = 0
    # What clients got wrong: slots they did not hold, rectangles outside the page, connections ended for it, clients not let in.
    bad_slots: int = 0
    bad_rectangles: int = 0
    clients_failed: int = 0
    clients_refused: int = 0


class Latency:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(LOOKUP_BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(LOOKUP_BOUNDS_S, seconds)] += 1
        self.total_s += seconds


# Counter fields that are shown for each tier instead.
_TIERED = frozenset({"pages_staged", "bytes_staged"})
# Numbers of a tier: name outside and help. Those that count end in _total there.
_TIER_COUNTERS = {
    "hit_pages": ("pages_hit", "Pages that fetches got from this tier"),
    "hit_bytes": ("bytes_hit", "Bytes that fetches got from this tier"),
    "read_pages": ("tier_pages_read", "Pages read, also those that nobody waited for any more"),
    "read_bytes": ("tier_bytes_read", "Bytes read"),
    "read_busy_s": ("tier_read_seconds", "Time in which at least one read was running"),
    "write_bytes": ("tier_bytes_written", "Bytes written"),
    "write_busy_s": ("tier_write_seconds", "Time in which at least one write was running"),
    "pages_written": ("tier_pages_written", "Pages written"),
    "pages_unwritten": ("tier_pages_unwritten", "Pages not written for want of room in the queue, or because the tier was away"),
    "pages_failed": ("tier_pages_failed", "Pages that the tier did not take"),
    "pages_bad": ("tier_pages_bad", "Pages that were read and did not match their trailer"),
    "evicted_pages": ("tier_pages_evicted", "Pages that went to make room"),
    "jobs_failed": ("tier_jobs_failed", "Lookups, reads and writes that the tier did not answer, or that were refused while it was away"),
    "outages": ("tier_outages", "How often the tier was taken out of use"),
    "processes_killed": ("tier_processes_killed", "Processes of the tier that died, hung or could not open it"),
}
_TIER_GAUGES = {
    "bytes": ("tier_bytes", "Bytes of pages in this tier"),
    "limit_bytes": ("tier_limit_bytes", "Most bytes of pages in this tier"),
    "pages": ("tier_pages", "Pages in this tier"),
    "queued_bytes": ("tier_queued_bytes", "Bytes of pages that wait to be written or are being written"),
}
_TIER_TIMES = ("leading", "read", "write")
# Keys of the stats that are gauges, with their help.
_GAUGES = {
    "pages": "Pages that can be fetched",
    "namespaces": "Namespaces that hold pages or have clients",
    "arena_bytes": "Bytes of memory in extents",
    "dram_bytes": "Most bytes that extents may have",
    "free_bytes": "Bytes of extents in free slots",
    "leased_pages": "Pages that a client may be reading",
    "leased_bytes": "Bytes of leased pages",
    "granted_slots": "Nameless slots in the hands of schedulers",
    "quarantined_slots": "Slots of ended schedulers whose workers have not answered",
    "reserved_bytes": "Bytes of slots reserved by name",
    "checking": "Batches of pages waiting to be checked or being checked",
    "sealing": "Pages waiting to be sealed or being sealed",
    "clients": "Connected clients of engines",
    "engines": "Engines with a connected client",
    "host_pool_bytes": "Bytes of connected engines' own host memory in which they keep pages too (SGLang)",
    "unsent_bytes": "Bytes that clients have not read yet",
    "uptime_s": "Seconds since the node started",
}


class _Collector(Collector):
    def __init__(self, loop: asyncio.AbstractEventLoop, stats: Callable[[], Stats], counters: Counters, lookups: Latency) -> None:
        self._loop = loop
        self._stats = stats
        self._counters = counters
        self._lookups = lookups

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        answer: Future[tuple[Stats, dict[str, int], list[int], float]] = Future()
        self._loop.call_soon_threadsafe(
            lambda: answer.set_result(
                (self._stats(), msgspec.structs.asdict(self._counters), list(self._lookups.counts), self._lookups.total_s)
            )
        )
        stats, counters, counts, total_s = answer.result(SCRAPE_S)
        for field, value in counters.items():
            if field not in _TIERED:
                yield CounterMetricFamily(f"mooncake_kv_node_{field}", f"Total {field.replace('_', ' ')}", value=value)
        yield from _tier_metrics(stats["tiers"])
        for key, text in _GAUGES.items():
            name = f"mooncake_kv_node_{key}"
            yield GaugeMetricFamily(name, text, value=float(stats[key]))
        buckets, seen = [], 0
        for bound, count in zip((*map(str, LOOKUP_BOUNDS_S), "+Inf"), counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        histogram = HistogramMetricFamily("mooncake_kv_node_lookup_seconds", "Time the event loop spends on a lookup")
        histogram.add_metric([], buckets, total_s)
        yield histogram

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing at registration: the event loop does not run yet."""
        return []


def _tier_metrics(tiers: dict[str, Stats]) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    for key, (name, text) in _TIER_COUNTERS.items():
        counter = CounterMetricFamily(f"mooncake_kv_node_{name}", text, labels=["tier"])
        for tier, stats in tiers.items():
            if key in stats:
                counter.add_metric([tier], stats[key])
        yield counter
    for key, (name, text) in _TIER_GAUGES.items():
        gauge = GaugeMetricFamily(f"mooncake_kv_node_{name}", text, labels=["tier"])
        for tier, stats in tiers.items():
            if key in stats:
                gauge.add_metric([tier], stats[key])
        yield gauge
    up = GaugeMetricFamily("mooncake_kv_node_tier_up", "Whether the tier is in use", labels=["tier"])
    times = GaugeMetricFamily(
        "mooncake_kv_node_tier_milliseconds", "Time of recent jobs, as the node sees it", labels=["tier", "job", "quantile"]
    )
    for tier, stats in tiers.items():
        up.add_metric([tier], stats.get("state", "up") == "up")
        for job in _TIER_TIMES:
            for quantile, suffix in (("0.5", "p50"), ("0.99", "p99")):
                if f"{job}_{suffix}_ms" in stats:
                    times.add_metric([tier, job, quantile], stats[f"{job}_{suffix}_ms"])
    yield up
    yield times


class MetricsServer:
    """Serves /metrics until `close`."""

    def __init__(
        self, host: str, port: int, loop: asyncio.AbstractEventLoop, stats: Callable[[], Stats], counters: Counters, lookups: Latency
    ) -> None:
        """Raises OSError when the address cannot be had. Port 0: any free one."""
        registry = CollectorRegistry()
        registry.register(_Collector(loop, stats, counters, lookups))
        self._server, self._thread = start_http_server(port, host, registry)
        self.address = f"[{host}]:{self._server.server_port}" if ":" in host else f"{host}:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
