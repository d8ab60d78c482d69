"""What tests run inside an engine's process (`Engine.call`): requests that token ids cannot express."""

from __future__ import annotations

from typing import Any


def from_embeddings(llm: Any, *, tokens: int, seed: int) -> dict[str, Any]:
    """One request whose prompt is `tokens` random embeddings."""
    import torch

    width = llm.llm_engine.model_config.get_hidden_size()
    embeddings = torch.randn((tokens, width), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    return _ask(llm, {"prompt_embeds": embeddings})


def about_image(llm: Any, *, seed: int, uuid: str | None = None, before: int = 100, after: int = 200) -> dict[str, Any]:
    """One request with `before` text tokens, a random image of one colour per quarter, and `after` text tokens."""
    import numpy as np
    from PIL import Image

    colours = np.random.default_rng(seed).integers(0, 256, (2, 2, 3), dtype=np.uint8)
    placeholder = llm.llm_engine.model_config.hf_config.image_token_index
    prompt: dict[str, Any] = {
        "prompt_token_ids": [1000 + i for i in range(before)] + [placeholder] + [5000 + i for i in range(after)],
        "multi_modal_data": {"image": Image.fromarray(colours).resize((64, 64), Image.Resampling.NEAREST)},
    }
    if uuid is not None:
        prompt["multi_modal_uuids"] = {"image": [uuid]}
    return _ask(llm, prompt)


def several(llm: Any, *, ids: list[int], n: int) -> dict[str, Any]:
    """`n` sampled answers of 70 tokens to one prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(n=n, temperature=1, seed=7, max_tokens=70, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    return {"cached": answer.num_cached_tokens, "outputs": [list(output.token_ids) for output in answer.outputs]}


def embed(llm: Any, *, ids: list[int]) -> dict[str, Any]:
    """The embedding of a prompt."""
    (answer,) = llm.embed([{"prompt_token_ids": ids}], use_tqdm=False)
    return {"cached": answer.num_cached_tokens, "vector": [float(x) for x in answer.outputs.embedding]}


def _ask(llm: Any, prompt: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    (answer,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    ids = list(answer.outputs[0].token_ids)
    return {"cached": answer.num_cached_tokens, "output": ids, "prompt": len(answer.prompt_token_ids or ())}


def load_adapter(llm: Any, *, lora_name: str, lora_int_id: int, lora_path: str, load_inplace: bool = False) -> bool:
    """What the server does for `/v1/load_lora_adapter` and `--lora-modules`: load it before there is a request."""
    from vllm.lora.request import LoRARequest

    return bool(llm.llm_engine.add_lora(LoRARequest(lora_name, lora_int_id, lora_path, load_inplace=load_inplace)))


def writers(llm: Any) -> list[bool]:
    """For each worker: does it write pages?"""
    return [bool(writes) for writes in llm.collective_rpc(_writes)]


def _writes(worker: Any) -> bool:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    return bool(connector._worker._writes)
