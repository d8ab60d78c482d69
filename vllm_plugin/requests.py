"""What of a vLLM request goes into its page hashes.

Promises: two requests get the same page hash only if vLLM computes the same KV for the page. What token ids do not say (LoRA adapter,
cache salt, images) goes into the hash; what cannot be put into it keeps the request away from the cache, with a reason.
"""

from __future__ import annotations

from typing import Any

from ..common.adapter import adapter_fingerprint
from ..common.hashing import storage_namespace_seed


def reason_to_skip(request: Any) -> str:
    """One word why a request does not use the cache, '' if it does."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompt_embeds"
    if request.resumable:
        return "streaming_input"  # its token ids may be replaced, not only appended to
    if request.lora_request is not None and not request.lora_request.lora_path:
        return "lora_without_path"
    return ""


def seed_of(request: Any) -> bytes:
    """Seed of the request's page hashes. Raises OSError, ValueError or UnsupportedError when its LoRA adapter cannot be identified."""
    lora = request.lora_request
    return storage_namespace_seed(None if lora is None else f"lora:{adapter_fingerprint(lora.lora_path)}", request.cache_salt)


def image_extras(request: Any, page_tokens: int) -> dict[int, bytes]:
    """Page index -> what identifies the multimodal items that reach into the page, and where they start relative to it."""
    extras: dict[int, bytes] = {}
    for feature in sorted(request.mm_features, key=lambda f: f.mm_position.offset):
        first, length = feature.mm_position.offset, feature.mm_position.length
        if length < 1:
            continue
        identifier = f"{feature.modality}\0{feature.identifier}".encode()
        for page in range(first // page_tokens, (first + length - 1) // page_tokens + 1):
            place = first - page * page_tokens
            part = (
                len(identifier).to_bytes(4, "little") + identifier + place.to_bytes(8, "little", signed=True) + length.to_bytes(8, "little")
            )
            extras[page] = extras.get(page, b"") + part
    return extras
