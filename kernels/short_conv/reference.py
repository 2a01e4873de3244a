"""Short convolutions in plain PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def short_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    slots: torch.Tensor,
    taps: torch.Tensor,
    tails: torch.Tensor,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.short_conv.short_conv`."""
    history = torch.cat([windows.index_select(0, slots).flatten(0, 1), x.to(windows.dtype)])
    windows.index_copy_(0, slots, history[tails])
    inputs = history.index_select(0, taps.flatten()).unflatten(0, taps.shape).float()  # [N, W, C]
    return F.silu((inputs * weight.t()).sum(1)).to(x.dtype)
