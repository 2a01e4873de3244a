"""The gated MLP on a CPU, in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import njit

from k3vl.kernels.compiled import EXACT, address, alive, compiled, product
from k3vl.kernels.gated_mlp import check_shapes
from k3vl.kernels.situ import caps
from k3vl.kernels.situ.cpu import activate

if TYPE_CHECKING:
    from k3vl.kernels.situ import GatedActivation


def gated_mlp_cpu(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: GatedActivation
) -> torch.Tensor:
    """See :class:`k3vl.kernels.gated_mlp.GatedMLPOp`."""
    check_shapes(x, gate_up, down)
    width, inner = down.shape
    out = torch.empty(x.shape[0], width)
    _gated_mlp(
        *(address(x), x.stride(0), x.shape[0], address(gate_up), address(down), inner, width),
        *(out.data_ptr(), *caps(activation)),
    )
    return out


@compiled
def _gated_mlp(
    x: int,
    x_stride: int,
    rows: int,
    gate_up: int,
    down: int,
    inner: int,
    width: int,
    out: int,
    beta: float,
    linear_beta: float,
) -> None:
    gated_mlp_rows(x, x_stride, rows, gate_up, down, inner, width, out, beta, linear_beta)


@njit(fastmath=EXACT, error_model="numpy")
def gated_mlp_rows(
    x: int,
    x_stride: int,
    rows: int,
    gate_up: int,
    down: int,
    inner: int,
    width: int,
    out: int,
    beta: float,
    linear_beta: float,
) -> None:
    """[rows, width] -> [rows, width] by addresses."""
    hidden = np.empty((rows, 2 * inner), np.float32)
    active = np.empty((rows, inner), np.float32)
    where, to = hidden.ctypes.data, active.ctypes.data
    product(x, x_stride, rows, gate_up, width, 2 * inner, where, 2 * inner)
    activate(where, 2 * inner, rows, inner, to, beta, linear_beta)
    product(to, inner, rows, down, inner, width, out, width)
    alive(hidden, active)
