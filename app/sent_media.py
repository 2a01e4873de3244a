"""Media as an endpoint is sent them: data URLs of what any server can read.

JPEG, PNG and WebP that are upright go out as they are; every other picture as an upright PNG. Whole
clips go out as they are. A piece of a clip, or an animated picture that is to be seen as a clip, is
written anew as MP4 with the frames that K3's own rules choose, each at its time from the first.
"""

from __future__ import annotations

import io
import os
from fractions import Fraction
from typing import TYPE_CHECKING

import av
import numpy as np

from k3vl.errors import MediaError
from k3vl.vision.image import load_image, open_image, read_orientation
from k3vl.vision.limits import DEFAULT_LIMITS
from k3vl.vision.portable import IMAGE_TYPES, VIDEO_TYPES, data_url
from k3vl.vision.processor import composite
from k3vl.vision.sniff import HEAD_BYTES, sniff
from k3vl.vision.source import read_path

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from PIL.Image import Image

    from k3vl.config import TransparentBackground

MAX_VIDEO_BYTES = 64 * 2**20
_TICKS = 1000  # a second in an MP4 that is written here


def image_url(data: bytes) -> str:
    """A picture's file as a data URL."""
    kind = sniff(data[:HEAD_BYTES])
    header = open_image(data, kind)
    plain = header.mode in ("RGB", "L", "RGBA") and read_orientation(header, []) == 1
    if plain and kind.decoder in IMAGE_TYPES:
        return data_url(IMAGE_TYPES[kind.decoder], data)
    return png_url(data)


def png_url(picture: Image | bytes) -> str:
    """A picture, or a file of one, as an upright PNG."""
    return data_url("image/png", upright_png(picture))


def upright_png(picture: Image | bytes) -> bytes:
    """A picture as the decoder brings it, in a form that everything shows."""
    image = load_image(picture, DEFAULT_LIMITS).image
    if image.mode not in ("RGB", "L", "RGBA"):
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def video_url(source: bytes | Path) -> str:
    """A whole clip's file as a data URL.

    Raises:
        MediaError: it cannot be read, or is too large to be sent.
    """
    try:
        size = len(source) if isinstance(source, bytes) else os.path.getsize(source)
    except OSError as exc:
        raise MediaError("the file is gone", code="media_not_found") from exc
    if size > MAX_VIDEO_BYTES:
        raise MediaError(
            f"a clip of {size} bytes is not sent to an endpoint, at most {MAX_VIDEO_BYTES} are",
            code="media_too_large",
        )
    data = source if isinstance(source, bytes) else read_path(source)
    kind = sniff(data[:HEAD_BYTES])
    return data_url(VIDEO_TYPES.get(kind.decoder, "video/mp4"), data)


def frames_url(
    frames: Iterable[tuple[Image, float]], background: TransparentBackground | None
) -> str:
    """Frames with their seconds as the data URL of a clip."""
    return data_url("video/mp4", encode_clip(frames, background))


def encode_clip(
    frames: Iterable[tuple[Image, float]], background: TransparentBackground | None
) -> bytes:
    """Write frames as H.264 in MP4, the first at 0.

    Args:
        frames: upright pictures of one size, with increasing seconds.
        background: what lies under transparent pixels, which H.264 has not.
    """
    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as container:
        video = container.add_stream("libx264", options={"crf": "16", "preset": "veryfast"})
        video.pix_fmt = "yuv420p"
        video.time_base = video.codec_context.time_base = Fraction(1, _TICKS)
        first: float | None = None
        for image, at in frames:
            if first is None:
                # Chroma has half the size; a side of an odd number of pixels loses its last one.
                first = at
                video.width, video.height = (max(side // 2 * 2, 2) for side in image.size)
            flat = composite(image, background)
            if flat.size != (video.width, video.height):
                flat = flat.resize((video.width, video.height))
            frame = av.VideoFrame.from_ndarray(np.asarray(flat), format="rgb24")
            frame.time_base = Fraction(1, _TICKS)
            frame.pts = round((at - first) * _TICKS)
            container.mux(video.encode(frame))
        container.mux(video.encode())
    return stream.getvalue()
