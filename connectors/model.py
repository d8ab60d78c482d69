"""From what an engine says about its model to the namespace of its KV, the same for all engines.

Promises: nothing of the engine itself goes in but `variant`; facts that cannot be had are an UnsupportedError with one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..common.config import CacheConfig
from ..common.errors import UnsupportedError
from ..common.fingerprint import model_fingerprint
from ..common.identity import KVNamespace


def namespace_of_model(
    config: CacheConfig,
    hf_config: Any,
    weights: Callable[[], Path],
    *,
    compute_dtype: str,
    max_model_len: int,
    quantization: str,
    load_format: str,
    page_tokens: int,
    facts: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> KVNamespace:
    """`hf_config`: the effective configuration, from transformers. `weights` gives the folder with the files; it is not asked when an
    operator vouches for them (`model_id`). `quantization` is what the engine does while loading, as its own name for it; what the files
    say about their own counts instead. `sizes` are KVNamespace.build's. Raises UnsupportedError where the model cannot be identified."""
    fingerprint = model_fingerprint(
        hf_config.to_dict(),
        Path() if config.model_id else weights(),
        compute_dtype=compute_dtype,
        max_model_len=max_model_len,
        quantization="" if getattr(hf_config, "quantization_config", None) else quantization,
        load_format=load_format,
        mode=config.fingerprint,
        model_id=config.model_id,
        facts=facts,
    )
    return KVNamespace.build(
        model=fingerprint,
        page_tokens=page_tokens,
        layers_per_group=config.layers_per_group,
        tenant=config.tenant,
        weights_epoch=config.weights_epoch,
        **sizes,
    )


def heads_of_rank(tp_rank: int, tp_size: int, num_kv_heads: int) -> tuple[int, bool]:
    """(first KV head that a tensor-parallel rank holds, whether it is the one of its replicas that writes). With more ranks than KV heads
    several ranks hold the same head."""
    replicas = max(1, tp_size // num_kv_heads)
    return tp_rank // replicas * max(1, num_kv_heads // tp_size), tp_rank % replicas == 0


def local_weights(model: str, revision: str | None, download_dir: str | None) -> Path:
    """The folder with the weight files that an engine has loaded: `model` itself, or where the Hugging Face hub keeps it."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model, revision=revision, cache_dir=download_dir, allow_patterns=["*.safetensors", "*.json"], local_files_only=True
            )
        )
    except Exception as error:
        raise UnsupportedError(
            f"the weight files of model {model!r} were not found locally ({error}); set model_id in the cache configuration."
        ) from error
