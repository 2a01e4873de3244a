"""Gated activations of the MLPs: SiTU-GLU (K3) and SwiGLU (Kimi-Linear)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3vl.errors import ShapeError
from k3vl.kernels.situ.reference import silu_glu_reference, situ_glu_reference

if TYPE_CHECKING:
    import torch


def situ_glu(gate_up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """Apply SiTU-GLU: ``beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)``.

    The sigmoid acts on the uncapped gate. The result is bounded by ``beta * linear_beta``.

    Args:
        gate_up: [..., 2 I]; gates first, then ups.
        beta: soft cap of the gate (K3: 4).
        linear_beta: soft cap of the up branch (K3: 25).

    Returns:
        [..., I] in the dtype of ``gate_up``; float32 inside.

    Raises:
        ShapeError: the last axis is odd.

    Source: Kimi K3 report, Stable LatentMoE; ``activation_situ_*`` of config.json.
    """
    _check_even(gate_up)
    return situ_glu_reference(gate_up, beta, linear_beta)


def silu_glu(gate_up: torch.Tensor) -> torch.Tensor:
    """Apply SwiGLU: ``silu(g) * u``; shapes as :func:`situ_glu`."""
    _check_even(gate_up)
    return silu_glu_reference(gate_up)


def _check_even(gate_up: torch.Tensor) -> None:
    if gate_up.shape[-1] % 2:
        raise ShapeError(f"gate and up halves expected, got {tuple(gate_up.shape)}")
