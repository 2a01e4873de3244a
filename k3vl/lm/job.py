"""A request inside the engine, and its part of a forward pass."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from k3vl.lm.backend import Token
from k3vl.lm.batch import Row
from k3vl.lm.sampler import token_logprob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from collections.abc import Sequence as Ordered

    import torch

    from k3vl.errors import K3VLError
    from k3vl.lm.cache import FeatureRows, HybridCache
    from k3vl.lm.features import Feature
    from k3vl.lm.sampler import Forced, Sampler
    from k3vl.lm.sequence import Sequence
    from k3vl.types import EncoderItem, Prompt


UNKNOWN = (-1,)
"""Stands for a token that is still on the device."""


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
    arrived: float = field(default_factory=time.perf_counter)
    salt: str | None = None
    targets: Targets | None = None

    def take(self, token_id: int) -> Token:
        """Note a chosen token; what is to be delivered, with ``finish`` where it is the last."""
        sequence = self.sequence
        sequence.num_generated += 1
        self.token_ids.append(token_id)
        stops = token_id in self.stop_ids
        is_last = sequence.num_generated == sequence.max_new
        return Token(
            id=token_id,
            finish="stop" if stops else "length" if is_last else None,
            cached_tokens=sequence.num_hit or 0,
            logprobs=self.sampler.logprobs,
        )

    def scored(self, begin: int, logits: Iterable[torch.Tensor]) -> Iterator[Token]:
        """Targets that follow tokens ``begin ..`` of the sequence, which have these logits."""
        targets = self.targets
        assert targets is not None
        for row, values in enumerate(logits, start=begin - targets.first):
            if row < targets.delivered:
                continue
            token_id = targets.token_ids[row]
            targets.delivered += 1
            yield Token(
                id=token_id,
                finish="length" if targets.delivered == len(targets.token_ids) else None,
                cached_tokens=self.sequence.num_hit or 0,
                logprobs=token_logprob(values, token_id, 0),
            )


def rows_of(parts: Ordered[tuple[Job, int]], cache: HybridCache, *, tile: int = 1) -> list[Row]:
    """The next tokens of requests as the rows of a pass; their slots are filled.

    Args:
        parts: requests, and how many tokens of each.
        cache: holds their media's features.
        tile: rows are padded to a multiple of this.
    """
    wanted = [_features_in(job.sequence, count) for job, count in parts]
    held = iter(cache.read_features([place for own in wanted for _, place in own]))
    return [
        _row_of(job.sequence, job.token_ids, count, [(at, next(held)) for at, _ in own], tile)
        for (job, count), own in zip(parts, wanted, strict=True)
    ]


def decode_rows_of(jobs: Ordered[Job], *, known: bool = True) -> list[Row]:
    """As :func:`rows_of`, of requests that decode; ``known`` says whether their tokens are."""
    rows = []
    for job in jobs:
        sequence = job.sequence
        assert sequence.slot is not None
        begin = sequence.num_cached
        rows.append(
            Row(
                token_ids=job.token_ids[begin : begin + 1] if known else UNKNOWN,
                context_len=begin,
                slot=sequence.slot,
                pages=sequence.pages,
                wants_logits=not known or begin + 1 == sequence.num_known,
            )
        )
    return rows


def _features_in(sequence: Sequence, count: int) -> list[tuple[int, FeatureRows]]:
    """Features among the next tokens: where in them they begin, and which."""
    if not sequence.pinned:
        return []
    begin, end = sequence.num_cached, sequence.num_cached + count
    found: list[tuple[int, FeatureRows]] = []
    for index in sequence.overlapping(begin, end):
        item, feature = sequence.media[index], sequence.pinned[index]
        assert feature.ready
        first, last = max(begin, item.offset), min(end, item.end)
        rows = feature.entry.units, first - item.offset, last - item.offset
        found.append((first - begin, rows))
    return found


def _row_of(
    sequence: Sequence,
    token_ids: Ordered[int],
    count: int,
    features: Ordered[tuple[int, torch.Tensor]],
    tile: int,
) -> Row:
    assert sequence.slot is not None
    begin = sequence.num_cached
    return Row(
        token_ids=token_ids[begin : begin + count],
        context_len=begin,
        slot=sequence.slot,
        pages=sequence.pages,
        features=features,
        wants_logits=count == sequence.num_pending,
        pad_to=-(-count // tile) * tile,
    )


def items_to_encode(jobs: Iterable[Job]) -> dict[Feature, EncoderItem]:
    """Encoder outputs that requests hold and that are not there yet: what they are made of."""
    return {
        feature: job.prompt.spans[index].item
        for job in jobs
        for index, feature in job.sequence.pinned.items()
        if not feature.ready
    }
