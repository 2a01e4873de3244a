"""RMSNorm in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional as F

if TYPE_CHECKING:
    import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`k3vl.kernels.rms_norm.rms_norm`."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
