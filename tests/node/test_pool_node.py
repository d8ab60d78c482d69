"""The pool behind real nodes: what one node has stored another one, with other folders and empty memory, gives to its engines."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import wait_for_end
from tests.node.pool_peer import Master, wait_for
from tests.node.wire_client import NodeProcess, WireClient, chain, running_node

POOL = ("--local-hostname", "127.0.0.1", "--global-segment-size", "64mb", "--write-policy", "all")


@pytest.fixture
def master() -> Iterator[Master]:
    running = Master()
    yield running
    running.process.send_signal(signal.SIGCONT)
    running.kill()


def connect(node: NodeProcess, secret: str = "") -> WireClient:
    client = WireClient(node.paths.folder, secret=secret)
    client.want(16)
    assert wait_for(lambda: tier(client)["state"] == "up", 20), tier(client)
    return client


def tier(client: WireClient) -> dict[str, object]:
    return dict(client.stats()["tiers"]["pool"])


@pytest.mark.parametrize("secret", ["", "hunter2"])
def test_a_second_node_reads_what_the_first_has_stored(runtime_dir: Path, master: Master, secret: str) -> None:
    pages = chain("p", 12)
    address = ("--master-server-address", master.address)
    with running_node("--dram-size", "1mb", *POOL, *address, name="one") as first:
        client = connect(first, secret)
        client.store(pages)
        assert wait_for(lambda: tier(client).get("write_pages") == 12, 20), tier(client)
        with running_node("--dram-size", "1mb", *POOL, *address, name="two") as second:
            reader = connect(second, secret)
            assert wait_for(lambda: reader.lookup([*pages, *chain("q", 3)]) == 12, 20), tier(reader)
            request, slots = reader.fetch(pages)
            assert len(slots) == 12 and all(reader.holds(slot, page) for slot, page in zip(slots, pages, strict=True))
            reader.release(request)


def test_an_embedded_master_ends_with_its_node(runtime_dir: Path) -> None:
    with running_node("--dram-size", "1mb", *POOL, "--master-server-address", "embedded") as node:
        client = connect(node)
        client.store(chain("p", 4))
        assert wait_for(lambda: tier(client).get("write_pages") == 4, 20), tier(client)
        family = psutil.Process(node.process.pid).children(recursive=True)
        assert any("mooncake_master" in " ".join(process.cmdline()) for process in family)
        node.process.kill()
        assert wait_for_end(family, 8) == []


@pytest.mark.parametrize("moment", ["starting", "up"])
def test_a_node_that_stops_takes_its_keeper_and_master_along(runtime_dir: Path, moment: str) -> None:
    """Before it ends itself, so that whoever waits for the node may remove its folder or start the next one."""
    with running_node("--dram-size", "1mb", *POOL, "--master-server-address", "embedded") as node:
        process = psutil.Process(node.process.pid)
        if moment == "up":
            connect(node)
        assert wait_for(lambda: any("pool.keeper" in " ".join(child.cmdline()) for child in process.children()), 10)
        family = process.children(recursive=True)
        begin = time.monotonic()
        assert "has left" in node.end()
        assert time.monotonic() - begin < 8
        # A master that was not ready yet is killed by the kernel, in its own time.
        assert wait_for_end(family, 0 if moment == "up" else 1) == []


def test_a_node_started_while_another_one_unmounts_waits_for_it(runtime_dir: Path) -> None:
    arguments = ("--dram-size", "1mb", *POOL, "--master-server-address", "embedded")
    with running_node(*arguments) as first:
        connect(first)
        first.process.terminate()
        assert wait_for(lambda: not first.paths.socket.exists(), 5)
        with running_node(*arguments) as second:
            assert first.process.wait(5) == 0
            connect(second)


def test_a_frozen_master_makes_lookups_miss_soon(runtime_dir: Path, master: Master) -> None:
    with running_node("--dram-size", "1mb", *POOL, "--master-server-address", master.address) as node:
        client = connect(node)
        client.store(chain("p", 4))
        assert wait_for(lambda: tier(client).get("write_pages") == 4, 20), tier(client)
        master.process.send_signal(signal.SIGSTOP)
        client.lookup(chain("q", 4))
        assert wait_for(lambda: tier(client)["state"] == "down", 10), tier(client)
        begin = time.monotonic()
        assert client.lookup(chain("p", 4)) == 4 and client.lookup(chain("q", 4)) == 0
        assert time.monotonic() - begin < 0.1
        master.process.send_signal(signal.SIGCONT)
        assert wait_for(lambda: tier(client)["state"] == "up", 20), tier(client)
