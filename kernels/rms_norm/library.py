"""RMSNorm by torch's own kernel, in the dtype of its input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional as F

from k3vl.errors import ShapeError

if TYPE_CHECKING:
    import torch


def rms_norm_library(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`k3vl.kernels.rms_norm.rms_norm`; one launch on a device, float32 inside."""
    if x.shape[-1:] != weight.shape:
        raise ShapeError(f"rms_norm: x {tuple(x.shape)} and weight {tuple(weight.shape)}")
    return F.rms_norm(x, weight.shape, weight, eps)
