"""Sizes, token counts, frame choice and timestamps: integers and floats, no pixels.

Every token count in the project comes from here. The rules are those of Kimi K3's released image
processor (``navit_resize_image``) and of K2.5's video code with K3's numbers; see the golden
vectors. Nothing here reads a file or imports an imaging library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from k3vl.errors import MediaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3vl.config import MediaConfig
    from k3vl.vision.limits import MediaLimits

TimestampMode = Literal["hh:mm:ss.fff", "mm:ss.fff", "mm:ss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizePlan:
    """How one picture or frame becomes patches.

    Attributes:
        new_width, new_height: pixels after the resize.
        pad_width, pad_height: black pixels added on the right and at the bottom.
        grid_thw: 1, patch rows and patch columns of the padded picture.
        num_tokens: features that the projector makes of it.
    """

    new_width: int
    new_height: int
    pad_width: int
    pad_height: int
    grid_thw: tuple[int, int, int]
    num_tokens: int

    @property
    def padded_width(self) -> int:
        """Pixels after padding."""
        return self.new_width + self.pad_width

    @property
    def padded_height(self) -> int:
        """Pixels after padding."""
        return self.new_height + self.pad_height


def plan_image(width: int, height: int, config: MediaConfig) -> ResizePlan:
    """Plan a picture of ``width`` x ``height`` upright pixels.

    Raises:
        MediaError: a side is not positive, or has more patches than the configuration permits
            (not reachable with K3's numbers).
    """
    return _plan(width, height, config, config.in_patch_limit)


def plan_frame(
    width: int, height: int, config: MediaConfig, patch_limit: int | None = None
) -> ResizePlan:
    """Plan one video frame; ``patch_limit`` overrides the configured limit for each frame.

    Raises:
        MediaError: as :func:`plan_image`.
    """
    if patch_limit is None:
        patch_limit = config.in_patch_limit_each_frame or config.in_patch_limit
    return _plan(width, height, config, patch_limit)


def frame_patch_limit(config: MediaConfig, num_frames: int) -> int:
    """Patches each of ``num_frames`` may have under K2.5's shared budget.

    K2.5 lowers the resolution to meet ``in_patch_limit_video``; the product lowers the frame rate
    instead (:func:`frame_budget`). Kept for the case where one frame alone exceeds the budget.
    """
    each = config.in_patch_limit_each_frame or config.in_patch_limit
    if config.in_patch_limit_video is None:
        return each
    return min(round(config.in_patch_limit_video / num_frames), each)


def _plan(width: int, height: int, config: MediaConfig, patch_limit: int) -> ResizePlan:
    """The released rule; ``int`` truncates, the budget bounds the patches before padding."""
    if width < 1 or height < 1:
        raise MediaError(f"the size {width} x {height} is not positive", code="size_invalid")
    patch = config.patch_size
    side = config.patch_limit_on_one_side * patch
    budget = math.sqrt(patch_limit / (max(1.0, width // patch) * max(1.0, height // patch)))
    scale = min(1.0, budget, side / width, side / height)
    new_width = min(max(1, int(width * scale)), side)
    new_height = min(max(1, int(height * scale)), side)

    cell = config.merge_kernel_size * patch
    pad_width, pad_height = -new_width % cell, -new_height % cell
    columns, rows = (new_width + pad_width) // patch, (new_height + pad_height) // patch
    if max(columns, rows) > config.patch_limit_on_one_side:
        raise MediaError(
            f"{width} x {height} needs {rows} x {columns} patches, a side may have "
            f"{config.patch_limit_on_one_side}",
            code="size_unsupported",
        )
    num_tokens = config.fixed_output_tokens
    if num_tokens is None:
        num_tokens = (rows // config.merge_kernel_size) * (columns // config.merge_kernel_size)
    return ResizePlan(
        new_width=new_width,
        new_height=new_height,
        pad_width=pad_width,
        pad_height=pad_height,
        grid_thw=(1, rows, columns),
        num_tokens=num_tokens,
    )


# ---------------------------------------------------------------------- which frames


def sample_frames(
    num_frames: int, fps: float, sample_fps: float, max_frames: int | None = None
) -> tuple[int, ...]:
    """Choose frame indices of a clip with a constant frame rate, first and last included.

    A count above ``max_frames`` is met by spacing the frames wider, never by leaving out the tail.

    Source: K2.5's ``split_video_chunks``; Python's half-even rounding is part of the rule.
    """
    if num_frames < 1:
        return ()
    wanted = max(round(num_frames * min(sample_fps, fps) / fps), 1)
    if max_frames is not None:
        wanted = min(wanted, max(max_frames, 1))
    return _spread(num_frames, wanted)


def sample_times(
    times: Sequence[float], sample_fps: float, max_frames: int | None = None
) -> tuple[int, ...]:
    """Choose frame indices of a clip with a variable frame rate, by presentation time.

    Evenly spaced moments between the first and the last frame, the nearest frame to each, no frame
    twice. On a constant frame rate this is :func:`sample_frames`.

    Args:
        times: seconds, strictly increasing.
        sample_fps: moments a second.
        max_frames: at most so many moments, by spacing them wider.
    """
    if not times:
        return ()
    gaps = sorted(b - a for a, b in pairwise(times))
    last_gap = gaps[len(gaps) // 2] if gaps else 0.0
    wanted = max(round((times[-1] - times[0] + last_gap) * sample_fps), 1)
    if max_frames is not None:
        wanted = min(wanted, max(max_frames, 1))
    if wanted >= len(times) and (not gaps or gaps[0] * sample_fps >= 1.0):
        return tuple(range(len(times)))
    chosen: list[int] = []
    index = 0
    step = (times[-1] - times[0]) / (wanted - 1) if wanted > 1 else 0.0
    for moment in range(wanted):
        target = times[0] + moment * step
        while index + 1 < len(times) and abs(times[index + 1] - target) < abs(
            times[index] - target
        ):
            index += 1
        if not chosen or chosen[-1] != index:
            chosen.append(index)
    return tuple(chosen)


def _spread(num_frames: int, wanted: int) -> tuple[int, ...]:
    """``wanted`` indices from 0 to ``num_frames - 1``, evenly spaced, rounded half to even."""
    if wanted == 1:
        return (0,)
    step = (num_frames - 1) / (wanted - 1)
    inner = [round(i * step) for i in range(wanted - 1)]
    return (*inner, num_frames - 1)


def constant_rate(times: Sequence[float], candidates: Sequence[float], tick: float) -> float | None:
    """The frame rate that explains all ``times``, or None where the rate varies.

    Args:
        times: seconds, increasing, ``times[0]`` is 0.
        candidates: rates the file claims; the first that fits wins, else the measured mean is
            tried.
        tick: the file's time unit in seconds; times are rounded to it.
    """
    claimed = [rate for rate in candidates if rate > 0]
    if len(times) < 2:
        return claimed[0] if claimed else 1.0
    measured = (len(times) - 1) / (times[-1] - times[0])
    # A file's clock rounds each time by up to a tick; half a millisecond covers coarse writers.
    tolerance = max(1.01 * tick, 0.0005)
    for rate in (*claimed, measured):
        if tolerance * rate < 0.5 and all(
            abs(time - index / rate) <= tolerance for index, time in enumerate(times)
        ):
            return rate
    return None


def frame_budget(plan: ResizePlan, config: MediaConfig, limits: MediaLimits) -> int:
    """How many frames of this size one clip may have, at least 1.

    The whole-video patch budget of the configuration, the server's token cap (a group of up to
    four frames costs the tokens of one) and its frame cap.

    Raises:
        MediaError: a single group already exceeds the token cap.
    """
    allowed = limits.max_video_frames
    _, rows, columns = plan.grid_thw
    if config.in_patch_limit_video is not None:
        allowed = min(allowed, config.in_patch_limit_video // (rows * columns))
    groups = limits.max_video_tokens // max(plan.num_tokens, 1)
    if groups < 1:
        raise MediaError(
            f"one group of frames takes {plan.num_tokens} tokens, a clip may take "
            f"{limits.max_video_tokens}",
            code="video_too_large",
        )
    return max(1, min(allowed, groups * config.temporal_merge_kernel_size))


def format_timestamp(seconds: float, mode: TimestampMode = "hh:mm:ss.fff") -> str:
    """Clock text of a moment; milliseconds are cut, not rounded; wraps like a clock.

    The released code takes the seconds from a clock rounded to microseconds and the milliseconds
    from the raw fraction, so 0.9999996 s reads as 1.999 s there; here both come from the same
    number.
    """
    whole = math.floor(seconds)
    millis = int((seconds % 1) * 1000)
    hours, minutes, secs = whole // 3600 % 24, whole // 60 % 60, whole % 60
    if mode == "hh:mm:ss.fff":
        return f"{hours:02d}:{minutes:02d}:{secs:02d}.{millis:03d}"
    if mode == "mm:ss.fff":
        return f"{minutes:02d}:{secs:02d}.{millis:03d}"
    return f"{minutes:02d}:{secs:02d}"
