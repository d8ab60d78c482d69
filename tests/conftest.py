"""What all tests share: a private runtime folder, and a check that no process outlives the run.

Every process that a test starts inherits MOONCAKE_KV_TEST_RUN; a node, which cleans its environment, has its folder on its command line.
Either names the run's folder, and that is how a survivor is found: it is ended by its pid, and the run fails.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

RUN_VARIABLE = "MOONCAKE_KV_TEST_RUN"
GRACE_S = 5.0
_counter = itertools.count()
_run_folder = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    # Short and outside pytest's own folders: a Unix socket's path has room for 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="mkv-", dir="/tmp"))
    config.stash[_run_folder] = folder
    signal.signal(signal.SIGTERM, _interrupt)  # so that a time limit on the whole run still cleans up
    os.environ[RUN_VARIABLE] = str(folder)
    os.environ["XDG_RUNTIME_DIR"] = str(folder)


def pytest_sessionfinish(session: pytest.Session) -> None:
    folder = session.config.stash[_run_folder]
    survivors = wait_for_end(processes_of(folder), GRACE_S)
    if survivors:
        print("\nERROR: processes that outlived the tests:")
        for process in survivors:
            print(f"  {process.pid}: {' '.join(_cmdline(process))[:300]}")
        end(survivors)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    shutil.rmtree(folder, ignore_errors=True)


def _interrupt(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # timeout(1) sends it to the process and again to its group
    raise KeyboardInterrupt("terminated")


@pytest.fixture
def runtime_dir(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A short folder that is XDG_RUNTIME_DIR for one test. Nodes that run in it at the end are stopped: sharing a warm node between tests
    would let one test's pages answer another's."""
    yield from _runtime_dir(request.config)


@pytest.fixture(scope="module")
def module_runtime_dir(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The same for the tests of a module that share an engine."""
    yield from _runtime_dir(request.config)


def _runtime_dir(config: pytest.Config) -> Iterator[Path]:
    folder = config.stash[_run_folder] / f"r{next(_counter)}"
    folder.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder
    end(processes_of(folder, nodes_only=True))
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: Path, *, nodes_only: bool = False) -> list[psutil.Process]:
    """Living processes, without this one and its ancestors, whose command line or environment names `folder` or a path below it."""
    ours = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        if process.pid in ours:
            continue
        command = _cmdline(process)
        if nodes_only and not any("mooncake_kv.common.node" in word or "mooncake-kv" in word for word in command):
            continue
        try:
            environment = process.environ()
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
        except psutil.Error:
            continue
        texts = [*command, environment.get("XDG_RUNTIME_DIR", ""), environment.get(RUN_VARIABLE, "")]
        if any(_names(text, folder) for text in texts):
            found.append(process)
    return found


def wait_for_end(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those still alive after at most `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while (alive := [p for p in processes if _alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def end(processes: list[psutil.Process]) -> None:
    """SIGTERM, and SIGKILL for what is left after GRACE_S."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            try:
                process.send_signal(signal.SIGCONT)  # a stopped process ignores SIGTERM
                process.send_signal(sign)
            except psutil.NoSuchProcess:
                continue
        processes = wait_for_end(processes, GRACE_S)


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _names(text: str, folder: Path) -> bool:
    return str(folder) in text and text[text.index(str(folder)) + len(str(folder)) :][:1] in ("", "/", "'", '"')
