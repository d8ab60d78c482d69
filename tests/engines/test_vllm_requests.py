"""Real vLLM: requests whose KV token ids alone do not tell apart (LoRA, embeddings, images), and sampling options that meet the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.harness import Engine
from tests.engines.test_vllm_hits import random_ids
from tests.engines.test_vllm_identity import SETTINGS, hit, stored
from tests.engines.variants import adapter, tiny_llava
from tests.models import generated_llama

IMAGE_TOKENS = 64


@pytest.fixture(scope="module")
def engine(module_runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Serves adapters and embeddings beside ordinary requests."""
    arguments: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4, "enable_prompt_embeds": True}
    log = tmp_path_factory.mktemp("requests") / "log"
    with Engine(generated_llama(), log, settings=SETTINGS, in_process=True, **arguments) as engine:
        yield engine


def no_load(engine: Engine, reason: str) -> float:
    """How many requests loaded nothing for this reason."""
    return sum(v for k, v in engine.metrics().items() if "mooncake_kv_no_load_total" in k and f'reason="{reason}"' in k)


# ---- LoRA ------------------------------------------------------------------------------------------------------------------------------


def test_an_adapter_and_the_model_below_it_do_not_mix(engine: Engine, tmp_path: Path) -> None:
    ids = random_ids(400, 51)
    lora = {"lora_name": "tiny", "lora_int_id": 1, "lora_path": str(adapter(tmp_path / "a", generated_llama(), seed=1))}
    assert stored(engine, ids, lora=lora)
    assert hit(engine, ids) == 0
    assert stored(engine, ids)
    other = random_ids(400, 52)
    assert stored(engine, other)
    assert hit(engine, other, lora=lora) == 0


def test_adapters_are_told_apart_by_content_not_by_name(engine: Engine, tmp_path: Path) -> None:
    ids = random_ids(400, 53)
    first = {"lora_name": "same", "lora_int_id": 11, "lora_path": str(adapter(tmp_path / "one" / "same", generated_llama(), seed=2))}
    second = {"lora_name": "same", "lora_int_id": 12, "lora_path": str(adapter(tmp_path / "two" / "same", generated_llama(), seed=3))}
    renamed = {"lora_name": "renamed", "lora_int_id": 13, "lora_path": str(adapter(tmp_path / "copy", generated_llama(), seed=2))}
    assert stored(engine, ids, lora=first)
    assert hit(engine, ids, lora=second) == 0
    assert hit(engine, ids, lora=renamed) == 384


def test_an_adapter_overwritten_while_it_is_loaded(engine: Engine, tmp_path: Path) -> None:
    """vLLM goes on with the weights that it has loaded; pages computed with them must not be found by those who load the new ones."""
    ids = random_ids(400, 54)
    folder = adapter(tmp_path / "adapter", generated_llama(), seed=4)
    lora = {"lora_name": "changing", "lora_int_id": 21, "lora_path": str(folder)}
    assert stored(engine, ids, lora=lora)
    adapter(folder, generated_llama(), seed=5)
    before = no_load(engine, "lora_unreadable")
    assert hit(engine, ids, lora=lora) == 0
    assert hit(engine, ids, lora=lora) == 0
    assert no_load(engine, "lora_unreadable") == before + 2
    fresh = {"lora_name": "fresh", "lora_int_id": 22, "lora_path": str(folder)}
    assert hit(engine, ids, lora=fresh) == 0
    assert stored(engine, ids, lora=fresh)


def test_an_adapter_overwritten_between_its_load_and_the_first_request(engine: Engine, tmp_path: Path) -> None:
    """The first request finds the new files; its KV is computed with the old weights."""
    ids, text = random_ids(400, 57), random_ids(400, 58)
    folder = adapter(tmp_path / "adapter", generated_llama(), seed=6)
    early = {"lora_name": "early", "lora_int_id": 31, "lora_path": str(folder)}
    assert engine.call("tests.engines.vllm_calls:load_adapter", **early)
    adapter(folder, generated_llama(), seed=7)
    before = no_load(engine, "other_weights")
    assert engine.generate(ids, 1, lora=early).cached == 0
    assert hit(engine, text, lora=early) == 0
    assert no_load(engine, "other_weights") == before + 1
    fresh = {"lora_name": "late", "lora_int_id": 32, "lora_path": str(folder)}
    assert hit(engine, ids, lora=fresh) == 0, "what was computed with the old weights is not found by those who load the new ones"
    assert stored(engine, ids, lora=fresh)
    # The same pages, wanted by the request that still runs on the old weights.
    assert hit(engine, ids, lora=early) == 0


def test_a_name_that_comes_to_stand_for_other_weights(engine: Engine, tmp_path: Path) -> None:
    """vLLM finds blocks in its own prefix cache by an adapter's name and path; what lies above old ones is not stored."""
    ids = random_ids(400, 59)
    folder = adapter(tmp_path / "adapter", generated_llama(), seed=8)
    first = {"lora_name": "reused", "lora_int_id": 33, "lora_path": str(folder)}
    assert stored(engine, ids, lora=first)
    adapter(folder, generated_llama(), seed=9)
    second = {**first, "lora_int_id": 34}
    longer = ids + random_ids(200, 60)
    assert (engine.generate(longer, 1, lora=second).cached or 0) > 0, "vLLM's own hit, on blocks of the old weights"
    fresh = {"lora_name": "another", "lora_int_id": 35, "lora_path": str(folder)}
    assert hit(engine, longer, lora=fresh) == 0


# ---- embeddings ------------------------------------------------------------------------------------------------------------------------


def test_prompt_embeddings_are_served_without_the_cache_and_counted(engine: Engine) -> None:
    before = no_load(engine, "prompt_embeds")
    for seed in (1, 1, 2):
        assert engine.reset_prefix_cache()
        answer = engine.call("tests.engines.vllm_calls:from_embeddings", tokens=300, seed=seed)
        assert answer["cached"] == 0
        assert len(answer["output"]) == 4
    assert no_load(engine, "prompt_embeds") == before + 3


# ---- sampling --------------------------------------------------------------------------------------------------------------------------


def test_prompt_logprobs_need_the_whole_prompt_computed(engine: Engine) -> None:
    ids = random_ids(140, 55)
    assert stored(engine, ids, 128)
    assert hit(engine, ids, sampling={"prompt_logprobs": 1}) == 0
    assert hit(engine, ids) == 128


def test_several_answers_to_one_prompt(engine: Engine) -> None:
    ids = random_ids(400, 56)
    assert stored(engine, ids)
    assert engine.reset_prefix_cache()
    answer = engine.call("tests.engines.vllm_calls:several", ids=ids, n=3)
    assert answer["cached"] >= 384
    assert [len(output) for output in answer["outputs"]] == [70, 70, 70]
    # Each answer goes on in pages of its own; the next turn after any of them hits them.
    for output in answer["outputs"]:
        assert hit(engine, ids + output + [1]) == 448


# ---- images ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(module_runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("llava")
    with Engine(tiny_llava(folder / "model", IMAGE_TOKENS), folder / "log", settings=SETTINGS, in_process=True) as engine:
        yield engine


def look(engine: Engine, seed: int, **more: Any) -> int:
    assert engine.reset_prefix_cache()
    return int(engine.call("tests.engines.vllm_calls:about_image", seed=seed, **more)["cached"])


def test_images_with_the_same_placeholders_do_not_mix(seeing: Engine) -> None:
    first = seeing.call("tests.engines.vllm_calls:about_image", seed=1)
    pages = (first["prompt"] - 1) // 64 * 64
    assert first["cached"] == 0 and pages >= 256
    found = 0
    for _ in range(20):
        found = found or look(seeing, 1)
    assert found == pages
    # 100 tokens of text come before the image: one whole page does not depend on it.
    assert look(seeing, 2) == 64
    assert look(seeing, 1) == pages


@pytest.mark.parametrize("uuid", ["picture-1", "ab" * 32, "content-" + "ab" * 32], ids=["name", "hash", "marked hash"])
def test_an_image_under_a_name_of_the_clients_choice_is_served_without_the_cache(seeing: Engine, uuid: str) -> None:
    before = no_load(seeing, "media_without_hash")
    assert look(seeing, 3, uuid=uuid) == 0
    assert look(seeing, 4, uuid=uuid) == 0
    assert no_load(seeing, "media_without_hash") == before + 2
