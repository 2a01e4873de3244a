"""Who runs in the next step, and how many tokens of each. Plain Python over integers.

No tensors, no device, no clock: a plan is a mapping from request to token count. A request is
admitted when a KDA slot and all the pages it can ever need are free, so an admitted request always
finishes and nothing has to be preempted. Admission is in order of arrival; a running request that
a step has no room for goes first in the next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from k3vl.errors import CapacityError
from k3vl.lm.pool import Pool

if TYPE_CHECKING:
    from k3vl.lm.cache import CacheSizes


@dataclass(slots=True, kw_only=True)
class Sequence:
    """What the scheduler knows of a request.

    Attributes:
        id: unique number.
        num_prompt: prompt tokens.
        max_new: most tokens it may generate.
        num_cached: tokens whose state is in the cache.
        num_generated: tokens sampled so far.
        slot: KDA slot, None before admission.
        pages: MLA pages, empty before admission.
    """

    id: int
    num_prompt: int
    max_new: int
    num_cached: int = 0
    num_generated: int = 0
    slot: int | None = None
    pages: tuple[int, ...] = ()

    @property
    def num_known(self) -> int:
        """Tokens that exist: prompt and generated."""
        return self.num_prompt + self.num_generated

    @property
    def num_pending(self) -> int:
        """Tokens that the model has not seen yet; one while decoding."""
        return self.num_known - self.num_cached

    @property
    def is_decoding(self) -> bool:
        """Whether only the last sampled token is pending."""
        return self.num_generated > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step's plan.

    Attributes:
        admitted: sequences that enter with this step, in order.
        tokens: (sequence, token count); those of one token come first.
    """

    admitted: tuple[Sequence, ...] = ()
    tokens: tuple[tuple[Sequence, int], ...] = ()


@dataclass(slots=True)
class Scheduler:
    """First come, first served; decoding before prefill; prefill in chunks.

    Attributes:
        sizes: slots, pages and page size of the cache.
        max_step_tokens: tokens of a step; bounds the time others wait for a long prompt.
        prefill_chunk: most prompt tokens of one sequence in a step.
    """

    sizes: CacheSizes
    max_step_tokens: int
    prefill_chunk: int
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)
    slots: Pool = field(init=False)
    pages: Pool = field(init=False)

    def __post_init__(self) -> None:
        """Create the pools."""
        assert self.max_step_tokens > 0
        assert self.prefill_chunk > 0
        self.slots = Pool(self.sizes.num_slots)
        self.pages = Pool(self.sizes.num_pages)

    def pages_needed(self, sequence: Sequence) -> int:
        """Pages for the prompt and every token it may generate (the last is never cached)."""
        return -(-(sequence.num_prompt + sequence.max_new) // self.sizes.page_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that :meth:`check_fits` has let through."""
        self.waiting.append(sequence)

    def check_fits(self, sequence: Sequence) -> None:
        """Refuse what could not run even alone; reads only constants, safe on any thread.

        Raises:
            CapacityError: with the pages it needs and those that exist.
        """
        needed = self.pages_needed(sequence)
        if needed > self.sizes.num_pages:
            raise CapacityError(
                f"{sequence.num_prompt} prompt tokens and up to {sequence.max_new} new ones need "
                f"{needed} pages of {self.sizes.page_size} tokens; the cache has "
                f"{self.sizes.num_pages}"
            )

    def plan(self) -> Step:
        """Admit what fits and choose the tokens of the next step; empty when nothing is left."""
        admitted = self._admit()
        budget = self.max_step_tokens
        tokens: list[tuple[Sequence, int]] = []
        left_out: set[int] = set()
        for sequence in sorted(self.running, key=self._urgency):
            count = min(sequence.num_pending, self.prefill_chunk, budget)
            if count:
                tokens.append((sequence, count))
                budget -= count
            else:
                left_out.add(sequence.id)
        self.left_out = left_out
        tokens.sort(key=lambda pair: pair[1] != 1)  # rows of one token lead the batch
        return Step(admitted=tuple(admitted), tokens=tuple(tokens))

    def _urgency(self, sequence: Sequence) -> tuple[bool, bool]:
        """Whom the last step had no room for, then who decodes, then the rest by arrival."""
        return (sequence.id not in self.left_out, not sequence.is_decoding)

    def finish(self, sequence: Sequence) -> None:
        """Free what a sequence holds, wherever it is in its life."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.slots.give_back([sequence.slot], sequence.id)
        self.pages.give_back(sequence.pages, sequence.id)
        sequence.slot, sequence.pages = None, ()

    def check_integrity(self) -> None:
        """Every unit is free or owned by exactly the running sequences."""
        self.slots.check_integrity()
        self.pages.check_integrity()
        held = sum(len(sequence.pages) for sequence in self.running)
        assert self.pages.size - self.pages.num_free == held
        assert self.slots.size - self.slots.num_free == len(self.running)

    def _admit(self) -> list[Sequence]:
        admitted = []
        while self.waiting and self.slots.fits(1):
            needed = self.pages_needed(self.waiting[0])
            if not self.pages.fits(needed):
                break
            sequence = self.waiting.popleft()
            (sequence.slot,) = self.slots.take(1, sequence.id)
            sequence.pages = self.pages.take(needed, sequence.id)
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted
