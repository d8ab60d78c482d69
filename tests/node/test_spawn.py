"""Starting the node: what it inherits, what happens when it does not come up, and when several start it at once."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mooncake_kv.common.node import paths, spawn
from mooncake_kv.common.node.client import NodeClient
from mooncake_kv.common.node.spawn import NodeUnavailable
from tests.node.scripted_peer import Listener, config, namespace, until

START_S = 60.0
CLIENT = textwrap.dedent(
    """
    import os
    from mooncake_kv.common.node.client import NodeClient
    from tests.node.scripted_peer import config, namespace
    client = NodeClient(config(), namespace(), engine=str(os.getpid()), role="scheduler")
    client.start()
    assert client.wait_ready(60), client.reason
    print(client.node_pid, client.epoch, client.counters()["nodes_spawned"], flush=True)
    input()
    client.close()
    """
)


def pause(seconds: float) -> bool:
    time.sleep(seconds)
    return True


def nodes_in(folder: Path) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if "mooncake_kv.common.node" in (p.info["cmdline"] or []) and str(folder) in " ".join(p.info["cmdline"])]


@pytest.fixture
def client(runtime_dir: Path) -> Iterator[NodeClient]:
    made = NodeClient(config(), namespace(), engine="e", role="scheduler")
    made.start()
    yield made
    made.close()


def test_eight_clients_at_once_give_one_node(runtime_dir: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    clients = [
        subprocess.Popen([sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
        for _ in range(8)
    ]
    try:
        answers = [client.stdout.readline().split() for client in clients if client.stdout is not None]
        assert len({tuple(answer[:2]) for answer in answers}) == 1, answers
        assert sum(int(answer[2]) for answer in answers) == 1
        assert [p.pid for p in nodes_in(runtime_dir)] == [int(answers[0][0])]
    finally:
        for client in clients:
            client.communicate("\n", timeout=20)
    assert [client.returncode for client in clients] == [0] * 8


def test_the_node_inherits_nothing(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKV_LEAK", "1")
    leak = os.open("/dev/zero", os.O_RDONLY)
    os.set_inheritable(leak, True)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    client = NodeClient(config(), namespace(), engine="e", role="scheduler")
    try:
        client.start()
        assert client.wait_ready(START_S), client.reason
        node = psutil.Process(client.node_pid)
        assert os.getpid() not in {parent.pid for parent in node.parents()}  # an engine that kills its descendants does not hit it
        assert not any(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children())
        assert os.getsid(node.pid) not in (os.getsid(0), os.getsid(node.ppid()) if node.ppid() else 0)
        assert set(node.cpu_affinity()) == before
        assert set(node.environ()) <= set(spawn.PASSED) | {"PYTHONPATH", "LC_CTYPE"}
        targets = {os.readlink(link) for link in Path(f"/proc/{node.pid}/fd").iterdir() if link.is_symlink()}
        assert "/dev/zero" not in targets
        status = Path(f"/proc/{node.pid}/status").read_text()
        mask = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")), 16)
        assert not mask & (1 << signal.SIGTERM - 1 | 1 << signal.SIGUSR1 - 1)
        log = paths.node_paths().log
        assert log.stat().st_mode & 0o777 == 0o600 and os.readlink(f"/proc/{node.pid}/fd/2") == str(log)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.sched_setaffinity(0, before)
        os.close(leak)
        client.close()


def test_a_node_that_does_not_start_says_why(runtime_dir: Path) -> None:
    with pytest.raises(NodeUnavailable, match=r"ended while it started.*no_such_setting"):
        spawn.connect_or_spawn(paths.node_paths(), {"no_such_setting": 1}, {}, pause)


def test_a_client_that_closes_does_not_wait_for_the_start(runtime_dir: Path) -> None:
    paths.create(paths.node_paths())
    with open(paths.node_paths().spawn_lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # somebody else is starting the node, and does not get on
        client = NodeClient(config(), namespace(), engine="e", role="scheduler")
        client.start()
        assert not client.wait_ready(0.2)
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < 1 and not client._thread.is_alive()


def test_waiting_for_another_spawner_has_a_deadline(runtime_dir: Path) -> None:
    node = paths.node_paths()
    paths.create(node)
    with open(node.spawn_lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(NodeUnavailable, match=r"not ready in time: another process is starting it"):
            spawn.connect_or_spawn(node, {}, {}, pause, timeout_s=0.2)


def test_a_socket_that_a_dead_node_left_is_no_node(runtime_dir: Path) -> None:
    listener = Listener()
    listener.socket.close()
    assert spawn.connect(listener.node) is None
    listener.close()
    assert spawn.connect(listener.node) is None


def test_a_folder_that_others_can_write_to_is_refused(runtime_dir: Path) -> None:
    listener = Listener()
    listener.node.folder.chmod(0o777)
    with pytest.raises(NodeUnavailable, match="0777"):
        spawn.connect(listener.node)
    listener.close()


def test_a_full_backlog_is_busy_and_not_absent(runtime_dir: Path) -> None:
    listener = Listener()
    listener.socket.listen(0)
    connections = []
    with pytest.raises(NodeUnavailable, match="queue"):
        for _ in range(10):
            connections.append(spawn.connect(listener.node))
    for connection in connections:
        assert connection is not None
        connection.close()
    listener.close()


def test_the_log_is_bounded(runtime_dir: Path) -> None:
    node = paths.node_paths()
    paths.create(node)
    node.log.write_bytes(b"x" * (spawn.LOG_BYTES + 1))
    os.close(spawn._open_log(node.log))
    assert node.log.stat().st_size == 0
    node.log.unlink()
    node.log.symlink_to(runtime_dir / "elsewhere")
    with pytest.raises(OSError):
        spawn._open_log(node.log)


def test_environment_is_clean_and_finds_the_package() -> None:
    environment = spawn.environment({"PATH": "/bin", "HOME": "/h", "SECRET": "s", "MOONCAKE_MASTER": "m:1", "PYTHONPATH": "/elsewhere"})
    assert environment.items() >= {"PATH": "/bin", "HOME": "/h"}.items()
    assert not {"SECRET", "MOONCAKE_MASTER"} & environment.keys() and environment.get("PYTHONPATH") != "/elsewhere"
    code = "import mooncake_kv.common.node.protocol"
    subprocess.run([sys.executable, "-P", "-c", code], env=environment, cwd="/", check=True, timeout=30)


def test_a_killed_node_is_started_again(client: NodeClient) -> None:
    assert client.wait_ready(START_S), client.reason
    first = client.node_pid, client.epoch
    os.kill(client.node_pid, signal.SIGKILL)
    until(lambda: client.ready and client.node_pid != first[0], START_S)
    assert client.epoch != first[1] and client.counters()["nodes_spawned"] == 2
