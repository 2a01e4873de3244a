"""Forward passes over a :class:`k3vl.hf.cache.KimiK3Cache`, in the shapes that the engine uses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from k3vl.hf.cache import PAGE_SIZE
from k3vl.lm.batch import Row, build_batch
from k3vl.lm.cache import TILE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from k3vl.hf.cache import KimiK3Cache
    from k3vl.lm.model import K3Model

    Span = tuple[int, torch.Tensor]
    """First token and [M, D] features of a media item in a sequence."""


def decode(model: K3Model, cache: KimiK3Cache, token_ids: Sequence[int]) -> torch.Tensor:
    """One token of every sequence in one pass: [B, vocab] float32 logits."""
    rows = []
    for index, token_id in enumerate(token_ids):
        state = cache.reserve(index, cache.states[index].length + 1)
        rows.append(
            Row(
                token_ids=[token_id],
                context_len=state.length,
                slot=state.slot,
                pages=state.pages,
            )
        )
    logits = _run(model, cache, rows)
    for state in cache.states:
        state.length += 1
    return logits


def prefill(
    model: K3Model,
    cache: KimiK3Cache,
    index: int,
    token_ids: Sequence[int],
    *,
    media: Sequence[Span] = (),
    wanted: Collection[int],
) -> dict[int, torch.Tensor]:
    """More tokens of one sequence, page by page.

    Args:
        model: the language model.
        cache: of the batch.
        index: of the sequence in the batch.
        token_ids: the new tokens.
        media: features that stand for some of them.
        wanted: tokens whose logits are asked for, counted from the first new one.

    Returns:
        Token -> [vocab] float32 logits.
    """
    made: dict[int, torch.Tensor] = {}
    begin = 0
    while begin < len(token_ids):
        length = cache.states[index].length
        end = min(len(token_ids), begin + PAGE_SIZE - length % PAGE_SIZE)
        padded = -(-(end - begin) // TILE) * TILE
        state = cache.reserve(index, length + padded)
        row = Row(
            token_ids=token_ids[begin:end],
            context_len=length,
            slot=state.slot,
            pages=state.pages,
            features=[*_overlap(media, begin, end)],
            pad_to=padded,
        )
        here = [at for at in range(begin, end) if at in wanted]
        logits = _run(model, cache, [row], [at - begin for at in here])
        made.update(zip(here, logits, strict=True))
        state.length += end - begin
        begin = end
    return made


def _run(
    model: K3Model,
    cache: KimiK3Cache,
    rows: Sequence[Row],
    logit_rows: Sequence[int] | None = None,
) -> torch.Tensor:
    batch = build_batch(rows, cache.hybrid)
    if logit_rows is not None:
        where = torch.tensor(logit_rows, dtype=torch.int64, device=batch.token_ids.device)
        batch = replace(batch, logit_rows=where)
    logits: torch.Tensor = model(batch, cache.hybrid)
    return logits


def _overlap(media: Sequence[Span], begin: int, end: int) -> Iterator[Span]:
    """The parts of media items that lie in tokens ``begin .. end``, by their place in there."""
    for start, rows in media:
        first, last = max(begin, start), min(end, start + rows.shape[0])
        if first < last:
            yield first - begin, rows[first - start : last - start]
