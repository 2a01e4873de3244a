"""The tower against a naive forward, and its behaviour over packed items."""

import dataclasses
import math
from collections import Counter

import pytest
import torch

from k3vl.config import K3_MEDIA, MediaConfig
from k3vl.errors import ShapeError
from k3vl.kernels.vision import triton_vision
from k3vl.kernels.vision_pos.reference import (
    resize_position_table_reference,
    rotate_reference,
    temporal_rows_reference,
)
from k3vl.vision.tower import VisionTower, merge, stacked
from tests.device_only import META, device_only, recorded
from tests.vision.tiny_vision import TINY, pixels, tiny_models

GRIDS = [(1, 2, 2), (1, 4, 6), (2, 4, 2), (4, 2, 4), (1, 6, 5 + 1), (3, 4, 6)]


def naive_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1.1920929e-07).sqrt() * weight.double()


def naive_forward(tower: VisionTower, patches: torch.Tensor, grid: tuple[int, int, int]):
    """One item in float64, straight from the published description."""
    frames, rows, columns = grid
    x = ((patches.double() / 255 - 0.5) / 0.5).flatten(1)
    h = x @ tower.patch_weight.double().flatten(1).T
    place = resize_position_table_reference(tower.position_table, rows, columns)
    if frames > 1:
        time = temporal_rows_reference(frames, TINY.vt_hidden_size)
        place = torch.cat([place + time[t] for t in range(frames)])
    h = h + place
    for block in tower.blocks:
        weights = {name: value.double() for name, value in block.named_parameters()}
        q, k, v = (
            part.view(len(h), TINY.vt_num_attention_heads, TINY.head_dim)
            for part in (naive_norm(h, weights["attention_norm"]) @ weights["qkv.weight"].T).chunk(
                3, dim=1
            )
        )
        q, k = rotate_reference(q, rows, columns), rotate_reference(k, rows, columns)
        heads = []
        for i in range(TINY.vt_num_attention_heads):
            scores = q[:, i] @ k[:, i].T / math.sqrt(TINY.head_dim)
            heads.append(scores.softmax(-1) @ v[:, i])
        h = h + torch.cat(heads, dim=1) @ weights["out.weight"].T
        inner = naive_norm(h, weights["mlp_norm"]) @ weights["up.weight"].T
        inner = inner / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        h = h + inner @ weights["down.weight"].T
    h = naive_norm(h, tower.final_norm)
    cells = []
    for row in range(0, rows, 2):
        for column in range(0, columns, 2):
            corners = []
            for down, across in [(0, 0), (0, 1), (1, 0), (1, 1)]:
                at = [(t * rows + row + down) * columns + column + across for t in range(frames)]
                corners.append(h[at].mean(0))
            cells.append(torch.cat(corners))
    return torch.stack(cells)


@pytest.mark.parametrize("grid", GRIDS)
def test_equals_the_naive_forward(grid):
    tower, _ = tiny_models()
    patches = pixels(grid)
    out = tower(patches, [grid])
    expected = naive_forward(tower, patches, grid)
    assert out.shape == (grid[1] * grid[2] // 4, TINY.merged_size)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)


def test_packed_items_equal_lone_ones():
    tower, _ = tiny_models()
    grids = [*GRIDS, GRIDS[1], GRIDS[0]]
    patches = pixels(*grids, seed=5)
    packed = tower(patches, grids)
    counts = [t * h * w for t, h, w in grids]
    lone = [tower(part, [grid]) for part, grid in zip(patches.split(counts), grids, strict=True)]
    torch.testing.assert_close(packed, torch.cat(lone), atol=1e-5, rtol=1e-5)


def test_pictures_of_one_width_are_merged_together():
    grids = [(1, 2, 4), (1, 4, 4), (2, 2, 4), (1, 2, 4), (1, 2, 6), (1, 6, 6)]
    tall = stacked(grids)
    assert tall == [(1, 6, 4), (2, 2, 4), (1, 2, 4), (1, 8, 6)]
    x = torch.randn(sum(t * h * w for t, h, w in grids), 3)

    def merged(grids: list[tuple[int, int, int]]) -> torch.Tensor:
        parts = x.split([t * h * w for t, h, w in grids])
        return torch.cat([merge(part, grid) for part, grid in zip(parts, grids, strict=True)])

    assert torch.equal(merged(tall), merged(grids))


def test_float_patches_are_taken_as_normalised():
    tower, _ = tiny_models()
    patches = pixels((1, 2, 4))
    normalised = (patches.float() / 255 - 0.5) / 0.5
    assert torch.equal(tower(patches, [(1, 2, 4)]), tower(normalised, [(1, 2, 4)]))


def test_mean_and_deviation_come_from_the_media_configuration():
    media = MediaConfig(
        patch_size=14,
        merge_kernel_size=2,
        in_patch_limit=100,
        patch_limit_on_one_side=10,
        image_mean=(0.1, 0.2, 0.3),
        image_std=(0.5, 0.25, 2.0),
    )
    plain, _ = tiny_models()
    tower = VisionTower(TINY, media)
    tower.load_state_dict(plain.state_dict())
    patches = pixels((1, 2, 2))
    scaled = patches.float() / 255
    expected = torch.stack(
        [(scaled[:, 0] - 0.1) / 0.5, (scaled[:, 1] - 0.2) / 0.25, (scaled[:, 2] - 0.3) / 2.0], dim=1
    )
    torch.testing.assert_close(tower(patches, [(1, 2, 2)]), plain(expected, [(1, 2, 2)]))


def test_a_picture_is_not_a_clip_of_equal_frames():
    tower, _ = tiny_models()
    patches = pixels((1, 4, 4))
    picture = tower(patches, [(1, 4, 4)])
    clip = tower(patches.repeat(2, 1, 1, 1), [(2, 4, 4)])
    assert clip.shape == picture.shape
    assert (clip - picture).abs().max() > 0.05


def test_order_of_frames_matters():
    tower, _ = tiny_models()
    patches = pixels((2, 2, 2))
    swapped = torch.cat([patches[4:], patches[:4]])
    assert (tower(patches, [(2, 2, 2)]) - tower(swapped, [(2, 2, 2)])).abs().max() > 1e-3


def test_merge_puts_each_corner_in_its_place():
    rows, columns = 4, 6
    for row in range(rows):
        for column in range(columns):
            x = torch.zeros(rows * columns, 3)
            x[row * columns + column] = torch.tensor([1.0, 2.0, 3.0])
            merged = merge(x, (1, rows, columns)).view(rows // 2, columns // 2, 4, 3)
            corner = row % 2 * 2 + column % 2
            assert merged[row // 2, column // 2, corner].tolist() == [1.0, 2.0, 3.0]
            assert merged.count_nonzero() == 3


def test_merge_averages_over_frames():
    x = torch.zeros(3 * 4, 2)
    x[0], x[4], x[8] = 3.0, 6.0, 0.0
    merged = merge(x, (3, 2, 2))
    assert merged.tolist() == [[3.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]


def test_eps_is_a_parameter():
    tower, _ = tiny_models()
    other, _ = tiny_models()
    other.eps = 2.0**-7
    patches = pixels((1, 2, 2))
    assert not torch.equal(tower(patches, [(1, 2, 2)]), other(patches, [(1, 2, 2)]))


def test_bfloat16_tower_is_close_to_float32():
    exact, _ = tiny_models()
    tower, _ = tiny_models(dtype=torch.bfloat16)
    patches = pixels((1, 4, 4), (2, 2, 2))
    out = tower(patches, [(1, 4, 4), (2, 2, 2)])
    assert out.dtype == torch.bfloat16
    error = (out.float() - exact(patches, [(1, 4, 4), (2, 2, 2)])).norm()
    assert error / out.float().norm() < 0.03


def test_plans_of_grids_are_kept_within_bounds_and_change_nothing(monkeypatch):
    tower, _ = tiny_models()
    monkeypatch.setattr("k3vl.vision.tower._PLAN_BYTES", 30_000)
    grids = [(1, 2, 2), *((1, 2, columns) for columns in range(2, 80, 2)), (2, 2, 4), (1, 2, 2)]
    for grid in grids:
        fresh, _ = tiny_models()
        assert torch.equal(tower(pixels(grid), [grid]), fresh(pixels(grid), [grid]))
        assert sum(plan.nbytes for plan in tower._plans.values()) <= 30_000
    assert (2, 2, 4) in tower._plans
    assert (1, 2, 4) not in tower._plans, "the oldest went"


def test_plans_follow_the_table_they_were_made_from():
    tower, _ = tiny_models()
    grid = (2, 4, 2)
    before = tower(pixels(grid), [grid])
    tower.position_table.mul_(2)
    fresh, _ = tiny_models()
    fresh.position_table.mul_(2)
    after = tower(pixels(grid), [grid])
    assert torch.equal(after, fresh(pixels(grid), [grid]))
    assert not torch.equal(after, before)
    tower.position_table.data = tower.position_table.data / 2
    assert torch.equal(tower(pixels(grid), [grid]), before)
    tower.position_table.requires_grad_(True)
    tower(pixels(grid), [grid]).sum().backward()
    tower(pixels(grid), [grid]).sum().backward()
    assert tower.position_table.grad is not None


def test_a_repeated_grid_needs_nothing_of_the_host_but_launches():
    pytest.importorskip("triton")
    config = dataclasses.replace(
        TINY, vt_hidden_size=32, qkv_hidden_size=64, vt_num_attention_heads=2
    )
    tower = VisionTower(config, K3_MEDIA, device=META, kernels=triton_vision()).requires_grad_(
        False
    )
    grids = [(1, 4, 6), (2, 2, 2)]
    patches = torch.empty(32, 3, 14, 14, dtype=torch.uint8, device=META)
    with recorded():
        tower(patches[:24], grids[:1])
        plan = tower.plan(grids)
    with device_only():
        tower(patches[:24], grids[:1])
    with device_only() as launches:
        tower.run(patches, plan)
    names = Counter(launch.kernel for launch in launches)
    each = {"rotate_kernel": 2, "flash_kernel": 2}
    assert names == {"pixel_kernel": 1, "rms_norm_kernel": 2 * 2 + 1, **each}


def test_what_is_kept_of_a_grid_is_rows_and_is_not_copied_for_a_lone_item():
    tower = tiny_models()[0].requires_grad_(False)
    for grid in ((1, 6, 4), (3, 2, 8)):
        kept = tower.plan([grid])
        assert kept.place.is_contiguous(), grid
        again = tower.plan([grid])
        assert again.place.data_ptr() == kept.place.data_ptr()
        assert again.rotary.data_ptr() == kept.rotary.data_ptr()


def test_gradients_reach_every_parameter():
    tower, projector = tiny_models()
    for parameter in [*tower.parameters(), *projector.parameters()]:
        parameter.requires_grad_(True)
    projector(tower(pixels((2, 2, 4), (1, 4, 4)), [(2, 2, 4), (1, 4, 4)])).square().sum().backward()
    for name, parameter in tower.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize(
    "grid", [(1, 3, 2), (1, 2, 5), (0, 2, 2), (5, 2, 2), (1, 0, 2), (1, 2, -2)]
)
def test_grids_that_cannot_be_merged_are_named(grid):
    tower, _ = tiny_models()
    with pytest.raises(ShapeError, match="grid {}x{}x{}".format(*grid)):
        tower(pixels((1, 2, 2)), [grid])


def test_patches_must_fit_the_grids():
    tower, _ = tiny_models()
    with pytest.raises(ShapeError, match=r"patches \(4, 3, 14, 14\), 2 grids need \(12, 3"):
        tower(pixels((1, 2, 2)), [(1, 2, 2), (1, 2, 4)])
    with pytest.raises(ShapeError, match=r"patches \(4, 588\)"):
        tower(pixels((1, 2, 2)).flatten(1), [(1, 2, 2)])
    with pytest.raises(ShapeError, match="0 grids"):
        tower(pixels(), [])
