"""The node's process: socket, clients' connections, metrics, and when it ends.

Promises:
- Runs on one thread and never blocks it. Nothing a client sends can end the node; what breaks the protocol ends that client's connection.
- Only processes of this user are served (SO_PEERCRED), and only after a Hello within HELLO_S.
- The socket accepts as soon as it exists, and is removed before the lock is released. The node leaves on SIGTERM, SIGINT, `Stop`,
  `idle_exit_s` after its last engine has gone, or, without engines, when its socket has been taken away.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import stat
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

from ..errors import UnsupportedError
from . import protocol
from .connection import Connection
from .memory import available
from .metrics import MetricsServer
from .paths import NodePaths
from .service import Service
from .session import ProtocolError, Session
from .settings import NodeSettings

log = logging.getLogger("mooncake_kv.node")

HELLO_S = 10.0
TICK_S = 0.5
# The first request after a start should find what lies on disk.
TIERS_S = 2.0
FOLDER_S = 60.0
# Without a free descriptor nobody can be let in; looking again at once would take a whole core.
ACCEPT_PAUSE_S = 1.0
ACCEPT_LOG_S = 60.0
_CREDENTIALS = struct.Struct("3i")


class Client:
    """A connection, and its session once it has said Hello."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.born = time.monotonic()
        self.session: Session | None = None
        self.connection: Connection


class Node:
    def __init__(self, paths: NodePaths, settings: NodeSettings, version: str) -> None:
        self._paths = paths
        self._settings = settings
        self._version = version
        self._folder_check = time.monotonic() + FOLDER_S
        self._clients: set[Client] = set()
        self._metrics: MetricsServer | None = None
        self._failure = ""
        self._accept_logged = -ACCEPT_LOG_S
        self._leaving = asyncio.Event()

    async def run(self) -> None:
        """Serve until told to leave. The caller holds the lock of `paths`. Raises OSError where the socket cannot be made or
        the helper process dies."""
        self._loop = asyncio.get_running_loop()
        self._service = Service(
            self._loop, self._paths.name, self._paths.folder, self._settings, self._version, leave=self._leave, fail=self._fail
        )
        for sign in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(sign, self._leave, sign.name)
        await self._service.wait_for_tiers(TIERS_S)
        self._listen()
        log.info(
            "node %s (pid %d, version %s) serves up to %d bytes at %s",
            self._paths.name,
            os.getpid(),
            self._version,
            self._service.dram_bytes,
            self._paths.socket,
        )
        if self._service.dram_bytes > (there := available()):
            source = self._settings.sources["dram_size"]
            log.warning("dram_size is %d (%s), but only %d bytes of memory are available", self._service.dram_bytes, source, there)
        ticking = asyncio.create_task(self._tick())
        try:
            if self._settings.metrics_port >= 0:
                self._start_metrics()
            await self._leaving.wait()
        finally:
            ticking.cancel()
            self._close()
        if self._failure:
            raise ChildProcessError(f"node {self._paths.name!r} cannot go on: {self._failure}")

    # ---- socket and metrics

    def _listen(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._paths.socket)  # of a node that was killed: we hold the lock
        self._tell_people(self._paths.pid, str(os.getpid()))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._listener.bind(str(self._paths.socket))
        except OSError as error:
            raise OSError(f"the socket {str(self._paths.socket)!r} cannot be made: {error.strerror}") from None
        self._socket_inode = os.lstat(self._paths.socket).st_ino
        self._listener.listen(512)
        self._loop.add_reader(self._listener, self._accept)

    @staticmethod
    def _tell_people(file: Path, line: str) -> None:
        """Write a file that the node does not need itself: a full disk costs the file."""
        try:
            file.write_text(f"{line}\n")
        except OSError as error:
            log.warning("the file %s could not be written: %s", file, error.strerror)

    def _start_metrics(self) -> None:
        """In a thread, because Python's HTTP server asks the resolver for its own name, which may take seconds."""
        host, port, service = self._settings.metrics_host, self._settings.metrics_port, self._service

        def start() -> None:
            try:
                server = MetricsServer(host, port, self._loop, service.stats, service.counters, service.lookups)
            except OSError as error:
                source = self._settings.sources["metrics_port"]
                log.error("no metrics: metrics_host is %s, metrics_port %d (%s): %s", host, port, source, error)
                return
            with suppress(RuntimeError):  # the loop is closed: the node has left
                self._loop.call_soon_threadsafe(self._metrics_started, server)

        threading.Thread(target=start, name="metrics", daemon=True).start()

    def _metrics_started(self, server: MetricsServer) -> None:
        if not self._leaving.is_set():
            self._metrics = server
            self._service.metrics_address = server.address
            self._tell_people(self._paths.metrics, server.address)

    def _close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for path in (self._paths.metrics, self._paths.pid, self._paths.socket):
            if path is not self._paths.socket or self._socket_is_ours():
                with suppress(FileNotFoundError):
                    path.unlink()
        for client in self._clients:
            client.connection.close()
        if self._metrics:
            self._metrics.close()
        self._service.close()
        log.info("node %s has left", self._paths.name)

    def _fail(self, why: str) -> None:
        self._failure = why
        self._leave(why)

    def _leave(self, why: str) -> None:
        log.info("node %s leaves: %s", self._paths.name, why)
        self._leaving.set()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._loop.remove_reader(self._listener)
            self._loop.call_later(ACCEPT_PAUSE_S, self._accept_again)
            if (now := time.monotonic()) - self._accept_logged >= ACCEPT_LOG_S:
                self._accept_logged = now
                log.error("cannot accept a client: %s", error)
            return
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        client = Client(pid)

        def broken(reason: str) -> None:
            self._service.counters.clients_failed += 1
            log.warning("ended the connection of pid %d: %s", pid, reason)

        client.connection = Connection(
            self._loop, sock, receive=lambda message: self._receive(client, message), gone=lambda: self._gone(client), broken=broken
        )
        self._clients.add(client)
        if uid != os.geteuid():
            self._refuse(client, f"the node at {self._paths.socket} serves uid {os.geteuid()}, not uid {uid}")

    def _accept_again(self) -> None:
        if not self._leaving.is_set():
            self._loop.add_reader(self._listener, self._accept)

    def _refuse(self, client: Client, reason: str) -> None:
        self._service.counters.clients_refused += 1
        log.warning("refused pid %d: %s", client.pid, reason)
        client.connection.send(protocol.frame(protocol.Refused(reason)))
        client.connection.end()

    # ---- clients

    def _gone(self, client: Client) -> None:
        self._clients.discard(client)
        if client.session is not None:
            self._service.gone(client.session)

    def _receive(self, client: Client, message: protocol.ToNode) -> None:
        try:
            if client.session is not None:
                self._service.handle(client.session, message)
            elif isinstance(message, protocol.Hello):
                try:
                    client.session = self._service.hello(client.connection, client.pid, message)
                except (ValueError, UnsupportedError) as error:
                    self._refuse(client, str(error))
            else:
                raise ProtocolError(f"{type(message).__name__} before Hello")
        except ValueError:
            raise
        except Exception:
            log.exception("a bug: %s of pid %d", type(message).__name__, client.pid)
            client.connection.fail("the node failed on its message")

    # ---- housekeeping

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._keep_house(time.monotonic())
            except Exception:
                log.exception("a bug in housekeeping")

    def _keep_house(self, now: float) -> None:
        self._service.keep_house(now)
        for client in [client for client in self._clients if client.session is None and now - client.born > HELLO_S]:
            client.connection.close()
            self._clients.discard(client)
        idle = self._settings.idle_exit_s
        if idle and not self._service.has_engines and now - self._service.last_engine >= idle:
            self._leave(f"no engine for {idle:g} s (idle_exit_s)")
        if now >= self._folder_check:
            self._folder_check = now + FOLDER_S
            self._check_folder()
            self._service.report_slow(now)

    def _check_folder(self) -> None:
        """Cleaners of temporary folders go by age, so show that we are here; without its socket a node is of no use to newcomers."""
        if self._socket_is_ours():
            for path in (self._paths.folder, self._paths.lock, self._paths.socket, self._paths.pid):
                with suppress(OSError):
                    os.utime(path)
        elif not self._service.has_engines:
            self._leave("its socket was removed")
        else:
            log.warning("the socket %s was removed: the node leaves with its last engine", self._paths.socket)

    def _socket_is_ours(self) -> bool:
        try:
            found = os.lstat(self._paths.socket)
        except OSError:
            return False
        return stat.S_ISSOCK(found.st_mode) and found.st_ino == self._socket_inode
