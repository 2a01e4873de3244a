"""Attention residuals on a CUDA device: one launch.

A token is mixed by the kernel that is fastest for the number of tokens in the pass: its last bits
are the same in all passes of up to FEW tokens, but may be others in one of more, as they may with
the number of warps.
"""

from __future__ import annotations

import torch
import triton

from k3vl.errors import ShapeError
from k3vl.kernels.attn_residual import check_shapes
from k3vl.kernels.attn_residual.hopper import cluster_mix, cluster_takes
from k3vl.kernels.attn_residual.mix_kernel import attn_residual_kernel
from k3vl.kernels.dependent import begins_early
from k3vl.kernels.hopper import hopper_runs

FEW = 64
"""Up to so many tokens a cluster of multiprocessors takes each, where that kernel runs."""

_NOT_FULL = 128
"""Up to so many tokens the device is not full, and a token's own latency is all that counts."""

_STAGED_BYTES = 64 << 10
"""Of a row; wider ones are not fetched ahead, as three of them would not fit in shared memory."""


def attn_residual(
    rows: torch.Tensor,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    warps: int | None = None,
    cluster: bool = False,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.attn_residual.attn_residual`.

    The rest is for measurements: ``warps`` of the Triton kernel, ``cluster`` for the one in Gluon
    at any number of tokens.
    """
    check_shapes(rows, query, norm_weight)
    if rows.stride(-1) != 1:
        raise ShapeError("attn_residual: rows must be contiguous")
    depth, tokens, d = rows.shape
    out = torch.empty(tokens, d, dtype=rows.dtype, device=rows.device)
    if not tokens:
        return out
    early = begins_early(rows)
    few = tokens <= FEW and warps is None and hopper_runs(rows.device)
    if cluster or (few and cluster_takes(rows, query, norm_weight)):
        cluster_mix(rows, query, norm_weight, eps, out, early=early)
        return out
    width = triton.next_power_of_2(d)
    attn_residual_kernel[(tokens,)](
        rows,
        query,
        norm_weight,
        out,
        rows.stride(0),
        rows.stride(1),
        eps,
        depth,
        D=d,
        BD=width,
        PDL=early,
        STAGES=4 if width * rows.itemsize <= _STAGED_BYTES else 1,
        num_warps=warps or (8 if tokens <= _NOT_FULL else 4),
        launch_pdl=early,
    )
    return out
