"""Gated RMSNorm in plain PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def gated_norm_reference(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See :func:`k3vl.kernels.gated_norm.gated_norm`."""
    normed = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed.flatten(1) * torch.sigmoid(gate.float())).to(gate.dtype)
