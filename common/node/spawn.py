"""Finds the node, and starts it where nobody has: connect, else lock, connect again, spawn, wait until it accepts.

Promises:
- Clients that start at once give one node: who spawns holds the folder's spawn lock until the node accepts.
- The node is nobody's child and no member of the engine's session: engines end by killing all their descendants, and the cache has to
  outlive them. It gets all CPUs, an empty signal mask, /dev/null, a log file and no other descriptors, and an environment of the few
  variables that Python and the choice of the folder need; settings travel as arguments.
- Every wait has a deadline and ends early when `pause` says so. Called on the client's own thread only.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import site
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from ..errors import ConfigError
from . import paths
from .paths import NodePaths

START_S = 30.0
LOG_BYTES = 1 << 20
_STEP_S = 0.02
# LD_LIBRARY_PATH: some Python installations do not start without it. TMPDIR and XDG_RUNTIME_DIR decide where the folder is.
PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "XDG_RUNTIME_DIR", "TMPDIR", "LD_LIBRARY_PATH")
# Runs between the engine and the node, in a fresh and single-threaded Python, so that fork is safe here: gives the node to init.
_LAUNCHER = """
import os, signal, sys
pid = os.fork()
if pid:
    print(pid, flush=True)
    sys.exit()
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.dup2(2, 1)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class NodeUnavailable(Exception):
    """There is no node to talk to now; the message is one sentence that says why."""


def connect(node: NodePaths) -> socket.socket | None:
    """A non-blocking connection to the running node, None if none accepts. Raises NodeUnavailable if something does that is not ours."""
    try:
        if not paths.check(node):
            return None
    except (ConfigError, OSError) as error:
        raise NodeUnavailable(str(error)) from None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(str(node.socket))
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            raise NodeUnavailable(f"node {node.name!r}: the process at {node.socket} belongs to uid {uid}, not to uid {os.geteuid()}")
    except (ConnectionRefusedError, FileNotFoundError):
        connection.close()
        return None
    except BlockingIOError:
        connection.close()
        raise NodeUnavailable(f"node {node.name!r} does not accept connections: its queue at {node.socket} is full") from None
    except (OSError, NodeUnavailable) as error:
        connection.close()
        raise NodeUnavailable(str(error)) from None
    return connection


def connect_or_spawn(
    node: NodePaths,
    settings: Mapping[str, int | float | str | bool],
    sources: Mapping[str, str],
    pause: Callable[[float], bool],
    timeout_s: float = START_S,
) -> tuple[socket.socket, bool]:
    """A connection to the node, and whether this call has started it. `settings` and `sources` are the node's settings and where each came
    from. `pause(seconds)` waits and returns False when the caller gives up. Raises NodeUnavailable."""
    connection = connect(node)
    if connection is not None:
        return connection, False
    deadline = time.monotonic() + timeout_s
    try:
        paths.create(node)
        lock = os.open(node.spawn_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except (ConfigError, OSError) as error:
        raise NodeUnavailable(f"node {node.name!r} cannot be started: {error}") from None
    try:
        while not _locked(lock):
            _wait(node, pause, deadline, "another process is starting it")
            if (connection := connect(node)) is not None:
                return connection, False
        if (connection := connect(node)) is not None:
            return connection, False
        pid = _launch(node, settings, sources, pause, deadline)
        while (connection := connect(node)) is None:
            if _ended(pid):
                # Or one that was started by hand a moment earlier has made it leave; then the next try finds that one.
                raise NodeUnavailable(f"node {node.name!r} ended while it started, see {node.log}: {_last_line(node.log)}")
            _wait(node, pause, deadline, f"pid {pid} does not accept yet, see {node.log}")
        return connection, True
    finally:
        # Not by closing alone: a child that was forked meanwhile holds the same lock.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(node: NodePaths, pause: Callable[[float], bool], deadline: float, why: str) -> None:
    if time.monotonic() > deadline:
        raise NodeUnavailable(f"node {node.name!r} was not ready in time: {why}")
    if not pause(_STEP_S):
        raise NodeUnavailable("the client was closed")


def _launch(
    node: NodePaths,
    settings: Mapping[str, int | float | str | bool],
    sources: Mapping[str, str],
    pause: Callable[[float], bool],
    deadline: float,
) -> int:
    """Starts the node and returns its pid."""
    arguments = ["-P", "-m", "mooncake_kv.common.node", "--name", node.name, "--folder", str(node.folder)]
    arguments += ["--settings", json.dumps(dict(settings)), "--sources", json.dumps(dict(sources))]
    # A child starts with the affinity of the thread that made it: on an engine's own cores, which may be full of spinning threads, it has
    # been seen to get no time for half a minute.
    ours = os.sched_getaffinity(0)
    try:
        log = _open_log(node.log)
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        try:
            launcher = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=node.folder,
                env=environment(os.environ),
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, ours)
            os.close(log)
    except OSError as error:
        raise NodeUnavailable(f"node {node.name!r} cannot be started: {error}") from None
    assert launcher.stdout is not None
    try:
        # Not until the end of the pipe: a process that an engine thread forks at this moment holds it too.
        poll = select.poll()
        poll.register(launcher.stdout, select.POLLIN)
        while not poll.poll(0):
            _wait(node, pause, deadline, "its launcher gets no time to run")
        return int(launcher.stdout.readline())
    except ValueError:
        raise NodeUnavailable(f"node {node.name!r} cannot be started, see {node.log}: {_last_line(node.log)}") from None
    finally:
        launcher.stdout.close()
        launcher.kill()
        launcher.wait()


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the node gets of this process's environment. PYTHONPATH only where our package is importable through nothing else."""
    kept = {name: environ[name] for name in PASSED if name in environ}
    installed = {os.path.realpath(folder) for folder in (*site.getsitepackages(), site.getusersitepackages())}
    for folder in map(Path, import_module("mooncake_kv").__path__):
        if folder.name == "mooncake_kv" and os.path.realpath(folder.parent) not in installed:
            kept["PYTHONPATH"] = str(folder.parent)
    return kept


def _open_log(log: Path) -> int:
    """Append to the log; what an earlier node left is moved aside when it has grown, so that two files bound it."""
    with suppress(FileNotFoundError):
        if log.stat().st_size > LOG_BYTES:
            log.replace(log.with_name(log.name + ".old"))
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _ended(pid: int) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        # Readable once it has ended, also where nobody reaps it (a container without an init).
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(process)


def _last_line(log: Path) -> str:
    with suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        if lines:
            return lines[-1].strip()[:300]
    return "the log is empty"
