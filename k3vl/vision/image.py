"""One normaliser for every front end: a file's bytes, or a PIL image, to an upright picture.

Recognition, the allow-list of decoders, header limits before any raster byte, EXIF orientation,
bit depths and colour models are settled here, before anything else sees the size. What stays in
the picture's own mode is what the released processor resizes in that mode (palettes, alpha, CMYK).
The resize, the background and the patches are in ``processor.py``.

ICC profiles are ignored, as in the released processor.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from k3vl.errors import MediaError
from k3vl.vision.sniff import HEAD_BYTES, Sniffed, sniff, webp_canvas
from k3vl.vision.structure import box_ends_early, count_pages, png_without_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from PIL.ImageFile import ImageFile

    from k3vl.vision.limits import MediaLimits

    PlanSize = Callable[[int, int], tuple[int, int]]

ACCEPTED = "JPEG, PNG, WebP, GIF, BMP, TIFF, PPM/PGM, AVIF"
_DRAFT_PIXELS = 64_000_000
_ORIENTATION = 0x0112
_SCALE_ROWS = 128
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# What Pillow's decoders raise on damaged input, beside OSError.
DECODER_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    OverflowError,
    ZeroDivisionError,
    EOFError,
    AttributeError,
    AssertionError,
    NotImplementedError,
    RuntimeError,
    struct.error,
    zlib.error,
)
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning, MemoryError)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedImage:
    """A decoded picture, ready for the resize.

    Attributes:
        image: upright pixels in a mode that Pillow can resize; may be smaller than the size says
            where a huge JPEG was decoded at a reduced scale.
        width, height: upright pixels of the file.
        num_frames: pictures in the file; the first is ``image``.
        warnings: what was repaired or ignored.
    """

    image: Image.Image
    width: int
    height: int
    num_frames: int = 1
    warnings: tuple[str, ...] = ()


def load_image(
    source: bytes | Image.Image,
    limits: MediaLimits,
    *,
    plan_size: PlanSize | None = None,
    parity: bool = False,
) -> LoadedImage:
    """Decode and normalise a picture.

    Args:
        source: a file's content, or an image that someone opened or made; it is not changed.
        limits: the pixel cap is checked on the header.
        plan_size: upright size to the size after the resize; given, JPEGs of more than 64 million
            pixels are decoded at a reduced scale that is still at least twice as large.
        parity: as the released processor: EXIF orientation ignored, 16 bits clipped.

    Raises:
        MediaError: codes ``image_empty``, ``not_an_image``, ``video_as_image``,
            ``image_unsupported``, ``svg_unsupported``, ``pdf_unsupported``, ``heic_unsupported``,
            ``image_too_large``, ``image_truncated``, ``image_corrupt``.
    """
    warnings: list[str] = []
    if isinstance(source, Image.Image):
        image, name, data = source, source.format or "in-memory", b""
    else:
        kind = check_image(source, limits)
        image, name, data = open_image(source, kind), kind.name, source
    check_pixels(image.size, limits)
    num_frames = _count_frames(image, data, warnings, limits.max_source_frames)
    size_in_header = image.size
    if plan_size is not None and not parity and data and name == "JPEG":
        _draft(image, plan_size)
    _decode(image, name, data)
    drafted = data and image.size != size_in_header and name == "JPEG"
    # Tags behind the pixels, as PNG allows, are known only after decoding.
    orientation = 1 if parity else read_orientation(image, warnings)
    pixels = image if parity else _settle_mode(image, warnings)
    if orientation in _TRANSPOSE:
        pixels = pixels.transpose(_TRANSPOSE[orientation])
    width, height = size_in_header if drafted else image.size
    if orientation >= 5:
        width, height = height, width
    return LoadedImage(pixels, width, height, num_frames, tuple(warnings))


# ---------------------------------------------------------------------- before decoding


def check_image(data: bytes, limits: MediaLimits) -> Sniffed:
    """Recognise a picture that can be decoded, or say exactly what the data are instead.

    Raises:
        MediaError: as :func:`load_image`.
    """
    if not data:
        raise MediaError("image: the file is empty (0 bytes)", code="image_empty")
    kind = sniff(data[:HEAD_BYTES])
    if kind.family == "image":
        if kind.decoder == "WEBP":
            size = webp_canvas(data[:HEAD_BYTES])
            if size is not None:
                check_pixels(size, limits)
        return kind
    if kind.family == "video":
        raise MediaError(
            f"not a picture: this is {kind.name} video; send it as a video", code="video_as_image"
        )
    if kind.code == "heic_unsupported":
        raise MediaError(
            f"HEIC/HEIF pictures are not supported; convert to one of {ACCEPTED}", code=kind.code
        )
    if kind.code == "pdf_unsupported":
        raise MediaError(
            "PDF documents are not supported; send each page as a picture", code=kind.code
        )
    if kind.code == "svg_unsupported":
        raise MediaError("SVG drawings are not rendered; send a PNG of the drawing", code=kind.code)
    raise MediaError(
        f"not a picture that can be read: looks like {kind.name}; accepted: {ACCEPTED}",
        code=kind.code,
    )


def check_pixels(size: tuple[int, int], limits: MediaLimits) -> None:
    """Refuse by the header's size, before a raster byte is touched."""
    width, height = size
    if width < 1 or height < 1:
        raise MediaError(f"the picture's size {width} x {height} is empty", code="image_corrupt")
    if width * height > limits.max_image_pixels:
        raise MediaError(
            f"{width} x {height} is {width * height} pixels, at most {limits.max_image_pixels} are "
            "accepted",
            code="image_too_large",
        )


def open_image(data: bytes, kind: Sniffed) -> ImageFile:
    """Read the header with the one decoder that the data call for.

    The decoder's class is called directly: ``Image.open`` would apply Pillow's global pixel limit,
    which refuses legitimate panoramas and can only be changed for the whole process.

    Raises:
        MediaError: ``image_truncated``, ``image_corrupt``, ``image_too_large``.
    """
    if kind.decoder == "PNG":
        data = png_without_text(data)
    try:
        return _DECODERS[kind.decoder](BytesIO(data), "")
    except _BOMBS as exc:
        raise MediaError(f"{kind.name} picture is too large", code="image_too_large") from exc
    except DECODER_ERRORS as exc:
        raise _damaged(kind.name, data, exc, "header") from exc


_DECODERS: Mapping[str, Callable[[BytesIO, str], ImageFile]] = {
    "AVIF": AvifImagePlugin.AvifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "JPEG": JpegImagePlugin.jpeg_factory,
    "PNG": PngImagePlugin.PngImageFile,
    "PPM": PpmImagePlugin.PpmImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
}


def _count_frames(image: Image.Image, data: bytes, warnings: list[str], limit: int) -> int:
    """Pictures in the file, counted up to the limit; more than one is never silent."""
    try:
        counted = count_pages(data, image.format or "", limit) if data else None
        count = int(getattr(image, "n_frames", 1)) if counted is None else max(counted, 1)
    except (*_BOMBS, *DECODER_ERRORS):
        image.seek(0)
        warnings.append("more than one frame, later ones are damaged; first used")
        return 1
    if count > 1:
        what = {"TIFF": "pages", "MPO": "pictures"}.get(image.format or "", "frames")
        animated = "animated, " if what == "frames" else ""
        number = f"{count}" if count <= limit else f"more than {limit}"
        warnings.append(f"{animated}{number} {what}, first used")
    return count


def _draft(image: Image.Image, plan_size: PlanSize) -> None:
    """Let libjpeg halve a huge picture while the result stays twice as large as needed."""
    width, height = image.size
    if width * height <= _DRAFT_PIXELS:
        return
    wanted = plan_size(width, height)
    image.draft(None, (2 * wanted[0], 2 * wanted[1]))


def _decode(image: Image.Image, name: str, data: bytes) -> None:
    """Read the pixels."""
    try:
        image.load()
    except _BOMBS as exc:
        raise MediaError(f"{name} picture is too large", code="image_too_large") from exc
    except DECODER_ERRORS as exc:
        raise _damaged(name, data, exc, "pixels") from exc


def _damaged(name: str, data: bytes, exc: BaseException, where: str) -> MediaError:
    """A precise code from Pillow's complaint; its words (which may hold addresses) stay inside."""
    words = str(exc).lower()
    early = any(word in words for word in ("truncat", "broken data stream", "not enough", "eof"))
    if early or isinstance(exc, EOFError) or _ends_early(name, data):
        return MediaError(
            f"{name} picture is truncated: its data end early", code="image_truncated"
        )
    return MediaError(
        f"{name} picture is damaged: its {where} cannot be read", code="image_corrupt"
    )


def _ends_early(name: str, data: bytes) -> bool:
    """Whether the mark that ends the format is missing."""
    if name == "JPEG":
        return b"\xff\xd9" not in data[-64:]
    if name == "PNG":
        return b"IEND" not in data[-64:]
    if name == "WebP":
        return len(data) < int.from_bytes(data[4:8], "little") + 8
    if name == "BMP":
        return len(data) < int.from_bytes(data[2:6], "little")
    if name == "AVIF":
        return box_ends_early(data)
    return False


# ---------------------------------------------------------------------- after decoding


def read_orientation(image: Image.Image, warnings: list[str]) -> int:
    """EXIF orientation 1-8; 1 where there is none, or where it makes no sense.

    TIFF pictures are turned by Pillow while loading. Pillow's own reader is not used: it reports
    damaged EXIF through Python's process-wide warnings only.
    """
    if image.format == "TIFF":
        return 1
    exif = image.info.get("exif")
    if not isinstance(exif, bytes):
        return 1
    try:
        value = _orientation_tag(exif.removeprefix(b"Exif\0\0"))
    except (IndexError, ValueError, struct.error):
        warnings.append("EXIF data are damaged, orientation ignored")
        return 1
    if value is None or value == 1:
        return 1
    if value not in _TRANSPOSE:
        warnings.append(f"EXIF orientation {value} is not one of 1-8, ignored")
        return 1
    return value


def _orientation_tag(tiff: bytes) -> int | None:
    """Find tag 0x0112 in the first directory of a TIFF block of either byte order."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        raise ValueError("no TIFF header")
    (offset,) = struct.unpack_from(order + "I", tiff, 4)
    (count,) = struct.unpack_from(order + "H", tiff, offset)
    for index in range(count):
        entry = offset + 2 + 12 * index
        tag, kind, _ = struct.unpack_from(order + "HHI", tiff, entry)
        if tag == _ORIENTATION:
            layout = {1: "B", 3: "H", 4: "I"}.get(kind)
            if layout is None:
                raise ValueError("orientation is not a number")
            return int(struct.unpack_from(order + layout, tiff, entry + 8)[0])
    return None


def _settle_mode(image: Image.Image, warnings: list[str]) -> Image.Image:
    """Bring modes that Pillow cannot resize or would clip into ones that it can.

    Palettes, 1-bit, grey, alpha and CMYK stay as they are: the released processor resizes them in
    their own mode.
    """
    if image.mode.startswith("I") or image.mode == "F":
        return _to_eight_bits(image, warnings)
    if image.mode in ("PA", "RGBa"):
        return image.convert("RGBA")
    if image.mode == "La":
        return image.convert("LA")
    if image.mode in ("LAB", "HSV"):
        return image.convert("RGB")
    if image.mode == "CMYK" and image.format in ("JPEG", "MPO") and "adobe" not in image.info:
        warnings.append("CMYK JPEG without Adobe's marker, read as Adobe's inverted inks")
    return image


def _to_eight_bits(image: Image.Image, warnings: list[str]) -> Image.Image:
    """Scale grey of more than 8 bits to 0-255; a colour key becomes an alpha band."""
    values: np.ndarray = np.asarray(image)
    if image.mode == "F":
        values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    # PNG and PPM say that full scale is 65535; a mode alone does not.
    is_sixteen_bit = image.mode.startswith("I;16") or image.format in ("PNG", "PPM")
    if is_sixteen_bit or (image.mode == "I" and low >= 0 and 255 < high <= 65535):
        low, high = 0.0, 65535.0
    elif image.mode == "F" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif low >= 0 and high <= 255:
        low, high = 0.0, 255.0
    else:
        warnings.append(f"grey values from {low:g} to {high:g} scaled to 0-255")
    span = high - low or 1.0
    scaled = np.empty(values.shape, np.uint8)
    for top in range(0, len(values), _SCALE_ROWS):  # bounds the float copies of a large picture
        rows = slice(top, top + _SCALE_ROWS)
        wide: np.ndarray = values[rows].astype(np.float32 if is_sixteen_bit else np.float64)
        scaled[rows] = np.rint((wide - low) * (255.0 / span)).clip(0, 255)
    grey = Image.fromarray(scaled)
    key = image.info.get("transparency")
    if not isinstance(key, int):
        return grey
    alpha = Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8))
    return Image.merge("LA", (grey, alpha))
