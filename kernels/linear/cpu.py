"""Projections on a CPU: weights are read once for all rows, and no row depends on another."""

from __future__ import annotations

import torch
from numba import njit

from k3vl.kernels.compiled import EXACT, address, product
from k3vl.kernels.linear import check_shapes


def linear_cpu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See :func:`k3vl.kernels.linear.linear`."""
    check_shapes(x, weight)
    (rows, inner), outputs = x.shape, weight.shape[0]
    out = torch.empty(rows, outputs)
    if rows:
        _linear(address(x), x.stride(0), rows, address(weight), inner, outputs, out.data_ptr())
    return out


@njit(cache=True, nogil=True, fastmath=EXACT, error_model="numpy")
def _linear(
    x: int, x_stride: int, rows: int, weight: int, inner: int, outputs: int, out: int
) -> None:
    product(x, x_stride, rows, weight, inner, outputs, out, outputs)
