"""A media part as files for another server, after everything was checked and repaired here.

What goes out is what the model here would see: upright, in RGB, resized into the pixel budget, over
the background, so that no other decoder's reading of orientation, palettes, alpha or depth counts.
A picture that nothing of this would change keeps its own bytes. Clips go as their sampled frames,
or whole. The prompt of the other server states the size of what it gets.
"""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from k3vl.errors import MediaError
from k3vl.vision.image import open_image, read_orientation
from k3vl.vision.processor import unpatchify
from k3vl.vision.sniff import HEAD_BYTES, sniff
from k3vl.vision.source import read_path, resolve

if TYPE_CHECKING:
    from k3vl.types import MediaPart, ProcessedMedia
    from k3vl.vision.plan import ResizePlan
    from k3vl.vision.processor import MediaProcessor

IMAGE_TYPES = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}
"""Pillow's names of what every server reads, and their media types."""
VIDEO_TYPES = {"matroska": "video/webm", "GIF": "image/gif", "avi": "video/x-msvideo"}
"""FFmpeg's names of containers, and their media types; others go as ``video/mp4``."""
_FRAME_QUALITY = 95


def portable(processor: MediaProcessor, part: MediaPart, *, whole_clips: bool) -> ProcessedMedia:
    """Check a part as always, and make ``urls`` in place of patches.

    Args:
        processor: whose rules hold; one that groups single frames (``temporal_merge_kernel_size``
            1) where frames are wanted, as each of them is a picture to the other server.
        part: with a source that needs no network.
        whole_clips: clips keep their own bytes; else every group of frames becomes a JPEG.

    Raises:
        MediaError: as :meth:`MediaProcessor.process`.
    """
    source = resolve(part.source, part.kind, processor.policy)
    if isinstance(source, Image.Image):
        raise MediaError("a picture in memory cannot be sent on", code="source_invalid")
    if part.kind == "image" and isinstance(source, Path):
        source = read_path(source)
    media = processor.process(replace(part, source=source))
    empty = np.empty((0, 3, 1, 1), np.uint8)
    bare = replace(media, items=tuple(replace(item, patches=empty) for item in media.items))
    width, height = media.layout.width, media.layout.height
    if part.kind == "video" and whole_clips:
        return replace(bare, urls=(_whole_clip(source, processor.policy.max_bytes),))
    if part.kind == "video":
        plan = processor.plan_frame(width, height)
    else:
        assert isinstance(source, bytes)
        plan = processor.plan_image(width, height, part.detail)
        mime = _type_as_it_is(source, media, plan)
        if mime is not None:
            return replace(bare, urls=(data_url(mime, source),))
    layout = replace(media.layout, width=plan.new_width, height=plan.new_height)
    seen = (
        Image.fromarray(frame[: plan.new_height, : plan.new_width])
        for item in media.items
        for frame in unpatchify(item.patches, item.grid_thw)
    )
    return replace(bare, layout=layout, urls=tuple(_encoded(image, part.kind) for image in seen))


def data_url(mime: str, data: bytes) -> str:
    """A base64 ``data:`` URL."""
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def _type_as_it_is(data: bytes, media: ProcessedMedia, plan: ResizePlan) -> str | None:
    """The media type of a picture that every server sees as we do; None for others."""
    kind = sniff(data[:HEAD_BYTES])
    header = open_image(data, kind)
    if kind.decoder == "PNG":
        header.load()  # its tags may lie behind the pixels
    is_plain = (
        header.mode in ("RGB", "L")
        and "transparency" not in header.info
        and read_orientation(header, []) == 1
        and not media.warnings
        and (plan.new_width, plan.new_height) == (media.layout.width, media.layout.height)
    )
    return IMAGE_TYPES.get(kind.decoder) if is_plain else None


def _whole_clip(source: bytes | Path, max_bytes: int) -> str:
    if isinstance(source, Path):
        source = read_path(source, max_bytes + 1)
    if len(source) > max_bytes:
        raise MediaError(
            f"video: more than {max_bytes} bytes, no more are sent on", code="media_too_large"
        )
    kind = sniff(source[:HEAD_BYTES])
    return data_url(VIDEO_TYPES.get(kind.decoder, "video/mp4"), source)


def _encoded(image: Image.Image, kind: str) -> str:
    """A picture without loss; a frame of a clip, which has seen losses before, without visible."""
    out = io.BytesIO()
    if kind == "image":
        image.save(out, "PNG", compress_level=1)
        return data_url("image/png", out.getvalue())
    image.save(out, "JPEG", quality=_FRAME_QUALITY, subsampling=0)
    return data_url("image/jpeg", out.getvalue())
