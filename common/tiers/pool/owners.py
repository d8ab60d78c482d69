"""Which owners of segments are not to be asked now: those that have hung or failed lately, and those that do not answer.

Why: the first transfer from a process that is frozen takes 62 s, whatever is configured (Mooncake's handshake); later ones a second for
each object and connection (MC_TCP_PROGRESS_TIMEOUT_SEC).

Promises: an owner that has not been heard from for FRESH_S is asked first, at its handshake port and without a byte of Mooncake's protocol:
a connection that is closed for writing at once is closed by a living process in return (0.1 ms, and no line in its log), by a frozen one
never. An owner that hangs in the middle of a transfer costs this node one deadline, not one each request: what is being read from is
written to a file before each batch, and if this process is killed meanwhile, the next one takes what it finds there for hung. The file is 4
KiB of memory shared with the page cache: marking costs microseconds and no system call.

An owner is the transfer endpoint in a replica's descriptor, `host:port`; a restarted one has another port.
"""

from __future__ import annotations

import mmap
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

_BYTES = 4096
# A dead owner's keys are gone after the master's client_ttl, 10 s by default. A frozen one may come back.
FIRST_S = 5.0
LONGEST_S = 60.0
FRESH_S = 1.0
ASK_S = 1.0


class _Suspect(msgspec.Struct, array_like=True):
    until: float
    pause_s: float


class _Journal(msgspec.Struct, array_like=True):
    busy: list[str]
    suspects: dict[str, _Suspect]


class Owners:
    """Times are those of time.monotonic(), which all processes of a machine share."""

    def __init__(self, file: Path | None, *, asks: bool = True) -> None:
        """`asks`: whether owners are addresses."""
        self._asks = asks
        self._lock = threading.Lock()
        self._busy: Counter[str] = Counter()
        self._suspects: dict[str, _Suspect] = {}
        self._heard: dict[str, float] = {}
        self._memory = _open(file) if file else None
        if self._memory is not None:
            self._adopt()

    def _adopt(self) -> None:
        assert self._memory is not None
        length = int.from_bytes(self._memory[:4], "little")
        try:
            found = msgspec.msgpack.decode(self._memory[4 : 4 + length], type=_Journal)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            found = _Journal([], {})
        now = time.monotonic()
        # A later boot starts the clock anew.
        self._suspects = {owner: s for owner, s in found.suspects.items() if s.until < now + LONGEST_S + 1}
        self.failed(found.busy)

    def begin(self, owners: Iterable[str]) -> None:
        """Data are being read from or written to them; `end` follows unless this process is killed in between."""
        with self._lock:
            self._busy.update(owners)
            self._note()

    def end(self, owners: Iterable[str]) -> None:
        with self._lock:
            self._busy.subtract(owners)
            self._busy = +self._busy
            self._note()

    def failed(self, owners: Iterable[str]) -> None:
        """They hung, or a transfer failed: leave them alone, twice as long each time."""
        now = time.monotonic()
        with self._lock:
            for owner in owners:
                last = self._suspects.get(owner)
                if last is not None and last.until > now:
                    continue  # the same failure, seen by another thread
                pause = min(last.pause_s * 2, LONGEST_S) if last else FIRST_S
                self._suspects[owner] = _Suspect(now + pause, pause)
                self._heard.pop(owner, None)
            # Forgotten when it has not failed again for long; ports of dead processes would pile up otherwise.
            self._suspects = {o: s for o, s in self._suspects.items() if s.until > now - 2 * LONGEST_S}
            self._note()

    def answered(self, owners: Iterable[str]) -> None:
        now = time.monotonic()
        with self._lock:
            for owner in owners:
                self._heard[owner] = now
                if self._suspects.pop(owner, None):
                    self._note()
            if len(self._heard) > 4096:
                self._heard = {owner: at for owner, at in self._heard.items() if at > now - FRESH_S}

    def usable(self, owner: str) -> bool:
        suspect = self._suspects.get(owner)
        return suspect is None or suspect.until <= time.monotonic()

    def ask(self, owners: Iterable[str]) -> None:
        """Those that are neither suspected nor heard from lately, all at once and for at most ASK_S, whether they live."""
        if not self._asks:
            return
        heard_after = time.monotonic() - FRESH_S
        quiet = [owner for owner in owners if self._heard.get(owner, 0.0) < heard_after and self.usable(owner)]
        if quiet:
            living = alive(quiet)
            self.answered(living)
            self.failed(set(quiet) - living)

    def suspects(self) -> int:
        now = time.monotonic()
        return sum(suspect.until > now for suspect in list(self._suspects.values()))

    def _note(self) -> None:
        if self._memory is None:
            return
        data = msgspec.msgpack.encode(_Journal(list(self._busy), self._suspects))
        if len(data) <= _BYTES - 4:
            self._memory[: 4 + len(data)] = len(data).to_bytes(4, "little") + data


def alive(owners: Iterable[str]) -> set[str]:
    """Those that answer; also those that are no `host:port`, which cannot be asked."""
    living = set()
    with selectors.DefaultSelector() as selector, ExitStack() as sockets:
        for owner in owners:
            host, _, port = owner.rpartition(":")
            if not host or not port.isdigit():
                living.add(owner)
                continue
            with suppress(OSError):
                family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
                probe = sockets.enter_context(socket.socket(family, kind))
                probe.setblocking(False)
                probe.connect_ex(address)
                selector.register(probe, selectors.EVENT_WRITE, (owner, probe))
        deadline = time.monotonic() + ASK_S
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, events in selector.select(left):
                owner, probe = key.data
                try:
                    if events & selectors.EVENT_WRITE:
                        probe.shutdown(socket.SHUT_WR)
                        selector.modify(probe, selectors.EVENT_READ, key.data)
                        continue
                    probe.recv(64)
                    living.add(owner)
                except ConnectionResetError:
                    living.add(owner)
                except OSError:
                    pass  # nobody has the port
                selector.unregister(probe)
    return living


def _open(file: Path) -> mmap.mmap | None:
    """Shared memory of the file, which is this user's alone; None where it cannot be had."""
    try:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(fd).st_size != _BYTES:
                os.ftruncate(fd, 0)
                os.ftruncate(fd, _BYTES)
            return mmap.mmap(fd, _BYTES)
        finally:
            os.close(fd)
    except OSError:
        return None
