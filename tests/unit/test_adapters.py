"""LoRA adapters whose files change: what a request's pages are keyed by, and what the engine has loaded."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager

from mooncake_kv.common import adapter
from mooncake_kv.common.adapter import adapter_fingerprint
from mooncake_kv.vllm_plugin import adapters, compat


def written(folder: Path, value: int) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"a": np.full((64, 64), value, np.int16)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    return folder


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """vLLM's worker loads a request's adapter; `meanwhile` runs while it reads the files."""
    during: list[Callable[[], Any]] = []
    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", lambda self, lora_request: [run() for run in during])
    monkeypatch.setattr(adapters, "_loaded", {})
    monkeypatch.setattr(adapters, "_names", {})
    adapters.watch("sample")
    adapters.watch("sample")
    manager = LRUCacheWorkerLoRAManager.__new__(LRUCacheWorkerLoRAManager)

    def load(request: LoRARequest, *meanwhile: Callable[[], Any]) -> None:
        during[:] = meanwhile
        manager._load_adapter(request)

    return load


def test_vllm_has_what_is_watched() -> None:
    compat.require(compat.LORA)


def test_files_that_were_overwritten_after_the_load(load: Callable[..., None], tmp_path: Path) -> None:
    request = LoRARequest("one", 1, str(written(tmp_path / "a", 1)))
    old = adapters.token(request, adapter_fingerprint(tmp_path / "a"))
    assert not adapters.differ(old), "not loaded yet: nothing speaks against it"
    load(request)
    written(tmp_path / "a", 2)
    new = adapters.token(request, adapter_fingerprint(tmp_path / "a"))
    assert new != old
    assert adapters.differ(new) and not adapters.differ(old)


def test_files_that_were_overwritten_while_they_were_loaded(load: Callable[..., None], tmp_path: Path) -> None:
    request = LoRARequest("one", 1, str(written(tmp_path / "a", 1)))
    tokens = [adapters.token(request, adapter_fingerprint(tmp_path / "a"))]
    load(request, lambda: written(tmp_path / "a", 2))
    tokens.append(adapters.token(request, adapter_fingerprint(tmp_path / "a")))
    assert all(map(adapters.differ, tokens)), "nobody knows which of the two it read"


def test_an_id_or_a_name_is_distrusted_once_its_weights_were_replaced(load: Callable[..., None], tmp_path: Path) -> None:
    folder = written(tmp_path / "a", 1)
    first, again = LoRARequest("one", 1, str(folder)), LoRARequest("one", 2, str(folder))
    load(first)
    load(first)
    kept = adapters.token(first, adapter_fingerprint(folder))
    assert not adapters.differ(kept), "loaded again, unchanged"
    load(again)
    assert not adapters.differ(kept)
    written(folder, 2)
    load(again)
    assert adapters.differ(adapters.token(again, adapter_fingerprint(folder)))
    assert adapters.differ(kept), "its name is what vLLM's own prefix cache goes by"
    other = LoRARequest("two", 3, str(folder))
    load(other)
    assert not adapters.differ(adapters.token(other, adapter_fingerprint(folder)))


def test_an_adapter_that_cannot_be_identified_is_loaded_all_the_same(load: Callable[..., None], tmp_path: Path) -> None:
    request = LoRARequest("hub", 1, "somebody/adapter")
    load(request)
    assert adapters.differ(adapters.token(request, "0" * 32))


def test_a_write_that_leaves_size_and_time_as_they_were_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "SETTLED_NS", 50_000_000)
    file = written(tmp_path / "a", 1) / "adapter_model.safetensors"
    stamp = file.stat().st_mtime_ns
    before = adapter_fingerprint(tmp_path / "a")
    time.sleep(0.1)
    assert adapter_fingerprint(tmp_path / "a") == before
    written(tmp_path / "a", 2)
    os.utime(file, ns=(stamp, stamp))
    assert adapter_fingerprint(tmp_path / "a") != before


def test_one_changed_weight_needs_a_full_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    written(tmp_path / "a", 1)
    values = np.full((64, 4096), 1, np.int16)
    found = []
    for _ in range(2):
        save_file({"a": values}, tmp_path / "a" / "adapter_model.safetensors")
        found.append((adapter_fingerprint(tmp_path / "a"), adapter_fingerprint(tmp_path / "a", "full")))
        values[1, 7] += 1
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]
