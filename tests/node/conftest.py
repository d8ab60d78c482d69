"""Fixtures of the tests that talk to a scripted peer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake_kv.common.node.client import NodeClient
from tests.node.scripted_peer import Connect, Listener, config, namespace


@pytest.fixture
def listener(runtime_dir: Path) -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


@pytest.fixture
def connect(listener: Listener) -> Iterator[Connect]:
    """Makes and starts a client of the scripted peer: `connect(role, settings, **arguments of NodeClient)`."""
    clients: list[NodeClient] = []

    def make(role: Any = "scheduler", settings: dict[str, Any] | None = None, **arguments: Any) -> NodeClient:
        client = NodeClient(config(**(settings or {})), namespace(), engine="e", role=role, spawn=False, **arguments)
        clients.append(client)
        client.start()
        return client

    yield make
    for client in clients:
        client.close()
        assert not client._thread.is_alive()
