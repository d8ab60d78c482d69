"""When a load from slow tiers is given up because computing is faster."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mooncake_kv.common.node.handles import Fetch
from mooncake_kv.connectors.store import SchedulerHalf
from mooncake_kv.connectors.store.rates import PrefillRate


def prefill(rate: PrefillRate, name: str, tokens: int, tokens_per_s: float, now: float, chunk: int = 1024) -> float:
    """One prompt in chunks and two steps of decode, on an engine that does nothing else; then it idles."""
    rate.begin(name, 0)
    done = 0
    while done < tokens + 2:
        step = max(min(chunk, tokens - done), 1)
        done += step
        rate.scheduled(name, done)
        rate.end_step(now)
        now += step / tokens_per_s if step > 1 else 0.001
    rate.finish(name)
    return now + 100.0


def test_the_rate_is_that_of_prefills_and_not_of_pauses() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s == 0
    now = 0.0
    for i in range(4):
        now = prefill(rate, f"r{i}", 5000, 2000.0, now)
    assert rate.tokens_per_s == pytest.approx(2000, rel=0.01)
    for i in range(12):
        now = prefill(rate, f"s{i}", 5000, 8000.0, now)
    assert 6000 < rate.tokens_per_s < 8100


def test_short_steps_and_loaded_tokens_do_not_count() -> None:
    rate = PrefillRate()
    now = prefill(rate, "short", 200, 1000.0, 0.0)
    assert rate.tokens_per_s == 0
    rate.begin("loaded", 4000)
    rate.begin("loaded", 0)  # asked again after the load
    for end in (4600, 4601):
        rate.scheduled("loaded", end)
        rate.end_step(now)
        now += 0.6
    assert rate.tokens_per_s == pytest.approx(1000)
    rate.scheduled("nothing is saved", 0)
    rate.end_step(now)
    assert rate.tokens_per_s == pytest.approx(1000)


class Node:
    """A client whose fetches never end."""

    ready, epoch, generation, dram_bytes = True, 1, 1, 1 << 30

    def __init__(self) -> None:
        self.fetches: list[Fetch] = []

    def lookup(self, hashes: list[bytes]) -> None:
        return None

    def fetch(self, hashes: list[bytes], limit_bytes: int = 0, *, check: bool = True) -> Fetch:
        self.fetches.append(Fetch(1, 1, 1, 0.15, 2.0))
        self.fetches[-1].started = self.fetches[-1].heard = 0.0
        return self.fetches[-1]

    def release(self, fetch: Fetch) -> None:
        self.fetches.remove(fetch)


def test_a_load_that_takes_longer_than_computing_is_cut_to_what_is_there() -> None:
    node, now = Node(), [0.0]
    client: Any = node
    half = SchedulerHalf(client, "d", page_tokens=64, block_tokens=32, ranks=1, slot_bytes=100, clock=lambda: now[0])
    prefill(half._rate, "r", 8000, 10_000.0, 0.0)
    tokens = [random.Random(1).randrange(1000) for _ in range(6401)]
    for name, staged in (("some", 30), ("none", 0)):
        now[0] = 0.0
        half.arrive(name, tokens)
        assert half.match(name, 0, 6401) is None
        fetch = node.fetches[-1]
        fetch.slow = True
        fetch.slots += list(range(staged))
        fetch.tiers += ["ssd"] * staged
        for now[0] in (0.3, 0.6):  # 6,400 tokens take 0.64 s to compute
            assert half.blind_ask(name) and half.match(name, 0, 6401) is None
        now[0] = 0.7
        assert not half.blind_ask(name)
        assert half.match(name, 0, 6401) == staged * 64
        half.start(name, staged * 64, lambda: list(range(201)))
    assert half.counters["loads_cut"] == 2 and half.counters["loaded_tokens_ssd"] == 30 * 64
