"""What vllm_ttft.py runs in the process that drives an engine, through Engine.call."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any


def facts(llm: Any) -> dict[str, Any]:
    """What the engine runs with: the isa of its attention kernels decides the layout of its KV cache."""
    from vllm.v1.attention.backends import cpu_attn

    config = llm.llm_engine.vllm_config
    model, cache = config.model_config, config.cache_config
    return {
        "isa": cpu_attn._get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype),
        "dtype": str(model.dtype).removeprefix("torch."),
        "block_size": cache.block_size,
        "num_blocks": cache.num_gpu_blocks,
        "num_layers": model.get_num_layers(config.parallel_config),
        "num_kv_heads": model.get_total_num_kv_heads(),
        "head_dim": model.get_head_size(),
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
    }


def decode_with_queue(llm: Any, decoder: list[int], tokens: int, after: int, prefix: list[int], tails: list[list[int]]) -> dict[str, Any]:
    """Decode `tokens` tokens after `decoder` alone; when `after` of them are there, add a request `prefix + tail` for each tail, and abort
    those when the decoder is done. `gaps`: seconds between the decoder's tokens; `answered`: tokens that the others got; `waiting`: how
    many of them vLLM says were waiting at the end, by reason."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    engine = llm.llm_engine
    engine.add_request("decoder", {"prompt_token_ids": decoder}, _sampling(tokens))
    times: list[float] = []
    queued: list[str] = []
    answered = 0
    waiting: dict[str, float] = {}
    finished = False
    while not finished:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.request_id != "decoder":
                answered += len(output.outputs[0].token_ids)
                continue
            times += [now] * (len(output.outputs[0].token_ids))
            finished = output.finished
        if len(times) >= after and not queued:
            for number, tail in enumerate(tails):
                queued.append(f"queued-{number}")
                one = SamplingParams(temperature=0, max_tokens=1, output_kind=RequestOutputKind.DELTA)
                engine.add_request(queued[-1], {"prompt_token_ids": prefix + tail}, one)
        if len(times) == tokens - 5:
            waiting = _waiting()
    engine.abort_request(queued)
    while engine.has_unfinished_requests():
        engine.step()
    return {"gaps": [b - a for a, b in pairwise(times)], "answered": answered, "waiting": waiting}


def _sampling(tokens: int) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


def _waiting() -> dict[str, float]:
    from prometheus_client import REGISTRY

    return {
        sample.labels["reason"]: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "vllm:num_requests_waiting_by_reason"
    }
