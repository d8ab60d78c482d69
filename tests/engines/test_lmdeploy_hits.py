"""Real LMDeploy, SmolLM2: what is reused, that the bytes are right, and that answers are those of LMDeploy's own prefix hit of the same
length."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake_kv.common.hashing import page_hashes, storage_namespace_seed
from mooncake_kv.common.identity import KVNamespace
from tests.engines.documents import PAGES, prompts
from tests.engines.judge import MAX_ERROR, PageReader, worst_error
from tests.engines.lmdeploy_harness import LMDeployEngine, LMDeployRequest, LMDeployServer
from tests.engines.test_vllm_hits import random_ids
from tests.models import SMOLLM2
from tests.node.scripted_peer import until

pytestmark = pytest.mark.timeout(300)

# A patient client: on a busy test machine the node may not get a core for longer than the default 150 ms.
SETTINGS = {"dram_size": "1gb", "extent_size": "64mb", "fetch_timeout_ms": 10000}
PROBES = "tests.engines.lmdeploy_probes:"


def counter(engine: LMDeployEngine, name: str) -> int:
    return int(engine.call(f"{PROBES}counters").get(name, 0))


@pytest.fixture(scope="module")
def warm(module_runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMDeployEngine]:
    """With prefix caching."""
    log = tmp_path_factory.mktemp("warm") / "log"
    with LMDeployEngine(SMOLLM2, log, settings=SETTINGS, enable_prefix_caching=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def reader(warm: LMDeployEngine) -> Iterator[PageReader]:
    with PageReader(KVNamespace.decode(bytes.fromhex(warm.call(f"{PROBES}namespace"))), SETTINGS) as made:
        yield made


@pytest.mark.parametrize(("length", "reused"), [(63, 0), (65, 64), (100, 64), (255, 192), (256, 192), (257, 256)])
def test_reuses_every_whole_page_below_the_last_token(warm: LMDeployEngine, reader: PageReader, length: int, reused: int) -> None:
    prompt = random_ids(length, length)
    assert warm.generate(prompt, 4).cached == 0
    hashes = page_hashes(prompt)
    assert reader.wait_for(hashes) == len(hashes)
    warm.call(f"{PROBES}forget")
    assert warm.generate(prompt, 4).cached == reused
    assert warm.generate(prompt, 4).cached == reused, "of LMDeploy's own"


def test_an_answer_is_that_of_a_local_hit(warm: LMDeployEngine, reader: PageReader) -> None:
    document = prompts()
    warm.generate(document[0], 24)
    own = [warm.generate(prompt, 24) for prompt in document[1:4]]
    assert all(result.cached == 64 * PAGES for result in own)
    warm.call(f"{PROBES}forget")
    assert reader.wait_for(page_hashes(document[0])) == PAGES
    for prompt, local in zip(document[1:4], own, strict=True):
        loaded = warm.generate(prompt, 24)
        assert (loaded.cached, loaded.output) == (64 * PAGES, local.output)
        warm.call(f"{PROBES}forget")


def test_a_fresh_engine_with_other_blocks_and_no_prefix_cache(warm: LMDeployEngine, reader: PageReader, tmp_path: Path) -> None:
    document = prompts()
    local = warm.generate(document[5], 24)
    local = warm.generate(document[5], 24) if local.cached < 64 * PAGES else local
    assert reader.wait_for(page_hashes(document[5])[:PAGES]) == PAGES
    before = reader.read(page_hashes(document[5])[:PAGES])
    with LMDeployEngine(SMOLLM2, tmp_path / "log", settings=SETTINGS, block_size=16, num_gpu_blocks=1000) as other:
        loaded = other.generate(document[5], 24)
        assert (loaded.cached, loaded.output) == (64 * PAGES, local.output)
        # Its own bytes for the same tokens, under a key that nobody else has.
        other.call(f"{PROBES}salt", salt="other")
        assert other.generate(document[5], 4).cached == 0  # a step that finds no slot granted leaves the rest to the next one
        salted = page_hashes(document[5], seed=storage_namespace_seed(None, "other"))[:PAGES]
        assert reader.wait_for(salted) == PAGES
        theirs = reader.read(salted)
    worst = max(worst_error(a, b) for a, b in zip(before, theirs, strict=True))
    print(f"largest difference of a page computed with blocks of 16 and with blocks of 64: {worst:.4f}")
    assert worst < MAX_ERROR
    assert all(np.array_equal(a, b) for a, b in zip(before, theirs, strict=True)), worst


def test_pages_of_generated_tokens_serve_the_next_turn(warm: LMDeployEngine, reader: PageReader) -> None:
    prompt = random_ids(100, 31)
    answer = warm.generate(prompt, 120, sampling={"ignore_eos": True})
    conversation = [*prompt, *answer.output]
    assert reader.wait_for(page_hashes(conversation[:192])) == 3, "the last two tokens have no KV, or no step that could save it"
    warm.call(f"{PROBES}forget")
    turn = [*conversation, *random_ids(20, 32)]
    loaded = warm.generate(turn, 16)
    assert loaded.cached == 192
    # Filled by decode steps and by a prefill: the same up to rounding.
    ours = reader.read(page_hashes(turn)[:3])
    warm.call(f"{PROBES}forget")
    warm.call(f"{PROBES}salt", salt="prefill")
    warm.generate(turn, 4)
    warm.call(f"{PROBES}salt", salt="")
    salted = page_hashes(turn, seed=storage_namespace_seed(None, "prefill"))[:3]
    assert reader.wait_for(salted) == 3
    assert max(worst_error(a, b) for a, b in zip(ours, reader.read(salted), strict=True)) < MAX_ERROR


def test_many_at_once_and_aborts_hold_on_to_nothing(warm: LMDeployEngine, reader: PageReader) -> None:
    prefix = random_ids(640, 41)
    warm.generate(prefix, 4)
    assert reader.wait_for(page_hashes(prefix)) == 10
    warm.call(f"{PROBES}forget")
    idle = warm.call(f"{PROBES}held")
    warm.call(f"{PROBES}load_pages_a_step", pages=2)
    for round_ in range(3):
        requests = [
            LMDeployRequest(
                ids=[*prefix, *random_ids(70, 50 + 10 * round_ + i)],
                sampling={"max_new_tokens": 40, "ignore_eos": True},
                **({"abort_after_tokens": 1 + i} if i % 2 else {}),
            )
            for i in range(6)
        ]
        results = warm.run(requests, together=True)
        assert [r.finish for r in results[::2]] == ["finish"] * 3 and all(len(r.output) == 40 for r in results[::2])
        assert {r.finish for r in results[1::2]} == {"cancel"}
        warm.call(f"{PROBES}forget")
    warm.call(f"{PROBES}load_pages_a_step", pages=1000)
    assert counter(warm, "loaded_tokens") > 0 and counter(warm, "failed_loads") == 0
    until(lambda: warm.call(f"{PROBES}held") == idle)


def test_reset_forgets_this_namespace(warm: LMDeployEngine, reader: PageReader) -> None:
    prompt = random_ids(300, 61)
    warm.generate(prompt, 4)
    assert reader.wait_for(page_hashes(prompt)) == 4
    warm.call(f"{PROBES}forget")
    assert warm.call(f"{PROBES}reset")
    until(lambda: reader.count(page_hashes(prompt)) == 0)
    assert warm.generate(prompt, 1).cached == 0


def test_pages_outlive_the_engines_sleep(warm: LMDeployEngine, reader: PageReader) -> None:
    prompt = random_ids(500, 81)
    warm.generate(prompt, 4)
    assert reader.wait_for(page_hashes(prompt)) == 7
    warm.call(f"{PROBES}forget")
    loaded = warm.generate(prompt, 8)
    warm.call(f"{PROBES}sleep")
    warm.call(f"{PROBES}wake")
    warm.call(f"{PROBES}forget")
    again = warm.generate(prompt, 8)
    assert (again.cached, again.output) == (448, loaded.output)
    assert {name: value for name, value in warm.call(f"{PROBES}held").items() if value and name != "blocks"} == {}


def test_the_log_says_where_the_tokens_came_from(warm: LMDeployEngine) -> None:
    if "loaded (dram " not in warm.log.read_text():
        time.sleep(11)  # at most one line in ten seconds
        warm.generate(random_ids(70, 71), 1)
    assert "loaded (dram " in warm.log.read_text()


def test_the_server_shows_the_connectors_numbers(runtime_dir: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "idle_exit_s": 60}
    with LMDeployServer(SMOLLM2, tmp_path / "log", settings=settings) as server:
        text = "The quick brown fox jumps over the lazy dog. " * 40
        body = {"model": "m", "prompt": text, "max_tokens": 8, "temperature": 0}
        server.post("/v1/completions", body)
        time.sleep(0.5)
        server.post("/v1/completions", body)
        name = 'lmdeploy:mooncake_kv_loaded_tokens_total{tier="dram"}'

        def shown() -> float:
            lines = [line for line in server.get("/metrics/").splitlines() if line.startswith(name)]
            return float(lines[0].split()[-1]) if lines else 0.0

        assert until(lambda: time.sleep(0.5) or shown(), 30) >= 320
