"""The encoder: order, duplicates, cache, independence of the batch."""

import hashlib

import numpy as np
import pytest
import torch

from k3vl.errors import ShapeError
from k3vl.types import EncoderItem
from k3vl.vision.encoder import VisionEncoder, join_patches, pin_patches
from tests.vision.tiny_vision import TINY, pixels, tiny_models


def item(*grid: int, seed: int = 0) -> EncoderItem:
    patches = pixels(grid, seed=seed).numpy()
    patches.flags.writeable = False
    digest = hashlib.sha256(repr(grid).encode() + patches.tobytes()).hexdigest()
    return EncoderItem(digest, patches, grid, grid[1] * grid[2] // 4)


ITEMS = [
    item(1, 2, 2),
    item(1, 4, 6, seed=1),
    item(4, 2, 4, seed=2),
    item(1, 2, 2),
    item(1, 4, 6, seed=3),
    item(2, 6, 4, seed=4),
]


class CountingTower(torch.nn.Module):
    """Passes on to a real tower and notes the grids of every call."""

    def __init__(self, tower: torch.nn.Module) -> None:
        super().__init__()
        self.tower = tower
        self.calls: list[list[tuple[int, int, int]]] = []

    def forward(self, patches, grids):
        self.calls.append(list(grids))
        return self.tower(patches, grids)


def counting_encoder(**options) -> tuple[VisionEncoder, CountingTower]:
    tower, projector = tiny_models()
    counting = CountingTower(tower)
    return VisionEncoder(counting, projector, **options), counting


def alone(one: EncoderItem) -> torch.Tensor:
    tower, projector = tiny_models()
    return projector(tower(torch.tensor(one.patches), [one.grid_thw]))


def test_features_come_in_the_order_of_the_items():
    encoder, _ = counting_encoder()
    for one, rows in zip(ITEMS, encoder.encode(ITEMS), strict=True):
        assert rows.shape == (one.num_tokens, TINY.text_hidden_size)
        assert torch.equal(rows, alone(one))


@pytest.mark.parametrize("limit", [1, 24, 50, 10_000])
def test_batches_agree_with_lone_items(limit):
    encoder, tower = counting_encoder(max_patches_per_batch=limit)
    for one, rows in zip(ITEMS, encoder.encode(ITEMS), strict=True):
        torch.testing.assert_close(rows, alone(one), atol=1e-5, rtol=1e-5)
        assert rows.untyped_storage().nbytes() == rows.nbytes
    for call in tower.calls:
        assert len(call) == 1 or sum(t * h * w for t, h, w in call) <= limit
    assert sum(len(call) for call in tower.calls) == 5


def test_equal_digests_are_computed_once_and_shared():
    encoder, tower = counting_encoder()
    out = encoder.encode([ITEMS[0], ITEMS[1], ITEMS[3], ITEMS[0]])
    assert len(tower.calls) == 2
    assert out[0] is out[2] is out[3]


def test_features_are_the_same_to_the_bit_in_any_company():
    encoder, _ = counting_encoder()
    first = encoder.encode(ITEMS[2:4])
    again = encoder.encode(ITEMS)
    assert all(torch.equal(a, b) for a, b in zip(first, again[2:4], strict=True))


def test_nothing_asked_nothing_done():
    encoder, tower = counting_encoder()
    assert encoder.encode([]) == []
    assert tower.calls == []


def test_an_item_that_contradicts_itself_is_named():
    encoder, _ = counting_encoder()
    wrong = EncoderItem("f" * 64, np.zeros((4, 3, 14, 14), dtype=np.uint8), (1, 2, 4), 2)
    with pytest.raises(ShapeError, match="item ffffffffffff: 4 patches, grid 1x2x4, 2 tokens"):
        encoder.encode([wrong])
    miscounted = EncoderItem("e" * 64, np.zeros((8, 3, 14, 14), dtype=np.uint8), (1, 2, 4), 3)
    with pytest.raises(ShapeError, match="3 tokens"):
        encoder.encode([miscounted])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_pinned_patches_are_the_joined_ones(dtype, monkeypatch):
    """Page-locked memory takes a driver: the request for it is noted and left out."""
    asked, empty = [], torch.empty

    def ordinary(*size, pin_memory, **options):
        asked.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", ordinary)
    parts = [one.patches.astype(dtype) for one in ITEMS[:3]]
    pinned = pin_patches(parts)
    assert asked == [True]
    assert pinned.dtype == join_patches(parts).dtype
    assert torch.equal(pinned, join_patches(parts))
