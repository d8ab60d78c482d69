"""The SSD tier: one file per object below a folder, at most so many bytes, the least recently used first to go.

Promises:
- A file appears whole: it is written under a temporary name and renamed. After a power failure it may be damaged all the same (nothing is
  synced); its trailer tells. It holds the object as it lies in its slot, with trailer and padding, a multiple of 4096 bytes.
- What is written does not go through the page cache, where the file system allows it: a third of the processor time (0.06 s instead of 0.16
  s for 0.44 GB, and no flood of dirty pages behind it), measured on ext4. Reads go through it: its readahead is as fast as direct reads.
- `read` checks what it reads in pieces of STEP, while they are in the processor's cache: 5.2 GB/s on one core, and 4.0 where a page is
  checked when all of it was read.
- Files are for their user only, no symlink is followed, and nothing is deleted but what this tier names so itself.
- The first lookup waits for no scan. A page that is not known is looked for on disk, galloping, as another node may have put it there; what
  is known and not there any more is a miss.
- Several nodes may use one folder: each looks again at what is there after it has written a share of the budget, so the budget may be
  exceeded by about that share for each.
- Temporary files of killed writers are removed after TEMP_S; one of a living writer never is, for it holds a lock.
- Whatever the disk does (full, read-only, I/O errors, short files) costs a page, a number in the statistics and a line in the log. When the
  folder itself is gone the tier is down.

Names: `<digest>/<first two digits of the page hash>/<page hash>.L<first>-<last>[.H<group>]`. Times of modification are the times of last
use, so that their order survives a restart.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..node.paths import check_folder
from ..page import TRAILER_BYTES, Check, ObjectSpec, PageLayout
from .base import Stats, TierDown
from .ssd_index import SsdIndex

log = logging.getLogger("mooncake_kv.tiers.ssd")

BLOCK = 4096
STEP = 256 << 10
# The folder is looked through again after this share of the budget was written.
SCAN_SHARE = 16
TEMP_S = 300.0
STAMP_S = 20.0
# After a write that failed the next ones fail at once for so long.
PAUSE_S = 2.0
LOG_S = 60.0

_DIGEST = re.compile(r"[0-9a-f]{32}")
_FAN = re.compile(r"[0-9a-f]{2}")
_OBJECT = re.compile(r"([0-9a-f]{64})(\.L\d{1,6}-\d{1,6}(?:\.H\d{1,6})?)")
_TEMPORARY = "tmp-"
_GONE = "gone-"


class SsdTier:
    name = "ssd"
    checks = True

    def __init__(self, folder: Path, budget: int) -> None:
        """Raises TierDown where the folder cannot be used."""
        self._root = str(folder)
        self._budget = budget
        self._direct = os.O_DIRECT
        self._layouts: dict[str, PageLayout] = {}
        # Ends of the file names of a page, by digest.
        self._suffixes: dict[str, tuple[str, ...]] = {}
        self._index = SsdIndex()
        self._counts_lock = threading.Lock()
        self._counts = dict.fromkeys(
            ("evicted_pages", "vanished_pages", "short_pages", "pages_bad", "read_errors", "write_errors", "writes_paused"), 0
        )
        self._paused_until = 0.0
        self._logged: dict[str, float] = {}
        self._written = 0
        self._scans = 0
        self._scan_s = 0.0
        self._wake = threading.Event()
        self._scan_due = True
        self._closing = False
        self._check()
        self._keeper = threading.Thread(target=self._keep, name="ssd-keeper", daemon=True)
        self._keeper.start()

    # ---- what the host calls

    def add_space(self, digest: str, layout: PageLayout) -> None:
        self._layouts[digest] = layout
        self._suffixes[digest] = tuple(_suffix(layout, digest, i) for i in range(len(layout.objects)))

    def leading(self, digest: str, hashes: Sequence[bytes]) -> int:
        keys = _keys(digest, hashes)
        known = self._index.leading(keys)
        if known == len(keys):
            return known
        suffix = self._suffixes[digest][0]

        def has(i: int) -> bool:
            return self._index.has(keys[i]) or os.path.lexists(self._path(digest, hashes[i], suffix))

        if not has(known):
            if not known and not os.path.isdir(self._root):
                self._check()
            return known
        low, step = known, 1
        while low + step < len(keys) and has(low + step):
            low += step
            step *= 2
        high = min(low + step, len(keys))
        while high - low > 1:
            middle = (low + high) // 2
            if has(middle):
                low = middle
            else:
                high = middle
        return low + 1

    def read(self, digest: str, hashes: Sequence[bytes], slots: Sequence[np.ndarray]) -> int:
        layout = self._layouts[digest]
        for i, (page_hash, slot) in enumerate(zip(hashes, slots, strict=True)):
            for spec, suffix in zip(layout.objects, self._suffixes[digest], strict=True):
                target = slot.data[spec.offset : spec.offset + spec.payload_bytes + TRAILER_BYTES]
                check = Check(spec, page_hash, digest, layout.key)
                if not self._read_file(self._path(digest, page_hash, suffix), target, check):
                    self.bad(digest, [page_hash])
                    return i
            if not self._index.has(key := _keys(digest, [page_hash])[0]):
                self._index.add(key, self._page_bytes(layout))
        return len(hashes)

    def write(self, digest: str, hashes: Sequence[bytes], slots: Sequence[np.ndarray], why: Sequence[str]) -> list[bool]:
        layout = self._layouts[digest]
        size = self._page_bytes(layout)
        good = []
        for page_hash, slot in zip(hashes, slots, strict=True):
            key = _keys(digest, [page_hash])[0]
            if self._is_there(digest, page_hash, layout):
                self._index.add(key, size)
                good.append(True)
                continue
            if size > self._budget or time.monotonic() < self._paused_until:
                self._count("writes_paused")
                good.append(False)
                continue
            self._delete(self._index.pop_oldest(size, self._budget))
            try:
                for spec, suffix in zip(layout.objects, self._suffixes[digest], strict=True):
                    self._write_file(digest, page_hash, suffix, slot.data[spec.offset : spec.offset + _file_bytes(spec)])
            except OSError as error:
                self._check()
                self._count("write_errors")
                self._paused_until = time.monotonic() + PAUSE_S
                self._complain("write", f"a page could not be written below {self._root}: {error.strerror or error}")
                self._unlink(digest, page_hash)
                good.append(False)
                continue
            self._index.add(key, size)
            self._written += size
            good.append(True)
        if self._written > self._budget // SCAN_SHARE:
            self._written = 0
            self._scan_due = True
            self._wake.set()
        return good

    def bad(self, digest: str, hashes: Sequence[bytes]) -> None:
        for page_hash in hashes:
            self._unlink(digest, page_hash)
            self._index.remove(_keys(digest, [page_hash])[0])

    def touch(self, digest: str, hashes: Sequence[bytes]) -> None:
        self._index.touch(_keys(digest, hashes))

    def drop(self, digest: str) -> None:
        try:
            os.rename(f"{self._root}/{digest}", f"{self._root}/{_GONE}{secrets.token_hex(8)}")
        except FileNotFoundError:
            self._check()
        except OSError as error:
            raise TierDown(f"namespace {digest} could not be dropped from {self._root}: {error.strerror}") from None
        self._index.forget_digest(bytes.fromhex(digest))
        self._wake.set()

    def stats(self) -> Stats:
        with self._counts_lock:
            counts = dict(self._counts)
        facts: Stats = {"path": self._root, "bytes": self._index.bytes, "limit_bytes": self._budget, "pages": len(self._index)}
        return facts | {"scans": self._scans, "scan_s": round(self._scan_s, 3)} | counts

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._keeper.join(1.0)  # a daemon: one that sits in a call to a dead disk ends with the process

    # ---- files

    def _check(self) -> None:
        try:
            check_folder(Path(self._root), "ssd_path")
        except FileNotFoundError:
            raise TierDown(f"the folder {self._root} (ssd_path) is gone") from None
        except (ConfigError, OSError) as error:
            raise TierDown(str(error)) from None

    def _path(self, digest: str, page_hash: bytes, suffix: str) -> str:
        name = page_hash.hex()
        return f"{self._root}/{digest}/{name[:2]}/{name}{suffix}"

    @staticmethod
    def _page_bytes(layout: PageLayout) -> int:
        return sum(_file_bytes(spec) for spec in layout.objects)

    def _is_there(self, digest: str, page_hash: bytes, layout: PageLayout) -> bool:
        try:
            return all(
                os.lstat(self._path(digest, page_hash, suffix)).st_size == _file_bytes(spec)
                for spec, suffix in zip(layout.objects, self._suffixes[digest], strict=True)
            )
        except OSError:
            return False

    def _read_file(self, path: str, target: memoryview, check: Check) -> bool:
        """Fill `target`, payload and trailer, from the beginning of the file. False: it is not what it should be."""
        payload = len(target) - TRAILER_BYTES
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            self._count("vanished_pages")
            if not os.path.isdir(self._root):
                self._check()
            return False
        except OSError as error:
            return self._read_failed(error)
        try:
            done = 0
            while done < len(target):
                got = os.preadv(file, [target[done : done + STEP]], done)
                if not got:
                    self._count("short_pages")
                    self._complain("short", f"{path} has {done} bytes instead of {len(target)}")
                    return False
                check.update(target[done : min(done + got, payload)])
                done += got
        except OSError as error:
            return self._read_failed(error)
        finally:
            os.close(file)
        if not check.passes(target[payload:]):
            self._count("pages_bad")
            self._complain("bad", f"{path} does not hold what its name says")
            return False
        return True

    def _read_failed(self, error: OSError) -> bool:
        self._count("read_errors")
        self._complain("read", f"a page could not be read: {error}")
        return False

    def _write_file(self, digest: str, page_hash: bytes, suffix: str, data: memoryview) -> None:
        """Raises OSError."""
        temporary = f"{self._root}/{_TEMPORARY}{secrets.token_hex(8)}"
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._write_whole(file, data)
            path = self._path(digest, page_hash, suffix)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                folder = os.path.dirname(path)
                for new in (os.path.dirname(folder), folder):
                    with suppress(FileExistsError):
                        os.mkdir(new, 0o700)
                os.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(file)

    def _write_whole(self, file: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            try:
                # Anew each time, as a short write may end where the next must not begin.
                fcntl.fcntl(file, fcntl.F_SETFL, self._direct if done % BLOCK == 0 else 0)
                done += os.write(file, data[done:])
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = 0  # the file system cannot do it, or not with this memory

    def _unlink(self, digest: str, page_hash: bytes) -> None:
        for suffix in self._suffixes.get(digest, ()):
            with suppress(OSError):
                os.unlink(self._path(digest, page_hash, suffix))

    def _delete(self, keys: list[bytes]) -> None:
        for key in keys:
            self._unlink(key[:16].hex(), key[16:])
        self._count("evicted_pages", len(keys))

    def _count(self, what: str, by: int = 1) -> None:
        with self._counts_lock:
            self._counts[what] += by

    def _complain(self, kind: str, text: str) -> None:
        now = time.monotonic()
        if now - self._logged.get(kind, -LOG_S) >= LOG_S:
            self._logged[kind] = now
            log.warning("ssd: %s", text)

    # ---- the keeper's thread

    def _keep(self) -> None:
        os.nice(15)
        while not self._closing:
            try:
                self._write_stamps()
                if self._scan_due:
                    self._scan_due = False
                    self._scan()
                self._remove_dropped()
            except OSError as error:
                self._index.abandon_scan()
                self._complain("scan", f"{self._root} could not be looked through: {error}")
            except Exception:
                self._index.abandon_scan()
                log.exception("a bug in the SSD tier's housekeeping")
            self._wake.wait(STAMP_S)
            self._wake.clear()
        with suppress(OSError):
            self._write_stamps()

    def _write_stamps(self) -> None:
        for key, stamp in self._index.take_stamps():
            digest = key[:16].hex()
            for suffix in self._suffixes.get(digest, ())[:1]:
                with suppress(FileNotFoundError):
                    os.utime(self._path(digest, key[16:], suffix), ns=(stamp, stamp), follow_symlinks=False)

    def _scan(self) -> None:
        began = time.monotonic()
        self._index.begin_scan()
        used: dict[bytes, int] = {}
        sizes: dict[bytes, int] = {}
        for top in _entries(self._root):
            if top.name.startswith(_TEMPORARY):
                self._remove_leftover(top)
            if not _DIGEST.fullmatch(top.name) or not top.is_dir(follow_symlinks=False):
                continue
            raw, suffixes = bytes.fromhex(top.name), set(self._suffixes.get(top.name, ()))
            for fan in _entries(top.path):
                if _FAN.fullmatch(fan.name) and fan.is_dir(follow_symlinks=False):
                    self._scan_folder(raw, fan.path, used, sizes, suffixes)
                if self._closing:
                    self._index.abandon_scan()
                    return
            if top.name not in self._layouts:
                self._suffixes[top.name] = tuple(sorted(suffixes))
        self._index.end_scan((key, sizes[key]) for key in sorted(used, key=used.__getitem__))
        self._scans += 1
        self._scan_s = time.monotonic() - began
        self._delete(self._index.pop_oldest(0, self._budget))

    def _scan_folder(self, raw: bytes, path: str, used: dict[bytes, int], sizes: dict[bytes, int], suffixes: set[str]) -> None:
        for entry in _entries(path):
            if match := _OBJECT.fullmatch(entry.name):
                with suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    key = raw + bytes.fromhex(match[1])
                    used[key] = max(used.get(key, 0), found.st_mtime_ns)
                    sizes[key] = sizes.get(key, 0) + -(-found.st_size // BLOCK) * BLOCK
                    suffixes.add(match[2])
        # Threads that serve the node come first.
        time.sleep(0)

    def _remove_leftover(self, entry: os.DirEntry[str]) -> None:
        with suppress(OSError):
            if time.time() - entry.stat(follow_symlinks=False).st_mtime < TEMP_S:
                return
            file = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                os.close(file)

    def _remove_dropped(self) -> None:
        for top in _entries(self._root):
            if top.name.startswith(_GONE):
                shutil.rmtree(top.path, ignore_errors=True)


def open_tier(settings: Mapping[str, Any]) -> SsdTier:
    return SsdTier(Path(settings["path"]), settings["bytes"])


def _file_bytes(spec: ObjectSpec) -> int:
    return -(-(spec.payload_bytes + TRAILER_BYTES) // BLOCK) * BLOCK


def _keys(digest: str, hashes: Sequence[bytes]) -> list[bytes]:
    raw = bytes.fromhex(digest)
    return [raw + page_hash for page_hash in hashes]


def _suffix(layout: PageLayout, digest: str, i: int) -> str:
    """Of an object's file: the end of its key in a form that is one file name."""
    key = layout.object_key(digest, bytes(32), layout.objects[i])
    return "." + key.split("/", 2)[2].replace("/", ".")


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if error.errno == errno.ELOOP:
            return []
        raise
