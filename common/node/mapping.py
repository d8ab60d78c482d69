"""The node's memory in a worker's process: extents mapped from sealed memfds, and pins that keep copies away from slots of the past.

Promises:
- A mapping is removed only after the last array that views it is gone, whoever holds it, so no view ever points at nothing; and it is
  removed on the client's thread (removing a GiB takes 10-50 ms), not on the thread that drops the last view.
- mmap, munmap (through ctypes: Python's own mmap object holds the GIL in munmap) and the touching of pages run without the GIL. Every page
  is read once before it is used, 50 ms a GiB, and copies then fault no more. Reading takes the lock of this one mapping; MADV_POPULATE
  would take the process's, and an engine thread whose malloc needs memory would wait for a thread that may have lost its processor.
- A memfd that is smaller than said, or that may still shrink, is refused: touching what was cut off would be a SIGBUS.
- `pin` and its end take a lock that is held for a counter update only.
- A forked child does not inherit a mapping (MADV_DONTFORK): a lingering child would keep a dead node's memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

import numpy as np

from .protocol import SLOT_SHIFT

_OFFSET = (1 << SLOT_SHIFT) - 1
_TOUCH_STEP = 64 << 20
_PAGE = 4096
_PROT_READ_WRITE = 3
_MAP_SHARED = 1
_MADV_DONTFORK = 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


class Doorbell:
    """Wakes the client's thread. `ring` costs one eventfd write, or nothing when it was rung already and not yet heard."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rung = False

    def ring(self) -> None:
        if not self._rung:
            self._rung = True
            os.eventfd_write(self.fd, 1)

    def hear(self) -> None:
        """Call before looking for work: whatever was queued before a later ring is seen by that look."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        self._rung = False

    def __del__(self) -> None:
        # Closed with the last reference only: an engine thread may be about to write, and the number must not be somebody else's by then.
        os.close(self.fd)


class Gone(NamedTuple):
    """A mapping that nobody views any more and that is still to be removed. `held` is let go after that."""

    arena: Arena
    extent: int
    address: int
    size: int
    held: object

    def unmap(self) -> None:
        _libc.munmap(self.address, self.size)
        self.arena.live -= 1


class Reaper:
    """Collects mappings to be removed by the client's thread. After `close`, they are removed where they are dropped."""

    def __init__(self, doorbell: Doorbell) -> None:
        self._doorbell = doorbell
        self._pid = os.getpid()
        self.gone: deque[Gone] = deque()
        self.closed = False

    def add(self, gone: Gone) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has no mapping there, perhaps something else
        if self.closed:
            gone.unmap()
            return
        self.gone.append(gone)
        self._doorbell.ring()


class _Mapping:
    """Owner of one mapped extent; the base of all arrays that view it."""

    def __init__(self, fd: int, gone: Callable[[int], Gone], size: int, reaper: Reaper) -> None:
        address = _libc.mmap(None, size, _PROT_READ_WRITE, _MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), f"cannot map an extent of {size} bytes: {os.strerror(ctypes.get_errno())}")
        _libc.madvise(address, size, _MADV_DONTFORK)
        self.address: int = address
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        self._reaper = reaper
        self._gone = gone(address)

    def __del__(self) -> None:
        if hasattr(self, "_gone"):
            self._reaper.add(self._gone)


class Arena:
    """All mapped extents of one node. `epoch` is the node's, `slot_bytes` the size of a page's slot, `held` an object that lives at least
    until the last mapping is removed (the socket: to the node, its end says that nothing is mapped any more)."""

    def __init__(self, epoch: int, slot_bytes: int, doorbell: Doorbell, reaper: Reaper, held: object = None) -> None:
        self.epoch = epoch
        self.slot_bytes = slot_bytes
        self.live = 0  # mappings that are not removed yet; the client's thread counts
        self._held = held
        self._doorbell = doorbell
        self._reaper = reaper
        self._lock = threading.Lock()
        self._extents: dict[int, np.ndarray] = {}  # replaced, never changed
        self._pins: Counter[int] = Counter()  # by generation
        self._fence = 0  # generations up to this one may not start
        self._waiting = False  # somebody waits for pins to end
        self._closed = False

    def pin(self, epoch: int, generation: int) -> Pin:
        """Context manager for copying: gives a PinnedArena, or None (copy nothing) when the epoch is another one, the generation is
        fenced or the node is lost. While pinned nothing is unmapped and the generation is not reported as fenced. `generation` is that of
        the Slots or the Fetch; 0 is not subject to fencing."""
        return Pin(self, epoch, generation)

    @property
    def mapped_bytes(self) -> int:
        return sum(len(extent) for extent in self._extents.values())

    # ---- what follows is for the client's thread -------------------------------------------------------------------------------

    def map(self, extent: int, fd: int, size: int, stop: Callable[[], bool] = lambda: False) -> int:
        """Map an extent and touch its pages; then slots in it are visible to pins that start. Returns the address. `stop` is asked
        between pieces. Raises ValueError for a memfd that cannot be trusted, OSError when mapping fails."""
        actual = os.fstat(fd).st_size
        if actual < size or size <= 0:
            raise ValueError(f"the node sent an extent of {size} bytes whose memory has {actual}")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("the node sent an extent that is not sealed against shrinking")
        mapping = _Mapping(fd, lambda address: Gone(self, extent, address, size, self._held), size, self._reaper)
        self.live += 1
        view = np.asarray(mapping)
        for offset in range(0, size, _TOUCH_STEP):
            if not stop():
                # A read fault makes the page writable too in a shared mapping of a memfd.
                view[offset : offset + _TOUCH_STEP : _PAGE].max()
        self._extents = {**self._extents, extent: view}
        return mapping.address

    def drop(self, extent: int) -> bool:
        """Let go of an extent; it is handed to the reaper once no pin and no view holds it. False if it was not mapped."""
        rest = dict(self._extents)
        found = rest.pop(extent, None) is not None
        self._extents = rest
        return found

    def close(self) -> None:
        """The node is lost: no pin starts any more, and all extents are let go."""
        with self._lock:
            self._closed = True
        self._extents = {}
        self._held = None

    def forked(self) -> None:
        """In a forked child: no pin, whoever held the lock when the process was copied."""
        self._lock = threading.Lock()
        self.close()

    def fence(self, generation: int) -> None:
        """Refuse pins of generations up to this one."""
        with self._lock:
            self._fence = max(self._fence, generation)

    def fenced(self, generation: int) -> bool:
        """Whether no pin of generations up to this one is left; if some are, the doorbell rings when one of them ends."""
        with self._lock:
            self._waiting = any(0 < pinned <= generation for pinned in self._pins)
            return not self._waiting

    # ---- what follows is for Pin -----------------------------------------------------------------------------------------------

    def _enter(self, epoch: int, generation: int) -> PinnedArena | None:
        with self._lock:
            if self._closed or epoch != self.epoch or 0 < generation <= self._fence:
                return None
            self._pins[generation] += 1
            return PinnedArena(self._extents, self.slot_bytes)

    def _exit(self, generation: int) -> None:
        with self._lock:
            self._pins[generation] -= 1
            if not self._pins[generation]:
                del self._pins[generation]
            ring = self._waiting
        if ring:
            self._doorbell.ring()


class PinnedArena:
    """The extents that were mapped when the pin began. Arrays from `slot` must not be kept beyond the pin."""

    __slots__ = ("_extents", "slot_bytes")

    def __init__(self, extents: dict[int, np.ndarray], slot_bytes: int) -> None:
        self._extents = extents
        self.slot_bytes = slot_bytes

    def slot(self, slot: int) -> np.ndarray | None:
        """The memory of a slot: uint8 [slot_bytes], contiguous, writable. None if its extent is not mapped, or the pin is over."""
        extent = self._extents.get(slot >> SLOT_SHIFT)
        begin = slot & _OFFSET
        if extent is None or begin + self.slot_bytes > len(extent):
            return None
        return extent[begin : begin + self.slot_bytes]

    def _end(self) -> None:
        self._extents = {}


class Pin:
    """See Arena.pin. Used once."""

    __slots__ = ("_arena", "_epoch", "_generation", "_pinned")

    def __init__(self, arena: Arena, epoch: int, generation: int) -> None:
        self._arena = arena
        self._epoch = epoch
        self._generation = generation
        self._pinned: PinnedArena | None = None

    def __enter__(self) -> PinnedArena | None:
        self._pinned = self._arena._enter(self._epoch, self._generation)
        return self._pinned

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pinned is not None:
            self._pinned._end()
            self._pinned = None
            self._arena._exit(self._generation)
