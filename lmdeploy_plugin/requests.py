"""What of a LMDeploy sequence goes into its page hashes, and which sequences stay away from the cache.

Promises: two sequences get the same page hash only if LMDeploy computes the same KV for the page; what token ids do not say (LoRA adapter)
goes into the hash, and what cannot be put into it (images, embeddings, KV that came from another engine) keeps the sequence away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.hashing import storage_namespace_seed


def reason_to_skip(sequence: Any, adapters: Mapping[str, str]) -> str:
    """One word why a sequence neither loads nor saves, '' if it does. A later turn of its session can bring a reason."""
    if sequence.history_multimodals.multimodals:
        return "media"
    if len(sequence.history_embeddings) > 0:
        return "prompt_embeds"
    if sequence.migration_request is not None:
        return "migrated"
    if sequence.adapter_name and not adapters.get(sequence.adapter_name):
        return "lora_unreadable"
    return ""


def seed_of(sequence: Any, adapters: Mapping[str, str]) -> bytes:
    """Seed of the page hashes. LMDeploy scales LoRA by alpha / r whatever else the adapter's configuration says, so pages computed with an
    adapter are shared among LMDeploy engines only."""
    if not sequence.adapter_name:
        return b""
    return storage_namespace_seed(f"lmdeploy-lora:{adapters[sequence.adapter_name]}", None)


def wants_all_tokens(sequence: Any) -> bool:
    """Does the request ask for something of every prompt token, which only computing gives?"""
    return bool(sequence.return_logits or sequence.return_ce_loss or sequence.return_routed_experts)


def block_table(sequence: Any) -> list[int]:
    """Physical blocks of a sequence, in order. LMDeploy hands them over for prefill steps only; its block manager knows them always."""
    return [int(block) for block in sequence.state.lifecycle._block_manager.get_block_table(sequence)]
