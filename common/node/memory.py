"""How much memory the node may take when nobody says so.

Promises: `available` never exceeds what the kernel thinks can be had without swapping, nor what is left below any memory limit of a cgroup
(v1 or v2) that this process is in; files that cannot be read count as no limit.
"""

from __future__ import annotations

from pathlib import Path

# With auto size the arena takes this share of what is available when the node starts: engines, page cache and another node keep the rest.
AUTO_SHARE = 4
# cgroup v1 writes "no limit" as a number near 2**63.
_NO_LIMIT = 1 << 60


def auto_size(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> int:
    """Bytes of the arena where `dram_size` is 0."""
    return available(proc, sys) // AUTO_SHARE


def available(proc: Path = Path("/proc"), sys: Path = Path("/sys"), *, at_most: bool = False) -> int:
    """Bytes: the least of MemAvailable and, for every cgroup above us, limit minus use (without page cache that has not been used again;
    with `at_most`, without any page cache: what the kernel could find before it kills)."""
    rooms = [_meminfo(proc), *_cgroup_rooms(proc, sys, ("inactive_file", "active_file") if at_most else ("inactive_file",))]
    return max(0, min(rooms))


def _meminfo(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError(f"{proc}/meminfo has no MemAvailable")


def _cgroup_rooms(proc: Path, sys: Path, caches: tuple[str, ...]) -> list[int]:
    rooms = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, use, total = sys / "fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            mount, limit, use, total = sys / "fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        # In a container the path may be the host's and not exist below our mount; the mount itself is then our own group.
        group = mount / path.lstrip("/")
        for folder in [group, *group.parents]:
            if not folder.is_relative_to(mount):
                break
            bound, used = _read(folder / limit).strip(), _read(folder / use).strip()
            if bound.isdigit() and used.isdigit() and int(bound) < _NO_LIMIT:
                rooms.append(int(bound) - int(used) + sum(_stat(folder, total + cache) for cache in caches))
    return rooms


def _stat(folder: Path, key: str) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
