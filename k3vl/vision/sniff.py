"""What a file is, by its first bytes. Names, extensions and declared media types are not believed.

Only recognition lives here; nothing is decoded. ``container`` of a video is the one demuxer that
may open it: a playlist or a script that refers to other files matches nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

HEAD_BYTES = 4096
"""How much of a file :func:`sniff` wants to see."""

Family = Literal["image", "video", "audio", "other"]


@dataclass(frozen=True, slots=True)
class Sniffed:
    """A recognised kind of file.

    Attributes:
        family: what it could be used as.
        name: for messages, e.g. ``JPEG`` or ``an HTML page``.
        decoder: Pillow's format name, or FFmpeg's demuxer name; empty where nothing opens it.
        code: error code where it cannot be used as a picture, e.g. ``svg_unsupported``.
    """

    family: Family
    name: str
    decoder: str = ""
    code: str = "not_an_image"


_UNSUPPORTED = "image_unsupported"
_MAGIC: tuple[tuple[bytes, Sniffed], ...] = (
    (b"\xff\xd8\xff", Sniffed("image", "JPEG", "JPEG")),
    (b"\x89PNG\r\n\x1a\n", Sniffed("image", "PNG", "PNG")),
    (b"GIF87a", Sniffed("image", "GIF", "GIF")),
    (b"GIF89a", Sniffed("image", "GIF", "GIF")),
    (b"II*\0", Sniffed("image", "TIFF", "TIFF")),
    (b"MM\0*", Sniffed("image", "TIFF", "TIFF")),
    (b"II+\0", Sniffed("image", "TIFF", "TIFF")),
    (b"MM\0+", Sniffed("image", "TIFF", "TIFF")),
    (b"\x1aE\xdf\xa3", Sniffed("video", "Matroska/WebM", "matroska")),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", Sniffed("video", "ASF/WMV", "asf")),
    (b"FLV\x01", Sniffed("video", "FLV", "flv")),
    (b"OggS", Sniffed("video", "Ogg", "ogg")),
    (b"\0\0\x01\xba", Sniffed("video", "MPEG program stream", "mpeg")),
    (b"\0\0\x01\xb3", Sniffed("video", "MPEG video", "mpegvideo")),
    (b"\0\0\0\x01\x67", Sniffed("video", "H.264", "h264")),
    (b"\0\0\0\x01\x09", Sniffed("video", "H.264", "h264")),
    (b"\0\0\0\x01\x40", Sniffed("video", "HEVC", "hevc")),
    (b"DKIF", Sniffed("video", "IVF", "ivf")),
    (b"YUV4MPEG2 ", Sniffed("video", "YUV4MPEG2", "yuv4mpegpipe")),
    (b"\x06\x0e\x2b\x34", Sniffed("video", "MXF", "mxf")),
    (b"ID3", Sniffed("audio", "MP3")),
    (b"\xff\xfb", Sniffed("audio", "MP3")),
    (b"\xff\xf3", Sniffed("audio", "MP3")),
    (b"\xff\xf1", Sniffed("audio", "AAC")),
    (b"\xff\xf9", Sniffed("audio", "AAC")),
    (b"fLaC", Sniffed("audio", "FLAC")),
    (b"%PDF-", Sniffed("other", "a PDF document", code="pdf_unsupported")),
    (b"%!PS", Sniffed("other", "PostScript", code=_UNSUPPORTED)),
    (b"\0\0\x01\0", Sniffed("other", "a Windows icon", code=_UNSUPPORTED)),
    (b"8BPS", Sniffed("other", "a Photoshop file", code=_UNSUPPORTED)),
    (b"\xff\x0a", Sniffed("other", "JPEG XL", code=_UNSUPPORTED)),
    (b"\0\0\0\x0cJXL ", Sniffed("other", "JPEG XL", code=_UNSUPPORTED)),
    (b"\0\0\0\x0cjP  ", Sniffed("other", "JPEG 2000", code=_UNSUPPORTED)),
    (b"\xff\x4f\xff\x51", Sniffed("other", "JPEG 2000", code=_UNSUPPORTED)),
    (b"DDS ", Sniffed("other", "DDS", code=_UNSUPPORTED)),
    (b"PK\x03\x04", Sniffed("other", "a ZIP archive")),
    (b"\x1f\x8b", Sniffed("other", "gzip data")),
    (b"7z\xbc\xaf", Sniffed("other", "a 7z archive")),
    (b"version https://git-lfs", Sniffed("other", "a Git LFS pointer, not the file itself")),
)
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
# Each byte can be matched in one way only: the time stays linear.
_PNM = re.compile(rb"P[1-6]\s*(?:#[^\r\n]*[\r\n]\s*)*\d+\s")
_MP4_ATOMS = (b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_UNKNOWN = Sniffed("other", "no known picture or video format")


def sniff(head: bytes) -> Sniffed:
    """Recognise a file by its first :data:`HEAD_BYTES` bytes (fewer when the file is shorter)."""
    if head[:4] == b"RIFF":
        return _riff(head)
    if head[4:8] == b"ftyp":
        return _ftyp(head)
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    if head[4:8] in _MP4_ATOMS:
        return Sniffed("video", "QuickTime", "mov")
    if _is_transport_stream(head):
        return Sniffed("video", "MPEG transport stream", "mpegts")
    if head[:2] == b"BM" and len(head) >= 14 and head[6:10] == b"\0\0\0\0":
        return Sniffed("image", "BMP", "BMP")
    if _PNM.match(head):
        return Sniffed("image", "PPM/PGM", "PPM")
    return _text(head)


def webp_canvas(head: bytes) -> tuple[int, int] | None:
    """Width and height of a WebP file from its header.

    Pillow allocates the whole canvas while opening; the size must be known before that.
    """
    chunk, body = head[12:16], head[20:30]
    if len(body) < 10:
        return None
    if chunk == b"VP8X":
        return int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
    if chunk == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = int.from_bytes(body[6:8], "little"), int.from_bytes(body[8:10], "little")
    return width & 0x3FFF, height & 0x3FFF


def _riff(head: bytes) -> Sniffed:
    """RIFF holds WebP, AVI and WAV."""
    form = head[8:12]
    if form == b"WEBP":
        return Sniffed("image", "WebP", "WEBP")
    if form == b"AVI ":
        return Sniffed("video", "AVI", "avi")
    if form == b"WAVE":
        return Sniffed("audio", "WAV")
    return _UNKNOWN


def _ftyp(head: bytes) -> Sniffed:
    """ISO base media: the major and compatible brands tell HEIC and AVIF from MP4."""
    end = min(int.from_bytes(head[:4], "big"), len(head))
    brands = [head[8:12], *(head[i : i + 4] for i in range(16, end - 3, 4))]
    if b"avif" in brands or b"avis" in brands:
        return Sniffed("image", "AVIF", "AVIF")
    if brands[0] in _HEIC_BRANDS:
        return Sniffed("other", "HEIC/HEIF", code="heic_unsupported")
    return Sniffed("video", "MP4/QuickTime", "mov")


def _is_transport_stream(head: bytes) -> bool:
    """Sync bytes every 188 bytes, or every 192 with a 4-byte time in front (Blu-ray).

    A recording may have been joined inside a packet; without a whole packet in front, more marks
    are asked for.
    """
    for start, step in ((0, 188), (4, 192)):
        marks = head[start::step]
        if len(marks) >= 3 and set(marks[:5]) == {0x47}:
            return True
    return any(
        len(marks) >= 16 and set(marks) == {0x47}
        for marks in (head[start::188] for start in range(1, 188))
    )


def _text(head: bytes) -> Sniffed:
    """Pages, documents and plain text that were saved under a picture's name."""
    text = head.decode("utf-8", errors="ignore").lstrip("\ufeff \t\r\n")
    lower = text[:1024].lower()
    # A cut multi-byte character at the end is lost above; more loss means that it is not text.
    if len(text.encode()) < 0.9 * len(head.strip()) or "\0" in text:
        return _UNKNOWN
    if "<svg" in lower and lower.startswith("<"):
        return Sniffed("other", "SVG, which is a drawing program", code="svg_unsupported")
    if lower.startswith(("<!doctype html", "<html", "<head", "<body")):
        return Sniffed("other", "an HTML page")
    if lower.startswith("<"):
        return Sniffed("other", "HTML or XML")
    if lower.startswith(("{", "[")) and _is_json_start(text):
        return Sniffed("other", "JSON")
    if text and all(c.isprintable() or c in "\r\n\t\f" for c in text):
        return Sniffed("other", "plain text")
    return _UNKNOWN


def _is_json_start(text: str) -> bool:
    """Whether the text is JSON, or would be if it had not been cut."""
    try:
        json.loads(text)
    except json.JSONDecodeError as exc:
        return exc.pos >= len(text.rstrip()) - 8 or '"' in text[:64]
    except RecursionError:
        return False
    return True
