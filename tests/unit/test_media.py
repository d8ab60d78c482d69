"""Images in a vLLM request: only what vLLM named by its content uses the cache, however a client's name looks."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.ExifTags import Base
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.v1.request import Request

from mooncake_kv.vllm_plugin import compat, media, register
from mooncake_kv.vllm_plugin.requests import image_extras, reason_to_skip

HASH = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a front end whose engine uses the connector; vLLM is left as it was found."""
    monkeypatch.setattr(
        ProcessorInputs, "get_mm_hashes", getattr(ProcessorInputs.get_mm_hashes, "__wrapped__", ProcessorInputs.get_mm_hashes)
    )
    plain = EngineArgs.create_engine_config
    monkeypatch.setattr(EngineArgs, "create_engine_config", getattr(plain, "__wrapped__", plain))
    monkeypatch.setattr(media, "_marking", True)
    register()
    register()
    yield


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8))


def names(*images: Any, uuids: list[str | None] | None = None, **options: Any) -> list[str]:
    """What vLLM calls these images in a request with these processor options."""
    items = MultiModalDataItems({"image": ImageProcessorItems(list(images))})
    return ProcessorInputs([1], items, {"image": uuids} if uuids else None, options).get_mm_hashes("model", "blake3")["image"]


def request(*found: str) -> Request:
    features = [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset=100 * i, length=50), mm_hash=name
        )
        for i, name in enumerate(found)
    ]
    return Request("r", list(range(1000)), SamplingParams(max_tokens=1), None, mm_features=features)


def test_vllm_has_what_is_wrapped() -> None:
    compat.require(compat.MEDIA)


def test_images_are_known_by_their_content_and_options() -> None:
    found = [names(picture(1)), names(picture(1)), names(picture(2)), names(picture(1), size=4)]
    assert [reason_to_skip(request(*name)) for name in found] == [""] * 4
    pages = [image_extras(request(*name), 64, b"") for name in found]
    assert pages[0] == pages[1] and pages[0] != pages[2] and pages[0] != pages[3]


@pytest.mark.parametrize(
    ("name", "options"),
    [("picture-1", {}), (HASH, {}), (media.BY_CONTENT + HASH, {}), ("picture-1", {"size": 4}), (HASH, {"size": 4})],
)
def test_a_clients_name_is_no_content(name: str, options: dict[str, Any]) -> None:
    (found,) = names(picture(1), uuids=[name], **options)
    assert reason_to_skip(request(found)) == "media_without_hash"


def test_one_named_image_keeps_the_request_away() -> None:
    found = names(picture(1), picture(2), uuids=[None, HASH])
    assert reason_to_skip(request(found[0])) == ""
    assert reason_to_skip(request(*found)) == "media_without_hash"


def test_clients_names_stay_different() -> None:
    given = ["a", "content-a", "client-a", "client-content-a", "client-client-a"]
    found = names(*map(picture, range(5)), uuids=list(given))
    assert len(set(found)) == 5 and found[0] == "a"


def test_a_name_inside_an_image_is_no_content() -> None:
    images = [picture(1), picture(2)]
    for image in images:
        image.getexif()[Base.ImageID] = uuid.UUID(int=7)
    found = names(*images)
    assert found[0] == found[1], "vLLM believes it"
    assert reason_to_skip(request(found[0])) == "media_without_hash"


def test_what_no_hook_has_seen_is_skipped() -> None:
    assert reason_to_skip(request(HASH)) == "media_without_hash"


def test_an_engine_without_our_connector_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "_marking", False)
    (found,) = names(picture(1))
    assert len(found) == 64
    assert names(picture(1), uuids=["content-a"]) == ["content-a"]


@pytest.mark.parametrize(
    ("transfer", "ours"),
    [
        (None, False),
        (KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both"), False),
        (KVTransferConfig(kv_connector="mooncake", kv_role="kv_both"), True),
        (
            KVTransferConfig(
                kv_connector="MultiConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"connectors": [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "mooncake"}]},
            ),
            True,
        ),
    ],
)
def test_marking_begins_with_an_engine_that_uses_us(monkeypatch: pytest.MonkeyPatch, transfer: Any, ours: bool) -> None:
    monkeypatch.setattr(media, "_marking", False)
    monkeypatch.setattr(ProcessorInputs, "get_mm_hashes", ProcessorInputs.get_mm_hashes.__wrapped__)  # type: ignore[attr-defined]
    made = SimpleNamespace(kv_transfer_config=transfer)

    def create_engine_config(self: Any, usage_context: Any = None, headless: bool = False) -> Any:
        return made

    monkeypatch.setattr(EngineArgs, "create_engine_config", create_engine_config)
    media.install()
    arguments = EngineArgs.__new__(EngineArgs)
    assert EngineArgs.create_engine_config(arguments, headless=True) is made
    assert media._marking is ours


def test_how_the_engine_processes_images_counts(tmp_path: Path) -> None:
    def identity(folder: Path, **settings: Any) -> bytes:
        config = SimpleNamespace(**{"mm_processor_kwargs": None, "media_io_kwargs": {}, **settings})
        return media.processing_identity(SimpleNamespace(model_config=SimpleNamespace(model=str(folder), multimodal_config=config)))

    one, same, other = tmp_path / "one", tmp_path / "same", tmp_path / "other"
    for folder, size in ((one, 336), (same, 336), (other, 448)):
        folder.mkdir()
        (folder / "preprocessor_config.json").write_text(json.dumps({"size": size}))
    found = identity(one)
    assert identity(same) == found, "where the model lies does not count"
    different = [identity(other), identity(one, mm_processor_kwargs={"num_crops": 4}), identity(one, video_pruning_rate=0.5)]
    assert len({found, *different}) == 4
    name = names(picture(1))[0]
    assert image_extras(request(name), 64, found) != image_extras(request(name), 64, different[0])
