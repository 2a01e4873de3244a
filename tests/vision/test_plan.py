"""Sizes, token counts, frame choice and timestamps against the golden vectors and the rules."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3vl.config import K3_MEDIA, K25_MEDIA
from k3vl.errors import MediaError
from k3vl.vision.limits import MediaLimits
from k3vl.vision.plan import (
    constant_rate,
    format_timestamp,
    frame_budget,
    frame_patch_limit,
    plan_frame,
    plan_image,
    sample_frames,
    sample_times,
)

GOLDEN = json.loads(
    (Path(__file__).resolve().parents[1] / "golden" / "resize_cases.json").read_text()
)
CONFIGS = {"k3": K3_MEDIA, "k25": K25_MEDIA}


def as_row(plan):
    return {
        "new_w": plan.new_width,
        "new_h": plan.new_height,
        "pad_w": plan.pad_width,
        "pad_h": plan.pad_height,
        "grid_h": plan.grid_thw[1],
        "grid_w": plan.grid_thw[2],
        "num_tokens": plan.num_tokens,
    }


@pytest.mark.parametrize(("table", "config"), [("k3_image", K3_MEDIA), ("k25_image", K25_MEDIA)])
def test_image_plans_equal_the_released_processor(table, config):
    for case in GOLDEN[table]:
        row = as_row(plan_image(case["width"], case["height"], config))
        assert row == {key: case[key] for key in row}, case


def test_frame_plans_equal_the_released_processor():
    for case in GOLDEN["video_frame_resize"]:
        config = CONFIGS[case["config"]]
        assert config.in_patch_limit_each_frame == case["per_frame_limit"]
        row = as_row(plan_frame(case["width"], case["height"], config))
        assert row == {key: case[key] for key in row}, case


def test_sampling_and_timestamps_equal_the_released_code():
    for case in GOLDEN["video_sampling"]:
        fps = case["fps"]
        chosen = sample_frames(case["num_frames"], fps, case["sample_fps"])
        assert len(chosen) == case["sampled_nframes"]
        if "indices" in case:
            assert list(chosen) == case["indices"]
        else:
            assert list(chosen[:16]) == case["indices_head"]
            assert list(chosen[-8:]) == case["indices_tail"]
        stamps = [format_timestamp(index / fps) for index in chosen[::4]]
        assert len(stamps) == case["num_chunks"]
        assert stamps[:4] == case["first_timestamps"]
        assert stamps[-2:] == case["last_timestamps"]


def test_shared_patch_budget_equals_k25():
    for case in GOLDEN["video_budget"]:
        config = dataclasses.replace(
            K25_MEDIA,
            in_patch_limit_video=case["in_patch_limit_video"],
            in_patch_limit_each_frame=case["in_patch_limit_each_frame"],
        )
        assert frame_patch_limit(config, case["num_frames"]) == case["effective_k25"]


def test_timestamps_equal_the_released_code():
    for case in GOLDEN["timestamps"]:
        for mode in ("hh:mm:ss.fff", "mm:ss.fff", "mm:ss"):
            assert format_timestamp(case["seconds"], mode) == case[mode]


def test_timestamp_just_below_a_second_does_not_jump_ahead():
    assert format_timestamp(0.9999996) == "00:00:00.999"


@given(st.integers(1, 200_000), st.integers(1, 200_000), st.sampled_from([K3_MEDIA, K25_MEDIA]))
def test_every_size_has_a_grid_of_whole_cells(width, height, config):
    plan = plan_image(width, height, config)
    t, rows, columns = plan.grid_thw
    assert t == 1
    assert plan.padded_width == columns * 14
    assert plan.padded_height == rows * 14
    assert rows % 2 == columns % 2 == 0
    assert max(rows, columns) <= 512
    assert plan.num_tokens == rows * columns // 4 >= 1
    assert 1 <= plan.new_width <= width
    assert 1 <= plan.new_height <= height


def test_448x449_is_padded_not_rounded():  # I50
    plan = plan_image(448, 449, K3_MEDIA)
    assert (plan.grid_thw, plan.num_tokens) == ((1, 34, 32), 272)


def test_narrow_picture_with_a_small_budget_keeps_one_pixel():  # I44, I47, I48
    tiny = dataclasses.replace(K3_MEDIA, in_patch_limit=16)
    for size in ((1, 10_000), (10_000, 1), (2270, 10), (27, 257)):
        assert plan_image(*size, tiny).num_tokens >= 1


def test_fixed_output_tokens_override_the_count():
    fixed = dataclasses.replace(K3_MEDIA, fixed_output_tokens=64)
    assert plan_image(100, 100, fixed).num_tokens == 64


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_sizes_that_are_not_positive_are_refused(size):
    with pytest.raises(MediaError, match="not positive"):
        plan_image(*size, K3_MEDIA)


def test_a_side_over_the_configured_patches_is_refused():
    odd = dataclasses.replace(K3_MEDIA, patch_limit_on_one_side=5)
    with pytest.raises(MediaError, match="6 x 2 patches, a side may have 5"):
        plan_image(10, 700, odd)


@given(st.integers(1, 3000), st.sampled_from([1.0, 7.9, 12.5, 24.0, 25.0, 29.97, 30.0, 60.0]))
def test_sampling_by_time_agrees_with_sampling_by_index_on_a_constant_rate(count, fps):
    times = [i / fps for i in range(count)]
    by_index = sample_frames(count, fps, 8.0)
    by_time = sample_times(times, 8.0)
    # Ties may fall to either side; the number and the neighbourhood agree.
    assert abs(len(by_time) - len(by_index)) <= 1
    if len(by_time) == len(by_index):
        assert all(abs(a - b) <= 1 for a, b in zip(by_time, by_index, strict=True))


@given(
    st.lists(st.floats(0.001, 3.0), min_size=0, max_size=60),
    st.integers(1, 20),
    st.sampled_from([1.0, 2.0, 8.0]),
)
def test_sampling_by_time_is_increasing_unique_and_capped(gaps, cap, rate):
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    chosen = sample_times(times, rate, cap)
    assert 1 <= len(chosen) <= cap
    assert list(chosen) == sorted(set(chosen))
    assert chosen[0] == 0
    if len(chosen) > 1:
        assert chosen[-1] == len(times) - 1


def test_a_frame_cap_thins_the_clip_and_keeps_its_end():
    assert sample_frames(300, 30.0, 8.0, max_frames=4) == (0, 100, 199, 299)


def test_slow_clips_keep_every_frame():
    assert sample_times([0.0, 10.0, 12.0, 40.0], 8.0) == (0, 1, 2, 3)


def test_constant_rate_survives_a_coarse_clock_and_rejects_a_varying_one():
    coarse = [round(i * 1001 / 30000, 3) for i in range(300)]
    assert constant_rate(coarse, [30000 / 1001], 0.001) == 30000 / 1001
    assert constant_rate(coarse, [25.0], 0.001) == pytest.approx(30000 / 1001, rel=1e-4)
    assert constant_rate([0.0, 0.1, 0.5, 0.6], [10.0], 0.001) is None
    assert constant_rate([0.0], [0.0], 0.001) == 1.0


def test_budgets_lower_the_number_of_frames():
    plan = plan_frame(640, 480, K3_MEDIA)  # 36 x 46 patches, 414 tokens
    assert frame_budget(plan, K3_MEDIA, MediaLimits(max_video_frames=7)) == 7
    assert frame_budget(plan, K3_MEDIA, MediaLimits(max_video_tokens=414 * 3)) == 12
    whole = dataclasses.replace(K3_MEDIA, in_patch_limit_video=36 * 46 * 5 + 1)
    assert frame_budget(plan, whole, MediaLimits()) == 5
    assert (
        frame_budget(plan, dataclasses.replace(whole, in_patch_limit_video=9), MediaLimits()) == 1
    )
    with pytest.raises(MediaError, match="takes 414 tokens"):
        frame_budget(plan, K3_MEDIA, MediaLimits(max_video_tokens=413))
