"""Faults of the SSD tier behind a real node: after each, every page is right or a miss, the node lives, and nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mooncake_kv.common.node import protocol
from mooncake_kv.common.node.paths import node_paths
from tests.node.test_tiers_ssd import SLOTS, arguments, connect, files, store
from tests.node.wire_client import WAIT_S, NodeProcess, WireClient, chain, running_node, small_namespace

PAGE_ON_DISK = 8192


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of its own, 1 MiB large."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    mounted = tmp_path / "disk"
    mounted.mkdir(mode=0o700)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "none", str(mounted)], check=False)
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)


def on_disk(client: WireClient, *prefixes: list[bytes]) -> None:
    """Store these pages and push them out of memory."""
    store(client, *prefixes)
    flood = chain(f"flood{random.random()}", SLOTS)
    store(client, flood)
    assert all(client.lookup_tiers(prefix)["dram"] == 0 for prefix in prefixes)


def up(client: WireClient, timeout_s: float = WAIT_S) -> None:
    client.until(lambda: client.tier()["state"] == "up", timeout_s)


# ---- the tier's process --------------------------------------------------------------------------------------------------------


def test_a_killed_tier_comes_back(runtime_dir: Path, folder: Path) -> None:
    with running_node(*arguments(folder)) as node:
        client = connect(node)
        pages = chain("p", 30)
        on_disk(client, pages)
        first = client.tier()["pid"]
        os.kill(first, signal.SIGKILL)
        client.until(lambda: client.tier()["state"] == "down")
        assert "has died" in client.tier()["reason"]
        began = time.monotonic()
        assert client.lookup(pages) == 0 and client.fetch(pages)[1] == []
        assert time.monotonic() - began < 0.5, "while it is away everything misses at once"
        up(client)
        assert client.tier()["pid"] != first and client.tier()["outages"] == 1
        assert client.check(pages, 30) == ["ssd"] * 30
        client.quiet()


def test_a_tier_killed_again_and_again_under_traffic(runtime_dir: Path, folder: Path) -> None:
    rng = random.Random(5)
    prefixes = [chain(f"p{i}", 20) for i in range(20)]
    quick = "import mooncake_kv.common.tiers.link as l; l.PAUSE_S = 0.1; l.PAUSE_MAX_S = 0.2"
    with running_node(*arguments(folder), patch=quick) as node:
        client = connect(node)
        kills, checked = 0, 0
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline or not checked:
            for _ in range(rng.randint(10, 40)):
                prefix = rng.choice(prefixes)
                found = client.lookup(prefix)
                request, slots = client.fetch(prefix)
                assert all(client.holds(slot, page) for slot, page in zip(slots, prefix, strict=False))
                checked += client.tiers.count("ssd")
                client.release(request)
                client.store(prefix[max(found, len(slots)) :])
            tier = client.tier()
            if tier["pid"] and tier["state"] == "up":
                time.sleep(rng.random() * 0.01)
                os.kill(tier["pid"], signal.SIGKILL)
                kills += 1
                client.until(lambda: client.tier()["state"] == "down")
        assert kills >= 4 and checked > 100, (kills, checked)
        up(client)
        client.quiet()


def test_a_stopped_tier_costs_a_moment_and_is_replaced(runtime_dir: Path, folder: Path) -> None:
    with running_node(*arguments(folder)) as node:
        client = connect(node)
        pages = chain("p", 30)
        on_disk(client, pages)
        client.check(pages[:5], 5)
        stopped = client.tier()["pid"]
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        assert client.lookup(pages) == 5, "what memory has"
        assert 0.05 < time.monotonic() - began < 0.5
        began = time.monotonic()
        request = client.start_fetch(pages, deadline_ms=300)
        assert len(client.finish_fetch(request)) == 5
        assert 0.25 < time.monotonic() - began < 0.8
        client.release(request)
        client.until(lambda: client.tier()["state"] == "down")
        assert "has not answered" in client.tier()["reason"]
        up(client)
        assert not psutil.pid_exists(stopped) or psutil.Process(stopped).status() == psutil.STATUS_ZOMBIE
        assert client.tier()["pid"] != stopped
        assert client.check(pages, 30).count("ssd") == 25
        client.quiet()


def test_slots_of_a_stopped_tier_wait_for_its_end(runtime_dir: Path, folder: Path) -> None:
    """While it may still write to them nobody else gets them, although the fetch that they were for is over."""
    with running_node(*arguments(folder)) as node:
        client = connect(node)
        pages = chain("p", 60)
        on_disk(client, pages)
        stopped = client.tier()["pid"]
        request = client.start_fetch(pages)
        os.kill(stopped, signal.SIGSTOP)
        client.ping()
        client.release(request)
        reading = client.stats()["reading"]
        if reading:  # otherwise it was faster than the signal
            time.sleep(0.3)
            assert client.stats()["reading"] == reading
        client.lookup(chain("other", 3))  # something that it does not answer
        client.until(lambda: client.tier()["state"] == "down")
        up(client)
        client.quiet()
        assert client.check(pages, 60)


def test_the_tier_goes_with_the_node(runtime_dir: Path, folder: Path) -> None:
    for end in ("kill", "end", "stopped"):
        node = NodeProcess(node_paths("t"), *arguments(folder))
        client = connect(node)
        tier = psutil.Process(client.tier()["pid"])
        if end == "stopped":
            tier.suspend()
        began = time.monotonic()
        node.kill() if end == "kill" else node.end()
        assert time.monotonic() - began < 5
        with_it = time.monotonic() + 3
        while tier.is_running() and tier.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < with_it, end
            time.sleep(0.02)
        client.close()


# ---- the node ------------------------------------------------------------------------------------------------------------------


def test_a_node_killed_at_any_point_leaves_nothing_wrong(runtime_dir: Path, folder: Path) -> None:
    rng = random.Random(3)
    prefixes = [chain(f"p{i}", 24) for i in range(8)]
    served = 0
    for turn in range(8):
        node = NodeProcess(node_paths("t"), *arguments(folder))
        try:
            client = connect(node)
            for prefix in rng.sample(prefixes, 5):
                request, slots = client.fetch(prefix)
                assert all(client.holds(slot, page) for slot, page in zip(slots, prefix, strict=False))
                served += len(slots)
                client.store(prefix[len(slots) :])
                client.release(request)
            if turn % 2:
                client.start_fetch(rng.choice(prefixes))
            time.sleep(rng.random() * 0.02)
        finally:
            node.kill()
        client.close()
    assert served > 100


# ---- the disk ------------------------------------------------------------------------------------------------------------------


def test_the_budget_is_kept_and_old_pages_go_first(runtime_dir: Path, folder: Path) -> None:
    budget = 200 * PAGE_ON_DISK
    with running_node(*arguments(folder, size=str(budget))) as node:
        client = connect(node)
        old, kept = chain("old", 50), chain("kept", 50)
        store(client, old, kept)
        for i in range(6):
            store(client, chain(f"new{i}", 50))
            client.check(kept, 50)  # in use
            client.written()
        assert len(files(folder)) * PAGE_ON_DISK <= budget
        assert client.lookup(old) == 0
        assert client.check(kept, 50)
    with running_node(*arguments(folder, size=str(budget))) as node:
        client = connect(node)
        assert client.check(kept, 50) == ["ssd"] * 50
        client.until(lambda: client.tier().get("scans"))
        assert client.tier()["bytes"] == len(files(folder)) * PAGE_ON_DISK


def test_two_nodes_share_a_folder(runtime_dir: Path, folder: Path) -> None:
    budget = 400 * PAGE_ON_DISK
    with (
        running_node(*arguments(folder, size=str(budget)), name="a") as a,
        running_node(*arguments(folder, size=str(budget)), name="b") as b,
    ):
        one, two = connect(a), connect(b)
        pages = chain("p", 60)
        store(one, pages)
        assert two.lookup_tiers(pages) == {"dram": 0, "ssd": 60}, "found without a scan"
        assert two.check(pages, 60) == ["ssd"] * 60
        for i in range(12):
            mine = chain(f"own{i}", 60)
            store(one if i % 2 else two, mine)
            other = two if i % 2 else one
            assert len(other.check(mine)) >= 50, "what one has written the other can read"
        # Each may exceed the budget by what it has not seen: the sixteenth part that the other writes between two looks.
        one.until(lambda: len(files(folder)) * PAGE_ON_DISK <= budget * 1.2)
        for client in (one, two):
            client.send(protocol.Drop(client.next_request()))
            client.wait_for(protocol.Done)
        one.until(lambda: not files(folder))
        assert one.lookup(pages) == two.lookup(pages) == 0
        one.quiet()
        two.quiet()


def test_a_dropped_namespace_stays_away_after_a_restart(runtime_dir: Path, folder: Path) -> None:
    pages = chain("p", 30)
    with running_node(*arguments(folder)) as node:
        client = connect(node)
        on_disk(client, pages)
        client.send(protocol.Drop(client.next_request()))
        assert client.lookup(pages) == 0 and client.fetch(pages)[1] == []
        store(client, pages[:10])
        assert client.lookup(pages) == 10
    with running_node(*arguments(folder)) as node:
        assert connect(node).check(pages, 10) == ["ssd"] * 10


@pytest.mark.parametrize("fault", ["killed", "stopped", "restarted"])
def test_what_is_dropped_while_the_tier_is_away_does_not_come_back(runtime_dir: Path, folder: Path, fault: str) -> None:
    pages, kept = chain("p", 30), chain("kept", 10)
    with running_node(*arguments(folder)) as node:
        client = connect(node)
        on_disk(client, pages)
        tier = client.tier()["pid"]
        os.kill(tier, signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
        if fault == "killed":
            client.until(lambda: client.tier()["state"] == "down")
        client.send(protocol.Drop(client.next_request()))
        client.wait_for(protocol.Done)
        assert client.lookup(pages) == 0 and client.fetch(pages)[1] == []
        client.store(kept)  # after the drop, so it stays
        other = WireClient(node.paths.folder, engine="other", namespace=small_namespace("other"))
        assert other.lookup(chain("q", 3)) == 0, "something that a stopped tier does not answer"
        client.until(lambda: client.tier()["outages"] == 1)
        up(client)
        assert client.lookup(pages) == 0 and client.fetch(pages)[1] == []
        client.until(lambda: not any(bytes.fromhex(file.name[:64]) in pages for file in files(folder)))
        assert client.check(kept, 10) == ["dram"] * 10
        client.until(lambda: client.written() >= 10)
    with running_node(*arguments(folder)) as node:
        client = connect(node)
        assert client.lookup(pages) == 0 and client.check(kept, 10) == ["ssd"] * 10


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "longer", "swapped", "gone", "folder"])
def test_damaged_files_are_misses(runtime_dir: Path, folder: Path, damage: str) -> None:
    pages = chain("p", 30)
    with running_node(*arguments(folder)) as node:
        client = connect(node)
        store(client, pages)
    path = {page: next(folder.rglob(f"{page.hex()}.*")) for page in pages}
    bad = path[pages[12]]
    data = bytearray(bad.read_bytes())
    if damage == "cut":
        bad.write_bytes(data[:4100])
    elif damage == "flip":
        data[1000] ^= 1
        bad.write_bytes(data)
    elif damage == "empty":
        bad.write_bytes(b"")
    elif damage == "longer":
        bad.write_bytes(data + b"x")
    elif damage == "swapped":
        bad.write_bytes(path[pages[13]].read_bytes())
    else:
        bad.unlink()
    if damage == "folder":
        bad.mkdir()
    with running_node(*arguments(folder)) as node:
        client = connect(node)
        got = client.check(pages)
        # One byte more than asked for is not looked at, and harms nobody.
        assert len(got) == (30 if damage == "longer" else 12)
        if damage != "longer":
            store(client, pages[12:])
            assert client.check(pages, 30).count("dram") == 30
        client.quiet()
    if damage not in ("longer", "folder"):
        with running_node(*arguments(folder)) as node:
            assert connect(node).check(pages, 30) == ["ssd"] * 30


def test_a_full_disk_costs_pages_and_nothing_else(runtime_dir: Path, small_disk: Path) -> None:
    with running_node(*arguments(small_disk / "kv")) as node:
        client = connect(node)
        first = chain("first", 60)
        store(client, first, chain("more", 300))
        tier = client.tier()
        assert tier["state"] == "up" and tier["pages_failed"] > 50
        client.until(lambda: client.tier().get("write_errors", 0) > 0)
        assert client.check(first, 60).count("ssd") > 30, "what is there is served"
        client.quiet()
    assert not [file for file in files(small_disk) if file.name.startswith("tmp-")]


def test_a_disk_that_becomes_read_only_still_serves(runtime_dir: Path, small_disk: Path) -> None:
    pages = chain("p", 40)
    with running_node(*arguments(small_disk / "kv")) as node:
        client = connect(node)
        on_disk(client, pages)
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        store(client, chain("more", 20))
        assert client.tier()["state"] == "up" and client.tier()["pages_failed"] >= 20
        assert client.check(pages, 40) == ["ssd"] * 40
        client.quiet()


def test_a_removed_folder_opens_the_breaker_until_it_is_back(runtime_dir: Path, folder: Path) -> None:
    away = folder.with_name("away")
    with running_node(*arguments(folder)) as node:
        client = connect(node)
        pages = chain("p", 40)
        on_disk(client, pages)
        folder.rename(away)
        client.lookup(chain("q", 3))
        client.until(lambda: client.tier()["state"] == "down")
        assert "is gone" in client.tier()["reason"] and str(folder) in client.tier()["reason"]
        assert client.fetch(pages)[1] == []
        more = chain("more", 10)
        store(client, more)
        away.rename(folder)
        up(client)
        assert client.check(pages, 40) == ["ssd"] * 40
        client.check(more, 10)  # a second use: now they can be written
        client.written()
        assert len([file for file in files(folder) if bytes.fromhex(file.name[:64]) in more]) == 10
        client.quiet()


def test_files_that_may_not_grow(runtime_dir: Path, folder: Path) -> None:
    """The limit on the size of a file stands for a disk that takes a part of what is written."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 1 << 40))"
    patch = "import mooncake_kv.common.tiers.link as l\nstart = l.Child\n"
    patch += f"def child(*a, **k):\n    import resource\n    {code}\n    try:\n        return start(*a, **k)\n"
    patch += "    finally:\n        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, 1 << 40))\nl.Child = child\n"
    with running_node(*arguments(folder), patch=patch) as node:
        client = connect(node)
        pages = chain("p", 20)
        store(client, pages)
        assert client.tier()["pages_failed"] >= 20 and not files(folder)
        assert client.check(pages, 20) == ["dram"] * 20
        client.quiet()


@pytest.mark.parametrize("fault", ["mode", "symlink", "file", "parent"])
def test_a_folder_that_cannot_be_trusted_is_refused(runtime_dir: Path, folder: Path, fault: str) -> None:
    if fault == "mode":
        folder.mkdir()
        folder.chmod(0o750)
    elif fault == "symlink":
        other = folder.with_name("other")
        other.mkdir(mode=0o700)
        folder.symlink_to(other)
    elif fault == "file":
        folder.write_text("")
    else:
        folder = folder / "missing" / "deeper"
    node = subprocess.run(
        [sys.executable, "-m", "mooncake_kv.common.node", "--name", "t", *arguments(folder)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    last = node.stderr.splitlines()[-1]
    assert node.returncode == 1 and str(folder) in last and "ssd_path" in last and "--ssd-path" in last, node.stderr


# ---- nothing is left -----------------------------------------------------------------------------------------------------------


def test_clients_that_die_while_pages_are_read_leave_nothing(runtime_dir: Path, folder: Path) -> None:
    with running_node(*arguments(folder)) as node:
        client = connect(node, credits=4)
        pages = chain("p", 60)
        on_disk(client, pages)
        for i in range(10):
            other = WireClient(node.paths.folder, engine=f"other{i}")
            other.wait_mapped(4)
            other.start_fetch(pages)
            other.close()
        client.until(lambda: client.stats()["clients"] == 1)
        client.quiet()
        assert client.check(pages, 60)
