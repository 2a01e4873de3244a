"""Short causal depthwise convolutions with a carried window, over packed sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3vl.errors import ShapeError
from k3vl.kernels.short_conv.reference import short_conv_reference

if TYPE_CHECKING:
    import torch


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    ends: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve every sequence with its own history and apply SiLU.

    ``y_t[c] = silu(sum_j weight[c, j] x_{t-W+1+j}[c])``; what lies before the first token of this
    call comes from the window, which holds zeros for a new sequence.

    Args:
        x: [N, C] packed sequences.
        weight: [C, W] float32; ``weight[:, W-1]`` multiplies the current token.
        windows: [S, W-1, C], the last inputs of every sequence, oldest first.
        cu_seqlens: [S + 1] int64; rows ``cu_seqlens[s] .. cu_seqlens[s + 1]`` are sequence s's.
        ends: [S] int64, the row behind the last token of every sequence; what follows is padding,
            which no window takes up.

    Returns:
        [N, C] float32, and the windows after the last token, [S, W-1, C] in their dtype.

    Raises:
        ShapeError: the shapes disagree.

    Source: Kimi Linear report (short convolution on q, k and v); K3 ``modeling_kimi_linear.py``.
    """
    channels, width = weight.shape
    sequences = windows.shape[0]
    shapes_agree = (
        x.shape[1:] == (channels,)
        and windows.shape[1:] == (width - 1, channels)
        and cu_seqlens.shape == (sequences + 1,)
        and ends.shape == (sequences,)
    )
    if not shapes_agree:
        raise ShapeError(
            f"short_conv: x {tuple(x.shape)}, weight {tuple(weight.shape)}, "
            f"windows {tuple(windows.shape)}, cu_seqlens {tuple(cu_seqlens.shape)}, "
            f"ends {tuple(ends.shape)}"
        )
    return short_conv_reference(x, weight, windows, cu_seqlens, ends)
