"""Real SGLang with what is not a plain model on one rank: MLA, LoRA adapters, pipeline parallelism. Each reader is a fresh process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.engines.judge import EXACT
from tests.engines.sglang_harness import LOADED, SGLangEngine, SGLangResult, namespace_in
from tests.engines.test_vllm_hits import random_ids
from tests.engines.variants import adapter, written
from tests.models import TINY_LLAMA, generated_llama, generated_mla
from tests.node.scripted_peer import until

pytestmark = pytest.mark.timeout(600)

SETTINGS = {"dram_size": "256mb", "extent_size": "64mb", "fetch_timeout_ms": 10000}
PROMPT = random_ids(620, 78)
REUSED = 576


def ask(engine: SGLangEngine, lora: str | None = None) -> SGLangResult:
    return engine.generate(PROMPT, 8, sampling={"ignore_eos": True}, lora_path=lora)


def write(engine: SGLangEngine, lora: str | None = None) -> SGLangResult:
    """Compute the prompt, wait until it is stored and comes back; the answer from the engine's own cache."""
    assert ask(engine, lora).stored == 0
    local = ask(engine, lora)
    assert (local.cached, local.stored) == (REUSED, 0)

    def back() -> bool:
        assert engine.flush()
        return ask(engine, lora).stored == REUSED

    until(back, 20)
    return local


@pytest.mark.long
def test_mla_and_its_tensor_parallel_sizes(runtime_dir: Path, tmp_path: Path) -> None:
    model = generated_mla()
    environment = {**EXACT, LOADED: str(tmp_path)}
    with SGLangEngine(model, tmp_path / "one", settings=SETTINGS, environment=environment) as engine:
        local = write(engine)
        space = namespace_in(tmp_path)
        assert (space.mla, space.num_kv_heads, space.k_head_dim, space.v_head_dim) == (True, 1, 80, 0)
    two = {**EXACT, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with SGLangEngine(model, tmp_path / "two", settings=SETTINGS, environment=two, tp_size=2) as engine:
        loaded = ask(engine)
        assert loaded.stored == loaded.cached == REUSED, "both ranks read what one wrote"
        assert len(loaded.output) == len(local.output)


def test_lora_is_shared_by_the_same_files_only(runtime_dir: Path, tmp_path: Path) -> None:
    model = generated_llama(TINY_LLAMA)
    folder = adapter(tmp_path / "lora", model, seed=1)

    def start(name: str) -> SGLangEngine:
        more: dict[str, Any] = {"enable_lora": True, "lora_paths": [f"a={folder}"], "max_loras_per_batch": 2}
        return SGLangEngine(model, tmp_path / name, settings=SETTINGS, environment=EXACT, lora_backend="torch_native", **more)

    with start("first") as engine:
        base, adapted = write(engine), write(engine, "a")
        assert base.output != adapted.output, "the adapter does something"
    with start("second") as engine:
        for lora, local in ((None, base), ("a", adapted)):
            answer = ask(engine, lora)
            assert (answer.stored, answer.output) == (REUSED, local.output)
    adapter(folder, model, seed=2)  # other weights under the same name and path
    with start("third") as engine:
        assert ask(engine, "a").stored == 0
        assert ask(engine).stored == REUSED


@pytest.mark.long
def test_pipeline_parallel_ranks_write_a_page_together(runtime_dir: Path, tmp_path: Path) -> None:
    # SGLang's last stage has no embeddings that an output layer could share.
    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False
    )
    model = written(config, tmp_path / "model")
    two = {**EXACT, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with SGLangEngine(model, tmp_path / "two", settings=SETTINGS, environment=two, pp_size=2) as engine:
        local = write(engine)
    with SGLangEngine(model, tmp_path / "one", settings=SETTINGS, environment=EXACT) as engine:
        answer = ask(engine)
        assert (answer.stored, answer.output) == (REUSED, local.output)
