"""Page hashes: SGLang's rule to the byte, increments, extras, refusals, speed."""

from __future__ import annotations

import hashlib
import itertools
import struct
import time
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_kv.common.hashing import PageHasher, page_hashes, storage_namespace_seed

# Output of sglang 0.5.23 (get_hash_str with storage_namespace_seed, page size 64) for tokens (i * 2654435761) % 49152, i < 192.
SGLANG_PLAIN = [
    "0e3ae2966f9514d96797963a2b3feb613726d03254bcd27dfd1a563309a018a4",
    "c63cdb0aa8dd65773b1035d41e770a7277e057cded4f4f313f1e1c14809a46b8",
    "58fc7f60a7f956787c8feb5566049f8efcec07996b5319490092b5f39225884f",
]
SGLANG_SEEDED = [
    "39404379246548274d9e76d6d2d80517a2a440a690b425a460bb56641f639f44",
    "1c84051b114abb07941204f64217b26b7d016bd8068314c9c756736287e0e165",
    "f404bf475f8afedfdc5ec0e9754416297b137e1969487b3e9d8abbe174f37f89",
]
TOKENS = [(i * 2654435761) % 49152 for i in range(200)]

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=300)
texts = st.none() | st.text(max_size=20)


def plain(tokens: list[int], page: int, seed: bytes) -> list[bytes]:
    hashes = []
    for start in range(0, len(tokens) - page + 1, page):
        seed = hashlib.sha256(seed + b"".join(struct.pack("<I", t) for t in tokens[start : start + page])).digest()
        hashes.append(seed)
    return hashes


def test_equals_what_sglang_computes() -> None:
    assert [h.hex() for h in page_hashes(TOKENS)] == SGLANG_PLAIN
    assert [h.hex() for h in page_hashes(TOKENS, 64, storage_namespace_seed("lora-a", "salt"))] == SGLANG_SEEDED


@given(token_lists, st.integers(1, 70), texts, texts)
def test_equals_a_plain_implementation(tokens: list[int], page: int, extra_key: str | None, salt: str | None) -> None:
    seed = storage_namespace_seed(extra_key, salt)
    expected = plain(tokens, page, seed)
    for form in (tokens, tuple(tokens), array("I", tokens), array("q", tokens), np.array(tokens, np.uint32), np.array(tokens, np.int64)):
        assert page_hashes(form, page, seed) == expected


@given(token_lists, st.lists(st.integers(0, 300), max_size=8), st.dictionaries(st.integers(0, 20), st.binary(max_size=50), max_size=4))
def test_increments_do_not_matter(tokens: list[int], cuts: list[int], extras: dict[int, bytes]) -> None:
    whole = PageHasher(16)
    whole.extend(tokens, extras)
    parts = PageHasher(16)
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        parts.extend(tokens[low:high], extras if i == 0 else None)
    assert parts.hashes == whole.hashes
    assert parts.tokens == whole.tokens == len(tokens)
    assert len(whole.hashes) == len(tokens) // 16


@given(texts, texts, texts, texts)
def test_seeds_differ(a: str | None, b: str | None, c: str | None, d: str | None) -> None:
    assert (storage_namespace_seed(a, b) == storage_namespace_seed(c, d)) == ((a, b) == (c, d))
    assert len(storage_namespace_seed(a, b)) == (0 if a is None and b is None else 32)


def test_extras_change_their_page_and_all_after() -> None:
    base = page_hashes(TOKENS)
    for page in range(3):
        seen = {tuple(base)}
        for extra in (b"", b"\0", b"\0\0", b"a", b"ab", bytes(300)):
            hasher = PageHasher()
            hasher.extend(TOKENS, {page: extra})
            assert hasher.hashes[:page] == base[:page]
            assert all(a != b for a, b in zip(hasher.hashes[page:], base[page:], strict=True))
            seen.add(tuple(hasher.hashes))
        assert len(seen) == 7


@given(st.binary(max_size=80), st.booleans())
def test_inputs_with_extras_are_of_a_length_that_no_other_page_has(extra: bytes, seeded: bool) -> None:
    inputs: list[bytes] = []

    def recording(data: bytes) -> object:
        inputs.append(data)
        return hashlib.sha256(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mooncake_kv.common.hashing.sha256", recording)
        hasher = PageHasher(4, b"s" * 32 if seeded else b"")
        hasher.extend(range(8), {0: extra})
    with_extras, without = inputs
    assert len(with_extras) % 4 == 2
    assert len(without) % 4 == 0
    assert with_extras[:32] == (b"s" * 32 if seeded else bytes(32))
    assert with_extras[48:56] == len(extra).to_bytes(8, "little")
    assert with_extras[56 : 56 + len(extra)] == extra


def test_late_or_contradicting_extras_are_refused_and_change_nothing() -> None:
    hasher = PageHasher()
    hasher.extend(TOKENS[:100], {1: b"image"})
    with pytest.raises(ValueError, match="page 0 come after"):
        hasher.extend(TOKENS[100:], {0: b"late"})
    with pytest.raises(ValueError, match="page 1 already has other extras"):
        hasher.extend(TOKENS[100:], {1: b"other"})
    hasher.extend(TOKENS[100:], {1: b"image"})
    whole = PageHasher()
    whole.extend(TOKENS, {1: b"image"})
    assert hasher.hashes == whole.hashes


@pytest.mark.parametrize("bad", [-1, 2**32, 2**40, -(2**63), 2**80])
def test_tokens_outside_uint32_are_named(bad: int) -> None:
    forms: list = [[1, bad, 2], (bad,)]
    if -(2**63) <= bad < 2**63:
        forms += [np.array([1, bad, 2]), array("q", [1, bad])]
    for form in forms:
        hasher = PageHasher(1)
        with pytest.raises(ValueError, match=f"token {bad} "):
            hasher.extend(form)
        assert hasher.tokens == 0 and not hasher.hashes


def test_tokens_that_are_no_integers_are_refused() -> None:
    wrong: list = [[1.5], ["a"], [None], np.array([1.5]), np.array([[1]]), np.array([True])]
    for bad in wrong:
        with pytest.raises(ValueError):
            page_hashes(bad)


def test_bad_seed_and_page_size_are_refused() -> None:
    with pytest.raises(ValueError, match="page_tokens"):
        PageHasher(0)
    with pytest.raises(ValueError, match="seed"):
        PageHasher(64, b"short")


def test_128k_tokens_stay_below_6_ms() -> None:
    tokens = list(range(128 * 1024))
    times = []
    for _ in range(20):
        start = time.thread_time()  # of this thread, whatever else the machine does
        page_hashes(tokens)
        times.append(time.thread_time() - start)
    assert min(times) < 0.006
