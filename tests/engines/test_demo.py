"""The demo as a user starts it. It judges itself: its exit code is 0 only if every answer from the cache is the engine's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import processes_of

TIMEOUT_S = 600


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_demo(runtime_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    command = [str(Path(sys.executable).with_name("mooncake-kv")), "demo", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, "TMPDIR": str(runtime_dir)})
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report.keys() == {"model", "prompt_tokens", "runs"}
    assert 2500 < report["prompt_tokens"] < 3500
    assert [run["name"] for run in report["runs"]] == ["cold", "reset", "new_engine"]
    assert all(run.keys() == {"name", "ttft_s", "tokens_reused", "tier", "text"} for run in report["runs"])
    cold, reset, new_engine = report["runs"]
    assert (cold["tokens_reused"], cold["tier"]) == (0, "none")
    for run in (reset, new_engine):
        assert run["tier"] == "dram"
        assert run["tokens_reused"] == report["prompt_tokens"] // 64 * 64
        assert run["ttft_s"] < cold["ttft_s"], "how much less is for the benchmarks"
    assert reset["text"] == new_engine["text"]
    assert "DRINK ME" in reset["text"]
    assert not list(runtime_dir.glob("mooncake-kv-demo-*"))
    assert not processes_of(runtime_dir), "its engines and its node are gone"


def test_a_model_that_is_not_there(runtime_dir: Path) -> None:
    command = [str(Path(sys.executable).with_name("mooncake-kv")), "demo", "--model", "/no/such/model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "TMPDIR": str(runtime_dir)})
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0 and "the engine did not start" in done.stderr
