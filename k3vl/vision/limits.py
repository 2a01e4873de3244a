"""The caps that every front end shares: what one picture or one clip may cost.

Numbers only; the checks lie where the thing is measured (``image.py``, ``video.py``). Pillow's own
global pixel limit is neither read nor changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """What one media part may cost before it is refused, or sampled more thinly.

    Attributes:
        max_image_pixels: width times height of a picture, read from its header.
        max_frame_pixels: the same for one video frame.
        max_video_seconds: longer clips are refused.
        max_source_frames: frames that a file may hold, used or not; more are refused.
        max_video_frames: frames that are looked at; the sampling rate is lowered to meet it.
        max_video_tokens: visual tokens of one clip; the sampling rate is lowered to meet it.
        max_decode_seconds: wall-clock time for decoding one clip.
    """

    max_image_pixels: int = 256_000_000
    max_frame_pixels: int = 64_000_000
    max_video_seconds: float = 3600.0
    max_source_frames: int = 250_000
    max_video_frames: int = 512
    max_video_tokens: int = 32_768
    max_decode_seconds: float = 120.0


DETAIL_PATCHES: Final[Mapping[str, int]] = MappingProxyType({"low": 1_024, "high": 16_384})
"""Patches (14 x 14 pixels) of a picture sent with a ``detail``, if the checkpoint's own budget is
not lower: low is 200,704 pixels and 256 tokens, high 3.2 million pixels and 4,096 tokens. ``auto``
and ``original`` are the checkpoint's own budget (K3: 65,536 patches, 12.8 million pixels)."""

DEFAULT_LIMITS = MediaLimits()
"""Generous for a laptop: a 20992x10496 panorama passes, a 40000x40000 picture does not."""
