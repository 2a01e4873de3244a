"""Packed attention by PyTorch's own fused kernel, equally long items together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Sequence


def vision_attention_grouped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """Attend within every item of ``lengths`` rows of [P, H, K] tensors; shapes are checked."""
    if len(set(lengths)) == 1:
        return _attend(q, k, v, lengths[0])
    starts: dict[int, list[int]] = {}
    offset = 0
    for length in lengths:
        starts.setdefault(length, []).append(offset)
        offset += length
    out = torch.empty_like(q)
    for length, firsts in starts.items():
        first = torch.tensor(firsts, device=q.device)
        rows = (first[:, None] + torch.arange(length, device=q.device)).flatten()
        out[rows] = _attend(q[rows], k[rows], v[rows], length)
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int) -> torch.Tensor:
    """Attention over [G * length, H, K] as a batch of G items."""
    q, k, v = (x.reshape(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
