"""What ``k3vl inspect plan`` and ``k3vl inspect media`` say: plain records, no printing.

Named like the standard library's module; imported only as ``k3vl.vision.inspect``.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

from k3vl.errors import MediaError
from k3vl.vision.plan import plan_image
from k3vl.vision.processor import model_view
from k3vl.vision.sniff import HEAD_BYTES, sniff
from k3vl.vision.source import read_path

if TYPE_CHECKING:
    from pathlib import Path

    from k3vl.config import MediaConfig
    from k3vl.types import MediaKind, ProcessedMedia
    from k3vl.vision.processor import MediaProcessor


def plan_record(record: object, config: MediaConfig) -> dict[str, Any]:
    """Plan the picture size in ``{"width", "height"}``; anything malformed gives ``{"error"}``."""
    try:
        width, height = _size_field(record, "width"), _size_field(record, "height")
        plan = plan_image(width, height, config)
    except MediaError as exc:
        return {"error": str(exc)}
    except OverflowError:
        return {"error": "'width' or 'height' is too large"}
    return {
        "new_width": plan.new_width,
        "new_height": plan.new_height,
        "pad_width": plan.pad_width,
        "pad_height": plan.pad_height,
        "grid_thw": list(plan.grid_thw),
        "num_tokens": plan.num_tokens,
    }


def _size_field(record: object, name: str) -> int:
    """A whole number out of a JSON object."""
    if not isinstance(record, dict):
        raise MediaError("expected an object with 'width' and 'height'")
    value = record.get(name)
    if value is None:
        raise MediaError(f"field '{name}' is missing")
    if isinstance(value, bool) or not isinstance(value, int):
        raise MediaError(f"field '{name}' is not a whole number")
    return value


def media_record(
    path: Path, processor: MediaProcessor, kind: MediaKind | None = None
) -> dict[str, Any]:
    """Describe one file as the model will get it, or why it cannot be used.

    Args:
        path: a picture or a clip.
        processor: settings and limits.
        kind: None decides by the file's content; animated pictures are pictures then.

    Returns:
        ``path``, ``kind``, ``width``, ``height`` (upright), ``frames`` (one object with ``index``
        and ``time`` in seconds for each frame used; a picture's time is None), ``grid_thw`` (one
        for each group), ``tokens``, ``warnings``, ``digest``; or ``path``, ``error``, ``code``.
    """
    try:
        media = load_path(path, processor, kind)
    except MediaError as exc:
        return {"path": str(path), "error": str(exc), "code": exc.code}
    return describe(path, media)


def load_path(
    path: Path, processor: MediaProcessor, kind: MediaKind | None = None
) -> ProcessedMedia:
    """Process a local file as what its content is.

    Raises:
        MediaError: as :meth:`MediaProcessor.process`.
    """
    return processor.process(path, kind or kind_of(path))


def kind_of(path: Path) -> MediaKind:
    """``video`` for video and audio files, else ``image`` (whose errors are more precise then).

    Sound, with cover art or without, is a clip that lacks its pictures.
    """
    try:
        if os.path.isfile(path) and sniff(read_path(path, HEAD_BYTES)).family in ("video", "audio"):
            return "video"
    except MediaError:
        pass  # said by whoever opens the file
    return "image"


def describe(path: Path, media: ProcessedMedia) -> dict[str, Any]:
    """The record of media that were processed; see :func:`media_record`."""
    times: tuple[float | None, ...] = media.frame_times or (None,)
    return {
        "path": str(path),
        "kind": media.layout.kind,
        "width": media.layout.width,
        "height": media.layout.height,
        "frames": [{"index": i, "time": time} for i, time in enumerate(times)],
        "grid_thw": [list(item.grid_thw) for item in media.items],
        "tokens": sum(item.num_tokens for item in media.items),
        "warnings": list(media.warnings),
        "digest": media_digest(media),
    }


def media_digest(media: ProcessedMedia) -> str:
    """A picture's own digest; for a clip the SHA-256 over the digests of its groups."""
    if len(media.items) == 1:
        return media.items[0].digest
    return hashlib.sha256("".join(item.digest for item in media.items).encode()).hexdigest()


def save_model_view(media: ProcessedMedia, directory: Path, stem: str) -> list[Path]:
    """Write what the model sees as PNG files, one for each frame, padding included.

    ``stem.png`` for a picture; ``stem.000.png`` and on for the frames of a clip. The directory is
    made where it is missing.
    """
    directory.mkdir(parents=True, exist_ok=True)
    pictures = model_view(media)
    is_clip = media.layout.kind == "video"
    paths = []
    for number, picture in enumerate(pictures):
        path = directory / (f"{stem}.{number:03d}.png" if is_clip else f"{stem}.png")
        picture.save(path)
        paths.append(path)
    return paths
