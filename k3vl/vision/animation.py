"""Animated pictures as clips: GIF, WebP, APNG and AVIF, through Pillow, which composes the frames.

A frame's delay is the file's own; a delay of 0, which viewers do not take literally, is 100 ms.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from PIL import Image

from k3vl.errors import MediaError
from k3vl.vision.image import DECODER_ERRORS, check_image, check_pixels, open_image
from k3vl.vision.timeline import ClipFrame, Timeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k3vl.vision.limits import MediaLimits
    from k3vl.vision.timeline import Moment

_DEFAULT_DELAY = 0.1


class AnimationClip:
    """A :class:`~k3vl.vision.timeline.Clip` over an animated picture."""

    def __init__(self, data: bytes, limits: MediaLimits) -> None:
        self._data = data
        self._kind = check_image(data, limits)
        self._limits = limits
        self._deadline = time.monotonic() + limits.max_decode_seconds
        self.num_damaged = 0
        image = open_image(data, self._kind)
        check_pixels(image.size, limits)
        self.width, self.height = image.size
        self.timeline = self._measure(image)

    def _measure(self, image: Image.Image) -> Timeline:
        """Step through every frame for its delay; only one is held."""
        starts: list[float] = []
        end = 0.0
        for _, delay in self._steps(image):
            starts.append(end)
            end += delay
            if len(starts) > self._limits.max_source_frames:
                raise MediaError(
                    f"{self._kind.name} has more than {self._limits.max_source_frames} frames",
                    code="video_too_many_frames",
                )
        if not starts:
            raise MediaError(f"{self._kind.name}: no frame can be decoded", code="video_corrupt")
        if end > self._limits.max_video_seconds:
            raise MediaError(
                f"the clip lasts {end:.1f} s, at most {self._limits.max_video_seconds:g} s are "
                "accepted",
                code="video_too_long",
            )
        return Timeline.build(starts, (), 0.001)

    def _steps(self, image: Image.Image) -> Iterator[tuple[Image.Image, float]]:
        """Every frame that decodes, composed, with its delay in seconds."""
        # An APNG may carry a still picture for old viewers in front of its animation.
        index = 1 if image.info.get("default_image") else 0
        while True:
            if time.monotonic() > self._deadline:
                raise MediaError("decoding the clip takes too long", code="video_timeout")
            try:
                image.seek(index)
                image.load()
            except EOFError:
                return
            except (Image.DecompressionBombError, MemoryError) as exc:
                raise MediaError("a frame is too large", code="image_too_large") from exc
            except DECODER_ERRORS:
                self.num_damaged = 1
                return
            delay = image.info.get("duration") or 0
            yield image, float(delay) / 1000 or _DEFAULT_DELAY
            index += 1

    def frames(self, moments: Sequence[Moment], *, threads: bool) -> Iterator[ClipFrame]:
        """Step through again and copy the chosen frames."""
        wanted = {moment.at: moment for moment in moments}
        for (image, _), start in zip(
            self._steps(open_image(self._data, self._kind)), self.timeline.times, strict=False
        ):
            if start in wanted:
                yield ClipFrame(image.copy(), wanted[start].time)

    def warnings(self) -> tuple[str, ...]:
        """A remark on frames that were lost."""
        if not self.num_damaged:
            return ()
        return (f"damaged after frame {len(self.timeline.times)}, the rest left out",)
