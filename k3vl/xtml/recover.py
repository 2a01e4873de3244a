"""Token ids -> the segments that they were encoded from, as far as ids can tell.

Each run of text between two control ids is cut where its ids demand it: neighbouring text parts and
a clip's timestamp were encoded apart, which shows only where joining them gives other ids.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from k3vl.errors import TemplateError
from k3vl.xtml import tokens
from k3vl.xtml.tokens import Segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3vl.xtml.tokenizer import Tokenizer

_TIMESTAMP_ENDS: Final = (
    re.compile(r"\d\d:\d\d:\d\d\.\d{3}\Z"),
    re.compile(r"\d\d:\d\d\.\d{3}\Z"),
    re.compile(r"\d\d:\d\d\Z"),
)

_MAX_PARTS: Final = 256
"""More parts than that between two control ids are one text spelled in odd tokens."""

_MAX_PART_TOKENS: Final = 64
"""How far behind the first surprising id the end of a part is looked for."""


def recover_segments(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[Segment]:
    """Cut ids into trusted and plain segments that encode to the same ids.

    Text that no plain segments encode to (a model need not use the shortest tokens) comes back as
    one segment; whoever compares will see.

    Raises:
        TemplateError: text between two control ids that is not UTF-8; with the position.
    """
    segments: list[Segment] = []
    runs = _runs(token_ids, tokenizer)
    opened_by = ""
    block = ""  # a media block is one segment, from its first marker to its last
    for number, (start, run, ended_by) in enumerate(runs):
        text = _text(run, tokenizer)
        if text is None:
            raise TemplateError(
                f"transcript: ids {start} to {start + len(run)} are not UTF-8 text",
                code="malformed_transcript",
            )
        is_header = opened_by in (tokens.OPEN, tokens.CLOSE, tokens.MEDIA_BEGIN)
        before_clip = (
            ended_by == tokens.MEDIA_BEGIN
            and number + 1 < len(runs)
            and _text(runs[number + 1][1], tokenizer) == "video"
        )
        if is_header:
            parts = [text]
        elif before_clip:
            parts = _parts_and_timestamp(run, text, tokenizer)
        else:
            parts = _parts(run, text, tokenizer)
        opened_by = ended_by
        if block:
            block += text + ended_by
        else:
            segments += [Segment(part, allow_special=False) for part in parts if part]
            block = ended_by
        if block and (ended_by == tokens.MEDIA_END or not block.startswith(tokens.MEDIA_BEGIN)):
            segments.append(Segment(block, allow_special=True))
            block = ""
    return [*segments, Segment(block, allow_special=True)] if block else segments


def _runs(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[tuple[int, Sequence[int], str]]:
    """Ordinary ids between control ids: where they start, they, and the control that ends them."""
    runs: list[tuple[int, Sequence[int], str]] = []
    start = 0
    for position, token_id in enumerate(token_ids):
        if tokenizer.is_control(token_id):
            marker = tokenizer.token_bytes(token_id).decode()
            runs.append((start, token_ids[start:position], marker))
            start = position + 1
    return [*runs, (start, token_ids[start:], "")]


def _text(run: Sequence[int], tokenizer: Tokenizer) -> str | None:
    try:
        return b"".join(map(tokenizer.token_bytes, run)).decode("utf-8")
    except UnicodeDecodeError:
        return None


def _parts_and_timestamp(run: Sequence[int], text: str, tokenizer: Tokenizer) -> list[str]:
    """The same, with the timestamp of the clip that follows as the last one."""
    for pattern in _TIMESTAMP_ENDS:
        if (match := pattern.search(text, max(0, len(text) - 16))) is None:
            continue
        ids = tokenizer.encode_segment(match[0], allow_special=False)
        if list(run[len(run) - len(ids) :]) == ids:
            rest = run[: len(run) - len(ids)]
            return [*_parts(rest, text[: match.start()], tokenizer), match[0]]
    return _parts(run, text, tokenizer)


def _parts(run: Sequence[int], text: str, tokenizer: Tokenizer) -> list[str]:
    """The texts that were encoded apart."""
    parts: list[str] = []
    while run:
        ids = tokenizer.encode_segment(text, allow_special=False)
        is_whole = ids == list(run) or len(parts) == _MAX_PARTS
        size = None if is_whole else _first_part(run, ids, tokenizer)
        if size is None:
            return [*parts, text]
        part = _text(run[:size], tokenizer) or ""
        parts.append(part)
        run, text = run[size:], text[len(part) :]
    return parts


def _first_part(run: Sequence[int], joined: Sequence[int], tokenizer: Tokenizer) -> int | None:
    """How many ids belong to the first part, given what the whole would have been encoded to."""
    pairs = zip(run, joined, strict=False)
    same: int = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(run), len(joined)))
    nearby = range(same + 1, min(len(run), same + _MAX_PART_TOKENS))
    earlier = range(min(same, len(run) - 1), max(0, same - _MAX_PART_TOKENS), -1)
    sizes: list[int] = [*nearby, *earlier]
    for size in sizes:
        part = _text(run[:size], tokenizer)
        if part and tokenizer.encode_segment(part, allow_special=False) == list(run[:size]):
            return size
    return None
