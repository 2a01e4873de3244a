"""How answers are scored: exact, without articles, names in captions, letters, intervals."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3vl.demo.grammar import NUMBERS, loose, plural, with_article

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b ?")
_VERBS = {"are": "is", "move": "moves", "appear": "appears", "disappear": "disappears"}
_Z = 1.96  # 95 per cent


@dataclass(frozen=True, slots=True)
class Share:
    """``hits`` of ``total`` with Wilson's 95 per cent interval."""

    hits: int
    total: int

    @property
    def value(self) -> float:
        """The share itself."""
        return self.hits / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end."""
        n = self.total
        if not n:
            return (math.nan, math.nan)
        p, z2 = self.value, _Z**2
        middle = (p + z2 / (2 * n)) / (1 + z2 / n)
        half = _Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
        # At 0 and 1 the ends are exact, up to rounding.
        return (max(0.0, middle - half), min(1.0, middle + half))


def without_articles(answer: str) -> str:
    """The answer in lower case without articles, number of the verb and full stop."""
    words = _ARTICLES.sub("", answer.lower().rstrip(".")).split()
    return " ".join(_VERBS.get(word, word) for word in words)


def same_family(answer: str, reference: str) -> bool:
    """Whether two names differ at most in what a small drawing cannot show."""
    return loose(without_articles(answer)) == loose(without_articles(reference))


class CaptionReader:
    """Reads the things out of a caption.

    Args:
        names: the names of the closed world.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._phrases: dict[str, tuple[str, int]] = {}
        for name in names:
            for phrase in (with_article(name), f"a {name}", f"an {name}", name):
                self._phrases.setdefault(phrase, (name, 1))
            for count in range(2, len(NUMBERS)):
                for many in (plural(name), f"{name}s"):
                    self._phrases.setdefault(f"{NUMBERS[count]} {many}", (name, count))
        longest_first = sorted(self._phrases, key=len, reverse=True)
        inside = "|".join(re.escape(phrase) for phrase in longest_first)
        self._pattern = re.compile(rf"(?<![\w'-])(?:{inside})(?![\w'-])")

    def read(self, caption: str) -> Counter[str]:
        """Multiset of names."""
        found: Counter[str] = Counter()
        for phrase in self._pattern.findall(caption.lower()):
            name, count = self._phrases[phrase]
            found[name] += count
        return found


def f1(pairs: Iterable[tuple[Counter[str], Counter[str]]]) -> float:
    """Micro F1 over (true, told) multisets."""
    hits = told = true = 0
    for reference, answer in pairs:
        hits += sum((reference & answer).values())
        true += sum(reference.values())
        told += sum(answer.values())
    return 2 * hits / (true + told) if true + told else math.nan


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Insertions, deletions and replacements from ``a`` to ``b``."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        corner, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]


def character_errors(pairs: Sequence[tuple[str, str]]) -> float:
    """Edit distance over all (answer, reference) pairs per reference character."""
    letters = sum(len(reference) for _, reference in pairs)
    return sum(edit_distance(a, r) for a, r in pairs) / letters if letters else math.nan
