"""Rotary positions on a CUDA device: one launch for queries and keys together."""

from __future__ import annotations

import torch
import triton

from k3vl.errors import ShapeError
from k3vl.kernels.vision_pos.rotate_kernel import rotate_kernel


def rotate(x: torch.Tensor, table: torch.Tensor, *, warps: int = 4) -> torch.Tensor:
    """See :func:`k3vl.kernels.vision_pos.rotate`."""
    fits = x.ndim == 3 and x.shape[2] >= 4 and not x.shape[2] & (x.shape[2] - 1)
    if not fits or tuple(table.shape) != (x.shape[0], x.shape[2] // 2) or x.stride(2) != 1:
        raise ShapeError(f"rotate: x {tuple(x.shape)}, table {tuple(table.shape)}")
    patches, heads, width = x.shape
    out = torch.empty(patches, heads, width, dtype=x.dtype, device=x.device)
    if patches:
        rotate_kernel[(patches,)](
            x,
            torch.view_as_real(table).contiguous(),
            out,
            *x.stride()[:2],
            heads,
            K=width,
            BH=triton.next_power_of_2(heads),
            num_warps=warps,
        )
    return out
