"""What is refused before Mooncake is touched, which wheels are accepted, and what is remembered of owners that failed.

Wheels: only their metadata are faked (the environment has one wheel, and installing a second would overwrite it); everything else here is
real.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from mooncake_kv.common.config import load_config
from mooncake_kv.common.errors import ConfigError
from mooncake_kv.common.node.settings import node_settings
from mooncake_kv.common.tiers.base import TierDown
from mooncake_kv.common.tiers.pool import checks, owners, wheel
from mooncake_kv.common.tiers.pool.checks import PoolSettings, check_master, master_addresses
from mooncake_kv.common.tiers.pool.owners import Owners
from tests.node.pool_peer import free_port

MIB = 1 << 20


def checked(infiniband: Path = Path("/nonexistent"), **given: Any) -> PoolSettings:
    config = load_config({"master_server_address": "127.0.0.1:50051", "global_segment_size": "64mb", **given}, environ={})
    return PoolSettings(config.node_settings(), config.sources, infiniband=infiniband)


def refused(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(**given)
    return str(caught.value)


# ---- settings ------------------------------------------------------------------------------------------------------------------------


def test_rdma_needs_a_network_card(tmp_path: Path) -> None:
    assert refused(protocol="rdma").startswith("protocol is 'rdma' (--moon-cache-config): there is no network card below /nonexistent")
    assert "no network card" in refused(protocol="rdma", infiniband=tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    assert checked(tmp_path, protocol="RDMA", device_name="mlx5_0").protocol == "rdma"
    message = refused(protocol="rdma", infiniband=tmp_path, device_name="mlx5_0,mlx5_7")
    assert message == "device_name is 'mlx5_0,mlx5_7' (--moon-cache-config): the network cards here are mlx5_0"
    assert checked(device_name="whatever").protocol == "tcp", "a device does not matter with TCP"


def test_a_protocol_that_passed_no_parser_is_refused_too() -> None:
    config = load_config({"master_server_address": "127.0.0.1:1"}, environ={})
    with pytest.raises(ConfigError, match="protocol is 'TCP'"):
        PoolSettings({**config.node_settings(), "protocol": "TCP"}, config.sources)


@pytest.mark.parametrize("server", ["P2PHANDSHAKE", "http://m:8080/metadata", "etcd://a:1;b:2", "10.0.0.1:2379"])
def test_metadata_servers(server: str) -> None:
    assert checked(metadata_server=server).metadata == server


@pytest.mark.parametrize("server", ["p2phandshake", "http://", "m", "ftp://m:1/x", "redis://r:6379"])
def test_metadata_servers_that_are_none(server: str) -> None:
    assert refused(metadata_server=server).startswith(
        f"metadata_server is {server!r} (--moon-cache-config): it must be 'P2PHANDSHAKE', a URL"
    )


def test_hostname() -> None:
    assert refused(local_hostname="no-such-host.invalid").startswith(
        "local_hostname is 'no-such-host.invalid' (--moon-cache-config): it does not"
    )
    message = refused(local_hostname="192.0.2.7")
    assert message == "local_hostname is '192.0.2.7' (--moon-cache-config): it resolves to 192.0.2.7, which is no address of this machine"
    assert "no address of this machine" in refused(local_hostname="0.0.0.0")
    assert checked(local_hostname="localhost").hostname == "127.0.0.1"
    assert checked().hostname == "127.0.0.1", "a master on loopback can only have clients there"
    assert checked(master_server_address="embedded").hostname == "127.0.0.1"
    elsewhere = checked(master_server_address="192.0.2.1:50051") if _routed() else None
    assert elsewhere is None or checks.is_ours(elsewhere.hostname)


def _routed() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(("192.0.2.1", 50051)) == 0


def test_segment_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available", lambda: 1000 * MIB)
    assert checked(global_segment_size=496 * MIB).segment_bytes == 496 * MIB
    message = refused(global_segment_size=512 * MIB)
    assert message.startswith(f"global_segment_size is {512 * MIB} (--moon-cache-config): at most {496 * MIB} bytes, half of the memory")
    # Nobody asked for the default.
    config = load_config({"master_server_address": "embedded"}, environ={})
    assert PoolSettings(config.node_settings(), config.sources).segment_bytes == 496 * MIB
    assert checked(global_segment_size=0).segment_bytes == 0


def test_master_addresses() -> None:
    assert master_addresses("h:1") == [("h", 1)]
    assert master_addresses("etcd://10.0.0.1:2379;10.0.0.2:2380") == [("10.0.0.1", 2379), ("10.0.0.2", 2380)]
    assert master_addresses("[::1]:50051") == [("::1", 50051)]


def test_a_master_is_asked_with_a_deadline() -> None:
    port = free_port()
    with pytest.raises(
        TierDown, match=rf"no Mooncake master answers at master_server_address '127\.0\.0\.1:{port}' \(file x\): Connection"
    ):
        check_master(f"127.0.0.1:{port}", "file x")
    with socket.create_server(("127.0.0.1", port)):
        check_master(f"127.0.0.1:{port}", "file x")
        check_master(f"etcd://127.0.0.1:{free_port()};127.0.0.1:{port}", "file x")


def test_the_node_gets_its_pool_settings_from_its_command_line() -> None:
    """As a client that starts it passes them: all of them, also those that are empty."""
    config = load_config({"master_server_address": "h:1", "soft_pin": True, "replicas": 2}, environ={})
    settings = node_settings(config.node_settings(), config.sources)
    assert settings.values == config.node_settings()
    assert node_settings(load_config(environ={}).node_settings(), {}).values == load_config(environ={}).node_settings()
    other = load_config({"master_server_address": "h:2"}, environ={})
    assert settings.conflicts(other.node_settings(), other.sources) == [
        "master_server_address is 'h:2' (--moon-cache-config) but the running node has 'h:1' (--moon-cache-config)"
    ]


# ---- wheels --------------------------------------------------------------------------------------------------------------------------


class _Fake(Distribution):
    """Metadata of an installed distribution, without its files."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: 1\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path("/nonexistent") / path


def installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(wheel, "distributions", lambda: [_Fake(name) for name in ("numpy", *names)])


@pytest.mark.parametrize(
    ("name", "flavour"),
    [
        ("mooncake-transfer-engine", "cuda12"),
        ("mooncake-transfer-engine-cuda13", "cuda13"),
        ("mooncake_transfer_engine_non_cuda", "cpu"),
        ("Mooncake-Transfer-Engine-NPU", "npu"),
        ("mooncake-transfer-engine-rocm", "rocm"),
        ("mooncake-transfer-engine-musa", "musa"),
        ("mooncake-transfer-engine-efa-cuda13", "efa-cuda13"),
    ],
)
def test_flavours(monkeypatch: pytest.MonkeyPatch, name: str, flavour: str) -> None:
    installed(monkeypatch, name)
    assert wheel.installed_flavour() == flavour


def test_the_installed_wheel() -> None:
    assert wheel.installed_flavour() == "cpu"
    assert wheel.master_program().name == "mooncake_master"


def test_no_wheel_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    with pytest.raises(ConfigError, match=r"not installed: install one of the extras mooncake-kv\[cuda12\]"):
        wheel.installed_flavour()
    with pytest.raises(ConfigError, match="not installed"):
        wheel.load()
    installed(monkeypatch, "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
    with pytest.raises(
        ConfigError,
        match="2 Mooncake wheels are installed, mooncake-transfer-engine and mooncake-transfer-engine-non-cuda, which overwrite",
    ):
        wheel.installed_flavour()


@pytest.mark.parametrize(
    ("library", "advice"),
    [
        ("libibverbs.so.1", "apt-get install libibverbs1"),
        ("libnuma.so.1", "apt-get install libnuma1"),
        ("libcurl.so.4", "apt-get install libcurl4"),
        ("libcudart.so.12", "it belongs to the cpu wheel's platform"),
    ],
)
def test_a_missing_system_library_is_named(monkeypatch: pytest.MonkeyPatch, library: str, advice: str) -> None:
    def missing(_: str) -> Any:
        raise ImportError(f"{library}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(wheel, "import_module", missing)
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(ConfigError) as caught:
        wheel.load()
    assert library in str(caught.value) and advice in str(caught.value) and "\n" not in str(caught.value)


def test_what_the_operator_has_set_stays() -> None:
    code = (
        "import os; from mooncake_kv.common.tiers.pool import wheel; wheel.load(); "
        "print(os.environ['MC_RPC_TIMEOUT_MS'], os.environ['MC_TCP_SLICE_SIZE'])"
    )
    environment = {**os.environ, "MC_RPC_TIMEOUT_MS": "777"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "777 4194304"


# ---- owners --------------------------------------------------------------------------------------------------------------------------


def test_an_owner_that_fails_is_left_alone_for_longer_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(owners.time, "monotonic", lambda: now)
    known = Owners(tmp_path / "owners")
    pauses = []
    for _ in range(6):
        assert known.usable("a:1")
        known.failed(["a:1"])
        known.failed(["a:1"])  # another thread, the same failure
        begin = now
        while not known.usable("a:1"):
            now += 0.5
        pauses.append(now - begin)
    assert pauses == [5, 10, 20, 40, 60, 60]
    known.answered(["a:1"])
    known.failed(["a:1"])
    now += 5
    assert known.usable("a:1"), "an answer has not made good for the failures"
    assert known.usable("b:1") and known.suspects() == 0


def test_the_next_process_knows_what_this_one_was_waiting_for(tmp_path: Path) -> None:
    first = Owners(tmp_path / "owners")
    first.begin(["a:1", "b:1"])
    first.begin(["b:1"])
    first.end(["a:1", "b:1"])
    first.failed(["c:1"])
    second = Owners(tmp_path / "owners")
    assert [second.usable(owner) for owner in ("a:1", "b:1", "c:1", "d:1")] == [True, False, False, True]
    assert (tmp_path / "owners").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"\xff" * 4096, b"\x05\x00\x00\x00hello", b"x" * 10_000])
def test_a_spoilt_file_means_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "owners").write_bytes(content)
    known = Owners(tmp_path / "owners")
    assert known.suspects() == 0
    known.begin(["a:1"])
    assert not Owners(tmp_path / "owners").usable("a:1")


def test_a_file_that_cannot_be_had_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"")
    (tmp_path / "owners").symlink_to(tmp_path / "target")
    for file in (tmp_path / "owners", tmp_path / "missing" / "owners"):
        known = Owners(file)
        known.failed(["a:1"])
        assert not known.usable("a:1")
    assert (tmp_path / "target").stat().st_size == 0


def test_who_lives_is_found_out_in_one_round() -> None:
    script = """
import socket
s = socket.create_server(("127.0.0.1", 0))
print(s.getsockname()[1], flush=True)
while True:
    s.accept()[0].close()
"""
    frozen = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert frozen.stdout is not None
    try:
        frozen_port = int(frozen.stdout.readline())
        assert owners.alive([f"127.0.0.1:{frozen_port}"]) == {f"127.0.0.1:{frozen_port}"}
        frozen.send_signal(signal.SIGSTOP)
        with socket.create_server(("127.0.0.1", 0)) as server:
            living = f"127.0.0.1:{server.getsockname()[1]}"
            threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
            asked = [f"127.0.0.1:{frozen_port}", living, f"127.0.0.1:{free_port()}", "no-port", "no-such-host.invalid:1", "192.0.2.1:9"]
            begin = time.monotonic()
            assert owners.alive(asked) == {living, "no-port"}
            assert time.monotonic() - begin < owners.ASK_S + 1
    finally:
        frozen.kill()
        frozen.wait(10)
        frozen.stdout.close()
