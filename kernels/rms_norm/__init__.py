"""RMSNorm with float32 statistics: the one normalisation of K3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3vl.errors import ShapeError
from k3vl.kernels.rms_norm.reference import rms_norm_reference

if TYPE_CHECKING:
    import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide ``x`` by its root mean square over the last axis and scale it.

    Args:
        x: [..., D], any floating dtype.
        weight: [D].
        eps: added to the mean square.

    Returns:
        [..., D] in the dtype of ``x``; statistics and product are float32.

    Raises:
        ShapeError: the widths disagree.
    """
    if x.shape[-1:] != weight.shape:
        raise ShapeError(f"rms_norm: x {tuple(x.shape)} and weight {tuple(weight.shape)}")
    return rms_norm_reference(x, weight, eps)
