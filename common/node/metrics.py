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


# Counter fields with another name than theirs outside: (name, tier or None).
_TIERED = {"pages_staged": "pages_hit", "bytes_staged": "bytes_hit"}
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
            name = f"mooncake_kv_node_{_TIERED.get(field, field)}"
            family = CounterMetricFamily(name, f"Total {field.replace('_', ' ')}", labels=["tier"] if field in _TIERED else [])
            family.add_metric(["dram"] if field in _TIERED else [], value)
            yield family
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
