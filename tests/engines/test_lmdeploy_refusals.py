"""Real LMDeploy: what it does not start with, in one sentence, and what it runs without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.harness import EngineError
from tests.engines.lmdeploy_harness import LMDeployEngine
from tests.engines.test_vllm_hits import random_ids
from tests.models import TINY_LLAMA, generated_llama

pytestmark = pytest.mark.timeout(300)

MP = {"tp": 2, "distributed_executor_backend": "mp"}


def test_ranks_without_joined_reports_are_refused_by_name(runtime_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="distributed_executor_backend 'mp'"):
        LMDeployEngine(generated_llama(TINY_LLAMA), tmp_path / "log", settings={}, **MP)


def test_a_misspelt_setting_is_refused_by_name(runtime_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"'dram_sise' \(kv_connector_extra_config\) is no setting: did you mean dram_size"):
        LMDeployEngine(generated_llama(TINY_LLAMA), tmp_path / "log", settings={"dram_sise": 1})


def test_what_is_not_served_runs_without_the_cache_on_request(runtime_dir: Path, tmp_path: Path) -> None:
    settings = {"on_unsupported": "disable"}
    overrides = {"layer_types": ["sliding_attention"] * TINY_LLAMA.layers}
    with LMDeployEngine(generated_llama(TINY_LLAMA), tmp_path / "log", settings=settings, hf_overrides=overrides) as engine:
        for _ in range(2):
            result = engine.generate(random_ids(200, 1), 4, sampling={"ignore_eos": True})
            assert (result.cached, len(result.output)) == (0, 4)
        log = engine.log.read_text()
    assert "runs without the cache: mooncake-kv does not serve layers of different kinds (sliding_attention)" in log
    assert not (runtime_dir / "mooncake-kv").exists(), "no node for nobody"
