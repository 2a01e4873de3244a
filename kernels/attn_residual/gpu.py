"""Attention residuals on a CUDA device: one launch."""

from __future__ import annotations

import torch
import triton

from k3vl.errors import ShapeError
from k3vl.kernels.attn_residual.mix_kernel import attn_residual_kernel
from k3vl.kernels.dependent import begins_early

_FEW = 128
"""Up to so many tokens the device is not full, and a token's own latency is all that counts."""


def attn_residual(
    rows: torch.Tensor,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    warps: int | None = None,
    registers: int | None = None,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.attn_residual.attn_residual`.

    ``warps`` and ``registers`` are for measurements.
    """
    agree = rows.ndim == 3 and rows.shape[-1:] == query.shape == norm_weight.shape
    if not agree or not rows.shape[0] or rows.stride(-1) != 1:
        raise ShapeError(
            f"attn_residual: rows {tuple(rows.shape)}, query {tuple(query.shape)}, "
            f"norm_weight {tuple(norm_weight.shape)}"
        )
    depth, tokens, d = rows.shape
    out = torch.empty(tokens, d, dtype=rows.dtype, device=rows.device)
    if not tokens:
        return out
    early = begins_early(rows)
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
        BD=triton.next_power_of_2(d),
        PDL=early,
        num_warps=warps or (8 if tokens <= _FEW else 4),
        maxnreg=registers,
        launch_pdl=early,
    )
    return out
