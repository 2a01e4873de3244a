"""RMSNorm on a CPU."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from k3vl.errors import ShapeError
from k3vl.kernels.compiled import EXACT, address, dot, floats


def rms_norm_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`k3vl.kernels.rms_norm.rms_norm`."""
    if x.shape[-1:] != weight.shape:
        raise ShapeError(f"rms_norm: x {tuple(x.shape)} and weight {tuple(weight.shape)}")
    rows = x if x.dim() == 2 else x.reshape(-1, weight.shape[0])
    out = torch.empty(x.shape)
    _rms_norm(
        *(address(rows), rows.stride(0), rows.shape[0], address(weight), weight.shape[0]),
        *(float(eps), out.data_ptr()),
    )
    return out


@njit(cache=True, nogil=True, fastmath=EXACT, error_model="numpy")
def _rms_norm(
    x: int, stride: int, rows: int, weight: int, width: int, eps: float, out: int
) -> None:
    for r in range(rows):
        by = floats(weight, width)
        normalise(x + 4 * r * stride, by, np.float32(eps), out + 4 * r * width)


@njit(fastmath=EXACT, error_model="numpy")
def normalise(x: int, weight: np.ndarray, eps: np.float32, out: int) -> None:
    """One row by addresses; ``out`` may be ``x``."""
    given, to = floats(x, weight.size), floats(out, weight.size)
    scale = np.float32(1) / np.sqrt(dot(given, given) / np.float32(weight.size) + eps)
    for i in range(weight.size):
        to[i] = given[i] * scale * weight[i]
