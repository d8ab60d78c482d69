"""`python -m mooncake_kv.common.node`: run a node in the foreground, logging to stderr.

Promises: at most one node runs in a folder (it holds a lock that ends with the process, however that ends). Exit code 0 after a clean stop,
3 when a node of that name is running, 1 for everything else, with one sentence as the last line of stderr.
"""

from __future__ import annotations

import os

# A node computes nothing with numpy that OpenBLAS has threads for.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import faulthandler
import fcntl
import gc
import json
import logging
import queue
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path

import uvloop

from ..config import NODE_KEYS
from ..errors import ConfigError
from .paths import NodePaths, at_folder, create, node_paths
from .server import Node
from .settings import NodeSettings, node_settings

EXIT_RUNNING = 3
# A predecessor that is leaving has removed its socket before its lock: a moment, or with a segment of the pool to unmount seconds.
LOCK_S = 2.0
LEAVING_S = 10.0
LOG_LINES = 1000
LOG_END_S = 1.0
# The event loop gets the GIL back from the thread that renders metrics after this time instead of Python's 5 ms.
SWITCH_S = 0.0005


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    try:
        paths = at_folder(Path(parsed.folder)) if parsed.folder else node_paths(parsed.name)
        settings = _settings(parsed)
        create(paths)
        settings.prepare_folders()
        lock = _lock(paths)
    except (ConfigError, OSError) as error:
        print(f"mooncake-kv node: {error}", file=sys.stderr)
        return 1
    if lock is None:
        print(f"mooncake-kv node: a node already runs in {paths.folder}", file=sys.stderr)
        return EXIT_RUNNING
    try:
        with _logging():
            _serve(paths, settings)
    except OSError as error:
        print(f"mooncake-kv node: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m mooncake_kv.common.node", description="Run a node of mooncake-kv in the foreground.")
    parser.add_argument("--name", default="default", help="name of the node")
    parser.add_argument("--folder", help="the node's own folder, instead of the one that follows from its name")
    parser.add_argument("--settings", default="{}", help="settings as a JSON object")
    parser.add_argument("--sources", default="{}", help="where each setting came from, as a JSON object")
    for key in NODE_KEYS:
        parser.add_argument(f"--{key.replace('_', '-')}", dest=key, help=f"setting {key}")
    return parser


def _settings(parsed: argparse.Namespace) -> NodeSettings:
    """Raises ConfigError. A flag wins over the same key in --settings."""
    objects = []
    for flag in ("settings", "sources"):
        try:
            value = json.loads(getattr(parsed, flag))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--{flag} is no JSON: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f"--{flag} must be a JSON object")
        objects.append(value)
    given, sources = objects
    for key in NODE_KEYS:
        if (value := getattr(parsed, key)) is not None:
            given[key] = value
            sources[key] = f"--{key.replace('_', '-')} of the node"
    return node_settings(given, {key: str(value) for key, value in sources.items()})


def _lock(paths: NodePaths) -> int | None:
    """A descriptor that holds the node's lock for as long as it is open; None if another node has it."""
    lock = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    begun = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > begun + (LOCK_S if paths.socket.exists() else LEAVING_S):
                os.close(lock)
                return None
            time.sleep(0.02)


@contextmanager
def _logging() -> Iterator[None]:
    """Log to stderr through a thread and a bounded queue: the event loop must not wait for a full pipe or a slow disk."""
    stderr = logging.StreamHandler(sys.stderr)
    stderr.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    lines: queue.Queue[logging.LogRecord] = queue.Queue(LOG_LINES)
    listener = QueueListener(lines, stderr)
    logging.raiseExceptions = False  # a line that finds the queue full is dropped
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(QueueHandler(lines))
    listener.start()
    try:
        yield
    finally:
        last = threading.Thread(target=listener.stop, daemon=True)
        last.start()
        last.join(LOG_END_S)


def _serve(paths: NodePaths, settings: NodeSettings) -> None:
    os.umask(0o077)
    faulthandler.enable()
    sys.setswitchinterval(SWITCH_S)
    # One descriptor for each extent and client.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # A collection would visit every page of the index: 25 ms with 400,000. Nothing here lives in circles; see Service.keep_house.
    gc.disable()
    uvloop.run(Node(paths, settings, _version()).run())


def _version() -> str:
    try:
        return version("mooncake-kv")
    except PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
