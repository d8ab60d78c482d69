"""Real vLLM under awkward schedules: chunks, preemption, aborts, resets, speculation, prefixes beyond the arena.

After each, every page that anybody can see is judged against the same tokens prefilled in one go, and nothing may be held any more.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from mooncake_kv.common.hashing import page_hashes
from mooncake_kv.common.identity import KVNamespace
from tests.engines.harness import ONE_THREAD, Engine, Request, Result
from tests.engines.judge import EXACT, MAX_ERROR, PageReader, judge_pages
from tests.engines.test_vllm_hits import INSECURE, random_ids
from tests.models import TINY_LLAMA, generated_llama

SETTINGS = {"dram_size": "256mb", "extent_size": "64mb", "fetch_timeout_ms": 10000}
ASYNC = {"MOONCAKE_KV_TEST_ASYNC": "1"}


class Bench:
    """An engine in a process of its own, and a reader of its pages."""

    def __init__(self, engine: Engine, reader: PageReader) -> None:
        self.engine, self.reader = engine, reader

    def nothing_is_held(self) -> None:
        held = self.engine.call("tests.engines.probes:held")
        assert not any(held.values()), held

    def judge(self, requests: Sequence[Request], results: Sequence[Result]) -> int:
        """Number of pages that are there, all of them right."""
        judged = judge_pages(self.engine, self.reader, [(r.ids, result.output) for r, result in zip(requests, results, strict=True)])
        print(judged)
        assert judged.different == 0
        assert judged.worst < MAX_ERROR
        return judged.pages

    def metric(self, name: str) -> float:
        return sum(value for key, value in self.engine.metrics().items() if key.startswith(f"vllm:{name}_total"))


@contextmanager
def bench(folder: Path, environment: dict[str, str], settings: dict[str, object] = SETTINGS, **arguments: object) -> Iterator[Bench]:
    model, log = generated_llama(TINY_LLAMA), folder / "log"
    variables = {**INSECURE, **EXACT, **ONE_THREAD, **environment}
    with Engine(model, log, settings=settings, environment=variables, in_process=True, **arguments) as engine:
        space = KVNamespace.decode(bytes.fromhex(engine.call("tests.engines.judge:namespace")))
        assert engine.call("tests.engines.probes:asynchronous") == (environment == ASYNC)
        with PageReader(space, settings) as reader:
            yield Bench(engine, reader)


def requests_of(count: int, length: int, tokens: int, seed: int, shared: int = 0) -> list[Request]:
    """`count` prompts of `length` tokens, the first `shared` of them the same, that each generate `tokens`."""
    prefix, sampling = random_ids(shared, seed), {"max_tokens": tokens, "ignore_eos": True}
    return [Request(ids=prefix + random_ids(length - shared, seed + 1 + i), sampling=sampling) for i in range(count)]


def again(requests: Sequence[Request]) -> list[Request]:
    return [Request(ids=r.ids, sampling=r.sampling) for r in requests]


# ---- room for few blocks, small chunks -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[(32, {}), (64, {}), (32, ASYNC)], ids=["32", "64", "32-async"])
def cramped(request: pytest.FixtureRequest, module_runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Chunks of 96 tokens, which end in the middle of pages, and blocks for 1,536 tokens."""
    block, environment = request.param
    room = {"block_size": block, "num_gpu_blocks_override": 1536 // block, "max_model_len": 1024}
    with bench(tmp_path_factory.mktemp("cramped"), environment, max_num_batched_tokens=96, **room) as made:
        yield made


def test_chunks_that_end_within_pages(cramped: Bench) -> None:
    requests = requests_of(3, 500, 20, seed=1000)
    results = cramped.engine.run(requests)
    cramped.nothing_is_held()
    assert cramped.judge(requests, results) == 3 * (519 // 64)
    assert cramped.engine.reset_prefix_cache()
    loaded = cramped.engine.run(again(requests))
    assert [r.cached for r in loaded] == [448] * 3


def test_preempted_requests_store_right_pages(cramped: Bench) -> None:
    before = cramped.metric("num_preemptions")
    requests = requests_of(6, 380, 130, seed=2000, shared=200)
    results = cramped.engine.run(requests)
    assert all(len(r.output) == 130 for r in results)
    assert cramped.metric("num_preemptions") > before, "nothing was preempted"
    cramped.nothing_is_held()
    # The same pages once more, loaded this time, and preempted again in between.
    assert cramped.engine.reset_prefix_cache()
    before = cramped.metric("num_preemptions")
    second = cramped.engine.run(again(requests))
    assert cramped.metric("num_preemptions") > before
    cramped.nothing_is_held()
    assert cramped.judge(requests, results) == 3 + 6 * (509 // 64 - 3)
    cramped.judge(requests, second)


def test_aborts_leave_nothing_behind(cramped: Bench) -> None:
    """In the middle of a prefill, of a decode, right away; others go on."""
    requests = requests_of(7, 400, 40, seed=3000, shared=130)
    for i, steps in enumerate((1, 2, 3, 5)):
        requests[i].abort_after_steps = steps
    requests[4].abort_after_tokens = 1
    requests[5].abort_after_tokens = 25
    results = cramped.engine.run(requests)
    assert [r.finish for r in results] == ["abort"] * 6 + ["length"]
    cramped.nothing_is_held()
    assert cramped.engine.reset_prefix_cache()
    loads = again(requests)
    for i, request in enumerate(loads[:4]):
        request.abort_after_steps = i + 1
    loaded = cramped.engine.run(loads)
    assert [r.finish for r in loaded[4:]] == ["length"] * 3
    cramped.nothing_is_held()
    assert cramped.judge(loads, loaded) >= 2 + 3 * 4


def test_an_abort_while_the_node_is_staging(cramped: Bench) -> None:
    requests = requests_of(2, 400, 8, seed=4000)
    cramped.engine.run(requests)
    cramped.nothing_is_held()
    assert cramped.engine.reset_prefix_cache()
    asked = again(requests)
    for request in asked:
        request.abort_after_steps = 20
    os.kill(cramped.reader.node_pid, signal.SIGSTOP)
    try:
        results = cramped.engine.run(asked)
    finally:
        os.kill(cramped.reader.node_pid, signal.SIGCONT)
    assert [(r.finish, r.output) for r in results] == [("abort", [])] * 2, "the node was stopped, so staging could not end"
    cramped.nothing_is_held()
    loaded = cramped.engine.run(again(requests))
    assert [r.cached for r in loaded] == [384] * 2


def test_prefix_cache_resets_under_load(cramped: Bench) -> None:
    """Each reset preempts all that runs."""
    requests = requests_of(5, 350, 60, seed=5000, shared=150)
    results = cramped.engine.run(requests, reset_every=7)
    assert all(len(r.output) == 60 for r in results)
    cramped.nothing_is_held()
    assert cramped.judge(requests, results) >= 2 + 5 * 3


def test_resetting_the_connector_forgets_this_namespace_only(cramped: Bench) -> None:
    ids = random_ids(300, 6000)
    cramped.engine.generate(ids, 1)
    hashes = page_hashes(ids)
    assert cramped.reader.wait_for(hashes) == 4
    with PageReader(msgspec.structs.replace(cramped.reader.namespace, tenant="other"), SETTINGS) as neighbour:
        for page_hash in hashes:
            neighbour.store(page_hash)
        assert cramped.engine.reset_prefix_cache(reset_connector=True)
        deadline = time.monotonic() + 10
        while cramped.reader.count(hashes) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert cramped.reader.count(hashes) == 0
        assert neighbour.count(hashes) == 4
    assert cramped.engine.generate(ids, 1).cached == 0
    assert cramped.engine.reset_prefix_cache()
    assert cramped.reader.wait_for(hashes) == 4
    assert cramped.engine.generate(ids, 1).cached == 256
    cramped.nothing_is_held()


# ---- speculation ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [32, 64, 128])
def test_rejected_drafts_are_never_saved(runtime_dir: Path, tmp_path: Path, block: int) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with bench(tmp_path, {}, speculative_config=speculation, block_size=block) as made:
        # Seven different tokens and no rest with any of them: every end of the text has occurred before, so something is drafted, and
        # often it goes on in another way this time.
        few = list(range(100, 107))
        sampling = {"max_tokens": 150, "ignore_eos": True, "allowed_token_ids": few, "frequency_penalty": 0.3}
        requests = [Request(ids=[few[x % 7] for x in random_ids(200 + i, 7000 + i)], sampling=sampling) for i in range(4)]
        results = made.engine.run(requests)
        drafted, accepted = made.metric("spec_decode_num_draft_tokens"), made.metric("spec_decode_num_accepted_tokens")
        print(json.dumps({"block": block, "drafted": drafted, "accepted": accepted}))
        assert drafted > accepted + 50, "no draft was rejected"
        made.nothing_is_held()
        assert made.judge(requests, results) >= 4 * 5 - 2
        assert made.engine.reset_prefix_cache()
        turn = [Request(ids=r.ids + result.output, sampling={"max_tokens": 4}) for r, result in zip(requests, results, strict=True)]
        assert all((r.cached or 0) >= 256 for r in made.engine.run(turn)), "decode pages are found by the next turn"


# ---- a small arena -------------------------------------------------------------------------------------------------------------------


def test_prefixes_beyond_the_arena(runtime_dir: Path, tmp_path: Path) -> None:
    """64 requests whose prefixes are four times the arena, many at once; and nothing that decode wrote is kept."""
    settings = {"dram_size": "16mb", "extent_size": "4mb", "fetch_timeout_ms": 10000, "save_decode": False}
    with bench(tmp_path, {}, settings, max_model_len=1024, max_num_seqs=16) as made:
        slots = (16 << 20) // made.reader.layout.slot_bytes
        requests = requests_of(64, 4 * slots // 64 * 64 + 70, 8, seed=8000)
        for _ in range(2):
            results = made.engine.run(again(requests))
            assert all(len(r.output) == 8 for r in results)
            made.nothing_is_held()
            assert made.engine.reset_prefix_cache()
        held = [r.ids for r in requests if made.reader.count(page_hashes(r.ids))]
        assert held
        long = Request(ids=random_ids(100, 8500), sampling={"max_tokens": 200, "ignore_eos": True})
        result = made.engine.run([long])[0]
        made.nothing_is_held()
        hashes = page_hashes(long.ids + result.output)
        assert made.engine.reset_prefix_cache()
        assert made.reader.wait_for(hashes[:1]) == 1
        assert made.reader.count(hashes) == 1, "save_decode is off"
        assert made.engine.generate(long.ids + result.output, 1).cached == 64
