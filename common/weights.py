"""Identity of a model's weights: a digest over the safetensors files that an engine would load.

Promises:
- The digest depends on the name, dtype, shape and content of every tensor, and on nothing else: not on the folder, the names or the
  number of the files, or the order of tensors in them.
- `sample` reads two windows of 4 KiB of each tensor at a quarter and three quarters of its bytes (tensors below 16 KiB: all bytes), and the
  files' headers; `full` reads everything. Neither maps files into memory, so a file that shrinks meanwhile is an error and not a crash.
- What `full` found is kept per file under (device, inode, size, mtime, ctime): any write to a file makes it read again. Nobody but the
  user can have written what is taken from there.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Literal

import msgspec

from .errors import UnsupportedError

log = logging.getLogger(__name__)

Mode = Literal["sample", "full"]
INDEX = "model.safetensors.index.json"
WINDOW = 4096
WHOLE_BELOW = 4 * WINDOW
# The format's own limit for its header.
MAX_HEADER = 100 << 20
_CHUNK = 8 << 20
_THREADS = 4
# A file that was written more recently is read again next time: another write in the same tick of the clock would leave no trace.
SETTLED_NS = 1_000_000_000
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".ckpt", ".npz", ".h5", ".tensors")
_HINT = "set model_id to your own name for these weights"

# name -> (dtype, shape, sha256 of the bytes read)
Tensors = dict[str, tuple[str, list[int], bytes]]


class _Header(msgspec.Struct):
    """One tensor in a safetensors header; data_offsets are relative to the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Cached(msgspec.Struct, array_like=True):
    """Content of a cache file: what was read, and of which file."""

    key: list[int]
    tensors: Tensors


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def weights_digest(weights: Path, mode: Mode, *, cache_dir: Path | None = None, consolidated: bool = False) -> bytes:
    """32 bytes that identify the weights in a folder (or one safetensors file).

    With an index file, its files count; else all safetensors files of the folder, those of Mistral's own format (`consolidated*`) only with
    `consolidated`. `cache_dir` is where `full` keeps its results, by default below the user's cache folder. Raises UnsupportedError for
    anything but safetensors.
    """
    try:
        files = _files(weights, consolidated)
    except OSError as error:
        raise UnsupportedError(f"the weights {str(weights)!r} cannot be read: {error.strerror} ({error.filename})") from None
    cache = _cache_folder(cache_dir) if mode == "full" else None
    with ThreadPoolExecutor(_THREADS, "weights") as pool:
        found = list(pool.map(lambda path: _tensors(path, mode, cache), files))
    rows = sorted((name, *facts) for tensors in found for name, facts in tensors.items())
    return sha256(msgspec.msgpack.encode([mode, rows])).digest()


def _files(weights: Path, consolidated: bool) -> list[Path]:
    if weights.is_file() and weights.suffix == ".safetensors":
        return [weights]
    if not weights.is_dir():
        raise UnsupportedError(f"the weights {str(weights)!r} are no folder of safetensors files and cannot be identified: {_HINT}")
    index = weights / INDEX
    if index.is_file() and not consolidated:
        try:
            names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise UnsupportedError(f"the index of the weights {str(index)!r} cannot be read: {error}") from None
        if not names:
            raise UnsupportedError(f"the index of the weights {str(index)!r} names no file: {_HINT}")
        return [weights / name for name in sorted(names)]
    files = sorted(weights.glob("*.safetensors"))
    chosen = [path for path in files if path.name.startswith("consolidated") == consolidated]
    if chosen:
        return chosen
    other = sorted(path.name for path in weights.iterdir() if path.suffix in (*_OTHER_FORMATS, ".safetensors"))
    what = f"only {other[0]!r}" if other else "no weight files"
    raise UnsupportedError(f"the folder {str(weights)!r} has {what}, and only safetensors files can be identified: {_HINT}")


def _tensors(path: Path, mode: Mode, cache: Path | None) -> Tensors:
    """Everything that counts of one file. Raises UnsupportedError if it is no valid safetensors file."""
    try:
        with open(path, "rb", buffering=0, opener=_opener) as file:
            fd = file.fileno()
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ValueError("it is no regular file")
            before = _key(fd)
            if cache and (cached := _recall(cache, before)) is not None:
                return cached
            header, start = _header(fd)
            read = _sample if mode == "sample" else _whole
            if mode == "sample":
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # or each window would read ahead 32 times its size
            else:
                log.info("reading all of %s, %d MiB, to identify the weights (fingerprint: full)", path, before[_SIZE] >> 20)
            by_place = sorted(header.items(), key=lambda item: item[1].data_offsets)
            size = before[_SIZE] - start
            tensors = {name: _facts(entry, fd, start, size, read) for name, entry in by_place}
            if _key(fd) != before:
                raise ValueError("it changed while it was read")
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise UnsupportedError(f"the weight file {str(path)!r} cannot be identified: {error}") from None
    if cache and time.time_ns() - max(before[_TIMES]) > SETTLED_NS:
        _remember(cache, before, tensors)
    return tensors


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # or a pipe would block


def _header(fd: int) -> tuple[dict[str, _Header], int]:
    """Entries by tensor name, and the offset of the data."""
    length = int.from_bytes(_pread(fd, 8, 0), "little")
    if length > MAX_HEADER:
        raise ValueError("it is no safetensors file")
    raw = msgspec.json.decode(_pread(fd, length, 8), type=dict[str, msgspec.Raw])
    raw.pop("__metadata__", None)
    return {name: msgspec.json.decode(entry, type=_Header) for name, entry in raw.items()}, 8 + length


def _facts(entry: _Header, fd: int, start: int, size: int, read: Callable[[int, int, int], bytes]) -> tuple[str, list[int], bytes]:
    first, last = entry.data_offsets
    if not 0 <= first <= last <= size:
        raise ValueError("it is shorter than its header says, or its header is damaged")
    return entry.dtype, entry.shape, read(fd, start + first, last - first)


def _sample(fd: int, offset: int, size: int) -> bytes:
    if size < WHOLE_BELOW:
        return sha256(_pread(fd, size, offset)).digest()
    return sha256(_pread(fd, WINDOW, offset + size // 4) + _pread(fd, WINDOW, offset + size * 3 // 4)).digest()


def _whole(fd: int, offset: int, size: int) -> bytes:
    digest = sha256()
    for place in range(offset, offset + size, _CHUNK):
        digest.update(_pread(fd, min(_CHUNK, offset + size - place), place))
    return digest.digest()


def _pread(fd: int, size: int, offset: int) -> bytes:
    data = os.pread(fd, size, offset)
    while len(data) < size:
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            raise ValueError("it ends too early")
        data += more
    return data


# ---- results of `full` ---------------------------------------------------------------------------------------------------------


_SIZE, _TIMES = 2, slice(3, 5)


def _key(fd: int) -> list[int]:
    found = os.fstat(fd)
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _cache_folder(given: Path | None) -> Path | None:
    """A folder that only the user can write to, or None if there is none to be had: then nothing is cached."""
    try:
        folder = given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mooncake-kv" / "fingerprints"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        log.warning("the results of fingerprint: full are not kept: %s", error)
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        log.warning("the results of fingerprint: full are not kept: %s must be a folder of your own with mode 0700", folder)
        return None
    return folder


def _cache_file(cache: Path, key: list[int]) -> Path:
    return cache / f"{sha256(msgspec.msgpack.encode(key)).hexdigest()[:32]}.msgpack"


def _recall(cache: Path, key: list[int]) -> Tensors | None:
    try:
        cached = msgspec.msgpack.decode(_cache_file(cache, key).read_bytes(), type=_Cached)
    except (OSError, msgspec.MsgspecError):
        return None
    return cached.tensors if cached.key == key else None


def _remember(cache: Path, key: list[int], tensors: Tensors) -> None:
    """Written to a name of its own and renamed: whoever reads sees all or nothing. Failing to write costs only time."""
    path = _cache_file(cache, key)
    try:
        fd, name = tempfile.mkstemp(dir=cache)
        try:
            with open(fd, "wb") as file:
                file.write(msgspec.msgpack.encode(_Cached(key, tensors)))
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        log.warning("the result of fingerprint: full is not kept: %s", error)
