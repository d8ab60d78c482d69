"""The check in tests/conftest.py that no process outlives the tests: it fails the run, ends the survivor, and can tell it from others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

LEAVES_ONE = """
import os, subprocess, sys
def test_passes():
    command = [sys.executable, "-c", "import time; time.sleep(100)", *{words}]
    child = subprocess.Popen(command, start_new_session=True, env={environment})
    open("pid", "w").write(str(child.pid))
"""


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        ("[]", "os.environ"),
        ("['--folder', os.environ['XDG_RUNTIME_DIR'] + '/mooncake-kv/x']", "{}"),
    ],
    ids=["inherited", "on its command line"],
)
def test_a_survivor_fails_the_run_and_is_ended(tmp_path: Path, words: str, environment: str) -> None:
    (tmp_path / "test_it.py").write_text(LEAVES_ONE.format(words=words, environment=environment))
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", str(tmp_path), "-q", "test_it.py"]
    variables = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)
    assert "1 passed" in done.stdout
    assert done.returncode == 1, done.stdout
    pid = int((tmp_path / "pid").read_text())
    assert f"{pid}:" in done.stdout
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
