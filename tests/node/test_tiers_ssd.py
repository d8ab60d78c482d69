"""The SSD tier behind a real node: what is written through comes back, byte for byte, after whatever has happened to memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_kv.common.node import protocol
from tests.node.wire_client import NodeProcess, WireClient, chain, running_node, small_namespace

SLOT = 8192
SLOTS = 128  # of the 1 MiB arena
FILE = 8192  # bytes of an object with its trailer, in whole blocks


def arguments(folder: Path, size: str = "64mb", dram: str = "1mb") -> list[str]:
    return ["--dram-size", dram, "--ssd-path", str(folder), "--ssd-size", size]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.fixture
def node(runtime_dir: Path, folder: Path) -> Iterator[NodeProcess]:
    with running_node(*arguments(folder)) as node:
        yield node


def connect(node: NodeProcess, credits: int = 8, **arguments: object) -> WireClient:
    client = WireClient(node.paths.folder, **arguments)  # type: ignore[arg-type]
    client.want(credits)
    return client


def files(folder: Path) -> list[Path]:
    found = []
    for top, _, names in os.walk(folder):  # folders may vanish meanwhile
        found += [Path(top, name) for name in names]
    return sorted(found)


def store(client: WireClient, *prefixes: list[bytes]) -> None:
    """Slowly enough for the queue of the disk, which has room for 16 small pages."""
    for prefix in prefixes:
        client.lookup(prefix)
        for i in range(0, len(prefix), 4):
            client.store(prefix[i : i + 4])
            client.written()


def test_pages_pushed_out_of_memory_come_back(node: NodeProcess, folder: Path) -> None:
    client = connect(node)
    first, flood = chain("first", 40), chain("flood", 3 * SLOTS)
    store(client, first, flood)
    assert client.written() == 40 + 3 * SLOTS
    assert client.stats()["pages_evicted"] > SLOTS
    assert client.lookup_tiers(first) == {"dram": 0, "ssd": 40}
    assert client.check(first, 40) == ["ssd"] * 40
    assert client.check(first, 40) == ["dram"] * 40, "promoted"
    assert client.lookup_tiers([*first, *chain("none", 5)]) == {"dram": 40, "ssd": 0}
    assert client.tier()["hit_pages"] == 40 and client.tier("dram")["hit_pages"] == 40
    assert client.written() == 40 + 3 * SLOTS, "what came from there is not written again"
    for file in files(folder):
        assert file.stat().st_size == FILE and file.stat().st_mode & 0o777 == 0o600


def test_a_restarted_node_serves_from_disk_what_its_predecessor_wrote(runtime_dir: Path, folder: Path) -> None:
    prefixes = [chain(f"p{i}", 50) for i in range(6)]
    with running_node(*arguments(folder)) as node:
        client = connect(node)
        store(client, *prefixes)
        assert client.written() == 300
    for i, prefix in enumerate(prefixes):
        with running_node(*arguments(folder)) as node:
            client = connect(node)
            # On a busy machine the first question may not be answered in time.
            client.until(lambda client=client, prefix=prefix: client.lookup([*prefix, *chain("q", 3)]) == 50)  # type: ignore[misc]
            assert client.check([*prefix, *chain("q", 3)], 50) == ["ssd"] * 50
            assert client.stats()["pages"] == 50, i


def test_a_prefix_may_be_spread_over_memory_and_disk(node: NodeProcess) -> None:
    client = connect(node, credits=4)
    pages = chain("p", 60)
    store(client, pages, chain("flood", 2 * SLOTS))
    client.written()
    client.check(pages[10:20], 10)
    client.check(pages[:3], 3)
    client.check(pages[35:40], 5)
    assert client.lookup_tiers(pages) == {"dram": 3, "ssd": 57}, "who has the pages behind the first that is missing is not looked at"
    tiers = client.check(pages, 60)
    assert tiers == ["dram"] * 3 + ["ssd"] * 7 + ["dram"] * 10 + ["ssd"] * 15 + ["dram"] * 5 + ["ssd"] * 20


def test_namespaces_do_not_see_each_other(node: NodeProcess, folder: Path) -> None:
    one, two = connect(node, 4), connect(node, 2, engine="two", namespace=small_namespace("b", layers=4))
    pages = chain("p", 30)
    store(one, pages)
    one.written()
    assert two.lookup(pages) == 0 and two.check(pages, 0) == []
    store(two, pages)
    two.written()
    two.send(protocol.Drop(two.next_request()))
    two.wait_for(protocol.Done)
    assert two.lookup(pages) == 0 and two.check(pages, 0) == []
    store(one, chain("flood", SLOTS))
    assert one.check(pages, 30) == ["ssd"] * 30
    assert {file.relative_to(folder).parts[0] for file in files(folder)} == {one.digest}


def test_a_namespace_of_several_objects_a_page(runtime_dir: Path, folder: Path) -> None:
    namespace = small_namespace("many", layers=6, layers_per_group=2)
    with running_node(*arguments(folder)) as node:
        client = connect(node, 4, namespace=namespace)
        pages = chain("p", 20)
        store(client, pages)
        assert client.written() == 20 and len(files(folder)) == 60
    with running_node(*arguments(folder)) as node:
        client = connect(node, 4, namespace=namespace)
        assert client.check(pages, 20) == ["ssd"] * 20


def test_a_fetch_larger_than_the_window_gets_what_fits(node: NodeProcess) -> None:
    client = connect(node)
    pages = chain("p", SLOTS)
    store(client, pages, chain("flood", SLOTS))
    client.written()
    request, slots = client.fetch(pages)
    assert 0 < len(slots) <= SLOTS // 2 and all(client.holds(slot, page) for slot, page in zip(slots, pages, strict=False))
    client.release(request)
    request, slots = client.fetch(pages, 10 * SLOT)
    assert len(slots) == 10
    client.release(request)
    client.until(lambda: client.stats()["leased_pages"] == 0 and client.stats()["reading"] == 0)


def test_a_fetch_whose_reader_checks_gets_checked_pages_from_disk(node: NodeProcess) -> None:
    client = connect(node)
    pages = chain("p", 20)
    store(client, pages, chain("flood", SLOTS + 30))
    request = client.next_request()
    client.send(protocol.Fetch(request, b"".join(pages), check=False))
    slots = client.finish_fetch(request)
    assert client.tiers == ["ssd"] * 20 and all(client.holds(slot, page) for slot, page in zip(slots, pages, strict=True))


def test_tiers_in_metrics_and_status(runtime_dir: Path, folder: Path) -> None:
    with running_node(*arguments(folder), "--metrics-port", "0") as node:
        client = connect(node)
        pages = chain("p", 20)
        store(client, pages, chain("flood", SLOTS + 30))
        client.check([*pages, *chain("q", 1)], 20)
        client.until(lambda: client.tier().get("read_pages") == 20)
        client.until(node.paths.metrics.exists)
        text = urllib.request.urlopen(f"http://{node.paths.metrics.read_text().strip()}/metrics", timeout=10).read().decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        tier = client.tier()
        for name, value in {
            "pages_hit_total": 20,
            "bytes_hit_total": 20 * SLOT,
            "tier_pages_read_total": 20,
            "tier_pages_written_total": tier["pages_written"],
            "tier_bytes": tier["bytes"],
            "tier_limit_bytes": 64 << 20,
            "tier_up": 1,
            "tier_outages_total": 0,
        }.items():
            assert float(values[f'mooncake_kv_node_{name}{{tier="ssd"}}']) == value, name
        assert float(values['mooncake_kv_node_tier_milliseconds{job="read",quantile="0.5",tier="ssd"}']) > 0
        assert float(values['mooncake_kv_node_pages_hit_total{tier="dram"}']) == 0
        command = [str(Path(sys.executable).with_name("mooncake-kv")), "status", "t"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "160"}).stdout
        line = next(line for line in shown.splitlines() if " ssd " in line)
        assert " up " in line and " 20 " in line and "GB/s" in line and "64.0 MiB" in line
        assert not any("reason" in line or "is not used" in line for line in shown.splitlines())
        sys.stdout.write(shown)
        folder.rename(folder.with_name("away"))
        client.lookup(chain("q", 1))
        client.until(lambda: client.tier()["state"] == "down")
        shown = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "160"}).stdout
        assert "ssd is not used: the folder" in shown.replace("\n", " ") and "down" in shown


def test_two_fetches_read_a_page_once(node: NodeProcess) -> None:
    clients = [connect(node, engine=f"e{i}", credits=4) for i in range(3)]
    pages = chain("p", 40)
    store(clients[0], pages, chain("flood", 2 * SLOTS))
    clients[0].written()
    for client in clients:
        client.wait_mapped(4)
    requests = [client.start_fetch(pages) for client in clients]
    for client, request in zip(clients, requests, strict=True):
        slots = client.finish_fetch(request)
        assert len(slots) == 40 and all(client.holds(slot, page) for slot, page in zip(slots, pages, strict=True))
    clients[0].until(lambda: clients[0].tier().get("read_pages", 0) == 40)


def test_a_fetch_that_waits_for_anothers_page_has_a_deadline_of_its_own(node: NodeProcess) -> None:
    one, two = (connect(node, engine=f"e{i}", credits=4) for i in range(2))
    pages = chain("p", 40)
    store(one, pages, chain("flood", 2 * SLOTS))
    for client in (one, two):
        client.wait_mapped(4)
    os.kill(one.tier()["pid"], signal.SIGSTOP)
    first = one.start_fetch(pages)
    one.ping()
    began = time.monotonic()
    second = two.start_fetch(pages, deadline_ms=200)
    assert two.finish_fetch(second) == [] and time.monotonic() - began < 0.8
    assert one.finish_fetch(first) == []
    one.until(lambda: one.tier()["state"] == "up")
    assert two.check(pages, 40) == ["ssd"] * 40
