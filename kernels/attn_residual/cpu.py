"""Attention residuals on a CPU."""

from __future__ import annotations

import numpy as np
import torch

from k3vl.kernels.attn_residual import check_shapes
from k3vl.kernels.compiled import address, compiled, dot, exp, floats
from k3vl.kernels.rms_norm.cpu import normalise


def attn_residual_cpu(
    rows: torch.Tensor,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.attn_residual.attn_residual`."""
    check_shapes(rows, query, norm_weight)
    depth, tokens, width = rows.shape
    out = torch.empty(tokens, width)
    _attn_residual(
        *(address(rows), rows.stride(0), rows.stride(1), depth, tokens, width),
        *(address(query), address(norm_weight), float(eps), out.data_ptr()),
    )
    return out


@compiled
def _attn_residual(
    rows: int,
    depth_stride: int,
    token_stride: int,
    depth: int,
    tokens: int,
    width: int,
    query: int,
    norm_weight: int,
    eps: float,
    out: int,
) -> None:
    by, norm = floats(query, width), floats(norm_weight, width)
    scores = np.empty(depth, np.float32)
    for n in range(tokens):
        for j in range(depth):
            row = floats(rows + 4 * (j * depth_stride + n * token_stride), width)
            root = np.sqrt(dot(row, row) / np.float32(width) + np.float32(eps))
            scores[j] = dot(by, row) / root
        top, total = scores.max(), np.float32(0)
        for j in range(depth):
            scores[j] = exp(scores[j] - top)
            total += scores[j]
        where = out + 4 * n * width
        mixed = floats(where, width)
        mixed[:] = 0
        for j in range(depth):
            row = floats(rows + 4 * (j * depth_stride + n * token_stride), width)
            share = scores[j] / total
            for i in range(width):
                mixed[i] += share * row[i]
        normalise(where, norm, np.float32(eps), where)
