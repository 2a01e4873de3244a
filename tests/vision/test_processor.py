"""Pixels, grids and counts of the released processor, bit for bit."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from k3vl.config import K3_MEDIA
from k3vl.vision.processor import MediaProcessor, model_view, normalise

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
ITEMS = json.loads((GOLDEN / "pixels_manifest.json").read_text())["items"]
IMAGES = [item for item in ITEMS if "file" in item]
CLIP = [item for item in ITEMS if "files" in item]
LIMIT16 = dataclasses.replace(K3_MEDIA, in_patch_limit=16)
CONFIGS = {
    "k3": K3_MEDIA,
    "k3_limit16": LIMIT16,
    "k3_limit16_before_resize": dataclasses.replace(
        LIMIT16, transparent_bg_fill_stage="before_resize"
    ),
    "k3_no_bg": dataclasses.replace(K3_MEDIA, transparent_bg_config=None),
}


@pytest.fixture(scope="module")
def pixels():
    with np.load(GOLDEN / "pixels.npz") as data:
        yield data


@pytest.mark.parametrize("item", IMAGES, ids=lambda item: item["key"])
def test_pictures_equal_the_released_processor(item, pixels):
    config = CONFIGS[item["config"]]
    media = MediaProcessor(config, parity=True).process(GOLDEN / item["file"], "image")
    (encoded,) = media.items
    key = item["key"]
    assert [media.layout.width, media.layout.height] == item["original_size"]
    assert list(encoded.grid_thw) == item["grid_thw"] == pixels[f"{key}|grid_thw"].tolist()
    assert encoded.num_tokens == media.layout.groups[0].num_tokens == item["num_tokens"]
    (seen,) = model_view(media)
    np.testing.assert_array_equal(np.asarray(seen), pixels[f"{key}|rgb8_padded"])
    values = normalise(encoded.patches, config)
    np.testing.assert_array_equal(values, pixels[f"{key}|pixel_values"])
    assert values.dtype == np.float32


CORRECTED = {"exif_orient6_40x24.jpg", "gray16_20x20.png"}


@pytest.mark.parametrize(
    "item", [i for i in IMAGES if Path(i["file"]).name not in CORRECTED], ids=lambda i: i["key"]
)
def test_only_orientation_and_bit_depth_differ_without_parity(item, pixels):
    media = MediaProcessor(CONFIGS[item["config"]]).process(GOLDEN / item["file"], "image")
    (seen,) = model_view(media)
    np.testing.assert_array_equal(np.asarray(seen), pixels[f"{item['key']}|rgb8_padded"])


def test_frames_equal_the_released_processor(pixels):
    frames = [Image.open(GOLDEN / name) for item in CLIP for name in item["files"]]
    media = MediaProcessor(K3_MEDIA).process_frames(frames, [i / 8 for i in range(5)])
    assert [group.timestamp for group in media.layout.groups] == ["00:00:00.000", "00:00:00.500"]
    for encoded, item in zip(media.items, CLIP, strict=True):
        assert list(encoded.grid_thw) == item["grid_thw"]
        assert encoded.num_tokens == item["num_tokens"]
        np.testing.assert_array_equal(
            normalise(encoded.patches, K3_MEDIA), pixels[f"{item['key']}|pixel_values"]
        )


def test_normalise_takes_mean_and_deviation_of_each_channel():
    config = dataclasses.replace(K3_MEDIA, image_mean=(0.0, 0.5, 1.0), image_std=(1.0, 0.5, 0.25))
    patches = np.full((2, 3, 14, 14), 255, np.uint8)
    out = normalise(patches, config)
    assert out[0, :, 0, 0].tolist() == [1.0, 1.0, 0.0]
