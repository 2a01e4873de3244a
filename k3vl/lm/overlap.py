"""Decode steps that are launched before the tokens of the step before them are known.

While the device computes step n + 1 the host hands out the tokens of step n: ends, texts, callers.
A decode step's positions, pages and states do not depend on tokens, and the tokens themselves stay
on the device, where the next step reads them (``decode.py``).

A request that turns out to have ended with step n has been computed once too often. Its token is
dropped; what that step writes lies in the request's own slot and behind its last token, in a page
that is its own. Both are given back when the end is known, as ever: the step may still run then,
but whatever the next owner does to them waits in the same stream behind it. No state is kept, and
no page handed to the prefix tree, by such a step.

Beside prompts the next step is not launched ahead, but the tokens are waited for and handed out
when the first pass over the prompts has been launched.

So a step is launched ahead only where nothing but decoding is to be done, nobody is known to end or
could enter, gives way, or loses what is kept for others, and no request chooses by the tokens
before. Everywhere else the order is the plain one: launch, wait, hand out, plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3vl.lm.job import decode_rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from k3vl.lm.decode import Decode, Launched
    from k3vl.lm.job import Job
    from k3vl.lm.scheduler import Scheduler
    from k3vl.lm.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Flight:
    """A decode step that was launched, and the requests of its rows; some may have ended since.

    ``ahead`` says that it was before the tokens of the step before it were known.
    """

    jobs: list[Job]
    launched: Launched
    ahead: bool = False


def launch_ahead(
    live: Ordered[tuple[int, Job]], scheduler: Scheduler, decoder: Decode
) -> Flight | None:
    """Launch the step behind the one launched last.

    Args:
        live: those of its requests that have not ended since, and their rows in it.
        scheduler, decoder: the engine's.

    Returns:
        The step; None where the last one's tokens must be known first.
    """
    sequences = [job.sequence for _, job in live]
    if not all(job.sampler.asks_ahead for _, job in live) or not _plan_ahead(sequences, scheduler):
        return None
    jobs = [job for _, job in live]
    launched = decoder.launch(
        decode_rows_of(jobs, known=False),
        [job.sampler for job in jobs],
        sources=[row for row, _ in live],
    )
    for sequence in sequences:
        sequence.num_cached += 1  # what ``Scheduler.advance`` does where no page is handed over
    return Flight(jobs, launched, ahead=True)


def _plan_ahead(sequences: Ordered[Sequence], scheduler: Scheduler) -> bool:
    """Get the pages for everybody's next token, if that can be computed now."""
    arena, size, running = scheduler.arena, scheduler.sizes.page_size, len(scheduler.running)
    if len(sequences) < running:
        return False  # somebody is at the prompt, was left out, or decodes again what it had
    if scheduler.waiting and running < scheduler.max_requests:
        return False
    if any(s.num_generated + 1 >= s.max_new for s in sequences):
        return False  # it ends with the token that is on its way, and others may take its place
    named = scheduler.reuse and scheduler.keep_decoded
    if named and any(not (s.num_cached + 1) % size for s in sequences):
        return False  # the key of the page that this completes is made of its tokens
    needy = [s for s in sequences if s.num_cached == len(s.pages) * size]
    if len(needy) > arena.num_free:
        return False
    for sequence in needy:
        sequence.pages += arena.take(1, "page")
    return True


def note_ahead(scheduler: Scheduler) -> None:
    """Count a step that was launched ahead: as :meth:`Scheduler.plan` would have, now."""
    running = len(scheduler.running)
    scheduler.counts.steps += 1
    scheduler.counts.running_steps += running
    scheduler.admission.note_work(0, running)
