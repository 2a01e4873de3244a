"""How prompts are cut into forward passes, and which share one. Integers only.

Where the kernels' rows are independent a pass takes as much of a prompt as it can, up to the next
place where a checkpoint is wanted, and short parts of several prompts together; elsewhere a page of
one prompt, because rounding depends on the number of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from k3vl.lm.job import Job
    from k3vl.lm.sequence import Sequence

SHARED_ROWS = 256
"""A pass does not grow beyond this for another prompt's sake. The demo model's cost of a row hardly
falls from 128 rows on (0.34 ms in a pass of 27, 0.22 in one of 216), and the first of many prompts
should not wait for the last."""


def next_pass(
    todo: Ordered[tuple[Job, int]], page_size: int, *, row_independent: bool
) -> list[tuple[Job, int]]:
    """Tokens of each request in the next pass, on the way to so many of each.

    A request whose tokens are scored wants the logits of every row and comes alone.
    """
    parts: list[tuple[Job, int]] = []
    rows = 0
    for job, end in todo:
        if not row_independent:
            return [(job, min(page_size, end - job.sequence.num_cached))]
        count = _up_to_checkpoint(job.sequence, end, page_size)
        if parts and (job.targets is not None or rows + count > SHARED_ROWS):
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
