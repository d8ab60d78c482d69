"""SGLang's HTTP server: the backend attached and detached at run time, by both of its names, under SGLang's own defaults."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mooncake_kv.common.hashing import page_hashes
from tests.engines.harness import HttpServer
from tests.engines.judge import PageReader
from tests.engines.sglang_harness import LOADED, namespace_in
from tests.engines.test_vllm_hits import random_ids
from tests.models import TINY_LLAMA, generated_llama

COMMAND = str(Path(sys.executable).with_name("mooncake-kv"))
KEY = "secret"
SETTINGS = {"dram_size": "256mb", "extent_size": "64mb", "fetch_timeout_ms": 10000}
DYNAMIC = {"backend_name": "mooncake-kv", "module_path": "mooncake_kv.sglang_plugin.backend", "class_name": "MooncakeHiCache"}
ARGUMENTS = (
    "--device cpu --dtype bfloat16 --attention-backend torch_native --mem-fraction-static 0.3 --max-total-tokens 4096 --page-size 64 "
    "--disable-cuda-graph --disable-overlap-schedule --skip-tokenizer-init --skip-server-warmup --enable-hierarchical-cache "
    f"--hicache-ratio 2 --admin-api-key {KEY} --enable-cache-report --enable-metrics"
)


class Api:
    def __init__(self, server: HttpServer) -> None:
        self.server = server

    def attach(self, backend: str, extra: dict[str, Any]) -> tuple[int, str]:
        """SGLang refuses while anything is under way: asked again until it does not."""
        body = {"hicache_storage_backend": backend, "hicache_storage_backend_extra_config_json": json.dumps(extra)}
        deadline = time.monotonic() + 15
        while "not idle" in (answer := self.server.send("PUT", "/hicache/storage-backend", body, KEY))[1]:
            assert time.monotonic() < deadline, answer
            time.sleep(0.1)
        return answer

    def detach(self) -> None:
        """SGLang refuses while anything is under way."""
        self._insist("DELETE", "/hicache/storage-backend")

    def stored(self, ids: list[int]) -> int:
        """Tokens that came from the storage when these are asked."""
        answer = self.server.post("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
        return int((answer["meta_info"].get("cached_tokens_details") or {}).get("storage", 0))

    def flush(self) -> None:
        self._insist("POST", "/flush_cache")

    def metrics(self) -> dict[tuple[str, str], float]:
        """(series, value of the label that we have added) -> count, of ours and of SGLang's cached tokens."""
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(self.server.get("/metrics")):
            for sample in family.samples:
                for label in ("tier", "event", "what", "call", "direction", "cache_source"):
                    if label in sample.labels:
                        found[sample.name, sample.labels[label]] = found.get((sample.name, sample.labels[label]), 0) + sample.value
        return found

    def _insist(self, method: str, path: str) -> None:
        deadline = time.monotonic() + 15
        while (answer := self.server.send(method, path, key=KEY))[0] != 200:
            assert time.monotonic() < deadline, answer
            time.sleep(0.1)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loaded")


@pytest.fixture(scope="module")
def api(module_runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory, loaded: Path) -> Iterator[Api]:
    # Loads plugins before the server's modules; the other command, `python -m sglang.launch_server`, after them.
    start = [str(Path(sys.executable).with_name("sglang")), "serve"]
    command = [*start, "--model-path", str(generated_llama(TINY_LLAMA)), *ARGUMENTS.split()]
    log = tmp_path_factory.mktemp("server") / "log"
    with HttpServer(command, log, environment={LOADED: str(loaded)}) as server:
        yield Api(server)


def test_attach_use_and_detach(api: Api, loaded: Path) -> None:
    status, text = api.attach("mooncake", SETTINGS)
    assert status == 200, text
    prompts = {length: random_ids(length, length) for length in (255, 256, 257, 600)}
    for prompt in prompts.values():
        assert api.stored(prompt) == 0
    with PageReader(namespace_in(loaded), SETTINGS) as reader:
        for length, prompt in prompts.items():
            assert reader.wait_for(page_hashes(prompt)) == length // 64
    api.flush()
    # SGLang asks from 256 whole tokens on, without the last token of the prompt.
    before = api.metrics()
    assert {length: api.stored(prompt) for length, prompt in prompts.items()} == {255: 0, 256: 0, 257: 256, 600: 576}
    check_metrics(before, api.metrics())
    (node,) = json.loads(subprocess.run([COMMAND, "status", "--json"], capture_output=True, check=True, timeout=60).stdout)["nodes"]
    host_pool, memory = node["stats"]["host_pool_bytes"], node["stats"]["arena_bytes"]
    assert host_pool >= 2 * 4096 * 2 * 4 * 4 * 32 * 2 and memory > 0, "SGLang's pool: ratio, tokens, K and V, layers, heads, dim, bf16"
    text = subprocess.run([COMMAND, "status"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert f"{host_pool / (1 << 20):,.1f} MiB" in text and "256.0 MiB" in text, "both memories are shown"
    api.detach()
    api.flush()
    assert api.stored(prompts[600]) == 0


def check_metrics(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]) -> None:
    """Of the four requests above: our numbers in SGLang's /metrics, beside its own."""
    grown = {series: after[series] - before.get(series, 0) for series in after}
    assert grown["sglang:mooncake_kv_loaded_tokens_total", "dram"] == 256 + 576
    assert grown["sglang:mooncake_kv_pages_total", "loaded"] == 4 + 9
    assert grown["sglang:mooncake_kv_pages_total", "found"] >= 4 + 9
    page_bytes = 64 * 2 * 4 * 4 * 32 * 2
    assert grown["sglang:mooncake_kv_bytes_total", "in"] == (4 + 9) * page_bytes
    assert before["sglang:mooncake_kv_bytes_total", "out"] == before["sglang:mooncake_kv_pages_total", "saved"] * page_bytes > 0
    assert 0 < grown["sglang:mooncake_kv_call_microseconds_total", "get"] < 10e6
    assert grown["sglang:cached_tokens_total", "storage"] >= 256 + 576


def test_attach_by_the_other_name_finds_the_pages(api: Api) -> None:
    status, text = api.attach("dynamic", {**DYNAMIC, **SETTINGS})
    assert status == 200, text
    api.flush()
    assert api.stored(random_ids(600, 600)) == 576
    assert api.server.send("POST", "/hicache/storage-backend/clear", key=KEY)[0] == 200
    time.sleep(0.5)
    api.flush()
    assert api.stored(random_ids(600, 600)) == 0
    api.detach()


def test_a_mistake_is_named_and_leaves_the_server_as_it_was(api: Api) -> None:
    status, text = api.attach("mooncake", {**SETTINGS, "tenannt": "x"})
    assert status == 400 and "tenannt" in text and "did you mean" in text
    status, text = api.attach("mooncake", {**SETTINGS, "page_tokens": 32})
    assert status == 400 and "--page-size 32" in text
    assert api.stored(random_ids(300, 7)) == 0
    status, text = api.attach("mooncake", SETTINGS)
    assert status == 200, text
    api.detach()
