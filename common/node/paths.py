"""Where a node lives on disk, and whether that place can be trusted.

Promises: node and clients that run as one user with one environment find the same folder. It is `$XDG_RUNTIME_DIR/mooncake-kv/NAME`, or
`mooncake-kv-UID/NAME` in the temporary directory where XDG_RUNTIME_DIR is not set or not usable (no folder, not ours, writable by others).
`create` and `check` accept the folder and the one above it only if both are real folders (no symlinks) of this user with mode 0700, below
a folder in which nobody else can rename them. So whoever passed one of them may open and connect to what lies in it by path.

Nothing here imports more than the standard library: the client pays for it in the engine's process.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError

APP = "mooncake-kv"
# sizeof(sockaddr_un.sun_path) is 108 with the closing NUL.
MAX_SOCKET_PATH = 107
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class NodePaths:
    """The files of one node. `lock` is held (flock) by the running node, `spawn_lock` by a client while it starts one; `pid`, `log` and
    `metrics` (host:port of the metrics server, absent when it is off) are for people and tools; a node is ready when `socket` accepts."""

    name: str
    folder: Path

    @property
    def socket(self) -> Path:
        return self.folder / "socket"

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def spawn_lock(self) -> Path:
        return self.folder / "spawn.lock"

    @property
    def pid(self) -> Path:
        return self.folder / "pid"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics"


def node_paths(name: str = "default", environ: Mapping[str, str] | None = None) -> NodePaths:
    """The files of the node of that name; touches nothing. Raises ConfigError for a bad name or a path too long for a socket."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"node: {name!r} is not a node name: 1 to 64 letters, digits, '.', '_' and '-', the first not '.'")
    return at_folder(base_folder(environ) / name)


def at_folder(folder: Path) -> NodePaths:
    """The files of the node in this very folder. Raises ConfigError where the path is relative or too long for a socket."""
    paths = NodePaths(folder.name, folder)
    length = len(os.fsencode(paths.socket))
    if not folder.is_absolute():
        raise ConfigError(f"node folder: {str(folder)!r} is not an absolute path")
    if length > MAX_SOCKET_PATH:
        raise ConfigError(
            f"node: the socket path {str(paths.socket)!r} has {length} bytes and a Unix socket takes {MAX_SOCKET_PATH}: "
            "use a shorter node name, or point XDG_RUNTIME_DIR or TMPDIR at a shorter path"
        )
    return paths


def base_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder that holds the folders of this user's nodes."""
    environ = os.environ if environ is None else environ
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and _usable_runtime(runtime):
        return Path(runtime) / APP
    # Not tempfile.gettempdir(), which goes elsewhere while the folder is full.
    temporary = environ.get("TMPDIR") or "/tmp"
    return Path(os.path.abspath(temporary)) / f"{APP}-{os.geteuid()}"


def create(paths: NodePaths) -> None:
    """Make the node's folder where it is missing, and check it. Raises ConfigError where it cannot be trusted or made."""
    try:
        _check_root(paths.folder.parent.parent)
        for folder in (paths.folder.parent, paths.folder):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            _check_ours(folder)
    except OSError as error:
        raise ConfigError(f"node folder: {str(paths.folder)!r} cannot be made: {error.strerror} ({error.filename})") from None


def check(paths: NodePaths) -> bool:
    """Whether the node's folder exists. Raises ConfigError where it does and cannot be trusted."""
    if not os.path.lexists(paths.folder):
        return False
    _check_root(paths.folder.parent.parent)
    for folder in (paths.folder.parent, paths.folder):
        try:
            _check_ours(folder)
        except FileNotFoundError:
            return False
    return True


def known_nodes(environ: Mapping[str, str] | None = None) -> list[NodePaths]:
    """Nodes of this user that have a socket, running or not, by name. What lies there and cannot be a node is passed over."""
    base = base_folder(environ)
    try:
        names = sorted(os.listdir(base))
    except OSError:
        return []
    found = [NodePaths(name, base / name) for name in names if _NAME.fullmatch(name)]
    return [paths for paths in found if len(os.fsencode(paths.socket)) <= MAX_SOCKET_PATH and os.path.lexists(paths.socket)]


def _usable_runtime(runtime: str) -> bool:
    try:
        found = os.stat(runtime)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def check_folder(folder: Path, what: str) -> None:
    """Whether everything below this folder is ours alone: a real folder of this user with mode 0700, below a folder in which nobody else
    can rename it. Raises ConfigError, which begins with `what`, where it is not, and FileNotFoundError."""
    _check_root(folder.parent, what)
    _check_ours(folder, what)


def _check_root(root: Path, what: str = "node folder") -> None:
    """Others may write to the folder above ours only if it is sticky, so that they cannot replace what is ours."""
    found = os.stat(root)
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{what}: {str(root)!r} belongs to uid {found.st_uid}, not to uid {os.geteuid()} or root")
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(f"{what}: others may write to {str(root)!r} (mode {stat.S_IMODE(found.st_mode):04o}), and it is not sticky")


def _check_ours(folder: Path, what: str = "node folder") -> None:
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{what}: {str(folder)!r} is a {'symlink' if stat.S_ISLNK(found.st_mode) else 'file'}, not a folder")
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{what}: {str(folder)!r} belongs to uid {found.st_uid}, not to uid {os.geteuid()}")
    if found.st_mode & 0o077:
        raise ConfigError(f"{what}: {str(folder)!r} has mode {stat.S_IMODE(found.st_mode):04o}; others must have no access (0700)")
