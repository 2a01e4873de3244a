"""Printed text: which words and codes are printed, and their letters as strips of alpha.

A tenth of the words and the fonts named in :data:`HELD_FONTS` are never trained on.
"""

from __future__ import annotations

import hashlib
import random
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from k3vl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

STRIP_HEIGHT, STRIP_WIDTH = 48, 256
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
HELD_FONTS = (
    "DejaVuSerifCondensed-Italic",
    "ComicNeue-Regular",
    "EBGaramond12-Regular",
    "Humor-Sans",
)
_SYSTEM_FONTS = Path("/usr/share/fonts/truetype/dejavu")
_POINTS = 42


def word_list(names: Iterable[str], *, unseen: bool) -> list[str]:
    """Words of 3 to 8 letters out of the names, in capitals; a tenth of them is unseen."""
    words = {w.upper() for n in names for w in re.findall("[a-z]+", n) if 3 <= len(w) <= 8}
    return [word for word in sorted(words) if _is_unseen(word) == unseen]


def _is_unseen(word: str) -> bool:
    digest = hashlib.md5(word.encode(), usedforsecurity=False).hexdigest()
    return int(digest, 16) % 10 == 0


def draw_text(rng: random.Random, words: Sequence[str], *, letters: float = 0.25) -> str:
    """A word, a code of letters and digits, or a string of letters only.

    Args:
        rng: source of chance.
        words: what to choose words from.
        letters: share of random letter strings, which teach letters that few words hold.
    """
    kind = rng.random()
    if kind < letters:
        return "".join(rng.choice(ALPHABET[:26]) for _ in range(rng.randint(2, 8)))
    if kind < 0.65:
        return rng.choice(words)
    return "".join(rng.choice(ALPHABET) for _ in range(rng.randint(2, 6)))


def draw_number(rng: random.Random) -> str:
    """One to six digits; the first of several is not zero."""
    length = rng.choice((1, 1, 2, 2, 3, 3, 4, 5, 6))
    return str(rng.randrange(10 ** (length - 1) if length > 1 else 0, 10**length))


def find_fonts(folder: Path, *, held: bool = False) -> tuple[str, ...]:
    """Font files in ``folder/fonts``, else the system's DejaVu; ``held`` gives the unseen ones.

    Raises:
        ConfigError: there is none.
    """
    for place in (folder / "fonts", _SYSTEM_FONTS):
        files = sorted([*place.glob("*.ttf"), *place.glob("*.otf")])
        found = [p for p in files if (p.stem in HELD_FONTS) == held]
        if found:
            return tuple(str(path) for path in found)
    raise ConfigError(f"no {'held-out ' if held else ''}fonts in {folder / 'fonts'}")


class Printer:
    """Renders strings in random fonts of a list.

    Args:
        fonts: paths of TrueType files.
        seed: which font comes when.
    """

    def __init__(self, fonts: Sequence[str], seed: int = 0) -> None:
        self._fonts = [ImageFont.truetype(path, _POINTS) for path in fonts]
        self._rng = random.Random(seed)  # noqa: S311 - fonts, not secrets
        self._draw = lru_cache(12_000)(self._render)

    def strip(self, text: str) -> NDArray[np.uint8]:
        """[48, 256] alpha of ``text`` stretched over the whole strip."""
        return self._draw(text, self._rng.randrange(len(self._fonts)))

    def strips(self, texts: Sequence[str | None]) -> NDArray[np.uint8]:
        """[n, 48, 256]; zeros where there is no text."""
        out = np.zeros((len(texts), STRIP_HEIGHT, STRIP_WIDTH), np.uint8)
        for row, text in zip(out, texts, strict=True):
            if text:
                row[:] = self.strip(text)
        return out

    def _render(self, text: str, font: int) -> NDArray[np.uint8]:
        face = self._fonts[font]
        left, top, right, bottom = (int(v) for v in face.getbbox(text))
        image = Image.new("L", (right - left + 6, bottom - top + 8), 0)
        ImageDraw.Draw(image).text((3 - left, 4 - top), text, fill=255, font=face)
        return np.asarray(image.resize((STRIP_WIDTH, STRIP_HEIGHT), Image.Resampling.BILINEAR))
