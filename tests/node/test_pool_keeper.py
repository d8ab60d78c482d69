"""The keeper: this node's segment and an embedded master live as long as the node and no longer, however processes end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from mooncake_kv.common.config import load_config
from mooncake_kv.common.errors import ConfigError
from mooncake_kv.common.tiers.base import TierDown
from mooncake_kv.common.tiers.pool import master as master_module
from mooncake_kv.common.tiers.pool.keeper import Keeper
from mooncake_kv.common.tiers.pool.master import FILE, EmbeddedMaster, end_stale
from mooncake_kv.common.tiers.pool.wheel import master_program
from tests.conftest import wait_for_end
from tests.node.pool_peer import Master, Peer, accepts, free_port, wait_for

# Starts a keeper as a node would, says where its processes are, and waits to be killed.
NODE = """
import json, sys, time
from pathlib import Path
from mooncake_kv.common.tiers.pool.keeper import Keeper
given = json.loads(sys.argv[1])
keeper = Keeper(given["settings"], {}, Path(given["folder"]))
print(json.dumps([keeper.ensure(), keeper.pid]), flush=True)
time.sleep(100)
"""


def pool_settings(**given: Any) -> tuple[dict[str, Any], dict[str, str]]:
    config = load_config({"master_server_address": "embedded", "global_segment_size": "64mb", "write_policy": "all", **given}, environ={})
    return config.node_settings(), config.sources


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "node"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def keeper(folder: Path) -> Iterator[Keeper]:
    made = Keeper(*pool_settings(), folder)
    yield made
    made.close()


def recorded(folder: Path) -> psutil.Process:
    return psutil.Process(json.loads((folder / FILE).read_text())["pid"])


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


def test_two_nodes_share_pages_through_an_embedded_master(keeper: Keeper, peer: Peer, tmp_path: Path) -> None:
    settings = keeper.ensure()
    assert settings["master_server_address"].startswith("127.0.0.1:") and settings["segment"].startswith("127.0.0.1:")
    assert keeper.ensure() == settings, "one that runs is not started again"
    peer.call("open", settings)
    assert peer.call("write", "wide", "a", [0, 1, 2])[0] == [True] * 3
    peer.kill()
    # The segment is the keeper's: what was written outlives the tier process.
    second = tmp_path / "second"
    second.mkdir(mode=0o700)
    other_keeper, other = Keeper(*pool_settings(master_server_address=settings["master_server_address"]), second), Peer()
    try:
        other.call("open", other_keeper.ensure())
        assert other.call("read", "wide", "a", [0, 1, 2])[:2] == [3, 3]
    finally:
        other.close()
        other_keeper.close()


def test_an_embedded_master_listens_on_loopback_only_and_its_files_are_private(keeper: Keeper, folder: Path) -> None:
    keeper.ensure()
    assert {file.stat().st_mode & 0o077 for file in folder.iterdir()} == {0}
    listening = [c.laddr.ip for c in recorded(folder).net_connections() if c.status == psutil.CONN_LISTEN]
    assert len(listening) == 2 and set(listening) == {"127.0.0.1"}


def test_close_ends_everything(keeper: Keeper, folder: Path) -> None:
    keeper.ensure()
    processes = [recorded(folder), psutil.Process(keeper.pid)]
    begin = time.monotonic()
    keeper.close()
    assert time.monotonic() - begin < 2.5
    assert wait_for_end(processes, 2) == []
    assert not (folder / FILE).exists()
    with pytest.raises(TierDown, match="closed"):
        keeper.ensure()


def test_a_killed_keeper_takes_its_master_along_and_is_started_again(keeper: Keeper, folder: Path, peer: Peer) -> None:
    keeper.ensure()
    first = [recorded(folder), psutil.Process(keeper.pid)]
    first[1].kill()
    assert wait_for_end(first, 5) == []
    assert wait_for(lambda: keeper.pid == 0, 5)
    peer.call("open", keeper.ensure())
    assert peer.call("write", "small", "a", [0])[0] == [True]
    assert recorded(folder).pid != first[0].pid


def test_a_killed_node_leaves_neither_keeper_nor_master(folder: Path) -> None:
    given = json.dumps({"settings": pool_settings()[0], "folder": str(folder)})
    node = subprocess.Popen([sys.executable, "-c", NODE, given], stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    try:
        settings, pid = json.loads(node.stdout.readline())
        processes = [recorded(folder), psutil.Process(pid)]
        assert accepts(int(settings["master_server_address"].rpartition(":")[2]))
    finally:
        node.kill()
        node.wait(10)
        node.stdout.close()
    assert wait_for_end(processes, 8) == []


def test_a_frozen_keeper_does_not_hold_up_close(keeper: Keeper, folder: Path) -> None:
    keeper.ensure()
    processes = [recorded(folder), psutil.Process(keeper.pid)]
    processes[1].suspend()
    begin = time.monotonic()
    keeper.close()
    assert time.monotonic() - begin < 8
    assert wait_for_end(processes, 2) == []


def test_a_master_that_ends_is_started_again_on_its_port(keeper: Keeper, folder: Path, peer: Peer) -> None:
    settings = keeper.ensure()
    peer.call("open", settings)
    assert peer.call("write", "small", "a", [0])[0] == [True]
    time.sleep(3)  # one that has just started is given a pause first
    first = recorded(folder)
    first.kill()
    assert wait_for(lambda: (folder / FILE).exists() and recorded_pid(folder) != first.pid, 10)
    assert keeper.ensure() == settings

    def stored() -> bool:
        try:
            return bool(peer.call("write", "small", "a", [0])[0] == [True])
        except Exception as error:
            assert "TierDown" in str(error)
            return False

    assert wait_for(stored, 15), "the segment is not mounted at the new master"
    assert peer.call("read", "small", "a", [0])[:2] == [1, 1]


def recorded_pid(folder: Path) -> int:
    with suppress(OSError, ValueError):
        return int(json.loads((folder / FILE).read_text())["pid"])
    return 0


# ---- what cannot work --------------------------------------------------------------------------------------------------------------------


def test_what_is_configured_wrong_is_told_from_what_is_away(folder: Path) -> None:
    wrong = Keeper(*pool_settings(local_hostname="no-such-host.invalid"), folder)
    with pytest.raises(ConfigError, match=r"local_hostname is 'no-such-host\.invalid' \(--moon-cache-config\): it does not resolve"):
        wrong.ensure()
    port = free_port()
    away = Keeper(*pool_settings(master_server_address=f"127.0.0.1:{port}"), folder)
    for _ in range(2):
        begin = time.monotonic()
        with pytest.raises(TierDown, match=f"no Mooncake master answers at master_server_address '127.0.0.1:{port}'"):
            away.ensure()
    assert time.monotonic() - begin < 0.1, "a keeper that has just failed is tried again at once"
    for keeper in (wrong, away):
        assert keeper.pid == 0
        keeper.close()
    assert not (folder / FILE).exists()


def test_a_master_that_accepts_and_never_answers(folder: Path) -> None:
    """Setup fails then, and the client after it must not be touched."""
    master = Master()
    master.process.send_signal(signal.SIGSTOP)
    keeper = Keeper(*pool_settings(master_server_address=master.address), folder)
    try:
        begin = time.monotonic()
        with pytest.raises(TierDown):
            keeper.ensure()
        assert time.monotonic() - begin < 10
        assert keeper.pid == 0
    finally:
        keeper.close()
        master.process.send_signal(signal.SIGCONT)
        master.kill()


# ---- stale masters, busy ports -----------------------------------------------------------------------------------------------------------


def test_a_master_left_behind_is_ended(folder: Path) -> None:
    command = [str(master_program()), f"--rpc_port={free_port()}", f"--metrics_port={free_port()}"]
    stale = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        started = master_module._start_time(stale.pid)
        (folder / FILE).write_text(json.dumps({"pid": stale.pid, "started": started, "port": 1}))
        master = EmbeddedMaster(folder)
        master.start()
        try:
            assert stale.wait(5) is not None
            assert recorded(folder).pid == master.pid and master.alive()
        finally:
            master.close()
        assert not master.alive() and not (folder / FILE).exists()
    finally:
        stale.kill()
        stale.wait(10)


@pytest.mark.parametrize("content", ["another process", "garbage", "of nobody"])
def test_a_file_that_means_no_master_harms_nobody(folder: Path, content: str) -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        started = master_module._start_time(other.pid)
        assert started is not None
        # The pid is in use again by a process that started at another time.
        texts = {
            "another process": json.dumps({"pid": other.pid, "started": started - 1, "port": 1}),
            "garbage": "\xff{",
            "of nobody": json.dumps({"pid": 2**22 - 1, "started": 5, "port": 1}),
        }
        (folder / FILE).write_text(texts[content])
        end_stale(folder / FILE)
        assert other.poll() is None and not (folder / FILE).exists()
    finally:
        other.kill()
        other.wait(10)


def test_a_busy_port_is_answered_with_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = Master()
    ports = iter([running.port, running.port, free_port(), free_port(), free_port(), free_port()])
    monkeypatch.setattr(master_module, "_free_port", lambda: next(ports))
    master = EmbeddedMaster(folder)
    try:
        master.start()
        assert master.port != running.port and accepts(master.port)
        assert running.process.poll() is None
    finally:
        master.close()
        running.kill()


def test_no_secret_on_a_command_line(folder: Path) -> None:
    config = load_config({"master_server_address": "embedded", "pool_secret": "hunter2", "global_segment_size": 0}, environ={})
    keeper = Keeper(config.node_settings(), config.sources, folder)
    try:
        settings = keeper.ensure()
        assert "hunter" not in repr(settings)
        for process in (recorded(folder), psutil.Process(keeper.pid)):
            assert "hunter" not in " ".join(process.cmdline()) and "hunter2" not in str(process.environ())
        assert os.listdir(folder)
    finally:
        keeper.close()
