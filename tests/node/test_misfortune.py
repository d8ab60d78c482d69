"""What befalls a node: clients that die at bad moments, no descriptors, no disk, no memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mooncake_kv.common.node import protocol
from mooncake_kv.common.node.client import NodeClient
from mooncake_kv.common.node.paths import node_paths
from tests.node.scripted_peer import config, namespace, until
from tests.node.wire_client import NodeProcess, WireClient, chain, running_node, small_namespace


@pytest.fixture
def node(runtime_dir: Path) -> Iterator[NodeProcess]:
    with running_node("--dram-size", "1mb") as node:
        yield node


def test_last_words_and_the_end_of_a_client_that_left_messages_unread_are_heard(node: NodeProcess) -> None:
    watcher = WireClient(node.paths.folder, "tool")
    client = WireClient(node.paths.folder)
    client.want(4)
    client.settle()
    page = [os.urandom(32)]
    client.fill(client.credits[0], page[0])
    client.send(protocol.Ping(1))
    time.sleep(0.2)  # its answer stays unread
    os.kill(node.pid, signal.SIGSTOP)
    try:
        client.commit(page, client.credits[:1])
        client.sock.close()
    finally:
        os.kill(node.pid, signal.SIGCONT)
    watcher.until(lambda: watcher.stats()["clients"] == 0)
    watcher.until(lambda: watcher.stats()["pages"] == 1)
    watcher.close()


def test_a_node_without_a_free_descriptor_waits_and_lets_clients_in_later(runtime_dir: Path) -> None:
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    with running_node("--dram-size", "1mb", patch=few) as node:
        crowd = [socket.socket(socket.AF_UNIX) for _ in range(100)]
        for one in crowd:
            one.connect(str(node.paths.socket))
        process = psutil.Process(node.pid)
        time.sleep(0.5)
        before = process.cpu_times()
        time.sleep(1.5)
        after = process.cpu_times()
        assert after.user + after.system - before.user - before.system < 0.3
        for one in crowd:
            one.close()
        WireClient(node.paths.folder).close()
        log = node.end()
    assert log.count("cannot accept a client") == 1


def test_a_full_disk_costs_the_files_for_people(runtime_dir: Path) -> None:
    full = """
from pathlib import Path
def write_text(self, *_, **__):
    raise OSError(28, "No space left on device", str(self))
Path.write_text = write_text
"""
    with running_node("--dram-size", "1mb", "--metrics-port", "0", patch=full) as node:
        client = WireClient(node.paths.folder)
        client.ping()
        client.until(lambda: client.stats()["metrics"])
        client.close()
        log = node.end()
    assert f"the file {node.paths.pid} could not be written: No space left on device" in log
    assert f"the file {node.paths.metrics} could not be written" in log


def test_a_socket_that_cannot_be_made_is_one_sentence(runtime_dir: Path) -> None:
    full = """
import socket, sys
class Unbound(socket.socket):
    def bind(self, address):
        raise OSError(28, "No space left on device")
socket.socket = Unbound
from mooncake_kv.common.node.__main__ import main
sys.exit(main([]))
"""
    done = subprocess.run([sys.executable, "-c", full], capture_output=True, text=True, timeout=30)
    said = f"mooncake-kv node: the socket '{node_paths().socket}' cannot be made: No space left on device"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == said, done.stderr


def test_a_client_that_fails_again_and_again_says_so_once(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = []

    def broken(*arguments: object) -> None:
        attempts.append(1)
        raise RuntimeError("no such luck")

    monkeypatch.setattr("mooncake_kv.common.node.spawn.connect_or_spawn", broken)
    monkeypatch.setattr("mooncake_kv.common.node.client.BACKOFF_MAX_S", 0.05)
    client = NodeClient(config(), namespace(), engine="e", role="scheduler")
    client.start()
    until(lambda: len(attempts) > 5)
    client.close()
    (line,) = [record for record in caplog.records if "no such luck" in record.getMessage()]
    assert line.exc_info is not None


def test_memory_that_the_machine_does_not_have_is_not_taken(runtime_dir: Path) -> None:
    short = """
from mooncake_kv.common.node import memory
free = iter([1 << 30, 40 << 20, 24 << 20] + [8 << 20] * 1000)
memory.available = lambda *a, **k: next(free)
"""
    with running_node("--dram-size", "64mb", "--extent-size", "16mb", patch=short) as node:
        client = WireClient(node.paths.folder)
        client.want(64)
        client.store(chain("p", 6000))  # 47 MiB
        assert client.stats()["arena_bytes"] == 32 << 20
        client.close()


def test_memory_that_the_helper_cannot_map_costs_that_memory_only(runtime_dir: Path) -> None:
    with running_node("--dram-size", "64mb", "--extent-size", "16mb") as node:
        first = WireClient(node.paths.folder)
        pages = chain("p", 6)
        first.want(3)
        first.store(pages[:3])  # now the helper has its threads
        first.check(pages[:3], 3)
        (helper,) = psutil.Process(node.pid).children()
        # Room for nothing more.
        helper.rlimit(psutil.RLIMIT_AS, (helper.memory_info().vms + (8 << 20), -1))
        other = WireClient(node.paths.folder, engine="other", namespace=small_namespace(layers=8))
        other.send(protocol.Want(1))
        other.settle(0.5)
        first.store(pages)
        assert first.check(pages, 6) == ["dram"] * 6
        first.close()
        other.close()
        log = node.end()
    assert "could not be populated" in log
