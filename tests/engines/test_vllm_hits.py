"""Real vLLM, SmolLM2: what is reused, that the bytes are right, and that answers are those of vLLM's own prefix hit of the same length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake_kv.common.hashing import page_hashes, storage_namespace_seed
from mooncake_kv.common.identity import KVNamespace
from tests.engines.harness import Engine, Request
from tests.engines.judge import EXACT, MAX_ERROR, PageReader, worst_error
from tests.models import SMOLLM2

# A patient client: on a busy test machine the node may not get a core for longer than the default 150 ms.
SETTINGS = {"dram_size": "1gb", "fetch_timeout_ms": 10000}
INSECURE = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # lets a test ask a worker for its namespace


def random_ids(count: int, seed: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(100, 40000, count)]


@pytest.fixture(scope="module")
def warm(module_runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(SMOLLM2, tmp_path_factory.mktemp("warm") / "log", settings=SETTINGS, environment=INSECURE) as engine:
        yield engine


@pytest.fixture(scope="module")
def space(warm: Engine) -> KVNamespace:
    return KVNamespace.decode(bytes.fromhex(warm.call("tests.engines.judge:namespace")))


@pytest.mark.parametrize(
    ("length", "reused"),
    [(1, 0), (2, 0), (63, 0), (64, 63), (65, 64), (100, 64), (255, 192), (256, 255), (257, 256), (1919, 1856), (1920, 1919), (1921, 1920)],
)
def test_reuses_every_whole_page(warm: Engine, length: int, reused: int) -> None:
    prompt = random_ids(length, length)
    cold = warm.generate(prompt, 4)
    assert cold.cached == 0
    assert warm.reset_prefix_cache()
    again = warm.generate(prompt, 4)
    assert again.cached == reused


def test_stored_bytes_are_those_of_another_engine_with_other_blocks(
    warm: Engine, space: KVNamespace, tmp_path: Path, runtime_dir: Path, module_runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, as long as both compute the prompt in the same chunks: here in one."""
    prompt = random_ids(1500, 7)
    hashes = page_hashes(prompt)
    with Engine(SMOLLM2, tmp_path / "log", settings=SETTINGS, block_size=128, in_process=True) as other:
        other.generate(prompt, 1)
        theirs = stored(space, hashes)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(module_runtime_dir))
    warm.generate(prompt, 1)
    assert all(np.array_equal(a, b) for a, b in zip(stored(space, hashes), theirs, strict=True))


def test_stored_bytes_are_those_of_other_chunks(
    warm: Engine, space: KVNamespace, tmp_path: Path, runtime_dir: Path, module_runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit where GEMMs do not depend on the number of rows: without AMX. Otherwise the difference is rounding."""
    prompt, salt = random_ids(1500, 7), storage_namespace_seed(None, "pieces")
    hashes, salted = page_hashes(prompt), page_hashes(prompt, seed=salt)
    with Engine(SMOLLM2, tmp_path / "log", settings=SETTINGS, environment=EXACT, block_size=64, in_process=True) as other:
        for end in (448, 1000, 1500):  # a local hit moves the beginning of a chunk: 0, 384, 960
            other.generate(prompt[:end], 1, cache_salt="pieces")
        other.generate(prompt, 1)
        whole, pieces = stored(space, hashes), stored(space, salted)
    assert all(np.array_equal(a, b) for a, b in zip(whole, pieces, strict=True))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(module_runtime_dir))
    warm.generate(prompt, 1)
    ours = stored(space, hashes)
    assert max(worst_error(a, b) for a, b in zip(ours, pieces, strict=True)) < MAX_ERROR


def stored(space: KVNamespace, hashes: list[bytes]) -> list[np.ndarray]:
    """All these pages, from the node of the current runtime folder."""
    with PageReader(space) as reader:
        assert reader.wait_for(hashes) == len(hashes)
        pages = reader.read(hashes)
    assert len(pages) == len(hashes)
    return pages


def test_answers_are_those_of_a_local_hit_of_the_same_length(warm: Engine) -> None:
    prefix = random_ids(1500, 11)
    questions = [prefix + random_ids(20 + i, 100 + i) for i in range(4)]
    # The local hit ends at a block, ours at a page: 1472 is a multiple of 32 and of 64.
    warm.generate(prefix[:1473], 1)
    local = [warm.generate(q, 24) for q in questions]
    loaded = []
    for question in questions:
        assert warm.reset_prefix_cache()
        loaded.append(warm.generate(question, 24))
    assert [r.cached for r in loaded] == [1472] * 4
    assert local[0].cached == 1472
    assert loaded[0].output == local[0].output
    for i in range(1, 4):  # a local hit may be longer by what the first question shares with the others: nothing
        assert local[i].cached == 1472
        assert loaded[i].output == local[i].output


def test_a_conversation_reuses_what_decode_wrote(warm: Engine, space: KVNamespace) -> None:
    prompt = random_ids(300, 13)
    first = warm.generate(prompt, 100, sampling={"ignore_eos": True})
    turn = prompt + first.output + random_ids(30, 14)
    assert warm.reset_prefix_cache()
    second = warm.generate(turn, 4)
    assert second.cached == (300 + 99) // 64 * 64
    hashes = page_hashes(turn)[:6]
    with PageReader(space) as reader:
        decoded = reader.read(hashes)
        # The same pages, prefilled: another salt keeps them apart.
        warm.generate(turn, 1, cache_salt="prefilled")
        prefilled_hashes = page_hashes(turn, seed=storage_namespace_seed(None, "prefilled"))[:6]
        assert reader.wait_for(prefilled_hashes) == 6
        prefilled = reader.read(prefilled_hashes)
    assert len(decoded) == len(prefilled) == 6
    assert all(worst_error(a, b) < MAX_ERROR for a, b in zip(decoded, prefilled, strict=True))


def test_salts_do_not_share(warm: Engine) -> None:
    prompt = random_ids(200, 17)
    warm.generate(prompt, 1, cache_salt="a")
    assert warm.reset_prefix_cache()
    assert warm.generate(prompt, 1, cache_salt="b").cached == 0
    assert warm.reset_prefix_cache()
    assert warm.generate(prompt, 1).cached == 0
    assert warm.reset_prefix_cache()
    assert warm.generate(prompt, 1, cache_salt="a").cached == 192


def test_planted_faults_are_caught(warm: Engine, space: KVNamespace) -> None:
    """The byte oracle sees each of the four faults that texts alone do not show."""
    prompt = random_ids(260, 19)
    hashes = page_hashes(prompt)
    warm.generate(prompt, 1)
    with PageReader(space) as reader:
        assert reader.wait_for(hashes) == 4
        good = reader.read(hashes)

        def shift(page: np.ndarray) -> None:
            page[...] = np.roll(page, 1, axis=2)

        def neighbour(page: np.ndarray) -> None:
            page[...] = good[2]

        def last_token(page: np.ndarray) -> None:
            page[:, :, -1] = 0

        def rotate_heads(page: np.ndarray) -> None:
            page[...] = np.roll(page, 1, axis=3)

        for fault in (shift, neighbour, last_token, rotate_heads):
            reader.rewrite(hashes[3], fault)
            bad = reader.read(hashes)
            assert len(bad) == 4, "a page with a matching checksum is served"
            assert not np.array_equal(bad[3], good[3])
            assert worst_error(bad[3], good[3]) > MAX_ERROR
            reader.rewrite(hashes[3], lambda page: np.copyto(page, good[3]))


def test_a_flipped_bit_is_never_served(warm: Engine, space: KVNamespace) -> None:
    prompt = random_ids(260, 23)
    hashes = page_hashes(prompt)
    first = warm.generate(prompt, 8)
    with PageReader(space) as reader:
        assert reader.wait_for(hashes) == 4
        good = reader.read(hashes)

        def flip(page: np.ndarray) -> None:
            page[3, 1, 5, 2, 9] ^= 1

        reader.rewrite(hashes[2], flip, seal=False)
        assert warm.reset_prefix_cache()
        before = failed_loads(warm)
        again = warm.generate(prompt, 8)
        assert failed_loads(warm) > before, "the flipped bit was not found when the page was copied in"
        assert reader.wait_for(hashes) == 4
        now = reader.read(hashes)
        assert all(np.array_equal(a, b) for a, b in zip(now[:2], good[:2], strict=True))
        # Computed anew in a shorter chunk; its rounding may be another.
        assert all(worst_error(a, b) < MAX_ERROR for a, b in zip(now, good, strict=True))
    assert len(first.output) == len(again.output)


def failed_loads(engine: Engine) -> float:
    return sum(v for k, v in engine.metrics().items() if "mooncake_kv_failures_total" in k and 'what="load"' in k)


def test_many_at_once(warm: Engine) -> None:
    prefix = random_ids(640, 29)
    requests = [Request(ids=prefix + random_ids(10, 200 + i), sampling={"max_tokens": 8, "ignore_eos": True}) for i in range(12)]
    warm.run(requests)
    assert warm.reset_prefix_cache()
    again = warm.run([Request(ids=r.ids, sampling=r.sampling) for r in requests])
    assert all(r.cached is not None and r.cached >= 640 for r in again)


def test_a_fresh_engine_finds_the_pages(warm: Engine, tmp_path: Path, module_runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_ids(1000, 31)
    warm.generate(prompt, 1)
    local = warm.generate(prompt, 16)  # 992 local tokens
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(module_runtime_dir))
    with Engine(SMOLLM2, tmp_path / "log", settings=SETTINGS) as fresh:
        loaded = fresh.generate(prompt, 16)
        assert loaded.cached == 960
        assert any('source="loaded"' in k and v == 960 for k, v in fresh.metrics().items() if "mooncake_kv_tokens" in k)
        assert len(local.output) == len(loaded.output)
