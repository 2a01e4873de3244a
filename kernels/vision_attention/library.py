"""Packed attention by torch's fused kernels: a call for every run of equally long items."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3vl.kernels.packed import Packed

ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""The first that takes a call; torch's own order depends on its version and the device."""


def vision_attention_library(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    items: Packed,
    *,
    together: bool = True,
    backends: Sequence[SDPBackend] | None = ORDER,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.vision_attention.vision_attention`; shapes are checked.

    Args:
        q, k, v: [P, H, K].
        items: of the batch.
        together: equally long neighbours in one call; False: a call for every item, whose bits
            then cannot depend on how many there are.
        backends: that may be used, in this order; None: as torch has it.
    """
    counts = [(length, len(list(same))) for length, same in groupby(items.lengths)]
    if not together:
        counts = [(length, 1) for length in items.lengths]
    if backends is None:
        return _attend_runs(q, k, v, counts)
    with sdpa_kernel(list(backends), set_priority=True):
        return _attend_runs(q, k, v, counts)


def _attend_runs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Runs of a length and the number of items that have it."""
    rows = [length * count for length, count in runs]
    tensors = zip(*(torch.split(x, rows) for x in (q, k, v)), strict=True)
    outs = [
        _attend(qi, ki, vi, length) for (length, _), (qi, ki, vi) in zip(runs, tensors, strict=True)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int) -> torch.Tensor:
    """Attention over [G * length, H, K] as a batch of G items, without copies."""
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
