"""What the captioner works on: a source as it was listed, and the parts of it that get captions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from k3vl.errors import MediaError

Key: TypeAlias = bytes
"""16 bytes of SHA-256 that stand for an item and a prompt; sets of them stay small."""


@dataclass(frozen=True, slots=True)
class FsspecFile:
    """A file behind a URL that fsspec opens."""

    url: str


Media: TypeAlias = "Path | bytes | str | FsspecFile"
"""Where the bytes are: a local file, the bytes themselves, a URL, or something fsspec opens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One listed input.

    Attributes:
        id: names the source in every output and in the journal.
        path: what a person would call it.
        media: where its bytes are; None where listing failed.
        beside: the path that sidecars are named after; None where there is no such place.
        columns: values for prompt templates.
        error: why it cannot be used, known from listing.
        repeats: a second listing of the same id is the same thing, not a mistake.
    """

    id: str
    path: str
    media: Media | None = None
    beside: Path | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    error: MediaError | None = None
    repeats: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a source.

    Attributes:
        page: number of the page or frame from 1; None is the whole.
        start, end: seconds of a clip; None is the whole.
        animated: take an animated picture as a clip.
    """

    page: int | None = None
    start: float | None = None
    end: float | None = None
    animated: bool = False

    @property
    def suffix(self) -> str:
        """What it adds to the source's id."""
        if self.page is not None:
            return f"#page={self.page}"
        if self.start is not None and self.end is not None:
            return f"#t={self.start:g},{self.end:g}"
        return ""

    @property
    def name(self) -> str:
        """What it adds to a file's name."""
        if self.page is not None:
            return f".p{self.page:03d}"
        if self.start is not None:
            return f".t{self.start:08.2f}"
        return ""


WHOLE = Piece()


@dataclass(frozen=True, slots=True)
class Item:
    """What gets one caption for each prompt."""

    source: Source
    piece: Piece = WHOLE

    @property
    def id(self) -> str:
        """Unique in the run."""
        return self.source.id + self.piece.suffix


def make_key(item_id: str, prompt_id: str) -> Key:
    """The journal's key of a caption."""
    data = f"{item_id}\0{prompt_id}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(data).digest()[:16]
