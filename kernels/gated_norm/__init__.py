"""The epilogue of a KDA layer: per-head RMSNorm, then a sigmoid gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3vl.errors import ShapeError
from k3vl.kernels.gated_norm.reference import gated_norm_reference

if TYPE_CHECKING:
    import torch


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Normalise every head and multiply by the sigmoid of its gate logits.

    Norm first, gate second; the gate logits are not normalised.

    Args:
        x: [N, H, V], any floating dtype.
        gate: [N, H * V] logits.
        weight: [V], shared by all heads.
        eps: added to the mean square.

    Returns:
        [N, H * V] in the dtype of ``gate``; float32 inside.

    Raises:
        ShapeError: the shapes disagree.

    Source: Kimi K3 ``modeling_kimi_linear.py``, output of the KDA layer.
    """
    n, heads, width = x.shape
    if gate.shape != (n, heads * width) or weight.shape != (width,):
        raise ShapeError(
            f"gated_norm: x {tuple(x.shape)}, gate {tuple(gate.shape)}, "
            f"weight {tuple(weight.shape)}"
        )
    return gated_norm_reference(x, gate, weight, eps)
