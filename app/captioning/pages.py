"""Which pictures of a file with several are captioned."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from k3vl.errors import ConfigError

MAX_PAGES = 4096
"""Pages of one file that are captioned one by one."""
Kind = Literal["first", "all", "clip", "listed"]
_WORDS: dict[str, Kind] = {"first": "first", "all": "all", "clip": "clip"}
_RANGE = re.compile(r"([1-9]\d{0,8})(-([1-9]\d{0,8})?)?")


@dataclass(frozen=True, slots=True)
class Pages:
    """A choice of pages of a document, or of frames of an animated picture.

    Attributes:
        kind: ``first``; ``all``, each by itself; ``clip``, an animated picture as one clip;
            ``listed``, each of ``ranges`` by itself.
        ranges: first and last number from 1, both included; None goes to the end.
    """

    kind: Kind = "first"
    ranges: tuple[tuple[int, int | None], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Pages:
        """Read ``first``, ``all``, ``clip`` or a list such as ``1,3-5,8-``.

        Raises:
            ConfigError: it is none of these.
        """
        if text in _WORDS:
            return cls(_WORDS[text])
        ranges = []
        for item in text.split(","):
            match = _RANGE.fullmatch(item.strip())
            if match is None:
                raise ConfigError(
                    f"--pages {text}: expected first, all, clip, or numbers such as 1,3-5,8-"
                )
            low = int(match[1])
            high = low if match[2] is None else int(match[3]) if match[3] else None
            if high is not None and high < low:
                raise ConfigError(f"--pages {text}: {item.strip()} runs backwards")
            ranges.append((low, high))
        return cls("listed", tuple(ranges))

    def numbers(self, count: int) -> list[int]:
        """Which of ``count`` pages are taken one by one, in order; those that it lacks are not."""
        if self.kind == "all":
            return list(range(1, min(count, MAX_PAGES) + 1))
        chosen: set[int] = set()
        for low, high in self.ranges:
            chosen.update(range(low, min(count if high is None else high, count) + 1))
        return sorted(chosen)[:MAX_PAGES]
