"""How prompts are cut into forward passes, and which share one. Integers only.

Where the kernels' rows are independent a pass takes as much of a prompt as it can, up to the next
place where a checkpoint is wanted, and short parts of several prompts together. Elsewhere rounding
depends on the number of rows: a pass takes a page of one prompt, unless nothing that is computed is
kept for others and nobody has asked for exactness. Then prompts share passes as tokens that decode
do, and as far as they come: what a pass costs there is its launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from k3vl.lm.engine import EngineConfig
    from k3vl.lm.job import Job
    from k3vl.lm.sequence import Sequence

SHARED_ROWS = 256
"""A pass does not grow beyond this for another prompt's sake. The demo model's cost of a row hardly
falls from 128 rows on (0.34 ms in a pass of 27, 0.22 in one of 216), and the first of many prompts
should not wait for the last."""

SPARE_ROWS = 64
"""Of a size: what its padding sequences may need; there are fewer than as many as real ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What a pass may hold.

    Attributes:
        page_size: tokens of a page.
        whole: prompts are not cut page by page.
        shared_rows: a pass does not grow beyond this for another prompt's sake; 0 shares nothing.
    """

    page_size: int
    whole: bool
    shared_rows: int

    @classmethod
    def of(cls, config: EngineConfig, *, row_independent: bool, most_rows: int = 0) -> Passes:
        """What an engine's passes may hold; ``most_rows`` of one that has a size, 0: none has."""
        loose = not config.reuse and not config.exact_decode
        most = config.max_step_tokens
        if most_rows:
            most = min(most, most_rows - SPARE_ROWS)
        rows = SHARED_ROWS if row_independent else most if loose else 0
        return cls(page_size=config.page_size, whole=row_independent, shared_rows=rows)


def next_pass(todo: Ordered[tuple[Job, int]], passes: Passes) -> list[tuple[Job, int]]:
    """Tokens of each request in the next pass, on the way to so many of each.

    A request whose tokens are scored wants the logits of every row and comes alone.
    """
    parts: list[tuple[Job, int]] = []
    rows = 0
    for job, end in todo:
        count = _up_to_checkpoint(job.sequence, end, passes.page_size)
        if not passes.whole and (job.targets is not None or not passes.shared_rows):
            count = min(passes.page_size, end - job.sequence.num_cached)
        if parts and (job.targets is not None or rows + count > passes.shared_rows):
            break
        parts.append((job, count))
        rows += count
        if job.targets is not None:
            break
    return parts


def _up_to_checkpoint(sequence: Sequence, end: int, page_size: int) -> int:
    """Tokens until a state is to be taken, or all that are left."""
    begin = sequence.num_cached
    deepest = len(sequence.keys)  # no checkpoint lies further down
    wanted = (depth * page_size for depth in sequence.wanted if depth <= deepest)
    return min((place for place in wanted if begin < place < end), default=end) - begin
