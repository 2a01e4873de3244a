"""``data:`` URLs: base64 text in, a file's bytes out, without another copy of the text.

The text may be a ``str``, as JSON holds it, or a ``bytearray``, as a worker's pipe brings it.
"""

from __future__ import annotations

import binascii
import io
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from k3vl.errors import MediaError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from k3vl.types import MediaKind

_PIECE = 1 << 16
_LONGEST_HEADER = 1 << 12
"""Characters in front of the comma; parameters may name a file."""
_STANDARD_ALPHABET = bytes.maketrans(b"-_", b"+/")
_WHITE_SPACE = b" \t\n\r\v\f"


def check_data_uri(uri: str | bytearray, kind: MediaKind, max_bytes: int) -> None:
    """Refuse a ``data:`` URI that is surely too long, at the cost of one search.

    An escape may stand for every byte, a sixteenth of the text may be line breaks, and the last
    two bytes may be padding.

    Raises:
        MediaError: ``media_too_large``.
    """
    size = (len(uri) - _find(uri, ",") - 1) * 3 // 4
    least = size // 3 if _find(uri, "%") >= 0 else size - size // 16
    if least - 2 > max_bytes:
        raise _uri_too_large(kind, max_bytes)


def _find(uri: str | bytearray, character: str, start: int = 0) -> int:
    if isinstance(uri, str):
        return uri.find(character, start)
    return uri.find(character.encode(), start)


def _uri_too_large(kind: MediaKind, max_bytes: int) -> MediaError:
    return MediaError(
        f"{kind}: the data URI is too long, at most {max_bytes} bytes are accepted",
        code="media_too_large",
    )


def decode_data_uri(uri: str | bytearray, kind: MediaKind, max_bytes: int) -> bytes:
    """Decode a base64 ``data:`` URI, tolerating what clients really send.

    White space, percent-escapes, missing padding, the URL-safe alphabet, parameters and any case
    of ``base64`` are accepted; the declared media type is not believed. The text is decoded piece
    by piece: no second copy of it is made, and what is not valid ends at its first piece.

    Raises:
        MediaError: ``data_uri_invalid``, ``media_too_large``, ``frame_list_unsupported``.
    """
    check_data_uri(uri, kind, max_bytes)
    comma = _find(uri, ",")
    if not 0 <= comma <= _LONGEST_HEADER:
        raise MediaError(
            f"{kind}: data URI without a comma in its first {_LONGEST_HEADER} characters",
            code="data_uri_invalid",
        )
    header = _as_bytes(uri[:comma]).decode().strip().lower()
    parameters = [part.strip() for part in header[len("data:") :].split(";")]
    if "base64" not in parameters[1:] and parameters != ["base64"]:
        raise MediaError(f"{kind}: only base64 data URIs are accepted", code="data_uri_invalid")
    if _find(uri, ",", comma + 1) >= 0:
        raise MediaError(
            f"{kind}: a data URI with several base64 pieces is a list of frames without times; "
            "send a video file, or one picture per part",
            code="frame_list_unsupported",
        )
    plain = _as_the_standard_has_it(uri, comma + 1)
    if plain is not None:
        if len(plain) > max_bytes:
            raise _uri_too_large(kind, max_bytes)
        return plain
    decoded = io.BytesIO()  # hands out what it holds without a copy
    try:
        for piece in _base64_quads(_unescaped(uri, comma + 1)):
            decoded.write(binascii.a2b_base64(piece, strict_mode=True))
            if decoded.tell() > max_bytes:
                raise _uri_too_large(kind, max_bytes)
    except ValueError:
        raise MediaError(
            f"{kind}: the data URI is not valid base64", code="data_uri_invalid"
        ) from None
    return decoded.getvalue()


def _as_the_standard_has_it(uri: str | bytearray, start: int) -> bytes | None:
    """Most texts, at half the time; None: there is something to tolerate, or to refuse."""
    if isinstance(uri, str):  # of which a piece is a copy
        return None
    with memoryview(uri) as view, view[start:] as text:
        try:
            return binascii.a2b_base64(text, strict_mode=True)
        except ValueError:
            return None


def _as_bytes(text: str | bytearray) -> bytes:
    """What is not ASCII becomes what no URI may hold."""
    if isinstance(text, str):
        return text.encode("ascii", "replace")
    return bytes(text) if text.isascii() else b"?"


def _unescaped(uri: str | bytearray, start: int) -> Iterator[bytes]:
    """The text from ``start`` on, in pieces, without percent-escapes."""
    cut = b""
    for at in range(start, len(uri), _PIECE):
        piece = cut + _as_bytes(uri[at : at + _PIECE])
        last = piece.find(b"%", max(len(piece) - 2, 0))
        piece, cut = (piece, b"") if last < 0 else (piece[:last], piece[last:])
        yield unquote_to_bytes(piece) if b"%" in piece else piece
    yield cut


def _base64_quads(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Base64 text in whole groups of four characters, in the standard alphabet, padded.

    Raises:
        ValueError: something follows the padding.
    """
    held, is_over = b"", False
    for piece in pieces:
        text = piece.translate(_STANDARD_ALPHABET, _WHITE_SPACE)
        unpadded = text.rstrip(b"=")
        if unpadded and is_over:
            raise ValueError
        is_over = is_over or len(unpadded) < len(text)
        held += unpadded
        whole = len(held) // 4 * 4
        yield held[:whole]
        held = held[whole:]
    yield held + b"=" * (-len(held) % 4)
