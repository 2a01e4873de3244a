"""Rotary positions on a CUDA device: one launch for queries and keys together."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from k3vl.errors import ShapeError
from k3vl.kernels.dependent import begins_early
from k3vl.kernels.vision_pos.rotate_kernel import rotate_kernel


class RotateShape(NamedTuple):
    """Patches and heads of a program, and its warps."""

    patches: int
    heads: int
    warps: int


def rotate(
    x: torch.Tensor, table: torch.Tensor, *, shape: RotateShape | None = None
) -> torch.Tensor:
    """See :func:`k3vl.kernels.vision_pos.rotate`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, table, out, shape)
    return out


def rotate_in_place(
    x: torch.Tensor, table: torch.Tensor, *, shape: RotateShape | None = None
) -> None:
    """As :func:`rotate`, into the memory of ``x``."""
    _launch(x, table, x, shape)


def _launch(
    x: torch.Tensor, table: torch.Tensor, out: torch.Tensor, shape: RotateShape | None
) -> None:
    fits = x.ndim == 3 and x.shape[2] >= 4 and not x.shape[2] & (x.shape[2] - 1)
    if not fits or tuple(table.shape) != (x.shape[0], x.shape[2] // 2) or x.stride(2) != 1:
        raise ShapeError(f"rotate: x {tuple(x.shape)}, table {tuple(table.shape)}")
    patches, heads, width = x.shape
    if not patches:
        return
    layout = shape or RotateShape(8, min(4, heads), 4)
    grid = triton.cdiv(patches, layout.patches) * triton.cdiv(heads, layout.heads)
    early = begins_early(x)
    rotate_kernel[(grid,)](
        x,
        torch.view_as_real(table).contiguous(),
        out,
        patches,
        heads,
        *x.stride()[:2],
        *out.stride()[:2],
        K=width,
        BP=layout.patches,
        BH=layout.heads,
        PDL=early,
        num_warps=layout.warps,
        launch_pdl=early,
    )
