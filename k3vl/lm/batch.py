"""One step's input, gathered from the requests that take part in it.

A batch is packed: sequences that decode (one token each) come first, then those that prefill.
Everything a layer needs to find its state is an index tensor made here once, so that layers hold
no bookkeeping and a step costs one gather per state, whatever the number of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from k3vl.kernels.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3vl.lm.cache import HybridCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence's part of a step.

    Attributes:
        token_ids: the new tokens.
        context_len: tokens already in the cache.
        slot: units of the KDA slot.
        pages: MLA pages, in order; they hold ``context_len + len(token_ids)`` tokens.
        features: (offset into ``token_ids``, [M, D] features) that replace embeddings.
        wants_logits: whether the last token's logits are needed.
        pad_to: rows that this part takes in the batch, at least its tokens. What depends on the
            number of rows is then the same for every part of a prompt. The rows behind the tokens
            leave the KDA state alone; their latents lie where the next tokens' will.
    """

    token_ids: Sequence[int]
    context_len: int
    slot: Sequence[int]
    pages: Sequence[int]
    features: Sequence[tuple[int, torch.Tensor]] = ()
    wants_logits: bool = True
    pad_to: int = 0

    @property
    def num_rows(self) -> int:
        """Rows that this part takes."""
        return max(len(self.token_ids), self.pad_to)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Tensors of one step. N tokens, B sequences of which the first ``num_decodes`` decode.

    Attributes:
        token_ids: [N] int64.
        feature_rows, features: rows of the input that are features instead of embeddings,
            [M] int64 and [M, D]; None without media.
        num_decodes: sequences of exactly one token, at the front.
        prefill_lens: rows of every other sequence, its padding among them.
        cells: [KDA layers, B, H] int64, where every head's state lies.
        cu_seqlens: [P + 1] int64, where the rows of the P other sequences begin and end, counted
            from the first of them.
        ends: [P] int64, the row behind the last token of each; padding follows.
        cache_rows: [N] int64, where each token's latent is written.
        decode_rows: [num_decodes, L] int64, where the pages of ``page`` latents begin that each of
            these sequences sees, and decode_lens: [num_decodes] int64, how many latents that are.
        prefill_rows: per prefill sequence [L_i] int64, all latents it sees; see
            :class:`~k3vl.kernels.sequences.Sequences` for those of a pass of fixed size.
        prefill_keys: [P + 1] int64 for such a pass, None for others.
        logit_rows: [R] int64, rows whose logits are wanted, in sequence order; None: all.
        page: see ``decode_rows``; with 1 they are the latents' own rows.
    """

    token_ids: torch.Tensor
    feature_rows: torch.Tensor | None
    features: torch.Tensor | None
    num_decodes: int
    prefill_lens: tuple[int, ...]
    cells: torch.Tensor
    cu_seqlens: torch.Tensor
    ends: torch.Tensor
    cache_rows: torch.Tensor
    decode_rows: torch.Tensor
    decode_lens: torch.Tensor
    prefill_rows: tuple[torch.Tensor, ...]
    logit_rows: torch.Tensor | None
    page: int = 1
    prefill_keys: torch.Tensor | None = None


def build_batch(rows: Sequence[Row], cache: HybridCache) -> Batch:
    """Gather the rows of a step; decoding rows must come first.

    A row of one token counts as decoding wherever such rows lead the batch, unless it is padded.
    """
    counts = [len(row.token_ids) for row in rows]
    lens = [row.num_rows for row in rows]
    starts = [0, *accumulate(lens)]
    num_decodes = next((i for i, n in enumerate(lens) if n != 1), len(rows))

    latents = [latent_rows(row, row.context_len + row.num_rows, cache) for row in rows]
    new = [all_rows[row.context_len :] for row, all_rows in zip(rows, latents, strict=True)]
    decode_lens = [len(own) for own in latents[:num_decodes]]
    decode_rows = np.empty((num_decodes, max(decode_lens, default=0)), np.int64)
    for to, own in zip(decode_rows, latents[:num_decodes], strict=True):
        to[: len(own)], to[len(own) :] = own, own[0]
    begins = [start - starts[num_decodes] for start in starts[num_decodes:]]
    ends = [begin + n for begin, n in zip(begins, counts[num_decodes:], strict=False)]
    wanted = [
        start + count - 1
        for row, start, count in zip(rows, starts, counts, strict=False)
        if row.wants_logits
    ]
    feature_rows, features = find_features(rows, starts)
    on_device = upload(
        [t for row in rows for t in _padded_ids(row)],
        feature_rows,
        cache.cells_on_host([row.slot for row in rows]),
        begins,
        ends,
        np.concatenate(new),
        decode_rows,
        decode_lens,
        wanted,
        *latents[num_decodes:],
        device=cache.buffer.device,
    )
    return Batch(
        token_ids=on_device[0],
        feature_rows=on_device[1] if features else None,
        features=torch.cat(features) if features else None,
        num_decodes=num_decodes,
        prefill_lens=tuple(lens[num_decodes:]),
        cells=on_device[2],
        cu_seqlens=on_device[3],
        ends=on_device[4],
        cache_rows=on_device[5],
        decode_rows=on_device[6],
        decode_lens=on_device[7],
        prefill_rows=tuple(on_device[9:]),
        logit_rows=on_device[8],
    )


def _padded_ids(row: Row) -> list[int]:
    return [*row.token_ids, *[0] * (row.num_rows - len(row.token_ids))]


def latent_rows(row: Row, total: int, cache: HybridCache) -> np.ndarray:
    """Cache rows of the first ``total`` tokens of a sequence, in order."""
    size = cache.sizes.page_size
    assert len(row.pages) * size >= total, "pages are allocated before a step"
    begins = np.array(row.pages[: cache.sizes.pages(total)], np.int64) * cache.rows_per_unit
    rows: np.ndarray = (begins[:, None] + np.arange(size)).ravel()[:total]
    return rows


def find_features(
    rows: Sequence[Row], starts: Sequence[int]
) -> tuple[list[int], list[torch.Tensor]]:
    """Which rows of the packed input are features, and the features in that order."""
    where: list[int] = []
    values: list[torch.Tensor] = []
    for row, start in zip(rows, starts, strict=False):
        for offset, features in row.features:
            where.extend(range(start + offset, start + offset + features.shape[0]))
            values.append(features)
    return where, values
