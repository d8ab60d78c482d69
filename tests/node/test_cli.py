"""The command line against real nodes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mooncake_kv.common.node import protocol
from mooncake_kv.common.node.paths import create, node_paths
from mooncake_kv.common.node.spawn import NodeUnavailable
from mooncake_kv.common.node.tool import NodeTool

COMMAND = str(Path(sys.executable).with_name("mooncake-kv"))


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *words], capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


def status(*words: str) -> tuple[int, list[dict[str, Any]]]:
    done = run("status", "--json", *words)
    return done.returncode, json.loads(done.stdout)["nodes"]


@pytest.fixture
def node(runtime_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A node that runs in the foreground, ready."""
    settings = '{"node": "one", "dram_size": "64mb", "metrics_port": -1}'
    process = subprocess.Popen([COMMAND, "node", "run", "--moon-cache-config", settings], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while not (runtime_dir / "mooncake-kv" / "one" / "socket").exists() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    yield process
    process.kill()
    process.communicate()


def test_no_node(runtime_dir: Path) -> None:
    assert status() == (1, [])
    assert "No node is running" in run("status").stdout
    code, found = status("one")
    assert code == 1 and found[0]["running"] is False and "one" in found[0]["reason"]
    stopped = run("node", "stop", "one")
    assert stopped.returncode == 1 and stopped.stderr.count("\n") == 1 and "'one' is not running" in stopped.stderr


def test_status_says_where_lmdeploy_would_not_find_the_plugin(runtime_dir: Path) -> None:
    told = "LMDeploy, started like this, does not see mooncake-kv"
    assert told in " ".join(run("status", TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout.split())
    assert told not in " ".join(run("status", TORCH_DEVICE_BACKEND_AUTOLOAD="1").stdout.split())


def test_status_and_stop(node: subprocess.Popen[str]) -> None:
    code, (found,) = status()
    assert code == 0
    assert (found["node"], found["pid"], found["running"]) == ("one", node.pid, True)
    assert found["stats"]["dram_bytes"] == 64 << 20
    text = run("status", "one").stdout
    assert "64.0 MiB" in text and str(node.pid) in text
    stopped = run("node", "stop", "one", "--json")
    assert json.loads(stopped.stdout) == {"node": "one", "pid": node.pid, "stopped": True}
    assert node.wait(5) == 0
    assert status() == (1, [])


def test_a_narrow_terminal_without_unicode_hides_nothing(node: subprocess.Popen[str]) -> None:
    done = run("status", COLUMNS="50", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and not done.stderr and done.stdout.isascii(), done.stderr
    words = "".join(done.stdout.translate(dict.fromkeys(map(ord, " |\n"))).split())
    assert "window_bytes" in words and str(node_paths("one").folder) in words, words


def test_a_node_that_does_not_answer_is_named(node: subprocess.Popen[str]) -> None:
    node.send_signal(signal.SIGSTOP)
    try:
        code, (found,) = status()
    finally:
        node.send_signal(signal.SIGCONT)
    assert code == 1 and found["running"] is False and "does not answer" in found["reason"]


def test_the_same_name_twice(node: subprocess.Popen[str]) -> None:
    second = run("node", "run", "one")
    assert second.returncode == 3 and "already runs" in second.stderr
    assert node.poll() is None


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["node", "run", "--moon-cache-config", '{"dram_sise": 1}'], ["dram_sise", "--moon-cache-config", "dram_size"]),
        (["node", "run", "a", "--moon-cache-config", '{"node": "b"}'], ["'a'", "'b'", "--moon-cache-config"]),
        (["node", "run", "../up"], ["../up"]),
        (["status", "a/b"], ["a/b"]),
        (["status", ""], ["''"]),
        (["node", "stop", ""], ["''"]),
        (["demo", "--model", "m", "--engines", "vllm,sglan"], ["--engines", "'sglan'", "vllm, sglang"]),
    ],
)
def test_mistakes_are_one_sentence(runtime_dir: Path, words: list[str], parts: list[str]) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and all(part in done.stderr for part in parts), done.stderr


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    done = run("node", "run", XDG_RUNTIME_DIR="", TMPDIR=str(tmp_path / "missing"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and str(tmp_path) in done.stderr, done.stderr


def test_names_of_folders_are_no_markup(runtime_dir: Path) -> None:
    odd = runtime_dir / "o[/b][red]"
    odd.mkdir(mode=0o700, parents=True)
    done = run("status", "one", XDG_RUNTIME_DIR=str(odd), COLUMNS="400")
    assert done.returncode == 1 and not done.stderr and f"{odd}/mooncake-kv/one" in done.stdout


@pytest.mark.parametrize(
    ("speech", "said"),
    [
        ([b"\x03\x00\x00\x00\xc1\xc1\xc1"], "no message"),
        ([b"\xff\xff\xff\x7f"], "a frame of"),
        ([b"\xff"] + [b"\x00"] * 100, "does not answer"),  # a byte at a time
        ([protocol.frame(protocol.Granted([]))] * 100, "does not answer"),  # never to the point
    ],
)
def test_whatever_a_node_says_status_ends(runtime_dir: Path, speech: list[bytes], said: str) -> None:
    paths = node_paths("one")

    def speak(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            for words in speech:
                connection.sendall(words)
                time.sleep(0.1)

    create(paths)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(paths.socket))
        listener.listen()
        threading.Thread(target=speak, args=(listener,), daemon=True).start()
        began = time.monotonic()
        with pytest.raises(NodeUnavailable, match=said), NodeTool(paths, version="test", timeout_s=1):
            pass
        assert time.monotonic() - began < 3


def test_the_configured_node_is_the_one_meant(runtime_dir: Path) -> None:
    done = run("node", "stop", MOONCAKE_NODE="other")
    assert done.returncode == 1 and "'other' is not running" in done.stderr
