"""Packed attention as it is written down: one item after the other, scores in the open."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def vision_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """Softmax(q k^T / sqrt(K)) v in float32, item by item; [P, H, K] in, [P, H, K] out."""
    outputs = []
    for qi, ki, vi in zip(*(torch.split(x.float(), list(lengths)) for x in (q, k, v)), strict=True):
        scores = torch.einsum("ihk,jhk->hij", qi, ki) * q.shape[-1] ** -0.5
        outputs.append(torch.einsum("hij,jhk->ihk", scores.softmax(-1), vi))
    return torch.cat(outputs).to(q.dtype)
