"""Projections on a CUDA device: torch's products, and for a single row a kernel of our own.

With one row a product is as fast as its weights can be read. torch's comes near that for large
matrices only, and what stands around it (a sum with the residual stream, an activation, a second
matrix of the same input) is a launch more. Imported only where Triton runs.
"""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch.nn import functional as F

from k3vl.kernels.dependent import begins_early
from k3vl.kernels.gated_mlp import glu_linear
from k3vl.kernels.linear import check_shapes
from k3vl.kernels.linear.row_kernel import row_linear_kernel
from k3vl.kernels.situ import SituGLU, caps
from k3vl.kernels.situ.gpu import glu_gpu
from k3vl.kernels.weight import plain

if TYPE_CHECKING:
    from k3vl.kernels.situ import GatedActivation
    from k3vl.kernels.weight import Weight


class RowShape(NamedTuple):
    """How a product of one row is laid out.

    Attributes:
        rows: outputs of a program; of a gated activation half of its rows are gates.
        columns: at a time, at most; a power of two.
        warps: of a program. A thread has eights of columns: 256 columns a warp need no exchange.
        ahead: bytes of a matrix' row that are asked for before the input is there.
        stages: columns that are under way at once, in shared memory; 1: in registers.
    """

    rows: int
    columns: int
    warps: int
    ahead: int = 2048
    stages: int = 4


ROW = RowShape(rows=8, columns=512, warps=2)


def row_shape(width: int) -> RowShape:
    """How products of inputs so wide are laid out: the fastest on an H200."""
    if width < 1024:
        return ROW
    return RowShape(4, 512, 2, stages=6) if width <= 8192 else RowShape(8, 512, 2, stages=3)


def linear_gpu(
    x: torch.Tensor,
    weight: Weight,
    *,
    onto: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.linear.linear`; ``dtype`` is not rounded to on the way."""
    check_shapes(x, weight, onto)
    w = plain(weight)
    if is_row(x, w):
        out = onto if onto is not None else x.new_empty(1, w.shape[0], dtype=dtype)
        return row_linear(x, w, out, onto=onto is not None)
    if onto is not None:
        return onto.addmm_(x, w.mT)
    return F.linear(x, w) if dtype in {None, x.dtype} else product_in(x, w, dtype)


def glu_linear_gpu(x: torch.Tensor, weight: Weight, activation: GatedActivation) -> torch.Tensor:
    """See :func:`k3vl.kernels.gated_mlp.glu_linear`."""
    w = plain(weight)
    if not is_row(x, w):
        return glu_linear(x, weight, activation, glu=glu_gpu)
    gates, ups = w.chunk(2)
    out = x.new_empty(1, gates.shape[0])
    return row_linear(x, gates, out, second=ups, activation=activation)


def front_gpu(
    x: torch.Tensor, router: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a router in float32 and the projection into the latent, of one row."""
    logits = x.new_empty(1, router.shape[0], dtype=torch.float32)
    latent = x.new_empty(1, down.shape[0])
    row_linear(x, down, latent, second=router, out_second=logits)
    return logits, latent


def product_in(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Another dtype than the inputs', unrounded where torch has such a product."""
    if x.dtype == weight.dtype == torch.bfloat16 and not x.is_cpu and dtype == torch.float32:
        return torch.mm(x, weight.mT, out_dtype=dtype)
    return F.linear(x.to(dtype), weight.to(dtype))


def is_row(x: torch.Tensor, *matrices: torch.Tensor) -> bool:
    """Whether :func:`row_linear` takes it."""
    one = (x.shape[0], x.stride(1)) == (1, 1)
    return one and can_stream(x.dtype, *matrices)


def can_stream(dtype: torch.dtype, *matrices: torch.Tensor) -> bool:
    """Whether one row in ``dtype`` can be multiplied by them as they lie."""
    return all(
        w.dtype == dtype and w.shape[1] % 16 == 0 and w.stride() == (w.shape[1], 1)
        for w in matrices
    )


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    onto: bool = False,
    second: torch.Tensor | None = None,
    out_second: torch.Tensor | None = None,
    activation: GatedActivation | None = None,
    shape: RowShape | None = None,
) -> torch.Tensor:
    """One row times one matrix or two, in one launch.

    Args:
        x: [1, D].
        weight: [O, D], rows in one run, in the dtype of ``x``.
        out: [1, O]; filled, or added to, and returned.
        onto: add to what ``out`` holds.
        second, out_second: another matrix of the same input, and its result.
        activation: of ``weight`` as gates and ``second`` as ups; then there is one result.
        shape: for measurements.
    """
    rows, d = weight.shape
    shape = shape or row_shape(d)
    other, count = (weight, 0) if second is None else (second, second.shape[0])
    glu = activation is not None
    blocks = triton.cdiv(rows, shape.rows) + (0 if glu else triton.cdiv(count, shape.rows))
    row_linear_kernel[(blocks,)](
        x,
        weight,
        other,
        out,
        out if out_second is None else out_second,
        out,
        *((1.0, 1.0) if activation is None else caps(activation)),
        rows,
        count,
        D=d,
        ONTO=onto,
        GLU=glu,
        SITU=isinstance(activation, SituGLU),
        **launch_options(shape, x, d),
    )
    return out


def launch_options(shape: RowShape, x: torch.Tensor, width: int) -> dict[str, int | bool]:
    """Of a kernel over rows of a matrix so wide, whose input is ``x``."""
    columns = min(shape.columns, width & -width)
    early = begins_early(x)
    return {
        "BN": shape.rows,
        "BK": columns,
        "AHEAD": min(shape.ahead, width * x.element_size()) // 128 * 128 if early else 0,
        "STAGES": shape.stages,
        "PDL": early,
        "num_warps": min(shape.warps, max(1, columns // 256)),
        "launch_pdl": early,
    }
