"""How much an answer's confidence tells: who keeps quiet at which threshold, and who is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Judged:
    """One answer: its confidence, and whether it is right."""

    confidence: float
    right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is left above a threshold.

    Attributes:
        answered: share of all questions.
        right: share of the answered ones that are right; 0 where none is.
        right_kept: share of the right answers that are given.
        wrong_withheld: share of the wrong answers that are not.
    """

    answered: float
    right: float
    right_kept: float
    wrong_withheld: float


def keep(answers: Sequence[Judged], threshold: float) -> Kept:
    """Withhold answers below a threshold."""
    given = [a for a in answers if a.confidence >= threshold]
    right = sum(a.right for a in answers)
    good = sum(a.right for a in given)
    wrong = len(answers) - right
    return Kept(
        answered=len(given) / len(answers),
        right=good / len(given) if given else 0.0,
        right_kept=good / right if right else 1.0,
        wrong_withheld=1 - (len(given) - good) / wrong if wrong else 1.0,
    )


def threshold_keeping(answers: Sequence[Judged], share: float) -> float:
    """The highest threshold, in hundredths, that keeps at least this share of right answers."""
    right = np.array([a.confidence for a in answers if a.right])
    if not len(right):
        return 0.0
    return float(np.floor(np.quantile(right, 1 - share, method="lower") * 100) / 100)


def separation(answers: Sequence[Judged]) -> float | None:
    """Area under the ROC curve: how often a right answer is surer than a wrong one.

    0.5 where the confidence says nothing; None where all answers are right, or wrong.
    """
    order = sorted(answers, key=lambda a: a.confidence)
    right = sum(a.right for a in order)
    wrong = len(order) - right
    if not right or not wrong:
        return None
    ranks = _ranks(np.array([a.confidence for a in order]))
    summed = float(ranks[[a.right for a in order]].sum())
    return (summed - right * (right + 1) / 2) / (right * wrong)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1 of sorted values; equal values share their mean rank."""
    _, first, inverse, counts = np.unique(
        values, return_index=True, return_inverse=True, return_counts=True
    )
    return (first + (counts + 1) / 2)[inverse]
