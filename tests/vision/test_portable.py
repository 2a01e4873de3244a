"""Media for another server: what it decodes is what the model here would see."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from k3vl.config import K3_MEDIA
from k3vl.errors import MediaError
from k3vl.types import MediaPart
from k3vl.vision.portable import portable
from k3vl.vision.processor import MediaProcessor, model_view
from k3vl.vision.source import FetchPolicy
from tests.vision.files import exif_bytes, png_chunk

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CLIP = next(EXAMPLES.glob("*.mp4")).read_bytes()
PROCESSOR = MediaProcessor(K3_MEDIA)
RELEASED = MediaProcessor(K3_MEDIA, parity=True)
"""As another server may be: it knows nothing of orientation."""
FRAMES = MediaProcessor(replace(K3_MEDIA, temporal_merge_kernel_size=1))
NOISE = np.random.default_rng(0).integers(0, 255, (60, 90, 4), dtype=np.uint8)


def saved(image: Image.Image, kind: str, **more) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def data_of(url: str) -> bytes:
    return base64.b64decode(url.partition(",")[2])


def orientation(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


RGB = Image.fromarray(NOISE[..., :3])
PNG = saved(RGB, "PNG")
TOUCHED = {
    "transparent": (saved(Image.fromarray(NOISE), "PNG"), None),
    "sideways JPEG": (saved(RGB, "JPEG", exif=orientation(6)), None),
    "sideways PNG": (saved(RGB, "PNG", exif=orientation(3)), None),
    "sideways PNG, said at its end": (
        PNG[:-12] + png_chunk(b"eXIf", exif_bytes(6).removeprefix(b"Exif\0\0")) + PNG[-12:],
        None,
    ),
    "palette": (saved(RGB.quantize(16), "PNG"), None),
    "16 bit": (saved(Image.fromarray(NOISE[..., 0].astype(np.uint16) * 257), "PNG"), None),
    "CMYK": (saved(RGB.convert("CMYK"), "JPEG"), None),
    "BMP": (saved(RGB, "BMP"), None),
    "pages": (saved(RGB, "TIFF", save_all=True, append_images=[RGB]), None),
    "colour key": (saved(RGB, "PNG", transparency=(1, 2, 3)), None),
    "over the budget": (saved(RGB.resize((900, 700)), "JPEG"), "low"),
}


@pytest.mark.parametrize(("data", "detail"), TOUCHED.values(), ids=TOUCHED)
def test_what_is_repaired_goes_out_as_the_model_sees_it(data, detail) -> None:
    part = MediaPart("image", data, detail)
    media = portable(PROCESSOR, part, whole_clips=False)
    (url,) = media.urls
    assert url.startswith("data:image/png;base64,")
    there = RELEASED.process(MediaPart("image", data_of(url)))
    here = PROCESSOR.process(part)
    assert there.items[0].digest == here.items[0].digest, "the same patches"
    assert media.layout.groups == here.layout.groups
    assert (media.layout.width, media.layout.height) == (there.layout.width, there.layout.height)
    assert media.warnings == here.warnings
    assert media.items[0].patches.size == 0


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_what_nothing_would_change_keeps_its_bytes(kind, mode) -> None:
    if (kind, mode) == ("WEBP", "L"):
        pytest.skip("WebP has no grey mode")
    data = saved(RGB.convert(mode), kind)
    (url,) = portable(PROCESSOR, MediaPart("image", data), whole_clips=False).urls
    assert url.startswith(f"data:image/{kind.lower()};")
    assert data_of(url) == data


def test_a_clip_is_its_frames_or_itself() -> None:
    media = portable(FRAMES, MediaPart("video", CLIP), whole_clips=False)
    seen = model_view(FRAMES.process(MediaPart("video", CLIP)))
    assert len(media.urls) == len(media.items) == len(media.layout.groups) == len(seen)
    for url, frame in zip(media.urls, seen, strict=True):
        sent = np.asarray(Image.open(io.BytesIO(data_of(url))), np.int16)
        there = np.asarray(frame, np.int16)[: sent.shape[0], : sent.shape[1]]
        assert sent.shape[1::-1] == (media.layout.width, media.layout.height)
        assert np.abs(sent - there).mean() < 2
    whole = portable(PROCESSOR, MediaPart("video", CLIP), whole_clips=True)
    assert [data_of(url) for url in whole.urls] == [CLIP]
    assert whole.urls[0].startswith("data:video/mp4;")
    assert whole.layout == PROCESSOR.process(MediaPart("video", CLIP)).layout


def test_a_clip_that_is_too_large_to_be_sent_whole_is_refused(tmp_path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(CLIP)
    processor = MediaProcessor(K3_MEDIA, policy=FetchPolicy(max_bytes=len(CLIP) - 1))
    with pytest.raises(MediaError) as caught:
        portable(processor, MediaPart("video", path), whole_clips=True)
    assert caught.value.code == "media_too_large"
