"""What befalls a node: clients that die at bad moments, no descriptors, no disk, no memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_kv.common.node import protocol
from tests.node.wire_client import NodeProcess, WireClient, running_node


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
