"""Launches of the products in ``joined_kernel.py``: one product a step, in place of eight."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3vl.errors import ShapeError
from k3vl.kernels.moe.joined_kernel import down_joined_kernel, gate_up_joined_kernel
from k3vl.kernels.moe.words_kernel import by_machine_code
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
        rows: of weights in a block, 64 or 128, 64 for four warps at least; half of them gates,
            half ups.
        warps: of a block.
        stages: steps whose loads are under way or done.
    """

    rows: int
    warps: int
    stages: int


_WIDE = Joined(rows=128, warps=8, stages=3)
_MIDDLE = Joined(rows=128, warps=4, stages=3)
_NARROW = Joined(rows=128, warps=4, stages=4)
SHAPES = {
    16: _NARROW,
    32: _NARROW,
    48: _MIDDLE,
    64: _MIDDLE,
    80: _MIDDLE,
    96: _MIDDLE,
    128: _WIDE,
    144: _WIDE,
    160: _WIDE,
    192: _WIDE,
}
"""By tile width, for the way in and the way back."""


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
    programs: int | None = None,
) -> torch.Tensor:
    """Every pair's output by itself.

    Args:
        x: [N, L].
        plan: of its pairs.
        stored: the experts; see :func:`can_join`.
        activation: theirs.
        top_k: experts a token.
        shapes: how the products are cut, by tile width.
        programs: of a launch at most, where they take blocks in turn; None: never in turn. A list
            of tiles is as long as the worst case, and a program for each of its places begins,
            reads the count and ends.

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
    packed = by_machine_code(x)
    mean = pairs / stored.count
    for width, tiles in plan.tiles.items():
        most = programs if _in_turn(width, mean) else None
        rows, constants = block_of(shapes[width], width)
        grid = _grid(2 * inner // rows, tiles.expert.numel(), most)
        gate_up_joined_kernel[grid](
            split, stored.w13, _words(stored.w13_scale), *plan.lists(width), hidden, top_k,
            *caps(activation), WIDTH=latent, INNER=inner, SITU=isinstance(activation, SituGLU),
            BM=rows // 2, PACKED=packed, TURNS=len(grid) == 1, **constants,
        )  # fmt: skip
    for width, tiles in plan.tiles.items():
        most = programs if _in_turn(width, mean) else None
        rows, constants = block_of(shapes[width], width)
        grid = _grid(latent // rows, tiles.expert.numel(), most)
        down_joined_kernel[grid](
            hidden, stored.w2, _words(stored.w2_scale), *plan.lists(width), outputs,
            INNER=inner, WIDTH=latent, BM=rows, PACKED=packed, TURNS=len(grid) == 1, **constants,
        )  # fmt: skip
    return outputs


def _in_turn(width: int, mean: float) -> bool:
    """Whether programs may take blocks in turn, for which they need more registers.

    Up to 64 pairs a multiprocessor would hold two in place of three: only where hardly any tile is
    so wide.
    """
    return width > 64 or not width / 3 < mean < 1.5 * width


def _grid(blocks: int, tiles: int, most: int | None) -> tuple[int, ...]:
    """One program for each block of each tile, or ``most`` in a row if those are fewer."""
    if most is None or blocks * tiles <= most:
        return blocks, tiles
    return (most,)


def _words(scale: torch.Tensor) -> torch.Tensor:
    """Four scale bytes, of 128 columns, as a word."""
    return scale.view(torch.int32)


def block_of(shape: Joined, width: int) -> tuple[int, dict[str, int]]:
    """Rows of a block and launch constants.

    Fewer stages where they would not fit in shared memory.
    """
    rows, warps, stages = shape.rows, shape.warps, shape.stages
    wide = 1 << width.bit_length() - 1
    while shared_bytes(rows, warps, stages, width) > SHARED:
        stages -= 1
    return rows, {
        "BN": wide,
        "TAIL": width - wide,
        "COPIES": _copies(rows, warps),
        "num_warps": warps,
        "num_stages": stages,
    }


def _copies(rows: int, warps: int) -> int:
    """How often a scale is read, so that no thread goes without."""
    return max(1, 32 * warps // rows)


def shared_bytes(rows: int, warps: int, stages: int, width: int) -> int:
    """What a block takes, as Triton compiles it (``compile_check.py``).

    Tokens of ``stages`` steps, which the tensor cores read there, and one step less of weights and
    scales, which are read into registers first.
    """
    tokens = 2 * _STEP_COLUMNS * width
    weights = rows * (_STEP_COLUMNS // 2 + 4 * _copies(rows, warps))
    return stages * tokens + (stages - 1) * weights
