"""The connector's counters on their way from LMDeploy's engine to its server's /metrics, and the engine's log line."""

from __future__ import annotations

import logging
import pickle
from collections import Counter

import lmdeploy.metrics.stats as stats  # the plugin wraps it when it is imported
import pytest
from lmdeploy.messages import ScheduleMetrics
from prometheus_client import REGISTRY, generate_latest

from mooncake_kv.lmdeploy_plugin import metrics


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_reported", {})
    monkeypatch.setattr(metrics, "_halves", metrics.defaultdict(list))


def report(engine: str) -> None:
    """What an engine's process sends, as the server's process receives it."""
    sent = ScheduleMetrics(active_seqs=3)
    setattr(sent, metrics.ATTRIBUTE, (engine, metrics.counts(engine)))
    stats.SchedulerStats().update_from_schedule_metrics(pickle.loads(pickle.dumps(sent)))


def shown(name: str) -> float | None:
    lines = [line for line in generate_latest(REGISTRY).decode().splitlines() if line.startswith(f"lmdeploy:mooncake_kv_{name} ")]
    return float(lines[0].split()[-1]) if lines else None


def test_counters_of_all_halves_and_engines_are_added_and_only_grow() -> None:
    name = 'loaded_tokens_total{tier="ssd"}'
    assert shown(name) is None, "an engine without the connector shows nothing"
    scheduler, worker = Counter({"loaded_tokens_ssd": 64, "misses": 1}), Counter({"loaded_bytes": 1000})
    metrics.count("first", scheduler)
    metrics.count("first", worker)
    try:
        report("first")
        assert shown(name) == 64
        scheduler["loaded_tokens_ssd"] += 128
        report("first")
        assert (shown(name), shown('bytes_total{direction="in"}'), shown('no_load_total{reason="miss"}')) == (192, 1000, 1)
        metrics.count("second", Counter({"loaded_tokens_ssd": 8}))
        report("second")
        assert shown(name) == 200, "an engine that was replaced still counts"
    finally:
        for collector in [c for c in REGISTRY._collector_to_names if isinstance(c, metrics._Collector)]:
            REGISTRY.unregister(collector)


def test_an_engine_without_the_connector_is_read_as_ever() -> None:
    found = stats.SchedulerStats()
    found.update_from_schedule_metrics(ScheduleMetrics(active_seqs=3, waiting_seqs=2))
    assert (found.num_running_reqs, found.num_waiting_reqs) == (3, 2)


def test_the_log_line_comes_at_most_every_ten_seconds(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    counters: Counter[str] = Counter(requests=1)
    summary = metrics.Summary(counters)
    ours = logging.getLogger("mooncake_kv")
    monkeypatch.setattr(ours, "propagate", True)
    with caplog.at_level(logging.INFO, "mooncake_kv"):
        summary.log()
        assert not caplog.records, "nothing has been loaded, saved or missed"
        counters.update(prompt_tokens=300, local_tokens=64, loaded_tokens=192, loaded_tokens_dram=128, loaded_tokens_ssd=64, saved_pages=2)
        summary.log()
        counters.update(prompt_tokens=100, misses=1)
        summary.log()
        now[0] += metrics.LOG_S
        summary.log()
    assert [record.getMessage() for record in caplog.records] == [
        "of 300 prompt tokens 64 from LMDeploy's own cache, 192 loaded (dram 128, ssd 64); saved_pages 2",
        "of 100 prompt tokens 0 from LMDeploy's own cache, 0 loaded; misses 1",
    ]
