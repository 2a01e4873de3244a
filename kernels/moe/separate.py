"""Launches of the products in ``experts_kernel.py``: eight a step, over any widths.

Faster than one product a step (``joined.py``) where experts have few tokens.
"""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton

from k3vl.kernels.moe.experts_kernel import down_mxfp4_kernel, gate_up_mxfp4_kernel
from k3vl.kernels.moe.mxfp4 import tile_rows
from k3vl.kernels.moe.plan import FULL
from k3vl.kernels.moe.words_kernel import by_machine_code
from k3vl.kernels.situ import SituGLU, caps

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from k3vl.kernels.moe.mxfp4 import Mxfp4Experts
    from k3vl.kernels.moe.plan import ExpertPlan
    from k3vl.kernels.situ import GatedActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """How a grouped product is cut: features, words of a step, warps, pipeline stages."""

    features: int
    step: int
    warps: int
    stages: int


GATE_UP = {
    16: Block(features=64, step=64, warps=4, stages=2),
    32: Block(features=64, step=32, warps=4, stages=2),
    64: Block(features=64, step=32, warps=4, stages=2),
    128: Block(features=64, step=16, warps=4, stages=3),
    160: Block(features=128, step=16, warps=8, stages=3),
}
DOWN = {
    16: Block(features=64, step=32, warps=4, stages=3),
    32: Block(features=64, step=32, warps=4, stages=3),
    64: Block(features=128, step=32, warps=4, stages=2),
    128: Block(features=128, step=16, warps=4, stages=3),
    160: Block(features=128, step=32, warps=8, stages=2),
}
"""By tile width."""


def separate_products(
    x: torch.Tensor,
    plan: ExpertPlan,
    stored: Mxfp4Experts,
    activation: GatedActivation,
    top_k: int,
    gate_up: Mapping[int, Block] = GATE_UP,
    down: Mapping[int, Block] = DOWN,
) -> torch.Tensor:
    """Every pair's output by itself.

    Args:
        x: [N, L].
        plan: of its pairs.
        stored: the experts.
        activation: theirs.
        top_k: experts a token.
        gate_up, down: how the products are cut, by tile width.

    Returns:
        [N k, L] by pair, in the dtype of ``x``.
    """
    pairs = x.shape[0] * top_k
    hidden = x.new_empty(pairs, stored.inner)
    outputs = x.new_empty(pairs, stored.latent)
    separate_gate_up(x, plan, stored, activation, top_k, hidden, gate_up)
    separate_down(hidden, plan, stored, outputs, down)
    return outputs


def separate_gate_up(
    x: torch.Tensor,
    plan: ExpertPlan,
    stored: Mxfp4Experts,
    activation: GatedActivation,
    top_k: int,
    hidden: torch.Tensor,
    shapes: Mapping[int, Block] = GATE_UP,
) -> None:
    """Fill the rows of ``hidden`` [N k, I] that belong to the plan's tiles, in sorted order."""
    if not plan.tiles:
        return
    latent, inner = stored.latent, stored.inner
    split = x.unflatten(1, (-1, 8)).transpose(1, 2).contiguous()
    for width, tiles in plan.tiles.items():
        grid, shape = _packed_shape(shapes[width], width, inner, latent)
        gate_up_mxfp4_kernel[(grid, tiles.expert.numel())](
            split, stored.w13, stored.w13_scale, *plan.lists(width), hidden, top_k,
            *caps(activation), WIDTH=latent, INNER=inner, SITU=isinstance(activation, SituGLU),
            PACKED=by_machine_code(x), **shape,
        )  # fmt: skip


def separate_down(
    hidden: torch.Tensor,
    plan: ExpertPlan,
    stored: Mxfp4Experts,
    outputs: torch.Tensor,
    shapes: Mapping[int, Block] = DOWN,
) -> None:
    """Fill the rows of ``outputs`` [N k, L], by pair, that belong to the plan's tiles."""
    latent, inner = stored.latent, stored.inner
    for width, tiles in plan.tiles.items():
        grid, shape = _packed_shape(shapes[width], width, latent, inner)
        down_mxfp4_kernel[(grid, tiles.expert.numel())](
            hidden, stored.w2, stored.w2_scale, *plan.lists(width), outputs,
            INNER=inner, WIDTH=latent, PACKED=by_machine_code(hidden), **shape,
        )  # fmt: skip


def _packed_shape(
    block: Block, width: int, features: int, columns: int
) -> tuple[int, dict[str, int | bool]]:
    """Blocks of features, and the launch constants of a product over packed weights."""
    whole = features % block.features == 0 and columns // 8 % block.step == 0
    return triton.cdiv(features, block.features), {
        "BM": block.features,
        "BN": min(width, FULL),
        "TAIL": max(0, width - FULL),
        "BK": block.step,
        "TILE": tile_rows(columns),
        "WHOLE": whole,
        "num_warps": block.warps,
        "num_stages": block.stages,
    }
