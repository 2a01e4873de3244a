"""Gated activations in plain PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def situ_glu_reference(gate_up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """See :class:`k3vl.kernels.situ.SituGLU`; [..., 2 I] -> [..., I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out = torch.tanh(gate / beta).mul_(torch.sigmoid(gate))
    out.mul_(torch.tanh(up / linear_beta)).mul_(beta * linear_beta)
    return out.to(gate_up.dtype)


def silu_glu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(g) u``; [..., 2 I] -> [..., I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
