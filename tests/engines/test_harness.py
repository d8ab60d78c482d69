"""The harness itself, on an engine without connector: what it reports is right, and nothing hangs or stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.harness import Engine, EngineError, Request
from tests.models import generated_llama

IDS = list(range(100, 400))


def sleep(llm: Any, seconds: float) -> None:
    time.sleep(seconds)


def divide(llm: Any, by: int) -> float:
    return 1 / by


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(generated_llama(), tmp_path_factory.mktemp("engine") / "log", in_process=True) as engine:
        yield engine


def test_local_hits_and_reset(engine: Engine) -> None:
    first, again = engine.generate(IDS, 4), engine.generate(IDS, 4)
    assert (first.cached, again.cached) == (0, 288)
    assert len(again.output) == len(again.token_times) == 4 and again.finish == "length"
    assert again.token_times == sorted(again.token_times) and again.ttft_s == again.token_times[0]
    assert engine.reset_prefix_cache()
    assert engine.generate(IDS, 4).cached == 0


def test_salt_separates(engine: Engine) -> None:
    engine.generate(IDS, 1, cache_salt="a")
    assert engine.generate(IDS, 1, cache_salt="b").cached == 0
    assert engine.generate(IDS, 1, cache_salt="a").cached == 288


def test_order_and_abort(engine: Engine) -> None:
    long = Request(ids=IDS[:50], id="long", sampling={"max_tokens": 20, "ignore_eos": True})
    late = Request(
        ids=IDS[50:90], id="late", sampling={"max_tokens": 20, "ignore_eos": True}, after="long", after_tokens=5, abort_after_tokens=3
    )
    first, second = engine.run([long, late])
    assert (len(first.output), first.finish) == (20, "length")
    assert (len(second.output), second.finish) == (3, "abort")
    assert second.added + second.token_times[0] > first.added + first.token_times[4]


def test_metrics(engine: Engine) -> None:
    before = engine.metrics()
    engine.generate(IDS[:100], 1)
    after = engine.metrics()
    name = next(k for k in after if k.startswith("vllm:prompt_tokens_total"))
    assert after[name] - before[name] == 100


def test_errors_carry_their_cause(engine: Engine) -> None:
    assert engine.call("tests.engines.test_harness:divide", by=2) == 0.5
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        engine.call("tests.engines.test_harness:divide", by=0)


def test_a_deadline_ends_the_whole_group(tmp_path: Path) -> None:
    engine = Engine(generated_llama(), tmp_path / "log")
    processes = engine.processes()
    assert len(processes) >= 3, "driver, engine core, worker"
    with pytest.raises(TimeoutError):
        engine.call("tests.engines.test_harness:sleep", seconds=60, timeout_s=0.5)
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive
