"""Launches of the products in ``joined_kernel.py``: one product a step, in place of eight."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3vl.errors import ShapeError
from k3vl.kernels.moe.joined_kernel import down_joined_kernel, gate_up_joined_kernel
from k3vl.kernels.moe.plan import FULL
from k3vl.kernels.situ import SituGLU, caps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k3vl.kernels.moe.mxfp4 import Mxfp4Experts
    from k3vl.kernels.moe.plan import ExpertPlan
    from k3vl.kernels.situ import GatedActivation

_STEP_COLUMNS = 128

SHARED = 227 << 10
"""Bytes of shared memory that a block may have on compute capability 9.0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """How a product is cut.

    Attributes:
        rows: of weights in a block, 64 for four warps at least; half of them gates, half ups.
        warps: of a block.
        parts: of 128 columns in a step.
        stages: steps whose loads are under way or done.
    """

    rows: int
    warps: int
    stages: int
    parts: int = 1


_WIDE = Joined(rows=128, warps=8, stages=3)
SHAPES = {
    16: Joined(rows=128, warps=4, stages=3, parts=2),
    32: Joined(rows=128, warps=4, stages=3, parts=2),
    64: Joined(rows=128, warps=4, stages=3),
    128: _WIDE,
    144: _WIDE,
    160: _WIDE,
    192: _WIDE,
}
"""By tile width, for the way in and the way back."""

AT_ONCE = 224
"""Tiles of a width that have programs of their own, where programs take several in turn.

Lists of tiles are as long as the worst case. At 8,192 tokens of K3 a program for each place of
every list would be 264,000 on the way in, of which 48,000 have a tile (uniform routing), and those
without one still begin, read the count and end.
"""


def can_join(stored: Mxfp4Experts, pairs: int) -> bool:
    """Whether blocks fit into the experts' widths, and offsets into 32 bits."""
    latent, inner = stored.latent, stored.inner
    whole = latent % _STEP_COLUMNS == 0 and inner % _STEP_COLUMNS == 0
    return whole and pairs * max(latent, inner) < 2**31


def joined_products(
    x: torch.Tensor,
    plan: ExpertPlan,
    stored: Mxfp4Experts,
    activation: GatedActivation,
    top_k: int,
    shapes: Mapping[int, Joined] = SHAPES,
    at_once: int | None = None,
) -> torch.Tensor:
    """Every pair's output by itself.

    Args:
        x: [N, L].
        plan: of its pairs.
        stored: the experts; see :func:`can_join`.
        activation: theirs.
        top_k: experts a token.
        shapes: how the products are cut, by tile width.
        at_once: most tiles of a width that have programs of their own; None: all.

    Returns:
        [N k, L] by pair, in the dtype of ``x``.

    Raises:
        ShapeError: the widths are no multiples of 128.
    """
    latent, inner = stored.latent, stored.inner
    pairs = x.shape[0] * top_k
    if not can_join(stored, pairs):
        raise ShapeError(f"joined products: L {latent}, I {inner}, {pairs} pairs")
    split = x.view(-1, latent // _STEP_COLUMNS, 16, 8).transpose(2, 3).contiguous()
    hidden = x.new_empty(pairs, inner)
    outputs = x.new_empty(pairs, latent)
    packed = x.dtype == torch.bfloat16 and x.is_cuda
    for width, tiles in plan.tiles.items():
        rows, constants = block_of(shapes[width], width, 2 * inner, latent)
        programs, turns = _programs(tiles.expert.numel(), at_once)
        gate_up_joined_kernel[(2 * inner // rows, programs)](
            split, stored.w13, _words(stored.w13_scale), *plan.lists(width), hidden, top_k,
            *caps(activation), WIDTH=latent, INNER=inner, SITU=isinstance(activation, SituGLU),
            BM=rows // 2, PACKED=packed, TURNS=turns, **constants,
        )  # fmt: skip
    for width, tiles in plan.tiles.items():
        rows, constants = block_of(shapes[width], width, latent, inner)
        programs, turns = _programs(tiles.expert.numel(), at_once)
        down_joined_kernel[(latent // rows, programs)](
            hidden, stored.w2, _words(stored.w2_scale), *plan.lists(width), outputs,
            INNER=inner, WIDTH=latent, BM=rows, PACKED=packed, TURNS=turns, **constants,
        )  # fmt: skip
    return outputs


def _programs(tiles: int, at_once: int | None) -> tuple[int, bool]:
    """How many programs a list of tiles gets, and whether they take turns."""
    if at_once is None or tiles <= at_once:
        return tiles, False
    return at_once, True


def _words(scale: torch.Tensor) -> torch.Tensor:
    """Four scale bytes, of 128 columns, as a word."""
    return scale.view(torch.int32)


def block_of(shape: Joined, width: int, features: int, columns: int) -> tuple[int, dict[str, int]]:
    """Rows of a block and launch constants.

    Smaller where a block would not divide the matrix or its steps would not fit in shared memory.
    """
    rows, warps, parts, stages = shape.rows, shape.warps, shape.parts, shape.stages
    while features % rows:
        rows, warps = rows // 2, max(4, warps // 2)
    while columns % (parts * _STEP_COLUMNS):
        parts //= 2
    while shared_bytes(rows, warps, parts, stages, width) > SHARED:
        if parts > 1:
            parts //= 2
        else:
            stages -= 1
    return rows, {
        "BN": min(width, FULL),
        "TAIL": max(0, width - FULL),
        "PARTS": parts,
        "COPIES": _copies(rows, warps, parts),
        "num_warps": warps,
        "num_stages": stages,
    }


def _copies(rows: int, warps: int, parts: int) -> int:
    """How often a scale is read, so that no thread goes without."""
    return max(1, 32 * warps // (rows * parts))


def shared_bytes(rows: int, warps: int, parts: int, stages: int, width: int) -> int:
    """What a block takes, as Triton 3.6 compiles it.

    Tokens of ``stages`` steps, which the tensor cores read there, and one step less of weights and
    scales, which are read into registers first.
    """
    tokens = 2 * _STEP_COLUMNS * parts * width
    weights = rows * parts * (_STEP_COLUMNS // 2 + 4 * _copies(rows, warps, parts))
    return stages * tokens + (stages - 1) * weights
