"""Tell apart what vLLM calls an image by its content and what a client calls it; and say how this engine processes images.

Promises: only a name that vLLM computed from the content itself begins with `BY_CONTENT`. An engine core sees nothing but names, and a
client's name may look like a hash, or become one (vLLM hashes a client's name together with the request's processor options). vLLM trusts
such names: under one of them its caches hand out what they computed for another image, and that must not reach others through our pages.

The names are made in the process that takes requests, so they are marked there, when an engine that uses our connector is configured in it.
What comes without a mark (other front ends, names of a client's choice) is served without the cache.
"""

from __future__ import annotations

import functools
import json
import uuid
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..common.errors import UnsupportedError
from . import CONNECTOR, compat

BY_CONTENT = "content-"
_BY_CLIENT = "client-"
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_PROCESSOR_SETTINGS = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method")

_marking = False


def install() -> None:
    """Wrap how vLLM names media; idempotent. With a vLLM that it does not fit: one warning, and no request with media uses the cache."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal.processing.inputs import ProcessorInputs

    if hasattr(ProcessorInputs.get_mm_hashes, "mooncake_kv"):
        return
    try:
        compat.require(compat.MEDIA)
    except UnsupportedError as error:
        compat.logger.warning("%s", error)
        return
    plain_hashes, plain_create = ProcessorInputs.get_mm_hashes, EngineArgs.create_engine_config

    @functools.wraps(plain_hashes)
    def get_mm_hashes(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = plain_hashes(self, *args, **kwargs)
        return _marked(self, names) if _marking else names

    @functools.wraps(plain_create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _marking
        config = plain_create(self, *args, **kwargs)
        _marking = _marking or uses_us(config.kv_transfer_config)
        return config

    get_mm_hashes.mooncake_kv = True  # type: ignore[attr-defined]
    ProcessorInputs.get_mm_hashes = get_mm_hashes
    EngineArgs.create_engine_config = create_engine_config


def uses_us(transfer: Any) -> bool:
    """Does this KVTransferConfig name our connector, itself or among those that vLLM's MultiConnector joins?"""
    if transfer is None:
        return False
    joined = (transfer.kv_connector_extra_config or {}).get("connectors") or ()
    return CONNECTOR in (transfer.kv_connector, *(part.get("kv_connector") for part in joined))


def processing_identity(vllm_config: Any) -> bytes:
    """32 bytes over what vLLM's names do not cover, though the KV of an image depends on it: the engine's own processor options, the
    processor's files next to the model, and the libraries that run it."""
    import transformers

    model = vllm_config.model_config
    settings = {name: getattr(model.multimodal_config, name, None) for name in _PROCESSOR_SETTINGS}
    digest = sha256(json.dumps([compat.vllm_version(), transformers.__version__, settings], sort_keys=True, default=repr).encode())
    for name in _PROCESSOR_FILES:
        content = _model_file(model, name)
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


def _marked(inputs: Any, names: dict[str, list[str]]) -> dict[str, list[str]]:
    marked: dict[str, list[str]] = {}
    for modality, found in names.items():
        given = (inputs.mm_uuid_items or {}).get(modality) or [None] * len(found)
        items = inputs.mm_data_items[modality].get_all_items_for_hash()
        marked[modality] = [
            BY_CONTENT + name if client is None and not _named_within(item) else _unmarked(name)
            for name, client, item in zip(found, given, items, strict=True)
        ]
    return marked


def _unmarked(name: str) -> str:
    """A client's name, which must not pass for a marked one; different names stay different."""
    return _BY_CLIENT + name if name.startswith((BY_CONTENT, _BY_CLIENT)) else name


def _named_within(item: Any) -> bool:
    """An image may carry a name: vLLM takes a UUID in the EXIF field ImageID instead of the pixels."""
    if isinstance(item, dict):
        return any(map(_named_within, item.values()))
    if isinstance(item, (list, tuple)):
        return any(map(_named_within, item))
    from PIL import Image
    from PIL.ExifTags import Base

    media = getattr(item, "media", item)
    try:
        return isinstance(media, Image.Image) and isinstance(media.getexif().get(Base.ImageID), uuid.UUID)
    except Exception:  # malformed metadata, whatever PIL says of it: vLLM goes on with the pixels
        return False


def _model_file(model: Any, name: str) -> bytes:
    """Empty if the model has no such file."""
    path = Path(model.model) / name
    if not Path(model.model).is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model.model, name, revision=model.revision)
        if not isinstance(cached, str):
            return f"{model.model} {model.revision}".encode()
        path = Path(cached)
    return path.read_bytes() if path.is_file() else b""
