"""What a scheduler decides for a step, and what it counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3vl.lm.features import Feature
    from k3vl.lm.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step's plan.

    Attributes:
        admitted: sequences that enter with this step; their slots are to be filled.
        tokens: (sequence, token count), in order of urgency.
        encode: encoder outputs to make first.
    """

    admitted: tuple[Sequence, ...] = ()
    tokens: tuple[tuple[Sequence, int], ...] = ()
    encode: tuple[Feature, ...] = ()


@dataclass(slots=True)
class Counts:
    """What has happened so far.

    Attributes:
        lookups: first admissions by what the prefix tree gave: ``hit`` (all that the prompt's
            pages allow), ``partial`` (less: the rest is new), ``no_checkpoint`` (pages were known
            deeper than any checkpoint), ``unknown``, ``short`` (no whole page to reuse).
        prompt_tokens, hit_tokens: of the same requests.
        preemptions: requests that gave way.
        recomputed_tokens: tokens that had to be computed again for them.
        checkpoints, checkpoints_skipped: made, and left out for want of cheaper units.
        peak_running: most requests that ran at once.
        steps, running_steps: steps, and requests summed over them.
    """

    lookups: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    checkpoints: int = 0
    checkpoints_skipped: int = 0
    peak_running: int = 0
    steps: int = 0
    running_steps: int = 0
