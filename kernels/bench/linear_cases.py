"""Projections of a single token at K3's dimensions, beside torch's product."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from k3vl.kernels.bench.case import Case, normal
from k3vl.kernels.dependent import after_all
from k3vl.kernels.linear.gpu import RowShape, row_linear
from k3vl.kernels.situ import SituGLU

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_D = 7168
_SITU = SituGLU(beta=4.0, linear_beta=25.0)
_MATRICES = {
    "KDA in": (49376, _D),
    "decay": (12288, 128),
    "attention out": (_D, 12288),
    "MLA in": (14400, _D),
    "MLA queries": (18432, 1536),
    "latent up": (_D, 3584),
    "shared down": (_D, 6144),
    "dense down": (_D, 33792),
    "router": (896, _D),
    "head": (163840, _D),
}
_SHAPES = (
    RowShape(4, 512, 2, stages=6),
    RowShape(8, 512, 2, stages=1),
    RowShape(8, 512, 2, stages=3),
    RowShape(8, 512, 2, stages=6),
    RowShape(16, 512, 2, stages=1),
    RowShape(16, 512, 2, stages=3),
    RowShape(16, 512, 2, stages=4),
    RowShape(8, 1024, 4, stages=1),
    RowShape(8, 1024, 4, stages=4),
    RowShape(16, 256, 1, stages=4),
)


def row_cases() -> Iterator[Case]:
    """One row times every matrix of a layer, and times gates and ups with their activation."""
    for name, (rows, d) in _MATRICES.items():
        x, w = normal(1, d), normal(rows, d) / d**0.5
        run = partial(_late, row_linear, x, w, torch.empty(1, rows, device="cuda", dtype=x.dtype))
        yield Case(
            op="row_linear",
            shape=f"{name}, {rows} x {d}",
            ours=run,
            want=partial(F.linear, x.float(), w.float()) if rows < 50000 else None,
            limit=8e-3,
            bytes=2 * rows * d,
            flops=2 * rows * d,
            variants={_name(shape): partial(run, shape=shape) for shape in _SHAPES},
            compared=True,
            peers={"PyTorch": partial(F.linear, x, w)},
        )
    for name, inner in (("shared", 6144), ("dense", 33792)):
        x, w = normal(1, _D), normal(2 * inner, _D) / _D**0.5
        gates, ups = w.chunk(2)
        out = torch.empty(1, inner, device="cuda", dtype=x.dtype)
        run = partial(_late, row_linear, x, gates, out, second=ups, activation=_SITU)
        yield Case(
            op="row_linear",
            shape=f"{name} gates and ups, 2 x {inner} x {_D}, SiTU",
            ours=run,
            want=partial(_glu, x.float(), w.float()),
            limit=8e-3,
            bytes=4 * inner * _D,
            flops=4 * inner * _D,
            variants={_name(shape): partial(run, shape=shape) for shape in _SHAPES},
            compared=True,
            peers={"PyTorch": partial(_glu, x, w)},
        )


def _late(work: Callable[..., torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
    """Not beside what is in front of it, which is not timed."""
    with after_all():
        return work(*args, **kwargs)


def _glu(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return _SITU(F.linear(x, w))


def _name(shape: RowShape) -> str:
    size = f"{shape.rows} rows, {shape.columns} columns"
    return f"{size}, {shape.warps} warps, {shape.stages} stages"
