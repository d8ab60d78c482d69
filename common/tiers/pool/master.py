"""A mooncake_master of our own, for one machine (`master_server_address: "embedded"`).

Promises: it listens on loopback only; it ends with the process that started it, however that ends (PR_SET_PDEATHSIG, which the kernel ties
to the *thread* that started it: only a main thread calls `start`); one that outlived its process all the same is found by the file
`pool-master` (pid, start time, port) in the node's folder and ended before the next is started. A pid that another process has by now is
left alone, since its start time differs.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from ..base import TierDown
from .wheel import master_program

FILE = "pool-master"
LOG = "pool-master.log"
START_S = 5.0
STOP_S = 3.0
TRIES = 5
# Mooncake's own command line has no way to choose a free port, so another process may take it in between: exit code 1.
_HOST = "127.0.0.1"
LOG_BYTES = 1 << 20
# Between fork and exec only a fresh interpreter runs, so it is safe in a process with threads. The second test of the parent closes the gap
# before prctl.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class _Running(msgspec.Struct):
    pid: int
    started: int
    port: int


class EmbeddedMaster:
    """One master process; `address` is its host:port."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the node's, private to this user."""
        self._file = folder / FILE
        self._log = folder / LOG
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"{_HOST}:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """On its earlier port where that is free, so that clients find it again. Main thread only. Raises ConfigError or TierDown."""
        program = master_program()
        end_stale(self._file)
        for attempt in range(TRIES):
            port = self.port if self.port and not attempt else _free_port()
            if self._launch(program, port):
                self.port = port
                assert self._process is not None
                _write(self._file, _Running(self._process.pid, _start_time(self._process.pid) or 0, port))
                return
        raise TierDown(f"mooncake_master does not start (tried {TRIES} times): {self._last_line()}")

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """SIGTERM, then SIGKILL."""
        if self._process is None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            self._process.send_signal(sign)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
                break
        # A successor may have taken over the folder.
        running = _read(self._file)
        if running is not None and running.pid == self._process.pid:
            self._file.unlink(missing_ok=True)
        self._process = None

    def _launch(self, program: Path, port: int) -> bool:
        """False where it has ended, most likely because somebody took a port."""
        command = [
            str(program),
            f"--rpc_port={port}",
            f"--rpc_address={_HOST}",
            f"--metrics_port={_free_port()}",
            f"--metrics_host={_HOST}",
        ]
        command += ["--logtostderr", "--minloglevel=1"]
        with suppress(FileNotFoundError):
            if self._log.stat().st_size > LOG_BYTES:
                self._log.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            log = os.open(self._log, flags, 0o600)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                )
            finally:
                os.close(log)
        except OSError as error:
            raise TierDown(f"mooncake_master cannot be started: {error}") from None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return False
            if _listens(self._process.pid, port):
                return True
            time.sleep(0.01)
        self.close()
        return False

    def _last_line(self) -> str:
        with suppress(OSError):
            lines = [line for line in self._log.read_text(errors="replace")[-4096:].splitlines() if line.strip()]
            if lines:
                return lines[-1][:300]
        return "its log is empty"


def start_embedded_master(folder: Path) -> EmbeddedMaster:
    """A running one. Raises ConfigError or TierDown."""
    master = EmbeddedMaster(folder)
    master.start()
    return master


def end_stale(file: Path) -> None:
    """Ends the master that an earlier process left behind, if there is one, and removes the file."""
    running = _read(file)
    try:
        process = os.pidfd_open(running.pid) if running is not None else -1
    except OSError:
        process = -1
    if running is None or process < 0:
        file.unlink(missing_ok=True)
        return
    try:
        # Opened first and compared then: from here on the descriptor cannot mean another process.
        if running.started and _start_time(running.pid) == running.started:
            poll = select.poll()
            poll.register(process, select.POLLIN)
            for sign in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(process, sign)
                if poll.poll(STOP_S * 1000):
                    break
    finally:
        os.close(process)
    file.unlink(missing_ok=True)


def _start_time(pid: int) -> int | None:
    """In clock ticks since boot: with the pid it names a process for good."""
    try:
        # The command's name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19])


def _listens(pid: int, port: int) -> bool:
    """Whether this very process does: whoever accepts may be another one that has the port."""
    here = f"0100007F:{port:04X}"
    with suppress(OSError):
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        sockets = {f"socket:[{row[9]}]" for row in rows if row[1] == here and row[3] == "0A"}
        if sockets:
            return any(os.readlink(entry.path) in sockets for entry in os.scandir(f"/proc/{pid}/fd"))
    return False


def _read(file: Path) -> _Running | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Running)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _write(file: Path, running: _Running) -> None:
    temporary = file.with_name(file.name + ".new")
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as out:
        out.write(msgspec.json.encode(running))
    temporary.rename(file)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
