"""Real vLLM, SmolLM2: a prompt that only the disk has, because the node was replaced and the engine's own cache reset."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from mooncake_kv.common.node.paths import node_paths
from mooncake_kv.common.node.spawn import NodeUnavailable
from mooncake_kv.common.node.tool import NodeTool
from tests.engines.harness import Engine
from tests.engines.test_vllm_hits import random_ids
from tests.models import SMOLLM2

PREFIX = 1472  # 23 pages


def stats() -> dict[str, object]:
    with NodeTool(node_paths("default"), version="test") as tool:
        return tool.stats()


def wait_for_node(other_than: int) -> dict[str, object]:
    deadline = time.monotonic() + 30
    while True:
        try:
            found = stats()
        except NodeUnavailable:
            found = {}
        if found and found["pid"] != other_than and found["clients"] == 2:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_a_new_node_serves_from_disk_what_the_old_one_was_given(runtime_dir: Path, tmp_path: Path) -> None:
    settings = {
        "dram_size": "512mb",
        "fetch_timeout_ms": 10000,
        "fetch_deadline_ms": 20000,
        "ssd_path": str(tmp_path / "ssd"),
        "ssd_size": "1gb",
    }
    prefix = random_ids(1500, 21)
    questions = [prefix + random_ids(20 + i, 300 + i) for i in range(3)]
    with Engine(SMOLLM2, tmp_path / "log", settings=settings) as engine:
        engine.generate(prefix[: PREFIX + 1], 1)
        local = [engine.generate(question, 24) for question in questions]
        assert [r.cached for r in local] == [PREFIX] * 3
        deadline = time.monotonic() + 20
        while (tier := stats()["tiers"]["ssd"])["pages_written"] < PREFIX // 64 or tier["queued_bytes"]:  # type: ignore[index]
            assert time.monotonic() < deadline, tier
            time.sleep(0.05)
        for question, expected in zip(questions, local, strict=True):
            old = stats()["pid"]
            assert isinstance(old, int)
            os.kill(old, signal.SIGKILL)
            assert wait_for_node(old)["pages"] == 0
            assert engine.reset_prefix_cache()
            loaded = engine.generate(question, 24)
            assert loaded.cached == PREFIX and loaded.output == expected.output
        tier = stats()["tiers"]["ssd"]  # type: ignore[index]
        assert tier["hit_pages"] >= PREFIX // 64 and tier["pages_bad"] == 0
        shown = {name: value for name, value in engine.metrics().items() if "mooncake_kv_loaded_tokens_total" in name}
        assert sum(value for name, value in shown.items() if "ssd" in name) == 3 * PREFIX, shown
