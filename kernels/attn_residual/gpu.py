"""Attention residuals on a CUDA device: one launch."""

from __future__ import annotations

import torch
import triton

from k3vl.errors import ShapeError
from k3vl.kernels.attn_residual import check_shapes
from k3vl.kernels.attn_residual.hopper import cluster_mix, cluster_takes
from k3vl.kernels.attn_residual.mix_kernel import attn_residual_kernel
from k3vl.kernels.dependent import begins_early

_FEW = 128
"""Up to so many tokens the device is not full, and a token's own latency is all that counts."""


def attn_residual(
    rows: torch.Tensor,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    added: torch.Tensor | None = None,
    *,
    fresh: bool = False,
    warps: int | None = None,
    registers: int | None = None,
    stages: int = 1,
    hints: tuple[str, str] = ("", ""),
    cluster: bool = False,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.attn_residual.attn_residual`.

    The rest is for measurements; ``stages`` are of rows in shared memory, with 1 the next one is
    in registers; ``hints`` are cache modifiers of loads of rows and of the store, ``cluster`` asks
    for the Gluon kernel.
    """
    check_shapes(rows, query, norm_weight, added)
    if rows.stride(-1) != 1 or (added is not None and added.stride(-1) != 1):
        raise ShapeError("attn_residual: rows must be contiguous")
    depth, tokens, d = rows.shape
    out = torch.empty(tokens, d, dtype=rows.dtype, device=rows.device)
    if not tokens:
        return out
    early = begins_early(rows)
    if cluster:
        assert cluster_takes(rows, query, norm_weight, added)
        cluster_mix(rows, query, norm_weight, eps, added, fresh, out)
        return out
    taken = rows if added is None else added
    attn_residual_kernel[(tokens,)](
        rows,
        query,
        norm_weight,
        taken,
        out,
        rows.stride(0),
        rows.stride(1),
        taken.stride(0),
        eps,
        depth,
        D=d,
        BD=triton.next_power_of_2(d),
        PDL=early,
        ADDED=added is not None,
        FRESH=fresh,
        STAGES=stages,
        LOAD=hints[0],
        STORE=hints[1],
        num_warps=warps or (8 if tokens <= _FEW else 4),
        maxnreg=registers,
        launch_pdl=early,
    )
    return out
