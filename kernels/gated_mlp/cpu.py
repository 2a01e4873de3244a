"""The gated MLP on a CPU, in one call."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from k3vl.kernels.compiled import EXACT, address, alive, compiled, doubles, ints
from k3vl.kernels.gated_mlp import GatedMLPWeights, check_shapes
from k3vl.kernels.linear import added
from k3vl.kernels.product import Table, Tables, matrix, product
from k3vl.kernels.situ import caps
from k3vl.kernels.situ.cpu import activate


class GatedMLPCPU:
    """See :class:`k3vl.kernels.gated_mlp.GatedMLPOp`."""

    def __init__(self) -> None:
        """Nothing is known of any weight yet."""
        self._tables: Tables[GatedMLPWeights] = Tables(_table)

    def __call__(
        self, x: torch.Tensor, weights: GatedMLPWeights, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[N, D] -> [N, D]."""
        check_shapes(x, weights.gate_up, weights.down)
        out = torch.empty(x.shape)
        where = self._tables(weights).address
        _gated_mlp(address(x), x.stride(0), x.shape[0], where, out.data_ptr())
        return added(out, onto)


def _table(weights: GatedMLPWeights) -> Table:
    width, inner = weights.down.shape
    matrices = matrix(weights.gate_up), matrix(weights.down)
    return Table(*matrices, inner, width, *caps(weights.activation))


@compiled
def _gated_mlp(x: int, x_stride: int, rows: int, table: int, out: int) -> None:
    w, caps = ints(table, 6), doubles(table, 6)
    gated_mlp_rows(x, x_stride, rows, w[0], w[1], w[2], w[3], out, caps[4], caps[5])


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
    """[rows, width] -> [rows, width] by addresses; ``gate_up`` and ``down`` of matrices' tables."""
    hidden = np.empty((rows, 2 * inner), np.float32)
    active = np.empty((rows, inner), np.float32)
    where, to = hidden.ctypes.data, active.ctypes.data
    product(x, x_stride, rows, gate_up, where, 2 * inner)
    activate(where, 2 * inner, rows, inner, to, beta, linear_beta)
    product(to, inner, rows, down, out, width)
    alive(hidden, active)
