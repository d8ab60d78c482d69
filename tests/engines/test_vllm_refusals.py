"""Real vLLM: models and settings that the cache cannot serve are refused at start in one sentence that names them, or run without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake_kv.common.hashing import page_hashes
from mooncake_kv.common.identity import KVNamespace
from tests.engines.harness import Engine, EngineError
from tests.engines.judge import PageReader
from tests.engines.test_vllm_hits import INSECURE, random_ids
from tests.engines.test_vllm_identity import SETTINGS, hit, stored
from tests.engines.variants import hybrid_gemma, mamba, sliding_mistral
from tests.models import Shape, generated_llama

DISABLE = {**SETTINGS, "on_unsupported": "disable"}
ONE_HEAD = Shape(layers=4, hidden=256, heads=4, kv_heads=1, head_dim=32)


def refusal(log: Path, model: Path, settings: dict[str, Any] = SETTINGS, **arguments: Any) -> str:
    """The sentence that ends the engine's start."""
    with pytest.raises(EngineError):
        Engine(model, log, settings=settings, **{"in_process": True, **arguments}).stop()
    text = log.read_text()
    assert "UnsupportedError: " in text, text
    return text.partition("UnsupportedError: ")[2].splitlines()[0]


def answers_without_cache(log: Path, model: Path, **arguments: Any) -> None:
    ids = random_ids(400, 71)
    with Engine(model, log, settings=DISABLE, in_process=True, **arguments) as engine:
        first = engine.generate(ids, 4)
        assert hit(engine, ids) == 0
        assert engine.generate(ids, 4).output == first.output
        assert len(first.output) == 4
        assert not sum(v for k, v in engine.metrics().items() if "mooncake_kv_tokens_total" in k and 'source="loaded"' in k)
    assert "without the cache" in log.read_text()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (sliding_mistral, "sliding window attention (window 256)"),
        (hybrid_gemma, "2 KV cache groups (SlidingWindowSpec, FullAttentionSpec)"),
        (mamba, "MambaSpec"),
    ],
    ids=["sliding window", "hybrid", "mamba"],
)
def test_models(runtime_dir: Path, tmp_path: Path, make: Callable[[Path], Path], named: str) -> None:
    model = make(tmp_path / "model")
    sentence = refusal(tmp_path / "log", model)
    assert named in sentence and "on_unsupported" in sentence
    if make is sliding_mistral:
        answers_without_cache(tmp_path / "disabled", model)


def test_a_draft_model(runtime_dir: Path, tmp_path: Path) -> None:
    model = generated_llama()
    draft = {"model": str(model), "method": "draft_model", "num_speculative_tokens": 2}
    assert "speculative decoding with method 'draft_model'" in refusal(tmp_path / "log", model, speculative_config=draft)


def test_ngram_speculation_is_served(runtime_dir: Path, tmp_path: Path) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    ids = random_ids(60, 72) * 6
    with Engine(generated_llama(), tmp_path / "log", settings=SETTINGS, in_process=True, speculative_config=ngram) as engine:
        first = engine.generate(ids, 60, sampling={"ignore_eos": True})
        assert len(first.output) == 60
        turn = ids + first.output + random_ids(20, 73)
        # What the drafts got wrong is in no page: the next turn goes on from the whole pages of the conversation.
        assert stored(engine, turn, 384)
        accepted = sum(v for k, v in engine.metrics().items() if "spec_decode_num_accepted_tokens_total" in k)
        assert accepted > 0


def test_context_parallelism(runtime_dir: Path, tmp_path: Path) -> None:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    arguments: dict[str, Any] = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "in_process": False}
    sentence = refusal(tmp_path / "log", generated_llama(ONE_HEAD), environment=environment, **arguments)
    assert "context parallelism (decode_context_parallel_size=2)" in sentence


def test_pooling(runtime_dir: Path, tmp_path: Path) -> None:
    """Served where the last token is enough; a mean over the prompt would lack the tokens that were loaded."""
    model, ids = generated_llama(), random_ids(400, 76)
    arguments: dict[str, Any] = {"runner": "pooling", "convert": "embed"}
    sentence = refusal(tmp_path / "mean", model, **arguments, pooler_config={"seq_pooling_type": "MEAN"})
    assert "prefix caching (pooling MEAN)" in sentence
    with Engine(model, tmp_path / "log", settings=SETTINGS, in_process=True, **arguments) as engine:
        answers = []
        for _ in range(20):
            assert engine.reset_prefix_cache()
            answers.append(engine.call("tests.engines.vllm_calls:embed", ids=ids))
            if answers[-1]["cached"]:
                break
        assert answers[-1]["cached"] == 384
        assert np.dot(answers[0]["vector"], answers[-1]["vector"]) > 0.999


def test_weights_that_cannot_be_identified(runtime_dir: Path, tmp_path: Path) -> None:
    model = generated_llama()
    sentence = refusal(tmp_path / "log", model, load_format="dummy")
    assert "'dummy'" in sentence and "set model_id" in sentence
    with Engine(model, tmp_path / "named", settings={**SETTINGS, "model_id": "mine"}, in_process=True, load_format="dummy") as engine:
        assert stored(engine, random_ids(400, 74))


def test_an_fp8_cache(runtime_dir: Path, tmp_path: Path) -> None:
    """Served where the layout is known: its pages are those of a bf16 engine, rounded. Refused where vLLM tiles it for AMX."""
    import torch

    model, ids, found = generated_llama(), random_ids(400, 75), {}
    for dtype in ("auto", "fp8_e4m3", "fp8_e5m2"):
        environment = {**INSECURE, "MOONCAKE_KV_TEST_ISA": "vec"}
        log = tmp_path / dtype
        with Engine(model, log, settings=SETTINGS, environment=environment, in_process=True, kv_cache_dtype=dtype) as engine:
            assert stored(engine, ids)
            space = KVNamespace.decode(bytes.fromhex(engine.call("tests.engines.judge:namespace")))
            with PageReader(space, SETTINGS) as reader:
                (found[dtype], *_) = reader.read(page_hashes(ids))
    exact = torch.from_numpy(found["auto"].view(np.int16)).view(torch.bfloat16).float()
    for dtype, kind, limit in (("fp8_e4m3", torch.float8_e4m3fn, 0.06), ("fp8_e5m2", torch.float8_e5m2, 0.12)):
        rounded = torch.from_numpy(found[dtype]).view(kind).float()
        # The first layer's input does not depend on the cache.
        error = (rounded[0] - exact[0]).norm() / exact[0].norm()
        assert 0 < error < limit, f"{dtype}: {error}"
    if torch.cpu._is_amx_tile_supported():
        assert "amx" in refusal(tmp_path / "amx", model, kv_cache_dtype="fp8_e4m3")
        # Only the worker sees that, and the node has the pages. Its first report comes before or with the first load.
        with Engine(model, tmp_path / "disabled", settings=DISABLE, in_process=True, kv_cache_dtype="fp8_e4m3") as engine:
            engine.generate(ids, 1)
            assert hit(engine, ids) == hit(engine, ids) == 0
            numbers = engine.metrics()
        in_vain = sum(v for k, v in numbers.items() if "mooncake_kv_failures_total" in k and 'what="load"' in k)
        unable = sum(v for k, v in numbers.items() if "mooncake_kv_no_load_total" in k and 'reason="worker_unable"' in k)
        assert in_vain <= 1 and unable >= 2
        assert (tmp_path / "disabled").read_text().count("a worker copies nothing") == 1
