"""Gated activations on a CPU, in vectors."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from k3vl.errors import ShapeError
from k3vl.kernels.compiled import EXACT, address, compiled, floats, sigmoid, tanh
from k3vl.kernels.situ import GatedActivation, caps


def glu_cpu(gate_up: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """See :func:`k3vl.kernels.situ.glu`."""
    double = gate_up.shape[-1]
    if double % 2:
        raise ShapeError(f"gate and up halves expected, got {tuple(gate_up.shape)}")
    rows = gate_up.reshape(-1, double)
    out = torch.empty(rows.shape[0], double // 2)
    _glu(
        *(address(rows), rows.stride(0), rows.shape[0], double // 2),
        *(out.data_ptr(), *caps(activation)),
    )
    return out.view(*gate_up.shape[:-1], double // 2)


@compiled
def _glu(
    gate_up: int, stride: int, rows: int, inner: int, out: int, beta: float, linear_beta: float
) -> None:
    activate(gate_up, stride, rows, inner, out, beta, linear_beta)


@njit(fastmath=EXACT, error_model="numpy")
def activate(
    gate_up: int, stride: int, rows: int, inner: int, out: int, beta: float, linear_beta: float
) -> None:
    """[rows, 2 inner] -> [rows, inner] by addresses; the caps are :func:`constants`."""
    cap, linear = np.float32(beta), np.float32(linear_beta)
    for r in range(rows):
        gate = floats(gate_up + 4 * r * stride, inner)
        up = floats(gate_up + 4 * (r * stride + inner), inner)
        to = floats(out + 4 * r * inner, inner)
        if beta > 0:
            for i in range(inner):
                g, u = gate[i], up[i]
                to[i] = cap * tanh(g / cap) * sigmoid(g) * (linear * tanh(u / linear))
        else:
            for i in range(inner):
                g = gate[i]
                to[i] = g * sigmoid(g) * up[i]
