"""The plugin's processor beside SGLang's own, in this process: no server, no language model."""

from __future__ import annotations

import asyncio
import io
import json
from importlib.metadata import version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from k3vl.sglang.features import as_the_tower_wants
from k3vl.sglang.settings import PluginSettings
from k3vl.vision.limits import MediaLimits
from tests.sglang.kit import clip, data_uri, picture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from k3vl.pipeline import Pipeline

FRAME = "<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"
FLAGS = {
    "trust_remote_code": True,
    "device": "cpu",
    "attention_backend": "triton",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
}


@pytest.fixture(scope="module")
def make(checkpoint: Path) -> Callable[..., Any]:
    """A processor as SGLang's tokenizer process makes it, ours or its own."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.hf_transformers_utils import get_processor

    def make(cls: type[Any], settings: PluginSettings | None = None, **flags: Any) -> Any:
        config = json.loads(settings.process_config()) if settings else {}
        arguments = ServerArgs(
            model_path=str(checkpoint), mm_process_config=config, **FLAGS, **flags
        )
        _publish(arguments)
        model = ModelConfig.from_server_args(arguments)
        processor = get_processor(str(checkpoint), trust_remote_code=True)
        return cls(model.hf_config, arguments, processor, None)

    return make


def _publish(arguments: Any) -> None:
    """Settings are global to a process of SGLang; each release has its own way."""
    if version("sglang") == "0.5.17":
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(arguments)
    else:
        from sglang.srt.runtime_context import publish

        publish(arguments, role="tokenizer")


@pytest.fixture(scope="module")
def native(make: Callable[..., Any]) -> Any:
    from sglang.srt.multimodal.processors.kimi_k3 import KimiK3ImageProcessor

    return make(KimiK3ImageProcessor)


@pytest.fixture
def ours(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    from k3vl.sglang.processors.k3 import K3MediaProcessor

    made = []

    def ours(settings: PluginSettings | None = None, **flags: Any) -> Any:
        made.append(make(K3MediaProcessor, settings, **flags))
        return made[-1]

    yield ours
    for processor in made:
        if version("sglang") == "0.5.17":  # which ends no processor
            processor._workers.kill()
        else:
            processor.shutdown()


def process(processor: Any, prompt: str, images: Any = (), videos: Any = (), **more: Any) -> Any:
    request = SimpleNamespace(
        video_data=list(videos) or None, mm_content_hashes=None, mm_hashes=None
    )
    ids = processor._tokenizer.encode(prompt)
    coroutine = processor.process_mm_data_async(list(images), ids, request, **more)
    return asyncio.run(coroutine)


def photograph(width: int, height: int, orientation: int = 1) -> bytes:
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(buffer, "JPEG", exif=exif, quality=95)
    return buffer.getvalue()


PICTURES = [picture(), photograph(200, 90), photograph(61, 300, orientation=6)]


def same(one: Any, other: Any) -> None:
    assert one.input_ids == other.input_ids
    assert len(one.mm_items) == len(other.mm_items)
    for a, b in zip(one.mm_items, other.mm_items, strict=True):
        assert a.offsets == b.offsets
        assert a.modality == b.modality
        assert torch.equal(a.image_grid_thw, b.image_grid_thw)
        left, right = seen_by_the_tower(a), seen_by_the_tower(b)
        assert left.dtype == right.dtype == torch.float32
        assert left.numpy().tobytes() == right.numpy().tobytes()


def seen_by_the_tower(item: Any) -> torch.Tensor:
    """Its pixels on a tower of float32; the item keeps its own."""
    before = item.feature
    (view,) = as_the_tower_wants([item], torch.device("cpu"), torch.float32)
    pixels: torch.Tensor = view.feature
    assert item.feature is before
    return pixels


ONLY_0523 = pytest.mark.skipif(version("sglang") == "0.5.17", reason="not in 0.5.17")
CACHED = pytest.mark.parametrize("cached", [pytest.param(False, marks=ONLY_0523), True])


@CACHED
def test_pictures_in_parity_are_sglang_s_own(
    native: Any, ours: Callable[..., Any], cached: bool
) -> None:
    """Ids, pixels, grids and places, to the byte, sideways photograph included."""
    prompt = "a<|media_pad|>b<|media_pad|> <|media_pad|>c"
    images = [data_uri(data) for data in PICTURES]
    flags = {} if cached else {"mm_preprocess_cache_size_mb": 0}
    expected = process(native, prompt, images)
    got = process(ours(PluginSettings(parity=True), **flags), prompt, images)
    same(got, expected)
    assert {item.feature.dtype for item in got.mm_items} == {torch.float32}


@CACHED
def test_a_clip_beside_them_does_not_change_them(
    native: Any, ours: Callable[..., Any], cached: bool
) -> None:
    images = [data_uri(PICTURES[2]), data_uri(PICTURES[0])]
    flags = {} if cached else {"mm_preprocess_cache_size_mb": 0}
    processor = ours(PluginSettings(parity=True), **flags)
    alone = process(processor, "<|media_pad|> <|media_pad|>", images)
    same(alone, process(native, "<|media_pad|> <|media_pad|>", images))
    prompt = f"<|media_pad|>{FRAME}<|media_pad|>"
    got = process(processor, prompt, images, [data_uri(clip([0, 9]))])
    first, video, second = got.mm_items
    assert video.image_grid_thw.tolist() == [[2, 2, 4]]
    for item, wanted in zip((first, second), alone.mm_items, strict=True):
        assert item.feature.numpy().tobytes() == wanted.feature.numpy().tobytes()
        assert item.hash == wanted.hash
    pads = [i for i, token in enumerate(got.input_ids) if token == got.im_token_id]
    places = [i for item in got.mm_items for a, b in item.offsets for i in range(a, b + 1)]
    assert places == pads


def test_upright_pictures_are_the_same_without_parity(
    native: Any, ours: Callable[..., Any]
) -> None:
    images = [data_uri(data) for data in PICTURES[:2]]
    prompt = "<|media_pad|> <|media_pad|>"
    same(process(ours(), prompt, images), process(native, prompt, images))


def test_sideways_photographs_are_turned_without_parity(ours: Callable[..., Any]) -> None:
    got = process(ours(), "<|media_pad|>", [data_uri(PICTURES[2])])
    (item,) = got.mm_items
    _, rows, columns = item.image_grid_thw[0].tolist()
    assert columns > rows
    assert b"image 300x61" in bytes(i for i in got.input_ids if i < 256)


def test_a_detail_is_a_budget(ours: Callable[..., Any]) -> None:
    from sglang.srt.utils import ImageData

    image = ImageData(url=data_uri(photograph(1400, 1400)), detail="low")
    (item,) = process(ours(), "<|media_pad|>", [image]).mm_items
    assert 900 < item.image_grid_thw.prod().item() <= 1024 + 2 * 64


def test_clips_are_those_of_the_pipeline(ours: Callable[..., Any], pipeline: Pipeline) -> None:
    """Frames, timestamps, pixels, grids; the identity is the digest that our own caches use."""
    from k3vl.vision.processor import normalise

    data = clip(range(0, 90, 10))
    media = pipeline.processor.process(data, "video")
    got = process(ours(), "<|media_pad|>", [], [data_uri(data)])
    assert len(got.mm_items) == 3
    for item, wanted in zip(got.mm_items, media.items, strict=True):
        assert item.image_grid_thw.tolist() == [list(wanted.grid_thw)]
        assert item.hash == int(wanted.digest[:16], 16)
        if version("sglang") != "0.5.17":
            assert item.identity.hex() == wanted.digest
        assert item.feature.dtype == torch.uint8
        expected = normalise(wanted.patches, pipeline.processor.config)
        assert seen_by_the_tower(item).numpy().tobytes() == expected.tobytes()
    text = bytes(token for token in got.input_ids if token < 256).decode()
    assert [text[i : i + 12] for i in range(len(text)) if text.startswith("00:00:", i)] == [
        "00:00:00.000",
        "00:00:02.000",
        "00:00:04.000",
    ]


def test_limits_reach_the_clips(ours: Callable[..., Any]) -> None:
    limits = MediaLimits(max_video_frames=2)
    processor = ours(PluginSettings(limits=limits))
    got = process(processor, "<|media_pad|>", [], [data_uri(clip(range(0, 90, 10)))])
    assert [item.image_grid_thw.tolist() for item in got.mm_items] == [[[2, 2, 4]]]
    tight = ours(PluginSettings(limits=MediaLimits(max_frame_pixels=1000)))
    with pytest.raises(ValueError, match="video 0: frames of 64 x 64 pixels, at most 1000"):
        process(tight, "<|media_pad|>", [], [data_uri(clip([1], size=(64, 64)))])
    small = ours(PluginSettings(max_media_bytes=10))
    with pytest.raises(ValueError, match="at most 10 "):
        process(small, "<|media_pad|>", [], [data_uri(clip([1]))])


@ONLY_0523
def test_sglang_s_allowed_domains_hold(ours: Callable[..., Any]) -> None:
    processor = ours(allowed_media_domains=["media.example.org"])
    for url in ("https://example.org/a.mp4", "https://media.example.org.evil.test/a.mp4"):
        with pytest.raises(ValueError, match="video 0: the URL's host is not among the allowed"):
            process(processor, "<|media_pad|>", [], [url])


def test_local_files_need_a_root(ours: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    inside, outside = tmp_path / "in" / "a.mkv", tmp_path / "b.mkv"
    for path in (inside, outside):
        path.write_bytes(clip([1]))
    with pytest.raises(ValueError, match="not a URL"):
        process(ours(), "<|media_pad|>", [], [str(inside)])
    processor = ours(PluginSettings(media_root=str(tmp_path / "in")))
    assert process(processor, "<|media_pad|>", [], [str(inside)]).mm_items
    with pytest.raises(ValueError, match="this file URL cannot be used"):
        process(processor, "<|media_pad|>", [], [str(outside)])


def test_opened_pictures_and_bytes_are_taken(ours: Callable[..., Any]) -> None:
    """SGLang's Python engine hands them over as they are."""
    with Image.open(io.BytesIO(picture())) as opened:
        opened.load()
        got = process(ours(), "<|media_pad|> <|media_pad|>", [opened, picture()])
    first, second = got.mm_items
    assert first.hash == second.hash


def test_too_many_waiting_media_are_a_503(ours: Callable[..., Any]) -> None:
    from fastapi import HTTPException

    processor = ours()
    processor._workers.num_jobs = 10_000
    with pytest.raises(HTTPException) as caught:
        process(processor, "<|media_pad|>", [], [data_uri(clip([1]))])
    assert caught.value.status_code == 503


EMBEDDING = {
    "format": "precomputed_embedding",
    "feature": torch.zeros(6, 256),
    "image_grid_thw": torch.tensor([[1, 4, 6]]),
}


@pytest.mark.parametrize("item", [EMBEDDING, {**EMBEDDING, "format": "processor_output"}])
def test_precomputed_inputs_are_refused(ours: Callable[..., Any], item: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="precomputed features and embeddings are not accepted"):
        process(ours(), "see <|media_pad|>", [item])


def test_sound_is_refused(ours: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="no audio"):
        process(ours(), "<|media_pad|>", [data_uri(picture())], audio_data=["x"])


def test_what_native_sglang_lacks(native: Any, tmp_path: Path) -> None:
    """The rows of the table in docs/sglang.md; a release that changes one must change the page."""
    with pytest.raises(ValueError, match="supports image input only"):
        process(native, "<|media_pad|>", [], [data_uri(clip([1]))])
    got = process(native, "see <|media_pad|>", [EMBEDDING])
    assert got.mm_items[0].offsets == [(4, 4)]  # six rows for one token, and no error
    # A client's string opens a file of the server's.
    mine = tmp_path / "secret.png"
    mine.write_bytes(picture())
    assert process(native, "<|media_pad|>", [str(mine)]).mm_items
    sideways = process(native, "<|media_pad|>", [data_uri(PICTURES[2])])
    assert b"image 61x300" in bytes(i for i in sideways.input_ids if i < 256)
