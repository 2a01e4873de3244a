"""Our image processor with K2.5's settings against transformers' ``Kimi_K25ImageProcessor``.

Recorded with transformers 5.24 and torchvision 0.28 (which it needs and the tests do without):
150 resize plans, and the pixels of two pictures, once in their own size and once made smaller.
Sizes, padding, patches and normalisation are one rule. The filter is not: torchvision resamples
tensors, the released code and ours PIL images, and they round differently.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from k3vl.config import K25_MEDIA
from k3vl.vision.plan import plan_image
from k3vl.vision.processor import MediaProcessor

TESTS = Path(__file__).resolve().parents[1]
PICTURES = ("sign.jpg", "fox-kite-bus.png")


@pytest.fixture(scope="module")
def recorded():
    with np.load(TESTS / "golden" / "k25_image_processor.npz") as data:
        return dict(data)


def patches(image: Image.Image, limit: int = K25_MEDIA.in_patch_limit) -> np.ndarray:
    config = dataclasses.replace(K25_MEDIA, in_patch_limit=limit)
    (item,) = MediaProcessor(config, parity=True).process(image).items
    return item.patches


def picture(name: str) -> Image.Image:
    with Image.open(TESTS.parent / "examples" / name) as image:
        return image.convert("RGB")


def test_every_size_is_planned_alike(recorded) -> None:
    for width, height, *expected in recorded["sizes"].tolist():
        plan = plan_image(width, height, K25_MEDIA)
        found = [plan.new_width, plan.new_height, plan.padded_width, plan.padded_height]
        assert found == expected, (width, height)


@pytest.mark.parametrize("name", PICTURES)
def test_pixels_are_the_same_where_nothing_is_resized(recorded, name) -> None:
    cut = picture(name).crop((20, 30, 117, 91))
    assert np.array_equal(patches(cut), recorded[f"{name} whole"])


@pytest.mark.parametrize("name", PICTURES)
def test_resized_pixels_differ_by_rounding(recorded, name) -> None:
    found, expected = patches(picture(name), 48), recorded[f"{name} small"]
    assert found.shape == expected.shape
    off = np.abs(found.astype(int) - expected.astype(int))
    assert off.max() <= 2
    assert (off > 0).mean() < 0.01
