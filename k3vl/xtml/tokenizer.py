"""Segments <-> token ids behind one small interface, and the incremental way back to text.

Only a segment that the template wrote may yield control ids; ``encode`` proves it on every call.
The two vocabularies live in ``tiktoken_model`` and ``tokenizer_json``; their libraries are imported
when a tokenizer is loaded, not before.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

from k3vl.errors import ConfigError
from k3vl.xtml import tokens
from k3vl.xtml.tokens import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from k3vl.types import MediaLayout
    from k3vl.xtml.tokens import Segment


class Tokenizer(Protocol):
    """A vocabulary. Instances are immutable and may be shared between threads."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Name -> id of every special token."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a generated message; the first is ``<|end_of_msg|>``."""
        ...

    def encode_segment(self, text: str, allow_special: bool) -> list[int]:
        """Tokenise one segment; without ``allow_special`` markers are ordinary characters."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id: a marker's name for a special one, nothing for an unused one."""
        ...

    def is_control(self, token_id: int) -> bool:
        """The id is a special token."""
        ...


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load a checkpoint's vocabulary: ``tiktoken.model`` or else ``tokenizer.json``.

    Raises:
        ConfigError: neither file is there, or the one that is there cannot be used.
    """
    if (path := directory / "tiktoken.model").is_file():
        from k3vl.xtml.tiktoken_model import load_tiktoken_model

        return load_tiktoken_model(path)
    if (path := directory / "tokenizer.json").is_file():
        from k3vl.xtml.tokenizer_json import load_tokenizer_json

        return load_tokenizer_json(path)
    raise ConfigError(f"{directory}: neither tiktoken.model nor tokenizer.json is there")


# ---------------------------------------------------------------------- there


def encode(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Tokenise every segment on its own and join the ids.

    The number of control ids is checked against the markers that the template wrote: a client's
    text has yielded none, or an assertion fails.
    """
    ids: list[int] = []
    for segment in segments:
        new = tokenizer.encode_segment(segment.text, segment.allow_special)
        assert_control_count(segment, new, tokenizer)
        ids += new
    return ids


def assert_control_count(segment: Segment, ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Check that a segment gave as many control ids as it holds markers (none, if untrusted)."""
    if not segment.allow_special:
        assert not any(map(tokenizer.is_control, ids)), "a control id in untrusted text"
        return
    if segment.text in tokens.CONTROL_MARKERS:  # most are nothing else
        assert list(ids) == [tokenizer.special_ids[segment.text]], "a marker is one control id"
        return
    expected = sum(map(segment.text.count, tokens.CONTROL_MARKERS))
    markers = {tokenizer.special_ids[marker] for marker in tokens.CONTROL_MARKERS}
    found = sum(map(markers.__contains__, ids))
    assert found == expected, f"{found} control ids in a segment with {expected} markers"


def media_spans(
    token_ids: Sequence[int], pad_id: int, media: Sequence[MediaLayout]
) -> tuple[tuple[int, int], ...]:
    """Where the features of each media group go.

    Args:
        token_ids: an encoded prompt.
        pad_id: the id of ``<|media_pad|>``.
        media: the layouts that the prompt was rendered with.

    Returns:
        (offset, length) of every run of pads, one per :class:`MediaGroup`, in order.
    """
    lengths = [group.num_tokens for layout in media for group in layout.groups]
    spans: list[tuple[int, int]] = []
    offset = 0
    for length in lengths:
        offset = _index(token_ids, pad_id, offset)
        spans.append((offset, length))
        offset += length
    num_pads = token_ids.count(pad_id)
    assert num_pads == sum(lengths), f"{num_pads} media pads, {sum(lengths)} were laid out"
    for start, length in spans:
        assert token_ids[start : start + length].count(pad_id) == length
    return tuple(spans)


def _index(token_ids: Sequence[int], pad_id: int, start: int) -> int:
    try:
        return token_ids.index(pad_id, start)
    except ValueError:
        raise AssertionError(f"no media pad after position {start}") from None


# ---------------------------------------------------------------------- and back


class Detokenizer:
    """Turns generated ids into pieces; bytes of an unfinished character wait for the rest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> list[Piece]:
        """The pieces that one more id completes: none, text, or text and a control piece."""
        data = self._tokenizer.token_bytes(token_id)
        if not self._tokenizer.is_control(token_id):
            text = self._decoder.decode(data)
            return [Piece(text, control=False)] if text else []
        return [*self.flush(), Piece(data.decode("utf-8"), control=True)]

    def feed_bytes(self, data: bytes) -> list[Piece]:
        """The text that the bytes of ordinary tokens complete."""
        text = self._decoder.decode(data)
        return [Piece(text, control=False)] if text else []

    def flush(self) -> list[Piece]:
        """What is left at the end: an unfinished character becomes the replacement character."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return [Piece(text, control=False)] if text else []


def decode(token_ids: Iterable[int], tokenizer: Tokenizer) -> list[Piece]:
    """All pieces of a finished sequence, text between two control ids in one piece."""
    detokenizer = Detokenizer(tokenizer)
    pieces: list[Piece] = []
    texts: list[str] = []
    fed = [piece for token_id in token_ids for piece in detokenizer.feed(token_id)]
    for piece in [*fed, *detokenizer.flush()]:
        if not piece.control:
            texts.append(piece.text)
            continue
        if texts:
            pieces.append(Piece("".join(texts), control=False))
            texts = []
        pieces.append(piece)
    if texts:
        pieces.append(Piece("".join(texts), control=False))
    return pieces
