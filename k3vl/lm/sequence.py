"""What the scheduler knows of a request: numbers, page keys and units; no tokens, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from k3vl.lm.arena import Entry
    from k3vl.lm.cache import CacheSizes
    from k3vl.lm.features import Feature, MediaItem
    from k3vl.lm.prefix import Node, PageKey

FIRST_SPACING = 512
"""Tokens between the end of a long prompt and the checkpoint before it; the next lie twice as far,
four times, ... A prompt that was changed near its end then finds a state close by."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A request.

    Attributes:
        id: unique number.
        num_prompt: prompt tokens.
        max_new: most tokens it may generate.
        keys: of the prompt's whole pages; none to reuse and leave nothing.
        wanted: depths in pages at which a checkpoint would be of use.
        asked: those of them that another request has asked for.
        media: the prompt's media, in order.
        order: of arrival.
        num_cached: tokens whose state is in the cache.
        num_generated: tokens sampled so far.
        num_prefill: tokens that are computed many at a time: the prompt, and after a preemption,
            where the scheduler keeps what decoding computed, all that were known then.
        num_hit: prompt tokens that were found in the cache at first admission; None before.
        slot: units of the KDA slot, None while not running.
        pages: units of the pages; the first ``len(path)`` belong to the tree.
        path: nodes of the tree that it holds.
        pinned: encoder outputs it holds, by index in ``media``.
        restore: checkpoint that its slot is to be filled from in the coming step.
        latest: the last checkpoint that its decoding left behind.
        sought, found: while it waits, whether it has been looked up, and the checkpoint there was.
        overtaken: how often others have entered while it had waited longest.
    """

    id: int
    num_prompt: int
    max_new: int
    keys: tuple[PageKey, ...] = ()
    wanted: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    media: tuple[MediaItem, ...] = ()
    order: int = 0
    num_cached: int = 0
    num_generated: int = 0
    num_hit: int | None = None
    slot: tuple[int, ...] | None = None
    pages: list[int] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)
    pinned: dict[int, Feature] = field(default_factory=dict)
    restore: Entry | None = None
    latest: Entry | None = None
    sought: bool = False
    found: Node | None = None
    overtaken: int = 0
    num_prefill: int = field(init=False)

    def __post_init__(self) -> None:
        """Nothing is generated yet."""
        self.num_prefill = self.num_prompt

    @property
    def num_known(self) -> int:
        """Tokens that exist: prompt and generated."""
        return self.num_prompt + self.num_generated

    @property
    def num_pending(self) -> int:
        """Tokens that the model has not seen yet."""
        return self.num_known - self.num_cached

    @property
    def is_decoding(self) -> bool:
        """Whether what follows is computed token by token.

        Unless ``num_prefill`` says otherwise that holds for tokens generated before a preemption
        too: computed in any other way, they would leave a state that differs in rounding.
        """
        return self.num_cached >= self.num_prefill

    def overlapping(self, begin: int, end: int) -> list[int]:
        """Indices of media that share tokens with ``begin .. end``."""
        return [i for i, m in enumerate(self.media) if m.offset < end and begin < m.end]


def checkpoint_depths(num_prompt: int, hints: Iterable[int], page_size: int) -> set[int]:
    """Where in a prompt a KDA checkpoint is likely to be asked for, in pages.

    The deepest place from which the same prompt, and from which a longer one, could go on; the
    places that the caller knows (ends of the system head and of turns); and, towards the front, at
    geometrically growing distances.
    """
    depths = {(num_prompt - 1) // page_size, num_prompt // page_size}
    depths |= {hint // page_size for hint in hints if hint <= num_prompt}
    spacing = FIRST_SPACING
    while spacing < num_prompt:
        depths.add((num_prompt - spacing) // page_size)
        spacing *= 2
    return depths - {0}


def media_units(sequence: Sequence, sizes: CacheSizes) -> int:
    """The most units of encoder output that one page of a prompt needs at once."""
    if not sequence.media:
        return 0
    size = sizes.page_size
    need: dict[int, int] = {}
    for item in sequence.media:
        units = sizes.feature_units(item.num_tokens)
        for page in range(item.offset // size, (item.end - 1) // size + 1):
            need[page] = need.get(page, 0) + units
    return max(need.values())
