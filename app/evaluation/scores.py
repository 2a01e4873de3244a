"""How answers are scored, and how sure a share is."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from k3vl.demo.grammar import NUMBERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b ?")
_VERBS = {"are": "is", "move": "moves", "appear": "appears", "disappear": "disappears"}
_BETWEEN = re.compile(r",\s*(?:and\s+)?|\s+and\s+")
_Z = 1.96  # 95 per cent
_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Said:
    """A reply, as far as it is scored: its text, and its calls as ``{"name", "arguments"}``."""

    text: str
    calls: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """One answer's share of a row: ``got`` of ``of``; the row's value is sum over sum."""

    got: float
    of: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A row's figure with its 95 per cent interval.

    ``method`` is ``Wilson`` for shares of right answers, else ``bootstrap`` over the answers.
    """

    value: float
    low: float
    high: float
    n: int
    method: str


# ---------------------------------------------------------------------- one answer


def _exact(said: Said, reference: Any) -> Score:
    return Score(said.text.strip() == str(reference).strip())


def without_articles(text: str) -> str:
    """The text in lower case without articles, number of the verb and full stop."""
    words = _ARTICLES.sub("", text.lower().strip().rstrip(".")).split()
    return " ".join(_VERBS.get(word, word) for word in words)


def _loose(said: Said, reference: Any) -> Score:
    return Score(without_articles(said.text) == without_articles(str(reference)))


def _contains(said: Said, reference: Any) -> Score:
    return Score(str(reference).casefold() in said.text.casefold())


def things(text: str) -> Counter[str]:
    """The things that a sentence lists: "Two foxes, a kite and a bus." -> foxes 2, kite, bus.

    A JSON list counts as its entries.
    """
    try:
        entries = json.loads(text)
    except ValueError:
        entries = _BETWEEN.split(text.lower().strip().rstrip("."))
    found: Counter[str] = Counter()
    for entry in entries if isinstance(entries, list) else [entries]:
        words = _ARTICLES.sub("", str(entry).lower().strip()).split()
        if words and words[0] in NUMBERS[1:]:
            found[" ".join(words[1:])] += NUMBERS.index(words[0])
        elif words:
            found[" ".join(words)] += 1
    return found


def _f1(said: Said, reference: Any) -> Score:
    told = things(said.text)
    true = things(reference if isinstance(reference, str) else json.dumps(reference))
    return Score(2 * (told & true).total(), told.total() + true.total())


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Insertions, deletions and replacements from ``a`` to ``b``."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        corner, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]


def _cer(said: Said, reference: Any) -> Score:
    return Score(edit_distance(said.text.strip(), str(reference)), len(str(reference)))


def _json(said: Said, reference: Any) -> Score:
    try:
        return Score(json.loads(said.text) == reference)
    except ValueError:
        return Score(False)


def _tool_call(said: Said, reference: Any) -> Score:
    wanted = reference if isinstance(reference, list) else [reference]
    return Score(list(map(dict, said.calls)) == wanted)


METRICS: Mapping[str, Callable[[Said, Any], Score]] = {
    "exact": _exact,
    "balanced": _exact,
    "loose": _loose,
    "contains": _contains,
    "f1": _f1,
    "cer": _cer,
    "json": _json,
    "tool_call": _tool_call,
}
"""Whole answer; the same averaged over the right answers, however often each occurs; without
articles, case and full stop; somewhere in the reply; F1 over the listed things; wrong characters
per right one; equal as JSON; the calls made, with their arguments."""

LESS_IS_BETTER = frozenset({"cer"})


def score(metric: str, said: Said, answers: Sequence[Any]) -> Score:
    """The best score that any right answer gives."""
    scores = [METRICS[metric](said, answer) for answer in answers]
    best = min if metric in LESS_IS_BETTER else max
    return best(scores, key=lambda s: s.got / s.of if s.of else 0.0)


# ---------------------------------------------------------------------- many answers


def wilson(hits: float, total: int) -> tuple[float, float]:
    """Wilson's 95 per cent interval of ``hits`` in ``total``."""
    if not total:
        return (math.nan, math.nan)
    p, z2 = hits / total, _Z**2
    middle = (p + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z * math.sqrt(p * (1 - p) / total + z2 / (4 * total * total)) / (1 + z2 / total)
    # At 0 and 1 the ends are exact, up to rounding.
    return (max(0.0, middle - half), min(1.0, middle + half))


def summarise(metric: str, scores: Sequence[Score], groups: Sequence[str]) -> Value:
    """The figure of a row.

    Args:
        metric: which one was scored.
        scores: one an answer.
        groups: the right answers, which ``balanced`` averages over.
    """
    n = len(scores)
    if metric not in ("balanced", "f1", "cer"):
        hits = sum(s.got for s in scores)
        low, high = wilson(hits, n)
        return Value(value=hits / n if n else math.nan, low=low, high=high, n=n, method="Wilson")
    by_group: defaultdict[str, list[Score]] = defaultdict(list)
    for group, one in zip(groups, scores, strict=True):
        by_group[group if metric == "balanced" else ""].append(one)
    pairs = [np.array([(s.got, s.of) for s in group]) for group in by_group.values()]
    random = np.random.default_rng(0)
    drawn = [
        _mean_ratio([pair[random.integers(len(pair), size=len(pair))] for pair in pairs])
        for _ in range(_RESAMPLES)
    ]
    low, high = (float(edge) for edge in np.percentile(drawn, (2.5, 97.5)))
    value = _mean_ratio(pairs)
    if value == 1 and metric not in LESS_IS_BETTER:  # nothing varies; n still bounds it
        return Value(value=value, low=wilson(n, n)[0], high=1.0, n=n, method="Wilson")
    return Value(value=value, low=low, high=high, n=n, method="bootstrap")


def _mean_ratio(pairs: Sequence[np.ndarray]) -> float:
    sums = [pair.sum(0) for pair in pairs]
    return float(np.mean([got / of if of else 0.0 for got, of in sums]))
