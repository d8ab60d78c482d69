"""A prefix that is spread over disk and pool in any pattern comes whole, up to the first page that nobody has."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.pool_peer import Master, Peer, wait_for
from tests.node.test_tiers_ssd import files
from tests.node.wire_client import NodeProcess, WireClient, chain, running_node

PAGES = 32
POOL = ("--local-hostname", "127.0.0.1", "--global-segment-size", "64mb", "--write-policy", "all")


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    running = Master()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def raw(master: Master) -> Iterator[Peer]:
    """Mooncake's own client: gives the segment that outlives the nodes, and removes objects."""
    peer = Peer()
    peer.call("raw_open", master.address, 64 << 20)
    yield peer
    peer.close()


def arguments(folder: Path, master: Master) -> list[str]:
    disk = ["--dram-size", "1mb", "--ssd-path", str(folder), "--ssd-size", "64mb"]
    return [*disk, *POOL[:2], "--global-segment-size", "0", *POOL[4:], "--master-server-address", master.address]


def connect(node: NodeProcess) -> WireClient:
    client = WireClient(node.paths.folder)
    client.want(8)
    assert wait_for(lambda: client.tier("pool")["state"] == client.tier()["state"] == "up", 20), client.stats()["tiers"]
    return client


def keep(client: WireClient, raw: Peer, folder: Path, prefix: list[bytes], where: str) -> None:
    """Remove pages from the tiers that are not to have them: of page i, 's' leaves it to the disk, 'p' to the pool, 'b' to both, '-' to
    none."""
    for page, at in zip(prefix, where, strict=True):
        if at in "p-":
            for file in files(folder):
                if file.name.startswith(page.hex()):
                    file.unlink()
        if at in "s-":
            assert raw.call("raw_call", "remove", client.layout.object_key(client.digest, page, client.layout.objects[0]), True) == 0


def store(client: WireClient, prefix: list[bytes]) -> None:
    for i in range(0, len(prefix), 4):
        client.store(prefix[i : i + 4])
        client.written()
        client.written("pool")


def spread(where: str) -> list[str]:
    """The tiers that a fetch may name, page by page: up to the first that is nowhere."""
    return ["ssd or pool" if at == "b" else {"s": "ssd", "p": "pool"}[at] for at in where.partition("-")[0]]


def agrees(tiers: list[str], where: str) -> bool:
    """What was on its way when the page before it did not come is in memory when its turn comes."""
    expected = spread(where)
    if len(tiers) != len(expected) or (tiers and tiers[0] == "dram"):
        return False
    return all(tier == "dram" or tier in may.split(" or ") for tier, may in zip(tiers, expected, strict=True))


def patterns() -> dict[str, str]:
    rng = random.Random(7)
    made = {
        "pool, then disk": "p" * 16 + "s" * 16,
        "disk, then pool, then disk": "s" * 10 + "p" * 10 + "s" * 12,
        "turn by turn": "sp" * 16,
        "pool first, turn by turn": "ps" * 16,
        "holes that a gallop does not see": "ssspssssssssspspsssssssspsssssps",
        "an end in the middle": "ppssppss-" + "b" * 23,
        "nothing": "-" + "b" * 31,
    }
    return made | {f"random {i}": "".join(rng.choices("spb-", (10, 10, 5, 0.3), k=PAGES)) for i in range(3)}


@pytest.mark.parametrize("fresh", [True, False], ids=["restarted", "running"])
def test_a_prefix_spread_over_disk_and_pool(runtime_dir: Path, tmp_path: Path, master: Master, raw: Peer, fresh: bool) -> None:
    """The node that reads has seen nothing (it gallops), or has written all the pages (its indexes are wrong about what was removed)."""
    folder = tmp_path / "ssd"
    prefixes = {name: chain(f"{fresh} {name}", PAGES) for name in patterns()}
    with running_node(*arguments(folder, master)) as node:
        client = connect(node)
        for prefix in prefixes.values():
            store(client, prefix)
        assert client.written() == client.written("pool") == PAGES * len(prefixes)
        for name, where in patterns().items():
            keep(client, raw, folder, prefixes[name], where)
        if not fresh:
            store(client, chain(f"{fresh} flood", 130))
            for name, where in patterns().items():
                client.check(prefixes[name])
                assert agrees(client.tiers, where), f"{name}: {where} gave {client.tiers}"
    if not fresh:
        return
    with running_node(*arguments(folder, master)) as node:
        client = connect(node)
        for name, where in patterns().items():
            there = len(spread(where))
            assert client.lookup(prefixes[name]) >= there or "b" in where, name
            client.check(prefixes[name])
            assert agrees(client.tiers, where), f"{name}: {where} gave {client.tiers}"
            # Now they are in memory, and nothing is leased or read any more.
            assert client.check(prefixes[name], there) == ["dram"] * there
        client.until(lambda: not client.stats()["leased_pages"] and not client.stats()["reading"])


def test_a_damaged_page_of_one_tier_comes_from_another(runtime_dir: Path, tmp_path: Path, master: Master, raw: Peer) -> None:
    folder = tmp_path / "ssd"
    pages = chain("damaged", PAGES)
    with running_node(*arguments(folder, master)) as node:
        store(connect(node), pages)
    file = next(file for file in files(folder) if file.name.startswith(pages[3].hex()))
    data = bytearray(file.read_bytes())
    data[700] ^= 1
    file.write_bytes(data)
    with running_node(*arguments(folder, master)) as node:
        client = connect(node)
        client.check(pages, PAGES)
        assert agrees(client.tiers, "sss" + "p" * (PAGES - 3)) and client.tiers[3] == "pool", client.tiers
        client.until(lambda: client.tier().get("pages_bad", 0) == 1)
        client.until(lambda: not client.stats()["leased_pages"] and not client.stats()["reading"])


def test_a_fetch_that_looks_elsewhere_keeps_its_deadline(runtime_dir: Path, tmp_path: Path, master: Master, raw: Peer) -> None:
    """The pool's process is stopped when the disk comes up short: what the disk gave counts."""
    folder = tmp_path / "ssd"
    pages = chain("deadline", PAGES)
    with running_node(*arguments(folder, master)) as node:
        client = connect(node)
        store(client, pages)
        keep(client, raw, folder, pages, "s" * 20 + "p" * 12)
    with running_node(*arguments(folder, master)) as node:
        client = connect(node)
        os.kill(client.tier("pool")["pid"], signal.SIGSTOP)
        began = time.monotonic()
        request = client.start_fetch(pages, deadline_ms=300)
        slots = client.finish_fetch(request)
        assert len(slots) == 20 and 0.25 < time.monotonic() - began < 1
        assert all(client.holds(slot, page) for slot, page in zip(slots, pages, strict=False))
        client.release(request)
        client.until(lambda: client.tier("pool")["state"] == "down")
        client.until(lambda: client.tier("pool")["state"] == "up", 20)
        client.check(pages, PAGES)
        client.until(lambda: not client.stats()["leased_pages"] and not client.stats()["reading"])
