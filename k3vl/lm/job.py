"""A request inside the engine, and its part of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3vl.lm.batch import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from k3vl.errors import K3VLError
    from k3vl.lm.backend import Token
    from k3vl.lm.cache import HybridCache
    from k3vl.lm.features import Feature
    from k3vl.lm.sampler import Forced, Sampler
    from k3vl.lm.sequence import Sequence
    from k3vl.types import EncoderItem, Prompt


@dataclass(slots=True, kw_only=True, eq=False)
class Targets:
    """Tokens whose log-probabilities are asked for.

    Attributes:
        token_ids: they follow token ``first`` of the sequence.
        first: the token before the first of them.
        delivered: how many have been reported; a preemption does not report twice.
    """

    token_ids: tuple[int, ...]
    first: int
    delivered: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request inside the engine; one with ``targets`` generates nothing."""

    sequence: Sequence
    prompt: Prompt
    sampler: Sampler | Forced
    stop_ids: frozenset[int]
    sink: Callable[[Token | K3VLError], None]
    token_ids: list[int]
    arrived: float
    salt: str | None = None
    targets: Targets | None = None


def row_of(job: Job, cache: HybridCache, count: int, *, pad_to: int = 0) -> Row:
    """The next ``count`` tokens of a request as part of a pass; its slot is filled."""
    sequence = job.sequence
    assert sequence.slot is not None
    begin, end = sequence.num_cached, sequence.num_cached + count
    pieces = []
    for index in sequence.overlapping(begin, end):
        item = sequence.media[index]
        first, last = max(begin, item.offset), min(end, item.end)
        feature = sequence.pinned[index]
        assert feature.ready
        rows = cache.read_features(feature.entry.units, first - item.offset, last - item.offset)
        pieces.append((first - begin, rows))
    return Row(
        token_ids=job.token_ids[begin:end],
        context_len=begin,
        slot=sequence.slot,
        pages=sequence.pages,
        features=pieces,
        wants_logits=count == sequence.num_pending,
        pad_to=pad_to,
    )


def items_to_encode(jobs: Iterable[Job]) -> dict[Feature, EncoderItem]:
    """Encoder outputs that requests hold and that are not there yet: what they are made of."""
    return {
        feature: job.prompt.spans[index].item
        for job in jobs
        for index, feature in job.sequence.pinned.items()
        if not feature.ready
    }
