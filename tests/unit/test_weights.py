"""Identity of weights: every tensor counts, files and folders do not; the cache of full reads is safe."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from mooncake_kv.common import weights as module
from mooncake_kv.common.errors import UnsupportedError
from mooncake_kv.common.fingerprint import model_fingerprint
from mooncake_kv.common.weights import INDEX, Mode, weights_digest

Tensors = dict[str, np.ndarray]


@pytest.fixture
def tensors() -> Tensors:
    random = np.random.default_rng(0)
    shapes = {"embed": (1000, 64), "layers.0.q": (64, 64), "layers.0.norm": (64,), "layers.1.q": (64, 64), "scalar": (), "empty": (0, 4)}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def save(folder: Path, tensors: Tensors, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name, metadata={"format": "pt", "from": str(folder)})
    return folder


def save_sharded(folder: Path, tensors: Tensors, count: int) -> Path:
    folder.mkdir()
    where: dict[str, str] = {}
    for i in range(count):
        name = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {key: value for j, (key, value) in enumerate(reversed(tensors.items())) if j % count == i}
        save_file(part, folder / name)
        where |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return folder


def settle() -> None:
    """Wait until files written so far count as settled in these tests."""
    time.sleep(0.05)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLED_NS", 30_000_000)


def patch_file(path: Path, place: int, *, keep_times: bool = False) -> None:
    """Flip one bit, `place` bytes from the end of the file."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(-place, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-place, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    if keep_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("mode", ["sample", "full"])
def test_files_and_folders_do_not_count(mode: Mode, tensors: Tensors, tmp_path: Path, cache: Path) -> None:
    digests = {
        weights_digest(folder, mode, cache_dir=cache)
        for folder in (
            save(tmp_path / "a", tensors),
            save(tmp_path / "b", dict(reversed(tensors.items())), "other.safetensors"),
            save_sharded(tmp_path / "c", tensors, 2),
            save_sharded(tmp_path / "d", tensors, 5),
            Path(shutil.copytree(tmp_path / "c", tmp_path / "e")),
            tmp_path / "a" / "model.safetensors",
        )
    }
    assert len(digests) == 1 and len(digests.pop()) == 32
    before = weights_digest(tmp_path / "a", mode, cache_dir=cache)
    (tmp_path / "a").rename(tmp_path / "renamed")
    assert weights_digest(tmp_path / "renamed", mode, cache_dir=cache) == before
    # As in a model hub's cache: links to files elsewhere.
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "model.safetensors").symlink_to(tmp_path / "renamed" / "model.safetensors")
    assert weights_digest(tmp_path / "links", mode, cache_dir=cache) == before


@pytest.mark.parametrize("mode", ["sample", "full"])
def test_every_tensor_counts(mode: Mode, tensors: Tensors, tmp_path: Path, cache: Path) -> None:
    seen = {weights_digest(save(tmp_path / "base", tensors), mode, cache_dir=cache)}
    changes: list[Tensors] = [tensors | {name: np.asarray(tensors[name] + np.float32(0.01))} for name in tensors if tensors[name].size]
    changes += [
        {f"x.{name}": value for name, value in tensors.items()},
        tensors | {"layers.0.q": tensors["layers.1.q"], "layers.1.q": tensors["layers.0.q"]},
        tensors | {"layers.0.q": tensors["layers.0.q"].reshape(32, 128)},
        tensors | {"layers.0.q": tensors["layers.0.q"].view(np.int32)},
        tensors | {"more": np.zeros(1, np.float32)},
        {name: value for name, value in tensors.items() if name != "empty"},
    ]
    for i, change in enumerate(changes):
        seen.add(weights_digest(save(tmp_path / str(i), change), mode, cache_dir=cache))
    assert len(seen) == len(changes) + 1


def test_one_weight_is_found_by_full_and_the_modes_differ(tensors: Tensors, tmp_path: Path, cache: Path) -> None:
    folder = save(tmp_path / "a", {"embed": tensors["embed"]})  # 256,000 bytes
    path = folder / "model.safetensors"
    settle()
    sample, full = weights_digest(folder, "sample"), weights_digest(folder, "full", cache_dir=cache)
    assert sample != full
    assert len(list(cache.iterdir())) == 1
    patch_file(path, 100, keep_times=True)
    settle()
    assert weights_digest(folder, "sample") == sample
    assert weights_digest(folder, "full", cache_dir=cache) != full
    patch_file(path, 100, keep_times=True)
    assert weights_digest(folder, "full", cache_dir=cache) == full
    for place in (256_000 - 64_000, 256_000 - 68_095, 256_000 - 192_000, 256_000 - 196_095):  # first and last bytes of both windows
        patch_file(path, place)
        assert weights_digest(folder, "sample") != sample
        patch_file(path, place)
    assert weights_digest(folder, "sample") == sample


def test_small_tensors_count_whole(tmp_path: Path) -> None:
    size = module.WHOLE_BELOW - 4
    folder = save(tmp_path / "a", {"a": np.zeros(size // 4, np.float32)})
    base = weights_digest(folder, "sample")
    for place in (1, size // 2, size):
        patch_file(folder / "model.safetensors", place)
        assert weights_digest(folder, "sample") != base
        patch_file(folder / "model.safetensors", place)


def test_sampling_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "a", {f"t{i}": np.zeros(1 << 20, np.uint8) for i in range(20)})
    reads: list[int] = []
    pread = os.pread

    def counting(fd: int, size: int, offset: int) -> bytes:
        reads.append(size)
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", counting)
    weights_digest(folder, "sample")
    assert sum(reads) < 20 * 2 * module.WINDOW + 4096


def test_only_what_an_engine_loads_counts(tensors: Tensors, tmp_path: Path) -> None:
    indexed = save_sharded(tmp_path / "a", tensors, 2)
    base = weights_digest(indexed, "sample")
    save(indexed, {"stale": np.zeros(4)}, "model-00001-of-00009.safetensors")
    save(indexed, {"stale": np.zeros(4)}, "consolidated.safetensors")
    (indexed / "optimizer.bin").write_bytes(b"x")
    assert weights_digest(indexed, "sample") == base
    plain = save(tmp_path / "b", tensors)
    save(plain, {"tok": np.zeros(4)}, "consolidated.safetensors")
    assert weights_digest(plain, "sample") == base
    assert weights_digest(plain, "sample", consolidated=True) != base
    save(plain, {"extra": np.zeros(4)}, "extra.safetensors")
    assert weights_digest(plain, "sample") != base


def test_a_mistral_checkpoint_counts_as_it_is_loaded(tensors: Tensors, tmp_path: Path) -> None:
    folder = save(tmp_path / "a", tensors, "consolidated-00001-of-00001.safetensors")
    common = {"compute_dtype": "bfloat16", "max_model_len": 1}
    assert len(model_fingerprint({}, folder, load_format="mistral", **common)) == 64  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="consolidated"):
        model_fingerprint({}, folder, **common)  # type: ignore[arg-type]


def test_fingerprint_follows_the_weights(tensors: Tensors, tmp_path: Path, cache: Path) -> None:
    def fingerprint(folder: Path, mode: Mode = "sample") -> str:
        return model_fingerprint({}, folder, compute_dtype="bfloat16", max_model_len=1, mode=mode, cache_dir=cache)

    a, b = save(tmp_path / "a", tensors), save_sharded(tmp_path / "b", tensors, 3)
    c = save(tmp_path / "c", tensors | {"layers.1.q": tensors["layers.1.q"] * np.float32(1.01)})
    assert fingerprint(a) == fingerprint(b) != fingerprint(c)
    assert fingerprint(a, "full") == fingerprint(b, "full") != fingerprint(c, "full")
    assert fingerprint(a) != fingerprint(a, "full")


# ---- refusals ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "model.pt", "consolidated.00.pth", None])
def test_other_formats_are_refused_by_name(name: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    if name:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UnsupportedError) as caught:
        weights_digest(tmp_path, "sample")
    message = str(caught.value)
    assert (repr(name) if name else "no weight files") in message and str(tmp_path) in message and "model_id" in message


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"x")
    for path in (tmp_path / "model.gguf", tmp_path / "missing", Path("org/model")):
        with pytest.raises(UnsupportedError, match=rf"{path.name}.*model_id"):
            weights_digest(path, "sample")


def header(entries: dict | bytes, length: int | None = None) -> bytes:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw


@pytest.mark.parametrize("mode", ["sample", "full"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        header(b"not json"),
        header({}, 1 << 40),
        header({}, 500),
        header({"a": 1}),
        header(b'{"a": {"?": ' + b"[" * 5000),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}) + b"\0" * 8,
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}) + b"\0" * 8,
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 62]}}) + b"\0" * 8,
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 70]}}) + b"\0" * 8,
    ],
    ids=str,
)
def test_damaged_files_are_refused(mode: Mode, data: bytes, tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(UnsupportedError, match=r"model\.safetensors"):
        weights_digest(folder, mode, cache_dir=cache)


def test_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="it is no regular file"):
        weights_digest(tmp_path, "sample")


def test_missing_shards_and_bad_indexes_are_refused(tensors: Tensors, tmp_path: Path) -> None:
    folder = save_sharded(tmp_path / "a", tensors, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UnsupportedError, match="model-00002-of-00003"):
        weights_digest(folder, "sample")
    for text in ("{}", '{"weight_map": {}}'):
        (folder / INDEX).write_text(text)
        with pytest.raises(UnsupportedError, match="index"):
            weights_digest(folder, "sample")


# ---- cache of full reads -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the tensors that `full` really read."""
    sizes: list[int] = []
    whole = module._whole

    def counting(fd: int, offset: int, size: int) -> bytes:
        sizes.append(size)
        return whole(fd, offset, size)

    monkeypatch.setattr(module, "_whole", counting)
    return sizes


def test_full_reads_once(tensors: Tensors, tmp_path: Path, cache: Path, reads: list[int]) -> None:
    folder = save_sharded(tmp_path / "a", tensors, 2)
    settle()
    base = weights_digest(folder, "full", cache_dir=cache)
    assert len(reads) == len(tensors)
    folder.rename(tmp_path / "b")
    assert weights_digest(tmp_path / "b", "full", cache_dir=cache) == base
    assert len(reads) == len(tensors)
    patch_file(tmp_path / "b" / "model-00001-of-00002.safetensors", 1, keep_times=True)
    settle()
    assert weights_digest(tmp_path / "b", "full", cache_dir=cache) != base
    assert len(tensors) < len(reads) < 2 * len(tensors)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in cache.iterdir()] == [0o600] * 3


def test_folders_that_may_not_be_read_are_refused(tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", forbidden)
    with pytest.raises(UnsupportedError, match=rf"^the weights '{tmp_path}' cannot be read: Permission denied"):
        weights_digest(tmp_path, "sample")


def test_a_user_without_a_home_reads_anew(tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    folder = save(tmp_path / "a", tensors)
    assert weights_digest(folder, "full") == weights_digest(folder, "full")


def test_default_cache_is_below_the_users_cache_folder(tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = save(tmp_path / "a", tensors)
    settle()
    weights_digest(folder, "full")
    assert len(list((tmp_path / "xdg" / "mooncake-kv" / "fingerprints").iterdir())) == 1


def test_damaged_or_foreign_cache_entries_are_not_believed(tensors: Tensors, tmp_path: Path, cache: Path, reads: list[int]) -> None:
    folder = save(tmp_path / "a", tensors)
    settle()
    base = weights_digest(folder, "full", cache_dir=cache)
    (entry,) = cache.iterdir()
    good = entry.read_bytes()
    key, found = msgspec.msgpack.decode(good)
    other_key = msgspec.msgpack.encode([[*key[:-1], key[-1] + 1], found])
    for bad in (b"", b"garbage", good[:-1], other_key, msgspec.msgpack.encode([key, {"embed": ["F32", [1], 5]}])):
        entry.write_bytes(bad)
        count = len(reads)
        assert weights_digest(folder, "full", cache_dir=cache) == base
        assert len(reads) == count + len(tensors)
        assert entry.read_bytes() == good


def test_a_cache_that_others_can_write_to_is_not_used(
    tensors: Tensors, tmp_path: Path, cache: Path, reads: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(tmp_path / "a", tensors)
    settle()
    base = weights_digest(folder, "full", cache_dir=cache)
    (tmp_path / "link").symlink_to(cache)
    (tmp_path / "file").write_text("")
    cache.chmod(0o770)
    for place in (cache, tmp_path / "link", tmp_path / "file", tmp_path / "file" / "below"):
        count = len(reads)
        assert weights_digest(folder, "full", cache_dir=place) == base
        assert len(reads) == count + len(tensors)
    assert caplog.text.count("are not kept") == 4


def test_a_file_written_just_now_is_read_again(tensors: Tensors, tmp_path: Path, cache: Path, reads: list[int]) -> None:
    folder = save(tmp_path / "a", tensors)
    os.utime(folder / "model.safetensors", (time.time() + 60, time.time() + 60))
    assert weights_digest(folder, "full", cache_dir=cache) == weights_digest(folder, "full", cache_dir=cache)
    assert len(reads) == 2 * len(tensors)


def test_a_full_disk_costs_only_time(
    tensors: Tensors, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    folder = save(tmp_path / "a", tensors)
    settle()
    monkeypatch.setattr(os, "replace", fail)
    assert len(weights_digest(folder, "full", cache_dir=cache)) == 32
    assert not list(cache.iterdir())
    assert "No space left" in caplog.text


def test_a_file_that_changes_while_it_is_read_is_refused(
    tensors: Tensors, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "a", tensors)
    whole = module._whole

    def meanwhile(fd: int, offset: int, size: int) -> bytes:
        patch_file(folder / "model.safetensors", 1, keep_times=True)
        return whole(fd, offset, size)

    monkeypatch.setattr(module, "_whole", meanwhile)
    with pytest.raises(UnsupportedError, match="changed while it was read"):
        weights_digest(folder, "full", cache_dir=cache)
    assert not list(cache.iterdir())
