"""Attention residuals in plain PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def attn_residual_reference(
    rows: torch.Tensor,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.attn_residual.attn_residual`."""
    if rows.shape[0] == 1:  # a softmax over one row
        mixed = rows[0].float()
    else:
        values = rows.float()  # [R, N, D]
        scores = F.rms_norm(values, query.shape, query, eps).sum(-1, keepdim=True)  # [R, N, 1]
        mixed = (torch.softmax(scores, dim=0) * values).sum(0)
    return F.rms_norm(mixed, norm_weight.shape, norm_weight.float(), eps).to(rows.dtype)
