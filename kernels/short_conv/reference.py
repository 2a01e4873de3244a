"""Short convolutions in plain PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def short_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    ends: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`k3vl.kernels.short_conv.short_conv`.

    In ``cat(windows, x)`` sequence s owns the window rows ``s (W-1) .. s (W-1) + W-2`` and, behind
    all windows, its tokens.
    """
    sequences, carried = windows.shape[:2]
    history = torch.cat([windows.flatten(0, 1), x.to(windows.dtype)])
    back = torch.arange(-carried, 1, device=x.device)

    def rows(sequence: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """Where packed token ``token`` lies; before its sequence's first that is the window."""
        before = token - cu_seqlens[sequence]  # negative: so many tokens before the first
        in_window = (sequence + 1) * carried + before
        return torch.where(before < 0, in_window, sequences * carried + token)

    tokens = torch.arange(x.shape[0], device=x.device)
    owner = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    taps = rows(owner.unsqueeze(1), tokens.unsqueeze(1) + back)  # [N, W]
    every = torch.arange(sequences, device=x.device).unsqueeze(1)
    tails = rows(every, ends.unsqueeze(1) + back[:-1])  # [S, W-1]
    inputs = history[taps].float()  # [N, W, C]
    return F.silu((inputs * weight.t()).sum(1)), history[tails]
