"""Walks over the outer structure of picture files, without a decoder: parts, pages, frames.

Pillow counts pages by parsing each one, in quadratic time for TIFF, and unpacks texts that nobody
asked for. A hostile file must cost neither.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Comments and the colour profile: nothing here uses them.
_PNG_TEXT = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")


def png_without_text(data: bytes) -> bytes:
    """A PNG file without its texts and its colour profile, which may unpack to gigabytes.

    A file that ends early, or is not made of parts, is given back from there on as it is.
    """
    kept, start, at = [], 0, 8
    while at + 12 <= len(data):
        name, end = data[at + 4 : at + 8], at + 12 + int.from_bytes(data[at : at + 4], "big")
        if name == b"IEND":
            break
        if name in _PNG_TEXT and end <= len(data):
            kept.append(data[start:at])
            start = end
        at = end
    return b"".join((*kept, data[start:])) if kept else data


def box_ends_early(data: bytes) -> bool:
    """Whether the last box of an ISO base media file announces more than there is."""
    at = 0
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        if size < 8:  # 0: up to the end
            return False
        at += size
    return at != len(data)


def count_pages(data: bytes, decoder: str, limit: int) -> int | None:
    """Pictures in a TIFF or a GIF file, at most ``limit`` + 1; None for other files.

    Where the chain breaks off, the pictures up to there are counted.
    """
    walk = {"TIFF": _tiff_pages, "GIF": _gif_frames}.get(decoder)
    if walk is None:
        return None
    number = 0
    try:
        for number, _ in enumerate(walk(data), 1):
            if number > limit:
                break
    except (IndexError, struct.error):
        pass  # the end of the file
    return number


def _tiff_pages(data: bytes) -> Iterator[int]:
    """Offsets of the directories; a chain that bites its tail ends there."""
    order = "<" if data[:2] == b"II" else ">"
    is_big = data[2:4] in (b"+\0", b"\0+")
    offset_kind, count_kind, entry = ("Q", "Q", 20) if is_big else ("I", "H", 12)
    head = struct.calcsize(order + count_kind)
    (at,) = struct.unpack_from(order + offset_kind, data, 8 if is_big else 4)
    seen = set()
    while at and at not in seen:
        seen.add(at)
        (entries,) = struct.unpack_from(order + count_kind, data, at)
        following = at + head + entry * entries
        if following > len(data):
            return
        yield at
        (at,) = struct.unpack_from(order + offset_kind, data, following)


def _gif_frames(data: bytes) -> Iterator[int]:
    """Offsets of the image blocks."""
    at = 13 + _gif_palette(data[10])
    while data[at] != 0x3B:
        if data[at] == 0x2C:
            yield at
            at += 11 + _gif_palette(data[at + 9])  # and the code size
        elif data[at] == 0x21:
            at += 2
        else:
            at += 1  # padding, which decoders skip
            continue
        while size := data[at]:
            at += 1 + size
        at += 1


def _gif_palette(flags: int) -> int:
    """Bytes of the colour table that a block's flags announce."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0
