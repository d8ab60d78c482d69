"""Folder rules, and how much memory the node takes by itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mooncake_kv.common.errors import ConfigError
from mooncake_kv.common.node import memory
from mooncake_kv.common.node.paths import at_folder, base_folder, check, create, known_nodes, node_paths

# ---- paths ---------------------------------------------------------------------------------------------------------------------


def test_folder_follows_from_the_environment(tmp_path: Path) -> None:
    runtime, temporary = tmp_path / "run", tmp_path / "tmp"
    runtime.mkdir(mode=0o700)
    temporary.mkdir()
    environ = {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(temporary)}
    assert node_paths("n", environ).folder == runtime / "mooncake-kv" / "n"
    ours = temporary / f"mooncake-kv-{os.geteuid()}"
    for unusable in ("", "run", str(tmp_path / "none"), str(__file__)):
        assert base_folder(environ | {"XDG_RUNTIME_DIR": unusable}) == ours
    runtime.chmod(0o770)
    assert base_folder(environ) == ours, "others may write there"
    assert base_folder({"TMPDIR": str(temporary)}) == ours


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "x" * 65, "ä", "a\n", "a\0"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a node name"):
        node_paths(name)


def test_a_path_too_long_for_a_socket_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 108 bytes and a Unix socket takes 107.*XDG_RUNTIME_DIR"):
        at_folder(Path("/" + "x" * 100))
    assert at_folder(Path("/" + "x" * 99)).socket
    with pytest.raises(ConfigError, match="not an absolute path"):
        at_folder(Path("here"))


def test_create_makes_private_folders_and_can_be_repeated(runtime_dir: Path) -> None:
    paths = node_paths("n")
    assert not check(paths)
    old = os.umask(0o000)
    try:
        create(paths)
    finally:
        os.umask(old)
    create(paths)
    assert check(paths) and paths.folder.stat().st_mode & 0o777 == 0o700 == paths.folder.parent.stat().st_mode & 0o777


def test_folders_that_cannot_be_trusted(runtime_dir: Path, tmp_path: Path) -> None:
    paths = node_paths("n")
    create(paths)
    paths.folder.chmod(0o750)
    with pytest.raises(ConfigError, match=r"has mode 0750; others must have no access"):
        check(paths)
    paths.folder.rmdir()
    paths.folder.symlink_to(tmp_path)
    for look in (check, create):
        with pytest.raises(ConfigError, match="is a symlink, not a folder"):
            look(paths)
    paths.folder.unlink()
    paths.folder.write_text("")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        create(paths)
    paths.folder.unlink()
    paths.folder.parent.rmdir()
    paths.folder.parent.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is a symlink"):
        create(paths)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_folders_of_another_user(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = node_paths("n")
    create(paths)
    os.chown(paths.folder, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to uid 65534, not to uid 0"):
        check(paths)
    os.chown(runtime_dir, 65534, 65534)
    assert not base_folder().is_relative_to(runtime_dir), "a runtime folder of another user is not used"
    with pytest.raises(ConfigError, match="belongs to uid 65534, not to uid 0 or root"):
        create(paths)


def test_a_shared_folder_must_be_sticky(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    paths = node_paths("n", {"TMPDIR": str(tmp_path)})
    with pytest.raises(ConfigError, match="it is not sticky"):
        create(paths)
    tmp_path.chmod(0o1777)
    create(paths)


def test_known_nodes_are_those_with_a_socket(runtime_dir: Path) -> None:
    assert known_nodes() == []
    for name in ("b", "a", "c"):
        create(node_paths(name))
    for name in ("b", "a"):
        node_paths(name).socket.write_text("")
    base = runtime_dir / "mooncake-kv"
    (base / ("l" * 64)).mkdir()  # together with a longer base, no place for a socket
    (base / "file").write_text("")
    long = {"XDG_RUNTIME_DIR": str(runtime_dir / ("r" * 40))}
    Path(long["XDG_RUNTIME_DIR"]).mkdir(mode=0o700)
    base.rename(Path(long["XDG_RUNTIME_DIR"]) / "mooncake-kv")
    assert [paths.name for paths in known_nodes(long)] == ["a", "b"]


def test_the_folder_does_not_depend_on_how_full_the_temporary_directory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", full)
    assert node_paths("a", {}).folder == Path(f"/tmp/mooncake-kv-{os.geteuid()}/a")


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    for temporary, why in (("/proc", "No such file"), (str(tmp_path / "missing"), "No such file")):
        with pytest.raises(ConfigError, match=rf"^node folder: '{temporary}/.*' cannot be made: {why}"):
            create(node_paths("a", {"TMPDIR": temporary}))


# ---- memory --------------------------------------------------------------------------------------------------------------------

GIB = 1 << 30


def machine(folder: Path, cgroup: str, files: dict[str, str], available_kib: int = 100 << 20) -> tuple[Path, Path]:
    proc, sys = folder / "proc", folder / "sys"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 999999999 kB\nMemAvailable:   {available_kib} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = sys / "fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, sys


def test_available_without_limits_is_what_the_kernel_says(tmp_path: Path) -> None:
    proc, sys = machine(tmp_path, "0::/user.slice\n", {"user.slice/memory.max": "max\n", "user.slice/memory.current": "5\n"})
    assert memory.available(proc, sys) == 100 * GIB
    assert memory.auto_size(proc, sys) == 25 * GIB


def test_available_takes_the_tightest_limit_above_us(tmp_path: Path) -> None:
    files = {
        "a/memory.max": f"{8 * GIB}\n",
        "a/memory.current": f"{6 * GIB}\n",
        "a/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file {2 * GIB}\n",
        "a/b/memory.max": f"{16 * GIB}\n",
        "a/b/memory.current": f"{GIB}\n",
    }
    proc, sys = machine(tmp_path, "0::/a/b\n", files)
    assert memory.available(proc, sys) == 3 * GIB
    assert memory.available(proc, sys, at_most=True) == 5 * GIB


def test_available_in_a_container_and_with_version_1(tmp_path: Path) -> None:
    container = machine(
        tmp_path / "v2", "0::/../host/path\n", {"memory.max": f"{4 * GIB}", "memory.current": f"{GIB}", "memory.stat": "inactive_file 0\n"}
    )
    assert memory.available(*container) == 3 * GIB
    old = machine(
        tmp_path / "v1",
        "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n",
        {
            "memory/memory.limit_in_bytes": f"{2 * GIB}",
            "memory/memory.usage_in_bytes": f"{GIB}",
            "memory/memory.stat": "total_inactive_file 7\n",
        },
    )
    assert memory.available(*old) == GIB + 7
    unlimited = machine(
        tmp_path / "none", "4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "1"}
    )
    assert memory.available(*unlimited) == 100 * GIB


def test_available_is_never_negative(tmp_path: Path) -> None:
    files = {"memory.max": "10", "memory.current": "2000"}
    assert memory.available(*machine(tmp_path, "0::/\n", files)) == 0


def test_this_machine_can_be_read() -> None:
    assert 0 < memory.auto_size() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
