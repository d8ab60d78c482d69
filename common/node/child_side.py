"""What the node's own processes share: their end of the socket pair, and the node's memory.

Promises: an extent is mapped from its Map to its Unmap, and longer while a view of it lives. A process that runs `serve` ends with the
node, whatever its threads are doing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import msgspec
import numpy as np

from .protocol import SLOT_SHIFT

# What the kernel allows a datagram by default is 208 KiB.
MAX_MESSAGE = 1 << 17
# Pages of one job: with 41 bytes each, far below what a message may have.
MAX_JOB_PAGES = 256
_OFFSET = (1 << SLOT_SHIFT) - 1
_PR_SET_PDEATHSIG = 1
_MADV_POPULATE_WRITE = 23
_POPULATE_STEP = 4 << 20
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Message(msgspec.Struct, tag_field="t"):
    """Base of all messages between the node and its processes."""


class Map(Message, tag=True):
    """An extent of `size` bytes; its descriptor travels with this message."""

    extent: int
    size: int


class Unmap(Message, tag=True):
    """The extent goes. No job works on it."""

    extent: int


class Space(Message, tag=True):
    """Namespace `digest`, in its encoding, for jobs to come; `key` is that of its trailers."""

    digest: str
    encoded: bytes
    key: bytes = b""


encode = msgspec.msgpack.Encoder().encode


class Extents:
    """The node's memory, as far as it is mapped here."""

    def __init__(self) -> None:
        self._memory: dict[int, np.ndarray] = {}

    def map(self, extent: int, size: int, fd: int) -> int:
        """Returns the address of its first byte."""
        mapping = mmap.mmap(fd, size)
        mapping.madvise(mmap.MADV_DONTDUMP)
        # Unmapped with its last view.
        self._memory[extent] = np.frombuffer(mapping, np.uint8)
        return self.address(extent)

    def address(self, extent: int) -> int:
        return self._memory[extent].ctypes.data

    def populate(self, extent: int) -> None:
        """Enter an extent into our page tables, until that is done or it is unmapped. Files are read into slots at 2.3 GB/s where
        that is left to page faults, and at 6.4 otherwise."""
        start = 0
        while (memory := self._memory.get(extent)) is not None and start < memory.nbytes:
            address, size = memory.ctypes.data + start, min(_POPULATE_STEP, memory.nbytes - start)
            if _madvise(address, size, _MADV_POPULATE_WRITE):
                return  # an older kernel: page faults do it
            start += size

    def unmap(self, extent: int) -> None:
        self._memory.pop(extent, None)  # one that could not be mapped

    def slot(self, slot: int, slot_bytes: int) -> np.ndarray:
        """uint8 [slot_bytes]."""
        offset = slot & _OFFSET
        return self._memory[slot >> SLOT_SHIFT][offset : offset + slot_bytes]


def serve(sock: socket.socket, handle: Callable[[bytes, list[int]], object]) -> None:
    """Hand each datagram, with its descriptors, to `handle`. Returns when the node has closed its end."""
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE, 1)
        except ConnectionResetError:
            return
        if not data:
            return
        handle(data, fds)


def send(sock: socket.socket, message: Message) -> None:
    """From any thread. That the node is gone is for `serve` to notice."""
    try:
        sock.send(encode(message))
    except OSError:
        return


def main(nice: int, run: Callable[[socket.socket], object]) -> NoReturn:
    """Run a process of the node's: `run` gets the socket whose descriptor is the first argument."""
    # The node's event loop must not wait for a time slice of ours where there are fewer cores than threads.
    os.nice(nice)
    # Where a native call never gives Python's lock back, nobody would read the end of the socket.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # Ctrl-C and `kill` are for the node, which ends this process by closing the socket.
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, signal.SIG_IGN)
    try:
        run(socket.socket(fileno=int(sys.argv[1])))
    except Exception:
        traceback.print_exc()
    finally:
        # Not sys.exit, which would wait for threads.
        os._exit(0)
