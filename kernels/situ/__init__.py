"""Gated activations of the MLPs: SiTU-GLU (K3) and SwiGLU (Kimi-Linear).

An activation is a value, so that kernels which fuse it can see which one it is and its constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from k3vl.errors import ShapeError
from k3vl.kernels.situ.reference import silu_glu_reference, situ_glu_reference

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SituGLU:
    """``beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)``.

    The sigmoid acts on the uncapped gate. The result is bounded by ``beta * linear_beta``.
    Source: Kimi K3 report, Stable LatentMoE; ``activation_situ_*`` of config.json.

    Attributes:
        beta: soft cap of the gate (K3: 4).
        linear_beta: soft cap of the up branch (K3: 25).
    """

    beta: float
    linear_beta: float

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[..., 2 I] -> [..., I] in plain PyTorch; see :func:`glu`."""
        return situ_glu_reference(gate_up, self.beta, self.linear_beta)


@dataclass(frozen=True, slots=True)
class SiluGLU:
    """``silu(g) * u``."""

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[..., 2 I] -> [..., I] in plain PyTorch; see :func:`glu`."""
        return silu_glu_reference(gate_up)


GatedActivation: TypeAlias = SituGLU | SiluGLU


def caps(activation: GatedActivation) -> tuple[float, float]:
    """Caps of gate and up branch, as numbers for a kernel; 0 for no caps (SwiGLU)."""
    if isinstance(activation, SituGLU):
        return float(activation.beta), float(activation.linear_beta)
    return 0.0, 0.0


def glu(gate_up: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """Apply a gated activation.

    Args:
        gate_up: [..., 2 I]; gates first, then ups.
        activation: which one.

    Returns:
        [..., I] in the dtype of ``gate_up``; float32 inside.

    Raises:
        ShapeError: the last axis is odd.
    """
    if gate_up.shape[-1] % 2:
        raise ShapeError(f"gate and up halves expected, got {tuple(gate_up.shape)}")
    return activation(gate_up)
