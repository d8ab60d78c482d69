"""The SSD tier alone, in this process: order, budget, leftovers, other nodes in the same folder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from mooncake_kv.common.identity import KVNamespace
from mooncake_kv.common.page import PageLayout
from mooncake_kv.common.tiers import ssd
from mooncake_kv.common.tiers.base import TierDown
from mooncake_kv.common.tiers.ssd import SsdTier

NAMESPACE = KVNamespace.build(
    model=sha256(b"m").hexdigest(),
    kv_dtype="float16",
    num_layers=4,
    num_kv_heads=2,
    k_head_dim=16,
    v_head_dim=16,
    page_tokens=16,
    layers_per_group=2,
)
LAYOUT = PageLayout(NAMESPACE)
DIGEST = NAMESPACE.digest()
OTHER = "0" * 32
PAGE = 2 * 8192  # two objects of two blocks each


def chain(tag: str, count: int) -> list[bytes]:
    return [sha256(f"{tag}/{i}".encode()).digest() for i in range(count)]


def until(what: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "ssd"
    made.mkdir(mode=0o700)
    return made


def opened(folder: Path, budget: int = 1 << 30, *digests: str) -> SsdTier:
    tier = SsdTier(folder, budget)
    for digest in digests or (DIGEST,):
        tier.add_space(digest, LAYOUT)
    until(lambda: tier.stats()["scans"])
    return tier


def page(page_hash: bytes, digest: str = DIGEST) -> np.ndarray:
    slot = np.random.default_rng(int.from_bytes(page_hash[:8], "little")).integers(0, 256, LAYOUT.slot_bytes, dtype=np.uint8)
    LAYOUT.seal(slot, page_hash, digest)
    return slot


def write(tier: SsdTier, hashes: list[bytes], digest: str = DIGEST) -> list[bool]:
    return tier.write(digest, hashes, [page(h, digest) for h in hashes], [""] * len(hashes))


def read(tier: SsdTier, hashes: list[bytes], digest: str = DIGEST) -> int:
    """Every page that is said to be there is the right one."""
    slots = [np.zeros(LAYOUT.slot_bytes, np.uint8) for _ in hashes]
    count = tier.read(digest, hashes, slots)
    assert all(LAYOUT.verify(slot, h, digest) for slot, h in zip(slots[:count], hashes, strict=False))
    return count


def files(folder: Path) -> list[Path]:
    return [Path(top, name) for top, _, names in os.walk(folder) for name in names]


def test_pages_and_names(folder: Path) -> None:
    tier = opened(folder)
    pages = chain("p", 10)
    assert write(tier, pages) == [True] * 10 and read(tier, pages) == 10
    assert tier.leading(DIGEST, [*pages, *chain("q", 5)]) == 10
    name = pages[0].hex()
    assert {str(file.relative_to(folder)) for file in files(folder) if file.name.startswith(name)} == {
        f"{DIGEST}/{name[:2]}/{name}.L0-2.H0",
        f"{DIGEST}/{name[:2]}/{name}.L2-4.H0",
    }
    assert tier.stats()["bytes"] == 10 * PAGE and tier.stats()["pages"] == 10
    assert all(path.stat().st_mode & 0o77 == 0 for path in folder.rglob("*"))
    tier.close()


def test_the_first_lookup_waits_for_no_scan_and_looks_at_few_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = chain("p", 1000)
    first = opened(folder)
    write(first, pages)
    first.close()
    monkeypatch.setattr(SsdTier, "_scan", lambda self: None)
    tier = SsdTier(folder, 1 << 30)
    tier.add_space(DIGEST, LAYOUT)
    looked: list[str] = []
    exists = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: looked.append(path) or exists(path))  # type: ignore[func-returns-value]
    assert tier.leading(DIGEST, [*pages, *chain("q", 500)]) == 1000
    assert len(looked) <= 22
    looked.clear()
    assert tier.leading(DIGEST, chain("q", 500)) == 0 and len(looked) == 1
    assert read(tier, pages[:20]) == 20
    tier.close()


def test_order_of_last_use_survives_a_restart(folder: Path) -> None:
    one = opened(folder, 100 * PAGE)
    a, b, c = chain("a", 30), chain("b", 30), chain("c", 30)
    for prefix in (a, b, c):
        write(one, prefix)
    one.touch(DIGEST, b)
    one.touch(DIGEST, a)
    one.close()
    two = opened(folder, 100 * PAGE)
    write(two, chain("new", 40))  # room for 30 of the old ones
    # c was never touched, so it went first; then the end of b, whose beginning is there still.
    assert two.leading(DIGEST, c) == 0 and two.leading(DIGEST, a) == 30 and two.leading(DIGEST, b) == 30
    write(two, chain("newer", 15))
    assert two.leading(DIGEST, a) == 30 and two.leading(DIGEST, b) == 15
    assert len(files(folder)) == 200
    two.close()


def test_a_smaller_budget_is_reached_by_the_first_scan(folder: Path) -> None:
    one = opened(folder, 100 * PAGE, DIGEST, OTHER)
    write(one, chain("p", 40))
    write(one, chain("p", 40), OTHER)
    one.close()
    two = SsdTier(folder, 50 * PAGE)  # which knows no namespace
    until(lambda: len(files(folder)) == 100)
    assert two.stats()["bytes"] == 50 * PAGE and two.stats()["evicted_pages"] == 30
    two.close()


def test_what_is_not_ours_stays(folder: Path) -> None:
    others = [folder / "notes.txt", folder / DIGEST / "readme", folder / DIGEST / "aa" / "x.L0-2.H0", folder / ("f" * 32) / "x"]
    for path in others:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text("mine")
    tier = opened(folder, 4 * PAGE)
    write(tier, chain("p", 20))
    tier.drop(OTHER)
    tier.close()
    assert all(path.read_text() == "mine" for path in others)


def test_leftovers_of_killed_writers_go_and_those_of_living_ones_stay(folder: Path) -> None:
    dead, young, living = (folder / f"tmp-{name}" for name in ("dead", "young", "living"))
    for path in (dead, young, living):
        path.write_bytes(b"x")
    old = time.time() - ssd.TEMP_S - 1
    os.utime(dead, (old, old))
    os.utime(living, (old, old))
    with living.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        opened(folder).close()
        assert not dead.exists() and young.exists() and living.exists()
    opened(folder).close()
    assert not living.exists() and young.exists()


def test_two_tiers_in_one_folder(folder: Path) -> None:
    budget = 64 * PAGE
    one, two = opened(folder, budget), opened(folder, budget)
    for i in range(20):
        write(one if i % 2 else two, chain(f"p{i}", 8))
        time.sleep(0.02)
        assert len(files(folder)) * 8192 <= budget * 1.4, i
    # Each has looked again meanwhile, so both know about most of what is there.
    assert read(one, chain("p18", 8)) == 8 and read(two, chain("p19", 8)) == 8
    gone = chain("p19", 8)
    one.bad(DIGEST, gone)
    assert two.leading(DIGEST, gone) == 8, "it may be wrong"
    assert read(two, gone) == 0 and two.leading(DIGEST, gone) == 0, "reading proves it"
    for tier in (one, two):
        tier.close()


def test_a_page_that_another_node_has_written_is_not_written_again(folder: Path) -> None:
    one, two = opened(folder), opened(folder)
    pages = chain("p", 5)
    write(one, pages)
    inodes = {path: path.stat().st_ino for path in files(folder)}
    assert write(two, pages) == [True] * 5
    assert {path: path.stat().st_ino for path in files(folder)} == inodes and two.stats()["pages"] == 5
    one.close()
    two.close()


def test_drop_forgets_one_namespace_at_once(folder: Path) -> None:
    tier = opened(folder, 1 << 30, DIGEST, OTHER)
    pages = chain("p", 30)
    write(tier, pages)
    write(tier, pages, OTHER)
    tier.drop(DIGEST)
    assert tier.leading(DIGEST, pages) == 0 and read(tier, pages) == 0
    assert tier.leading(OTHER, pages) == 30 and read(tier, pages, OTHER) == 30
    until(lambda: len(files(folder)) == 60)
    write(tier, pages[:3])
    assert read(tier, pages) == 3
    tier.close()


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "symlink"])
def test_a_file_that_cannot_be_read_whole_ends_the_run(folder: Path, damage: str) -> None:
    tier = opened(folder)
    pages = chain("p", 10)
    write(tier, pages)
    (bad,) = folder.rglob(f"{pages[6].hex()}.L2*")
    if damage == "cut":
        os.truncate(bad, 4096)
    elif damage == "empty":
        os.truncate(bad, 0)
    else:
        elsewhere = folder / "elsewhere"
        bad.rename(elsewhere)
        if damage == "symlink":
            bad.symlink_to(elsewhere)
    assert read(tier, pages) == 6 and tier.leading(DIGEST, pages) == 6
    assert not list(folder.rglob(f"{pages[6].hex()}.*")), "both objects of the page are gone"
    assert write(tier, pages[6:7]) == [True] and read(tier, pages) == 10
    tier.close()


def test_a_page_larger_than_the_budget_is_not_written(folder: Path) -> None:
    tier = opened(folder, PAGE - 1)
    assert write(tier, chain("p", 2)) == [False, False] and not files(folder)
    tier.close()


def test_a_folder_that_is_gone_is_down(folder: Path) -> None:
    tier = opened(folder)
    pages = chain("p", 3)
    write(tier, pages)
    moved = folder.with_name("moved")
    folder.rename(moved)
    for call in (lambda: tier.leading(DIGEST, chain("q", 2)), lambda: read(tier, pages), lambda: write(tier, chain("q", 2))):
        with pytest.raises(TierDown, match="is gone"):
            call()
    folder.symlink_to(moved)
    with pytest.raises(TierDown, match="symlink"):
        SsdTier(folder, 1 << 30)
    tier.close()
