"""From a media part to what the prompt and the vision tower need: layout, patches, digest.

The rules are those of Kimi K3's released processor: resize in the picture's own mode, transparent
pixels over the configured background, black padding on the right and at the bottom, 14x14 patches.
Patches stay uint8; the tower normalises on its own device (:func:`normalise` is the exact rule).
Sizes and token counts come from ``plan.py`` alone.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from k3vl.errors import ConfigError, MediaError
from k3vl.types import EncoderItem, MediaGroup, MediaLayout, MediaPart, ProcessedMedia
from k3vl.vision.image import LoadedImage, load_image
from k3vl.vision.kept import KeptMedia
from k3vl.vision.limits import DEFAULT_LIMITS, DETAIL_PATCHES, MediaLimits
from k3vl.vision.plan import (
    ResizePlan,
    format_timestamp,
    frame_budget,
    frame_patch_limit,
    plan_frame,
    plan_image,
)
from k3vl.vision.source import DEFAULT_POLICY, FetchPolicy, read_path, resolve
from k3vl.vision.timeline import ClipFrame
from k3vl.vision.video import open_video

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from k3vl.config import MediaConfig, TransparentBackground
    from k3vl.types import Detail, MediaKind, MediaSource

_DIGEST_VERSION = b"k3vl media 1\0"
_BLEND_ROWS = 128


class MediaProcessor:
    """Prepares media parts; one instance serves many threads.

    Args:
        config: the checkpoint's media settings.
        limits: what one part may cost.
        policy: what may be fetched.
        parity: reproduce the released processor to the byte: EXIF orientation ignored, 16-bit grey
            clipped. Off, both are put right.
        keep_bytes: of patches of pictures that are kept for whoever sends the same file again.

    Raises:
        ConfigError: ``fixed_output_tokens`` is set; K3's projector has no way to make a fixed
            number of features.
    """

    def __init__(
        self,
        config: MediaConfig,
        *,
        limits: MediaLimits = DEFAULT_LIMITS,
        policy: FetchPolicy = DEFAULT_POLICY,
        parity: bool = False,
        keep_bytes: int = 0,
    ) -> None:
        if config.fixed_output_tokens is not None:
            raise ConfigError(
                f"fixed_output_tokens is {config.fixed_output_tokens}; only null is supported"
            )
        self.config = config
        self.limits = limits
        self.policy = policy
        self.parity = parity
        self._kept = KeptMedia(keep_bytes)
        settings = json.dumps(asdict(config), sort_keys=True).encode()
        self._digest_head = _DIGEST_VERSION + settings + b"\0"

    def close(self) -> None:
        """Nothing runs; :class:`k3vl.vision.pool.PooledProcessor` has processes."""

    def process(
        self, source: MediaPart | MediaSource, kind: MediaKind | None = None
    ) -> ProcessedMedia:
        """Fetch, decode and cut one media part.

        Args:
            source: a part, or a bare source.
            kind: how a bare source is to be read; ``image`` by default.

        Raises:
            MediaError: anything that is wrong with the file; ``code`` says what.
        """
        detail = None
        if isinstance(source, MediaPart):
            kind, detail, source = source.kind, source.detail, source.source
        kind = kind or "image"
        resolved = resolve(source, kind, self.policy)
        if kind == "image":
            if isinstance(resolved, Image.Image) or not self._kept.max_bytes:
                return self._process_image(resolved, detail)
            data = read_path(resolved) if isinstance(resolved, Path) else resolved
            key = hashlib.sha256(data).digest(), detail
            return self._kept.get(key, partial(self._process_image, data, detail))
        if isinstance(resolved, Image.Image):
            raise MediaError("a PIL image is not a video", code="image_as_video")
        return self._process_video(resolved)

    def is_quick(self, part: MediaPart) -> bool:
        """Whether :meth:`begin` is over at once: others do the work, nothing is waited for."""
        return False

    def begin(self, part: MediaPart) -> Future[ProcessedMedia]:
        """As :meth:`process`, which may be over when the future is there or later."""
        future: Future[ProcessedMedia] = Future()
        try:
            future.set_result(self.process(part))
        except BaseException as exc:  # noqa: BLE001 - whoever asks for the result is told
            future.set_exception(exc)
        return future

    def process_frames(
        self, frames: Sequence[Image.Image], times: Sequence[float]
    ) -> ProcessedMedia:
        """Treat pictures with known times (seconds, increasing) as a clip; none is left out.

        Raises:
            MediaError: no frames, times that do not belong to them, or more frames than a clip may
                have (``video_too_many_frames``; the caller chose them, so none is dropped).
        """
        if not frames or len(frames) != len(times):
            raise MediaError(
                f"{len(frames)} frames with {len(times)} times; each frame needs one",
                code="frame_times_mismatch",
            )
        if any(b <= a for a, b in pairwise(times)):
            raise MediaError("frame times must increase", code="frame_times_mismatch")
        first = load_image(frames[0], self.limits, parity=self.parity)
        size = (first.width, first.height)
        plan = self.plan_frame(*size)
        budget = frame_budget(plan, self.config, self.limits)
        if len(frames) > budget:
            raise MediaError(
                f"{len(frames)} frames, a clip of this size may have {budget}",
                code="video_too_many_frames",
            )
        shown = (
            ClipFrame(load_image(frame, self.limits, parity=self.parity).image, at)
            for frame, at in zip(frames, times, strict=True)
        )
        return self._assemble(size, plan, shown)

    # ------------------------------------------------------------------ pictures

    def _process_image(
        self, source: bytes | Path | Image.Image, detail: Detail | None
    ) -> ProcessedMedia:
        source = read_path(source) if isinstance(source, Path) else source
        before = self.config.transparent_bg_fill_stage == "before_resize"

        def plan_size(width: int, height: int) -> tuple[int, int]:
            plan = self.plan_image(width, height, detail)
            return plan.new_width, plan.new_height

        loaded = load_image(source, self.limits, plan_size=plan_size, parity=self.parity)
        plan = self.plan_image(loaded.width, loaded.height, detail)
        pixels = render(loaded.image, plan, self.config.transparent_bg_config, before=before)
        item = self._item(patchify(pixels, self.config.patch_size), plan, frames=1)
        layout = MediaLayout("image", loaded.width, loaded.height, (MediaGroup(plan.num_tokens),))
        return ProcessedMedia(layout, (item,), warnings=_image_warnings(loaded))

    def plan_image(self, width: int, height: int, detail: Detail | None = None) -> ResizePlan:
        """The plan of an upright picture under its ``detail``."""
        budget = DETAIL_PATCHES.get(detail or "auto", self.config.in_patch_limit)
        limit = min(budget, self.config.in_patch_limit)
        return plan_image(width, height, replace(self.config, in_patch_limit=limit))

    # ------------------------------------------------------------------ clips

    def _process_video(self, source: bytes | Path) -> ProcessedMedia:
        with open_video(source, self.limits) as clip:
            size = (clip.width, clip.height)
            plan = self.plan_frame(*size)
            budget = frame_budget(plan, self.config, self.limits)
            moments = clip.timeline.choose(self.config.sample_fps, budget)
            media = self._assemble(size, plan, clip.frames(moments, threads=True))
            if clip.num_damaged:
                # Concealment of damage depends on timing with several decoder threads.
                media = self._assemble(size, plan, clip.frames(moments, threads=False))
            return replace(media, warnings=clip.warnings())

    def plan_frame(self, width: int, height: int) -> ResizePlan:
        """The plan of every frame; one frame alone must fit the whole-video budget too."""
        plan = plan_frame(width, height, self.config)
        total = self.config.in_patch_limit_video
        if total is not None and plan.grid_thw[1] * plan.grid_thw[2] > total:
            plan = plan_frame(width, height, self.config, frame_patch_limit(self.config, 1))
        return plan

    def _frame_patches(self, frame: Image.Image, plan: ResizePlan) -> np.ndarray:
        """[h*w, 3, 14, 14] uint8; frames with alpha are composited like pictures, but first."""
        pixels = render(frame, plan, self.config.transparent_bg_config, before=True)
        return patchify(pixels, self.config.patch_size)

    def _assemble(
        self, size: tuple[int, int], plan: ResizePlan, frames: Iterable[ClipFrame]
    ) -> ProcessedMedia:
        """Cut frames into groups as they come; a group's clock is its first frame's."""
        per_group = self.config.temporal_merge_kernel_size
        groups: list[MediaGroup] = []
        items: list[EncoderItem] = []
        times: list[float] = []
        buffer: list[np.ndarray] = []
        for frame in chain(frames, (None,)):
            if buffer and (frame is None or len(buffer) == per_group):
                items.append(self._item(np.concatenate(buffer), plan, frames=len(buffer)))
                stamp = format_timestamp(times[-len(buffer)], self.config.timestamp_mode)
                groups.append(MediaGroup(plan.num_tokens, stamp))
                buffer.clear()
            if frame is not None:
                buffer.append(self._frame_patches(frame.image, plan))
                times.append(frame.time)
        layout = MediaLayout("video", *size, tuple(groups))
        return ProcessedMedia(layout, tuple(items), tuple(times))

    # ------------------------------------------------------------------ both

    def _item(self, patches: np.ndarray, plan: ResizePlan, *, frames: int) -> EncoderItem:
        grid = (frames, *plan.grid_thw[1:])
        digest = hashlib.sha256(self._digest_head)
        digest.update(f"RGB uint8 {grid} {patches.shape}\0".encode())
        digest.update(patches.data)
        return EncoderItem(digest.hexdigest(), patches, grid, plan.num_tokens)


def _image_warnings(loaded: LoadedImage) -> tuple[str, ...]:
    """The loader's, and a remark on pictures that hold next to nothing."""
    if min(loaded.width, loaded.height) >= 14:
        return loaded.warnings
    return (*loaded.warnings, f"very small picture, {loaded.width} x {loaded.height} pixels")


# ---------------------------------------------------------------------- pixels


def render(
    image: Image.Image,
    plan: ResizePlan,
    background: TransparentBackground | None,
    *,
    before: bool,
) -> np.ndarray:
    """Resize, put transparent pixels over the background, pad.

    Args:
        image: upright, in its own mode.
        plan: sizes.
        background: None drops alpha.
        before: composite before the resize (else after it).

    Returns:
        [H, W, 3] uint8 of the padded picture; may be read-only.
    """
    size = (plan.new_width, plan.new_height)
    if before:
        image = composite(image, background)
    # Pillow would copy it.
    resized = image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
    if size == (plan.padded_width, plan.padded_height):
        return np.asarray(composite(resized, background))
    canvas = np.zeros((plan.padded_height, plan.padded_width, 3), np.uint8)
    canvas[: plan.new_height, : plan.new_width] = np.asarray(composite(resized, background))
    return canvas


def composite(image: Image.Image, background: TransparentBackground | None) -> Image.Image:
    """Flatten to RGB.

    An RGB picture with a colour key is not keyed, and the blend is cut, not rounded: both as in the
    released processor.
    """
    if image.mode == "RGB":
        return image
    has_alpha = "A" in image.getbands() or "transparency" in image.info
    if not has_alpha:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    if background is None:
        return rgba.convert("RGB")
    values = np.asarray(rgba)
    under = _background(image.size, background)
    flat = np.empty((*values.shape[:2], 3), np.uint8)
    for top in range(0, len(values), _BLEND_ROWS):  # bounds the float copies of a large picture
        rows = slice(top, top + _BLEND_ROWS)
        alpha = values[rows, :, 3:].astype(np.float32) / np.float32(255)
        below = under[rows, :, None].astype(np.float32)
        flat[rows] = alpha * values[rows, :, :3] + (np.float32(1) - alpha) * below
    return Image.fromarray(flat)


def _background(size: tuple[int, int], background: TransparentBackground) -> np.ndarray:
    """[H, W] uint8 grey levels, squares anchored at the top left."""
    width, height = size
    if background.pattern != "chessboard":
        level = 255 if background.pattern == "white" else 0
        return np.full((height, width), level, np.uint8)
    square = background.chessboard_square_size
    rows, columns = (np.arange(n) // square % 2 for n in (height, width))
    odd = rows.astype(np.uint8)[:, None] ^ columns.astype(np.uint8)[None, :]
    white, gray = background.chessboard_white_value, background.chessboard_gray_value
    first, second = (white, gray) if background.chessboard_square_on_top_left else (gray, white)
    return np.where(odd == 0, np.uint8(first), np.uint8(second))


def patchify(pixels: np.ndarray, patch: int) -> np.ndarray:
    """[H, W, 3] to [H/patch * W/patch, 3, patch, patch], row-major, contiguous."""
    height, width, _ = pixels.shape
    cells = pixels.reshape(height // patch, patch, width // patch, patch, 3)
    return np.ascontiguousarray(cells.transpose(0, 2, 4, 1, 3)).reshape(-1, 3, patch, patch)


def unpatchify(patches: np.ndarray, grid_thw: tuple[int, int, int]) -> np.ndarray:
    """Invert :func:`patchify` for every frame: [t, H, W, 3]."""
    t, rows, columns = grid_thw
    patch = patches.shape[-1]
    cells = patches.reshape(t, rows, columns, 3, patch, patch)
    return cells.transpose(0, 1, 4, 2, 5, 3).reshape(t, rows * patch, columns * patch, 3)


def level_table(mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """[3, 256] float32: what :func:`normalise` makes of each level of each channel."""
    levels = (np.arange(256) / 255.0).astype(np.float32)
    means = np.asarray(mean, np.float32)
    scale = (1.0 / np.asarray(std, np.float64)).astype(np.float32)
    table: np.ndarray = (levels[None, :] - means[:, None]) * scale[:, None]
    return table


def normalise(patches: np.ndarray, config: MediaConfig) -> np.ndarray:
    """uint8 patches to the tower's float32 input, bit-equal to the released processor.

    Args:
        patches: [N, 3, P, P] uint8.
        config: mean and standard deviation of each channel.

    Returns:
        [N, 3, P, P] float32; (u8 / 255 - mean) * (1 / std).
    """
    table = level_table(config.image_mean, config.image_std)
    out = np.empty(patches.shape, np.float32)
    for channel in range(3):
        out[:, channel] = table[channel][patches[:, channel]]
    return out


def model_view(media: ProcessedMedia) -> list[Image.Image]:
    """The pictures that the model sees, padding included: one, or one per frame used."""
    return [
        Image.fromarray(frame)
        for item in media.items
        for frame in unpatchify(item.patches, item.grid_thw)
    ]
