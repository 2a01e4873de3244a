"""Patches on the GPU before the scheduler has them; the CPU stands for the GPU, and its pool."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.multimodal.processors.kimi_k3 import DEFER_CUDA_IPC_FEATURE_RECONSTRUCTION_KEY

from k3vl.sglang.features import NORMALISE_KEY, as_the_tower_wants, place_beside_the_tower
from k3vl.sglang.processors.k3 import K3MediaProcessor

CPU = torch.device("cpu")


class Pooled:
    """What SGLang puts in the place of a tensor in its pool."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def item(seed: int, **data: Any) -> SimpleNamespace:
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 3, 14, 14), np.uint8)
    made = SimpleNamespace(feature=torch.from_numpy(pixels), model_specific_data=data)

    def reconstruct(device: int) -> None:
        made.feature = made.feature.tensor

    made.reconstruct = reconstruct
    return made


def ours(seed: int) -> SimpleNamespace:
    return item(seed, **{NORMALISE_KEY: [0.5] * 6})


def pool(one: Any) -> None:
    one.feature = Pooled(one.feature)


def test_our_patches_go_to_the_pool_and_nothing_else_does() -> None:
    items = [ours(0), item(1), ours(2)]
    items[2].feature = there = Pooled(items[2].feature)
    before = [one.feature for one in items]
    place_beside_the_tower(items, CPU, pool)
    assert torch.equal(items[0].feature.tensor, before[0])
    assert items[0].feature.tensor.dtype == torch.uint8
    assert items[1].feature is before[1]
    assert items[2].feature is there


def test_what_has_no_room_on_the_gpu_stays_here() -> None:
    def full(one: Any) -> None:
        if one is items[0]:
            raise torch.OutOfMemoryError
        pool(one)

    items = [ours(0), ours(1)]
    before = [one.feature for one in items]
    place_beside_the_tower(items, CPU, full)
    assert items[0].feature is before[0]
    assert items[1].feature.tensor is before[1]


def test_a_view_has_pixels_when_sglang_has_taken_them_out() -> None:
    """As ``get_image_feature`` does: look, take out, read."""
    one = ours(0)
    (expected,) = as_the_tower_wants([ours(0)], CPU, torch.float32)
    pool(one)
    (view,) = as_the_tower_wants([one], CPU, torch.float32)
    seen = view.feature
    assert isinstance(seen, Pooled)
    view.reconstruct(0)
    pixels = view.feature
    assert torch.equal(pixels, expected.feature)
    assert view.feature is pixels


@pytest.fixture
def processor() -> Any:
    """All of ours that hands over; ``release.free`` are items whose place is free again."""
    release = SimpleNamespace(free=[], handed=[])
    release.wrap = lambda _, one: pool(one)
    release.take_back = lambda _, one: release.free.append(one)
    release.hand_over = lambda _, items: release.handed.append(items) or items
    made = K3MediaProcessor.__new__(K3MediaProcessor)
    made._release = release
    made.cudaipc_mmfeature_pool = SimpleNamespace(memory_pool=torch.empty(0))
    return made


def test_the_scheduler_is_told_where_the_patches_are(processor: Any) -> None:
    items = [ours(0), ours(1)]
    assert asyncio.run(processor._hand_over(items)) is items
    assert processor._release.handed == [items]
    for one in items:
        assert isinstance(one.feature, Pooled)
        assert one.model_specific_data[DEFER_CUDA_IPC_FEATURE_RECONSTRUCTION_KEY] is True


def test_without_a_pool_they_stay(processor: Any) -> None:
    del processor.cudaipc_mmfeature_pool
    items = [ours(0)]
    (one,) = asyncio.run(processor._hand_over(items))
    assert isinstance(one.feature, torch.Tensor)
    assert DEFER_CUDA_IPC_FEATURE_RECONSTRUCTION_KEY not in one.model_specific_data


def test_a_request_that_ends_while_its_patches_move_leaves_no_place_taken(processor: Any) -> None:
    """Cancelled between two items: both come to lie in the pool, and both places are given back."""
    goes_on, under_way = threading.Event(), threading.Event()

    def wrap(_: Any, one: Any) -> None:
        under_way.set()
        assert goes_on.wait(10)
        pool(one)

    processor._release.wrap = wrap
    items = [ours(0), ours(1)]

    async def main() -> None:
        task = asyncio.create_task(processor._hand_over(items))
        await asyncio.to_thread(under_way.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert processor._release.free == []
        goes_on.set()
        while len(processor._release.free) < len(items):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert processor._release.free == items
    assert processor._release.handed == []


def test_one_that_fails_frees_the_others(processor: Any) -> None:
    def wrap(_: Any, one: Any) -> None:
        if one is items[1]:
            raise RuntimeError
        pool(one)

    processor._release.wrap = wrap
    items = [ours(0), ours(1)]

    async def main() -> None:
        with pytest.raises(RuntimeError):
            await processor._hand_over(items)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert processor._release.free == items[:1]
