"""The node as a process: who it serves, what ends it, and what is left when it or a client is killed."""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mooncake_kv.common.node import protocol
from mooncake_kv.common.node.paths import node_paths
from tests.conftest import wait_for_end
from tests.node.wire_client import WAIT_S, NodeProcess, WireClient, chain, running_node, small_namespace

SLOT = 8192


@pytest.fixture
def node(runtime_dir: Path) -> Iterator[NodeProcess]:
    with running_node("--dram-size", "1mb") as node:
        yield node


def resident_shared(pid: int) -> int:
    """Bytes of shared memory (memfds) that the process has touched."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssShmem")


def machine_shared() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no Shmem")


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *arguments], stdout=subprocess.PIPE, text=True)


LEASE_HOLDER = """
    import sys, pathlib, time
    from tests.node.wire_client import WireClient, chain
    client = WireClient(pathlib.Path(sys.argv[1]), engine="child")
    client.want(4)
    client.fetch(chain("p", 10))
    print("ready", flush=True)
    time.sleep(60)
"""


# ---- clients that die ----------------------------------------------------------------------------------------------------------


def test_killed_client_loses_its_leases_and_slots(node: NodeProcess) -> None:
    client = WireClient(node.paths.folder)
    client.want(4)
    client.store(chain("p", 10))
    holder = child(LEASE_HOLDER, str(node.paths.folder))
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        stats = client.stats()
        assert stats["leased_pages"] == 10 and stats["granted_slots"] == 8 and stats["clients"] == 2
        holder.kill()
        client.until(lambda: client.stats()["clients"] == 1)
        stats = client.stats()
        assert stats["leased_pages"] == 0 and stats["granted_slots"] == 4 and stats["quarantined_slots"] == 0
    finally:
        holder.kill()
        holder.communicate()


def test_slots_and_leases_of_a_dead_scheduler_wait_for_its_workers(node: NodeProcess) -> None:
    other = WireClient(node.paths.folder, engine="other")
    scheduler = WireClient(node.paths.folder)
    workers = [WireClient(node.paths.folder, "worker", answers=False) for _ in range(3)]
    for worker in workers:
        worker.until(lambda worker=worker: worker.told)  # type: ignore[misc]
        worker.send(protocol.Mapped(1))
        worker.ping()
    scheduler.want(8)
    pages = chain("p", 4)
    scheduler.store(pages)
    scheduler.until(lambda: len(scheduler.credits) == 8)
    _, leased = scheduler.fetch(pages)
    assert len(leased) == 4
    generation = scheduler.welcome.generation
    granted = set(scheduler.credits)
    scheduler.close()
    other.until(lambda: other.stats()["quarantined_slots"] == 8)
    for worker in workers:
        worker.until(lambda worker=worker: worker.fences == [generation])  # type: ignore[misc]

    # A new scheduler of the engine gets other slots, and nothing of the old ones goes to anybody.
    successor = WireClient(node.paths.folder)
    assert successor.welcome.generation > generation
    late = WireClient(node.paths.folder, "worker", answers=False)
    assert late.welcome.generation == successor.welcome.generation - 1 >= generation, "a late worker learns what is over"
    other.want(8)
    other.store(chain("flood", 200))
    assert not granted & set(other.credits)
    assert other.stats()["leased_pages"] == 4 and other.lookup(pages) == 4

    workers[0].send(protocol.Fenced(generation))
    workers[1].send(protocol.Fenced(generation - 1))
    for worker in workers:
        worker.ping()
    assert other.stats()["quarantined_slots"] == 8, "one has not answered, one for an earlier generation only"
    workers[1].send(protocol.Fenced(generation + 5))
    workers[1].ping()
    assert other.stats()["quarantined_slots"] == 8
    workers[2].close()  # gone counts as an answer
    other.until(lambda: other.stats()["quarantined_slots"] == 0)
    assert other.stats()["leased_pages"] == 0 and other.stats()["bad_frees"] == 0


def test_a_newer_scheduler_replaces_the_older_one(node: NodeProcess) -> None:
    old = WireClient(node.paths.folder)
    old.want(4)
    new = WireClient(node.paths.folder)
    old.wait_end()
    assert new.stats()["granted_slots"] == 4, "the old one may still use them until it closes"
    old.close()
    new.until(lambda: new.stats()["granted_slots"] == 0)
    new.want(4)


def test_a_client_that_does_not_read_is_ended_but_keeps_its_leases_until_it_closes(node: NodeProcess) -> None:
    watcher = WireClient(node.paths.folder, engine="watcher")
    client = WireClient(node.paths.folder)
    client.want(4)
    client.store(chain("p", 10))
    client.fetch(chain("p", 10))
    client.sock.settimeout(WAIT_S)
    for _ in range(8):  # each stats reply has some 900 bytes, each request 15
        client.send_raw(b"".join(protocol.frame(protocol.Stats(i)) for i in range(2000)))
    watcher.until(lambda: watcher.stats()["clients_failed"] == 1)
    assert watcher.stats()["leased_pages"] == 10 and watcher.stats()["unsent_bytes"] == 0
    client.close()
    watcher.until(lambda: watcher.stats()["leased_pages"] == 0)


# ---- hostile input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", protocol.MAX_FRAME + 1) + b"x",
        struct.pack("<I", 4) + b"\xff\xff\xff\xff",
        struct.pack("<I", 0),
        protocol.frame(protocol.Welcome(major=1, minor=0, version="", epoch=1, generation=1, pid=1)),
        protocol.frame(protocol.Lookup(1, b"x" * 33)),
        protocol.frame(protocol.Commit(b"x" * 32, [])),
        protocol.frame(protocol.Commit(b"x" * 32, [1], [protocol.Rectangle(0, 1, 0, 1)] * 1000)),
        protocol.frame(protocol.Hello(major=1, minor=0, version="", role="tool")),
        protocol.frame(protocol.Want(3)).replace(b"count", b"cxunt"),
        protocol.frame(protocol.Fetch(7, b"")) + os.urandom(300),
        # {"t": "Ping", "request": 1, "?": [[[...
        struct.pack("<I", 100_018) + b"\x83\xa1t\xa4Ping\xa7request\x01\xa1?" + b"\x91" * 100_000,
    ],
    ids=["oversized", "garbage", "empty", "direction", "cut hash", "uneven", "rectangles", "second hello", "no field", "noise", "nested"],
)
def test_what_is_no_message_ends_that_connection_only(node: NodeProcess, data: bytes) -> None:
    watcher = WireClient(node.paths.folder, engine="watcher")
    hostile = WireClient(node.paths.folder)
    hostile.send_raw(data)
    hostile.wait_end()
    hostile.close()
    watcher.until(lambda: watcher.stats()["clients"] == 1)
    assert watcher.stats()["clients_failed"] == 1


def test_slots_that_are_not_the_senders_are_ignored(node: NodeProcess) -> None:
    victim = WireClient(node.paths.folder, engine="victim")
    victim.want(4)
    victim.store(chain("p", 6))
    _, leased = victim.fetch(chain("p", 6))
    hostile = WireClient(node.paths.folder)
    hostile.want(4)
    wrong = [victim.credits[0], leased[0], leased[0] + 64, 0, -1, 2**63 - 1, 2**64 - 1, 99 << 40]
    hostile.commit(chain("h", len(wrong)), wrong)
    hostile.send(protocol.Discard(wrong))
    for message in (protocol.Mapped(77), protocol.Unmapped(-5), protocol.Release(99), protocol.Fenced(2**62), protocol.Suspect(b"")):
        hostile.send(message)
    hostile.ping()
    stats = victim.stats()
    assert stats["bad_slots"] == 2 * len(wrong) and stats["clients_failed"] == 0 and stats["bad_frees"] == 0
    assert stats["granted_slots"] == 8 and victim.lookup(chain("p", 6)) == 6
    own = hostile.credits.pop()
    hostile.fill(own, chain("own", 1)[0])
    hostile.commit(chain("own", 1), [own])
    hostile.commit(chain("again", 1), [own])
    hostile.until(lambda: hostile.lookup(chain("own", 1)) == 1)
    assert hostile.lookup(chain("again", 1)) == 0


def test_messages_before_hello_and_from_tools_are_refused(node: NodeProcess) -> None:
    early = WireClient(node.paths.folder, hello=False)
    early.send(protocol.Ping(1))
    early.wait_end()
    tool = WireClient(node.paths.folder, "tool")
    assert tool.stats()["clients"] == 0 and tool.welcome.slot_bytes == 0
    tool.send(protocol.Lookup(1, b"x" * 32))
    tool.wait_end()
    worker = WireClient(node.paths.folder, "worker")
    worker.send(protocol.Want(5))
    worker.wait_end()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"major": 2, "version": "9.9"},
            f"speaks protocol 1.{protocol.MINOR}, this client (version 9.9) 2.{protocol.MINOR}: stop the node (kill ",
        ),
        ({"namespace": b"junk"}, "not a KV namespace"),
        ({"digest": "short"}, "is no namespace digest"),
        ({"engine": ""}, "does not name its engine"),
        ({"namespace": small_namespace("big", layers=1000, heads=64).encode(), "digest": "0" * 32}, "dram_size is 1048576 (--dram-size"),
    ],
)
def test_refusals_say_why(node: NodeProcess, changes: dict[str, object], reason: str) -> None:
    client = WireClient(node.paths.folder, changes=changes)
    assert isinstance(client.welcome, protocol.Refused) and reason in client.welcome.reason, client.welcome
    client.wait_end()


def test_one_digest_is_one_namespace_and_one_engine_has_one(node: NodeProcess) -> None:
    first = WireClient(node.paths.folder)
    forged = WireClient(node.paths.folder, engine="x", namespace=small_namespace("other"), changes={"digest": first.digest})
    assert "two namespaces" in forged.welcome.reason
    mixed = WireClient(node.paths.folder, namespace=small_namespace("other"))
    assert "two namespaces" in mixed.welcome.reason


def test_minor_versions_and_unknown_fields_are_welcome(node: NodeProcess) -> None:
    client = WireClient(node.paths.folder, changes={"minor": 7})
    assert isinstance(client.welcome, protocol.Welcome)
    body = protocol.encoder.encode({"t": "Ping", "request": 5, "later": [1, 2]})
    client.send_raw(protocol.HEADER.pack(len(body)) + body)
    client.wait_for(protocol.Done, 5)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(node: NodeProcess) -> None:
    for folder in (node.paths.folder, node.paths.folder.parent, node.paths.folder.parent.parent, node.paths.folder.parent.parent.parent):
        folder.chmod(0o755)  # otherwise the other user does not even get there
    node.paths.socket.chmod(0o777)
    code = """
        import os, socket, sys
        from mooncake_kv.common.node import protocol
        os.setgid(65534), os.setuid(65534)
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(sys.argv[1])
        data = b""
        while part := sock.recv(1000):
            data += part
        print(protocol.decode_to_client(data[4:]).reason)
    """
    intruder = child(code, str(node.paths.socket))
    output, _ = intruder.communicate(timeout=WAIT_S)
    assert f"serves uid {os.geteuid()}, not uid 65534" in output
    node.paths.folder.chmod(0o700)
    assert WireClient(node.paths.folder, "tool").stats()["clients_refused"] == 1


def test_silent_connections_are_closed(runtime_dir: Path) -> None:
    with running_node("--dram-size", "1mb", patch="import mooncake_kv.common.node.server as s; s.HELLO_S = 0.3") as node:
        silent = WireClient(node.paths.folder, hello=False)
        silent.wait_end()


# ---- the node dies or stops ----------------------------------------------------------------------------------------------------


def test_five_kills_leave_one_arenas_memory(runtime_dir: Path) -> None:
    arena = 64 << 20
    namespace = small_namespace(layers=16, heads=4, tokens=128)
    before, ours = machine_shared(), resident_shared(os.getpid())
    client = None
    for _ in range(5):
        node = NodeProcess(node_paths("t"), "--dram-size", str(arena), "--extent-size", "16mb")
        try:
            if client is not None:
                client.wait_end()  # the old node is dead: let go of its memory before the next one
                client.close()
            client = WireClient(node.paths.folder, namespace=namespace)
            client.want(4)
            client.store(chain("p", 150))
            assert client.stats()["arena_bytes"] > arena * 9 // 10
            assert resident_shared(node.pid) <= arena + (1 << 20)
            assert resident_shared(os.getpid()) <= ours + arena + (1 << 20)
        finally:
            node.kill()
    assert client is not None
    client.wait_end()
    client.close()
    with running_node("--dram-size", str(arena)) as last:
        tool = WireClient(last.paths.folder, "tool")
        assert tool.stats()["arena_bytes"] == 0, "nothing is taken before somebody needs it"
        # Other programs on the machine use shared memory too, but hardly five arenas of it.
        assert machine_shared() - before < 2 * arena


def test_the_helper_goes_with_the_node_and_the_node_with_the_helper(runtime_dir: Path) -> None:
    node = NodeProcess(node_paths("t"), "--dram-size", "1mb")
    helper = WireClient(node.paths.folder, "tool").stats()["helper_pid"]
    node.kill()
    assert not wait_for_end([psutil.Process(helper)] if psutil.pid_exists(helper) else [], 5)

    node = NodeProcess(node_paths("t"), "--dram-size", "1mb")
    client = WireClient(node.paths.folder)
    client.want(4)
    os.kill(client.stats()["helper_pid"], signal.SIGKILL)
    log = node.wait()
    assert node.process.returncode == 1 and "its helper process" in log.splitlines()[-1], log
    client.wait_end()
    assert {path.name for path in node.paths.folder.iterdir()} == {"lock"}


def test_epochs_differ_and_stale_files_do_not_matter(runtime_dir: Path) -> None:
    node = NodeProcess(node_paths("t"), "--dram-size", "1mb")
    first = WireClient(node.paths.folder, "tool").welcome.epoch
    node.kill()
    assert node.paths.socket.exists() and node.paths.pid.exists()
    with running_node("--dram-size", "1mb") as again:
        assert WireClient(again.paths.folder, "tool").welcome.epoch != first
        assert again.paths.pid.read_text() == f"{again.pid}\n"
    assert not again.paths.socket.exists() and not again.paths.pid.exists()


def test_only_one_node_runs_in_a_folder(node: NodeProcess) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "mooncake_kv.common.node", "--name", "t"], stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False
    )
    assert second.returncode == 3 and "already runs" in second.stderr.splitlines()[-1]
    assert WireClient(node.paths.folder, "tool").stats()["pid"] == node.pid


def test_a_stopped_node_just_goes_on(node: NodeProcess) -> None:
    client = WireClient(node.paths.folder)
    client.want(4)
    client.store(chain("p", 10))
    os.kill(node.pid, signal.SIGSTOP)
    request = client.start_fetch(chain("p", 10))
    assert not client.read(0.3)
    os.kill(node.pid, signal.SIGCONT)
    assert len(client.finish_fetch(request)) == 10


def test_stop_and_signals_end_it_cleanly(runtime_dir: Path) -> None:
    for how in ("stop", signal.SIGTERM, signal.SIGINT):
        node = NodeProcess(node_paths("t"), "--dram-size", "1mb")
        client = WireClient(node.paths.folder)
        client.want(4)
        if isinstance(how, str):
            tool = WireClient(node.paths.folder, "tool")
            tool.send(protocol.Stop(1))
            tool.wait_for(protocol.Done, 1)
        else:
            node.process.send_signal(how)
        started = time.monotonic()
        node.wait()
        assert node.process.returncode == 0 and time.monotonic() - started < 5
        client.wait_end()
        assert {path.name for path in node.paths.folder.iterdir()} == {"lock"}


def test_idle_exit_counts_from_the_last_engine(runtime_dir: Path) -> None:
    node = NodeProcess(node_paths("t"), "--dram-size", "1mb", "--idle-exit-s", "1")
    client = WireClient(node.paths.folder)
    tool = WireClient(node.paths.folder, "tool")
    time.sleep(1.7)
    assert node.process.poll() is None
    client.close()
    left = time.monotonic()
    log = node.wait()
    assert 0.9 < time.monotonic() - left < 4 and "idle_exit_s" in log
    tool.wait_end()


def test_idle_exit_can_be_switched_off(runtime_dir: Path) -> None:
    with running_node("--dram-size", "1mb", "--idle-exit-s", "0") as node:
        time.sleep(1.2)
        assert node.process.poll() is None


def test_starts_fast_and_without_engines_or_torch(runtime_dir: Path) -> None:
    best = min(_start_time() for _ in range(3))
    print(f"start until the socket accepts: {best * 1e3:.0f} ms")
    assert best < 1.5, "0.25 s on an idle machine"
    code = "import sys; import mooncake_kv.common.node.server; print(*(m for m in sys.modules if m in ('torch', 'vllm', 'typer', 'rich')))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def _start_time() -> float:
    started = time.perf_counter()
    with running_node("--dram-size", "1mb"):
        return time.perf_counter() - started


# ---- settings and metrics ------------------------------------------------------------------------------------------------------


def test_the_first_settings_win_and_conflicts_name_both_sources(runtime_dir: Path) -> None:
    settings = '{"dram_size": 2097152, "extent_size": 1048576}'
    sources = '{"dram_size": "environment MOONCAKE_DRAM_SIZE", "extent_size": "default"}'
    with running_node("--settings", settings, "--sources", sources, "--idle-exit-s", "50") as node:
        theirs = {"dram_size": 1 << 20, "extent_size": 4 << 20, "idle_exit_s": 50.0, "metrics_host": "::1", "later": 1}
        flag = "--moon-cache-config"
        client = WireClient(
            node.paths.folder,
            changes={
                "settings": theirs,
                "sources": {"dram_size": flag, "extent_size": flag, "idle_exit_s": flag, "later": flag},
            },
        )
        assert client.welcome.conflicts == [
            "dram_size is 1048576 (--moon-cache-config) but the running node has 2097152 (environment MOONCAKE_DRAM_SIZE)",
            "extent_size is 4194304 (--moon-cache-config) but the running node has 1048576 (default)",
        ]
        assert client.welcome.dram_bytes == 2 << 20
        assert WireClient(node.paths.folder, engine="plain").welcome.conflicts == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dram-size", "-5"], "dram_size is '-5'"),
        (["--settings", '{"dram_sice": 5}'], "did you mean dram_size?"),
        (["--settings", "[]"], "--settings must be a JSON object"),
        (["--settings", "{"], "--settings is no JSON"),
        (["--name", "a/b"], "'a/b' is not a node name"),
        (["--folder", "/" + "x" * 120], "a Unix socket takes 107"),
    ],
)
def test_bad_arguments_end_it_with_one_sentence(runtime_dir: Path, arguments: list[str], said: str) -> None:
    run = subprocess.run([sys.executable, "-m", "mooncake_kv.common.node", *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 1 and said in run.stderr and len(run.stderr.splitlines()) == 1, run.stderr


def test_metrics_are_served_and_agree_with_the_stats(runtime_dir: Path) -> None:
    with running_node("--dram-size", "1mb", "--metrics-port", "0") as node:
        client = WireClient(node.paths.folder)
        client.want(4)
        client.store(chain("p", 10))
        client.lookup(chain("p", 10))
        client.fetch(chain("p", 12))
        client.until(node.paths.metrics.exists)
        address = node.paths.metrics.read_text().strip()
        assert client.stats()["metrics"] == address and address.startswith("127.0.0.1:")
        text = urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S).read().decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(values['mooncake_kv_node_pages_hit_total{tier="dram"}']) == 10
        assert float(values['mooncake_kv_node_bytes_hit_total{tier="dram"}']) == 10 * SLOT
        assert float(values["mooncake_kv_node_pages_missed_total"]) == 2
        assert float(values["mooncake_kv_node_leased_pages"]) == 10
        assert float(values["mooncake_kv_node_clients"]) == 1
        assert float(values["mooncake_kv_node_pages_bad_total"]) == 0
        assert float(values["mooncake_kv_node_lookup_seconds_count"]) == client.stats()["lookups"]
        assert float(values['mooncake_kv_node_lookup_seconds_bucket{le="+Inf"}']) == client.stats()["lookups"]
    assert not node.paths.metrics.exists()


def test_a_busy_metrics_port_does_not_stop_the_node(runtime_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running_node("--dram-size", "1mb", "--metrics-port", str(port)) as node:
            assert WireClient(node.paths.folder, "tool").stats()["metrics"] == ""


def test_a_full_log_pipe_does_not_stop_the_node(runtime_dir: Path) -> None:
    node = NodeProcess(node_paths("t"), "--dram-size", "1mb")
    try:
        for i in range(600):  # the log is read only at the end; a pipe takes 64 KiB
            WireClient(node.paths.folder, engine=f"with a long name to fill the log{'.' * 100}{i}").close()
        WireClient(node.paths.folder, "tool").ping()
    finally:
        log = node.end()
    assert len(log) >= 1 << 16


def test_many_clients_at_once(node: NodeProcess) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(200, soft // 4)
    tools = [WireClient(node.paths.folder, "tool") for _ in range(count)]
    for tool in tools:
        tool.ping()
    for tool in tools:
        tool.close()
    assert WireClient(node.paths.folder, "tool").stats()["clients"] == 0
