"""What of a vLLM request goes into its page hashes.

Promises: two requests get the same page hash only if vLLM computes the same KV for the page. What token ids do not say (LoRA adapter,
cache salt, images) goes into the hash; what cannot be put into it keeps the request away from the cache, with a reason.
"""

from __future__ import annotations

import re
from typing import Any

from ..common.adapter import adapter_fingerprint
from ..common.hashing import storage_namespace_seed
from ..common.weights import Mode
from .adapters import token
from .media import BY_CONTENT

# vLLM's hash of an item's content (blake3, sha256 or sha512), marked as such.
_CONTENT_HASH = re.compile(rf"{BY_CONTENT}([0-9a-f]{{64}}|[0-9a-f]{{128}})")


def reason_to_skip(request: Any) -> str:
    """One word why a request does not use the cache, '' if it does."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompt_embeds"
    if request.resumable:
        return "streaming_input"  # its token ids may be replaced, not only appended to
    if request.lora_request is not None and not request.lora_request.lora_path:
        return "lora_without_path"
    if not all(_CONTENT_HASH.fullmatch(_item_hash(feature)) for feature in request.mm_features or ()):
        # A name that the client chose, or, without prefix and processor cache, a number that every engine counts from 1.
        return "media_without_hash"
    return ""


def seed_of(request: Any, adapters: dict[int, str], mode: Mode) -> tuple[bytes, str]:
    """Seed of the request's page hashes, and what the workers must have loaded for it ('' without an adapter). `adapters` is the caller's
    memory of what each LoRA id stood for, which spares a request whose files have changed since the attempt. Raises OSError or ValueError
    when the request's adapter cannot be identified."""
    lora = request.lora_request
    if lora is None:
        return storage_namespace_seed(None, request.cache_salt), ""
    fingerprint = adapter_fingerprint(lora.lora_path, mode)
    if lora.load_inplace:
        adapters[lora.lora_int_id] = fingerprint
    elif adapters.setdefault(lora.lora_int_id, fingerprint) != fingerprint:
        raise ValueError(f"id {lora.lora_int_id} stood for other weights before, and vLLM may still use those")
    return storage_namespace_seed(f"lora:{fingerprint}", request.cache_salt), token(lora, fingerprint)


def image_extras(request: Any, page_tokens: int, processing: bytes) -> dict[int, bytes]:
    """Page index -> what identifies the multimodal items that reach into the page, and where they start relative to it. `processing`: how
    the engine processes them."""
    extras: dict[int, bytes] = {}
    for feature in sorted(request.mm_features, key=lambda f: f.mm_position.offset):
        first, length = feature.mm_position.offset, feature.mm_position.length
        if length < 1:
            continue
        identifier = processing + f"{feature.modality}\0{_item_hash(feature)}".encode()
        for page in range(first // page_tokens, (first + length - 1) // page_tokens + 1):
            place = first - page * page_tokens
            part = (
                len(identifier).to_bytes(4, "little") + identifier + place.to_bytes(8, "little", signed=True) + length.to_bytes(8, "little")
            )
            extras[page] = extras.get(page, b"") + part
    return extras


def _item_hash(feature: Any) -> str:
    """Without the adapter's name, which vLLM may put before it: the adapter is in the seed."""
    return str(feature.mm_hash or feature.identifier)
