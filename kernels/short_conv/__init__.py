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
    slots: torch.Tensor,
    taps: torch.Tensor,
    tails: torch.Tensor,
) -> torch.Tensor:
    """Convolve every sequence with its own history, apply SiLU, and carry the window on.

    ``y_t[c] = silu(sum_j weight[c, j] x_{t-W+1+j}[c])``; what lies before the first token of this
    call comes from the window, which holds zeros for a new sequence.

    Args:
        x: [N, C] packed sequences.
        weight: [C, W] float32; ``weight[:, W-1]`` multiplies the current token.
        windows: [S, W-1, C] pool of the last inputs, oldest first; updated in place.
        slots: [B] int64, the pool row of every sequence.
        taps: [N, W] int64, for every token its W inputs as rows of
            ``cat(windows[slots].flatten(0, 1), x)``.
        tails: [B, W-1] int64, the rows of the same that make the new window.

    Returns:
        [N, C] in the dtype of ``x``; products and sum in float32.

    Raises:
        ShapeError: the shapes disagree.

    Source: Kimi Linear report (short convolution on q, k and v); K3 ``modeling_kimi_linear.py``.
    """
    channels, width = weight.shape
    shapes_agree = (
        x.shape[1:] == (channels,)
        and windows.shape[1:] == (width - 1, channels)
        and taps.shape == (x.shape[0], width)
        and tails.shape == (slots.shape[0], width - 1)
    )
    if not shapes_agree:
        raise ShapeError(
            f"short_conv: x {tuple(x.shape)}, weight {tuple(weight.shape)}, "
            f"windows {tuple(windows.shape)}, taps {tuple(taps.shape)}, tails {tuple(tails.shape)}"
        )
    return short_conv_reference(x, weight, windows, slots, taps, tails)
