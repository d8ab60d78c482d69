"""What this node gives to the pool: its segment, and an embedded master where one is asked for, in a process of their own, the keeper.

Why: the tier process is killed when a call hangs, and a segment dies with its process. The keeper makes no calls that could hang, so what
it holds lives as long as the node.

Promises: the keeper ends when its node does, however that ends, and unmounts first (others would run into a dead segment for 11 s);
settings travel over a socket pair; `Keeper` makes no call without a deadline. A master that dies is started again, empty, on the same port;
Mooncake's client mounts the segment there again within a second or two.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...config import EMBEDDED, POOL_KEYS
from ...errors import ConfigError
from ..base import TierDown, with_low_priority

START_S = 8.0
CLOSE_S = 5.0
# Takes a millisecond where the master answers.
UNMOUNT_S = 1.0
NICE = 10
# A keeper that cannot start is not tried again at once.
BACK_OFF_S = 1.0
BACK_OFF_MAX_S = 30.0
_WATCH_MS = 500
_MAX_MESSAGE = 1 << 16


class _Start(msgspec.Struct):
    settings: dict[str, Any]
    sources: dict[str, str]
    folder: str


class _Ready(msgspec.Struct):
    """`error` is empty when the keeper serves; then `master` is the master's address and `segment` this node's segment, if any."""

    master: str = ""
    segment: str = ""
    error: str = ""
    kind: Literal["", "config", "down"] = ""


class Keeper:
    """The node's side. Calls block and may come from any thread, one at a time."""

    def __init__(self, settings: Mapping[str, Any], sources: Mapping[str, str], folder: Path) -> None:
        """`settings`: CacheConfig.node_settings(); `folder`: the node's, private to this user."""
        self._start = _Start(
            {key: settings[key] for key in POOL_KEYS},
            {key: sources.get(key, "default") for key in POOL_KEYS},
            str(folder),
        )
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._tier_settings: dict[str, Any] = {}
        self._after = 0.0
        self._pause_s = BACK_OFF_S
        self._last = TierDown("the pool's keeper has not been started")
        self._closed = threading.Event()

    @property
    def pid(self) -> int:
        """0 when it does not run."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    def ensure(self) -> dict[str, Any]:
        """Starts the keeper unless it runs. Returns the settings for `open_tier`. Raises ConfigError (what is configured cannot work) or
        TierDown (not now)."""
        with self._lock:
            if self._closed.is_set():
                raise TierDown("the pool's keeper is closed")
            if self._process is not None and self._process.poll() is None:
                return self._tier_settings
            if time.monotonic() < self._after:
                raise self._last
            self._end(0)
            try:
                ready = self._launch()
            except OSError as error:
                ready = _Ready(error=f"the pool's keeper cannot be started: {error}", kind="down")
            if not ready.error:
                self._pause_s = BACK_OFF_S
                settings = {**self._start.settings, "master_server_address": ready.master}
                self._tier_settings = {
                    **settings,
                    "sources": self._start.sources,
                    "folder": self._start.folder,
                    "segment": ready.segment,
                }
                return self._tier_settings
            self._end(0)
            if ready.kind == "config":
                raise ConfigError(ready.error)
            self._after = time.monotonic() + self._pause_s
            self._pause_s = min(self._pause_s * 2, BACK_OFF_MAX_S)
            self._last = TierDown(ready.error)
            raise self._last

    def close(self) -> None:
        """Unmounts the segment and ends the embedded master, within CLOSE_S and a moment. An `ensure` under way fails at once."""
        self._closed.set()
        starting = self._socket
        if starting is not None:
            with suppress(OSError):  # it is closed already
                starting.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._end(CLOSE_S)

    def _launch(self) -> _Ready:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._socket = ours
            if self._closed.is_set():
                return _Ready(error="the pool's keeper is closed", kind="down")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mooncake_kv.common.tiers.pool.keeper", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        ours.settimeout(START_S)
        try:
            ours.send(msgspec.msgpack.encode(self._start))
            data = ours.recv(_MAX_MESSAGE)
        except TimeoutError:
            return _Ready(error=f"the pool's keeper is not ready after {START_S:.0f} s", kind="down")
        if not data and self._closed.is_set():
            return _Ready(error="the pool's keeper is closed", kind="down")
        if not data:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
            return _Ready(error=f"the pool's keeper ended while it started (exit code {self._process.poll()})", kind="down")
        return msgspec.msgpack.decode(data, type=_Ready)

    def _end(self, timeout_s: float) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # one that the kernel does I/O for outlives its SIGKILL
                self._process.wait(1.0)
            self._process = None


# ---- the keeper's own process ---------------------------------------------------------------------------------------------------------


def _serve(sock: socket.socket) -> None:
    """Returns when the node is gone or when nothing could be started."""
    from .checks import PoolSettings
    from .client import PoolClient
    from .master import EmbeddedMaster

    data = sock.recv(_MAX_MESSAGE)
    if not data:
        return
    start = msgspec.msgpack.decode(data, type=_Start)
    settings = dict(start.settings)
    master: EmbeddedMaster | None = None
    client: PoolClient | None = None
    try:
        checked = PoolSettings(settings, start.sources)
        if checked.master == EMBEDDED:
            master = EmbeddedMaster(Path(start.folder))
            master.start()
            checked.master = master.address
        if checked.segment_bytes:
            # Its threads copy for others; the master, whom lookups wait for, keeps its priority.
            client = with_low_priority(lambda: PoolClient(checked, checked.segment_bytes), NICE)
        sock.send(msgspec.msgpack.encode(_Ready(master=checked.master, segment=client.endpoint if client else "")))
        _watch(sock, master)
    except (ConfigError, TierDown) as error:
        kind: Literal["config", "down"] = "config" if isinstance(error, ConfigError) else "down"
        with suppress(OSError):
            sock.send(msgspec.msgpack.encode(_Ready(error=str(error), kind=kind)))
    finally:
        # First the segment: unmounting needs the master, and blocks for many seconds where that is gone.
        if client is not None and (master is None or master.alive()):
            closing = threading.Thread(target=client.close, daemon=True)
            closing.start()
            closing.join(UNMOUNT_S)
        if master is not None:
            master.close()


def _watch(sock: socket.socket, master: Any) -> None:
    """Until the node closes its end; keeps an embedded master alive, but not one that ends again and again."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    started = time.monotonic()
    while not poll.poll(_WATCH_MS):
        if master is not None and not master.alive():
            if time.monotonic() < started + BACK_OFF_MAX_S / 10:
                continue
            print("mooncake-kv: the embedded mooncake_master has ended and is started again, empty", file=sys.stderr, flush=True)
            started = time.monotonic()
            master.start()


def main() -> None:
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, signal.SIG_IGN)
    os.umask(0o077)
    try:
        _serve(socket.socket(fileno=int(sys.argv[1])))
    except ConnectionResetError:
        pass
    finally:
        # Not sys.exit: Mooncake's destructors may wait for a master that is gone.
        os._exit(0)


if __name__ == "__main__":
    main()
