"""Mixture of experts on a GPU: router, plan, two grouped products over MXFP4 weights, combine.

For few pairs six launches (route, plan, split, gate-up, down, combine) and no wait for the device,
so that a CUDA graph can hold all of it. Imported only where Triton runs.
"""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from k3vl.errors import ShapeError
from k3vl.kernels.moe import check_experts
from k3vl.kernels.moe.dense_kernel import down_dense_kernel, gate_up_dense_kernel
from k3vl.kernels.moe.experts_kernel import (
    combine_kernel,
    down_mxfp4_kernel,
    gate_up_mxfp4_kernel,
    plan_kernel,
    route_kernel,
    route_sorted_kernel,
)
from k3vl.kernels.moe.joined import JOINED, JoinedShapes, can_join, joined_products
from k3vl.kernels.moe.plan import FULL, WIDTHS, ExpertPlan, Tiles, most_tiles, plan_experts
from k3vl.kernels.situ import SituGLU, caps

if TYPE_CHECKING:
    from k3vl.kernels.moe.experts import FloatExperts
    from k3vl.kernels.moe.mxfp4 import Mxfp4Experts
    from k3vl.kernels.situ import GatedActivation

FEW_PAIRS = 4096
"""Up to here one launch plans everything; beyond, sorting costs nothing beside the products."""


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
DENSE = Block(features=64, step=32, warps=4, stages=3)


def route_gpu(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    *,
    renormalise: bool,
    scale: float,
    sort_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`k3vl.kernels.moe.route` in one launch; choices come in falling order.

    ``sort_warps``: sort with so many warps a token, for a power of two of choices; None: look for
    the best one ``top_k`` times, with one warp.
    """
    tokens, experts = logits.shape
    if bias.shape != (experts,) or not 0 < top_k <= experts:
        raise ShapeError(
            f"route: logits {tuple(logits.shape)}, bias {tuple(bias.shape)}, top_k {top_k}"
        )
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if tokens and sort_warps:
        route_sorted_kernel[(tokens,)](
            logits.contiguous(), bias, weights, chosen, scale,
            E=experts, K=top_k, RENORMALISE=renormalise,
            BLOCK=triton.next_power_of_2(experts), num_warps=sort_warps,
        )  # fmt: skip
    elif tokens:
        route_kernel[(tokens,)](
            logits.contiguous(),
            bias,
            weights,
            chosen,
            scale,
            E=experts,
            K=top_k,
            KP=triton.next_power_of_2(top_k),
            RENORMALISE=renormalise,
            BLOCK=triton.next_power_of_2(experts),
            num_warps=1 if experts <= 1024 else 4,
        )
    return weights, chosen


def plan_gpu(experts: torch.Tensor, num_experts: int) -> ExpertPlan:
    """:func:`plan_experts`, in one launch where there are few pairs."""
    pairs = experts.numel()
    if pairs > FEW_PAIRS:
        return plan_experts(experts, num_experts)
    bounds = most_tiles(pairs, num_experts)
    longest = max(bounds.values(), default=0)

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=experts.device)

    order, counts = ints(pairs), ints(len(WIDTHS))
    expert, first, end = (ints(len(WIDTHS), longest) for _ in range(3))
    by_pair = pairs < num_experts
    plan_kernel[(pairs if by_pair else num_experts,)](
        experts,
        order,
        expert,
        first,
        end,
        counts,
        longest,
        PAIRS=pairs,
        E=num_experts,
        NUM_WIDTHS=len(bounds),
        BY_PAIR=by_pair,
        BLOCK_P=max(16, triton.next_power_of_2(pairs)),
        BLOCK_E=triton.next_power_of_2(num_experts + 1),
        num_warps=4,
    )
    tiles = {
        width: Tiles(expert=expert[i, : bounds[width]], first=first[i], end=end[i], count=counts[i])
        for i, width in enumerate(WIDTHS)
        if width in bounds
    }
    return ExpertPlan(order=order, tiles=tiles)


def moe_experts_mxfp4_gpu(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    stored: Mxfp4Experts,
    activation: GatedActivation,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """:func:`k3vl.kernels.moe.moe_experts` over packed weights, without waiting for the device.

    ``x`` is bfloat16 (any floating dtype in the interpreter). What a token gets does not depend on
    what the others are, only on how many share its experts: tiles of another width add in another
    order (float32).
    """
    check_experts(x, weights, experts, stored, norm)
    tokens, top_k = experts.shape
    latent, inner = stored.latent, stored.inner
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    plan = plan_gpu(experts, stored.count)
    split = x.unflatten(1, (-1, 8)).transpose(1, 2).contiguous()
    hidden = x.new_empty(tokens * top_k, inner)
    outputs = x.new_empty(tokens * top_k, latent)
    packed = x.dtype == torch.bfloat16 and x.is_cuda
    for width, tiles in plan.tiles.items():
        grid, shape = _packed_shape(GATE_UP[width], width, inner, latent)
        gate_up_mxfp4_kernel[(grid, tiles.expert.numel())](
            split, stored.w13, stored.w13_scale, *_lists(plan, tiles), hidden, top_k,
            *caps(activation), WIDTH=latent, INNER=inner, SITU=isinstance(activation, SituGLU),
            PACKED=packed, **shape,
        )  # fmt: skip
    for width, tiles in plan.tiles.items():
        grid, shape = _packed_shape(DOWN[width], width, latent, inner)
        down_mxfp4_kernel[(grid, tiles.expert.numel())](
            hidden, stored.w2, stored.w2_scale, *_lists(plan, tiles), outputs,
            INNER=inner, WIDTH=latent, PACKED=packed, **shape,
        )  # fmt: skip
    _combine(outputs, weights, norm, eps, out)
    return out


def moe_experts_joined_gpu(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    stored: Mxfp4Experts,
    activation: GatedActivation,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    shapes: JoinedShapes = JOINED,
) -> torch.Tensor:
    """:func:`moe_experts_mxfp4_gpu` with one product a step (``joined_kernel.py``)."""
    tokens, top_k = experts.shape
    if not can_join(stored, tokens * top_k):
        return moe_experts_mxfp4_gpu(x, weights, experts, stored, activation, norm, eps)
    check_experts(x, weights, experts, stored, norm)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    plan = plan_gpu(experts, stored.count)
    _combine(joined_products(x, plan, stored, activation, top_k, shapes), weights, norm, eps, out)
    return out


def moe_experts_gpu(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    stored: FloatExperts,
    activation: GatedActivation,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """:func:`k3vl.kernels.moe.moe_experts` without waiting for the device."""
    check_experts(x, weights, experts, stored, norm)
    tokens, top_k = experts.shape
    latent, inner = stored.latent, stored.inner
    x = x.contiguous()
    out = torch.empty_like(x)
    if not tokens:
        return out
    plan = plan_gpu(experts, stored.count)
    hidden = x.new_empty(tokens * top_k, inner)
    outputs = x.new_empty(tokens * top_k, latent)
    for width, tiles in plan.tiles.items():
        shape = _dense_shape(width)
        gate_up_dense_kernel[(triton.cdiv(inner, DENSE.features), tiles.expert.numel())](
            x, stored.w13, *_lists(plan, tiles), hidden, top_k, *caps(activation),
            WIDTH=latent, INNER=inner, SITU=isinstance(activation, SituGLU), **shape,
        )  # fmt: skip
    for width, tiles in plan.tiles.items():
        shape = _dense_shape(width)
        down_dense_kernel[(triton.cdiv(latent, DENSE.features), tiles.expert.numel())](
            hidden, stored.w2, *_lists(plan, tiles), outputs, INNER=inner, WIDTH=latent, **shape,
        )  # fmt: skip
    _combine(outputs, weights, norm, eps, out)
    return out


def _lists(plan: ExpertPlan, tiles: Tiles) -> tuple[torch.Tensor, ...]:
    """What a grouped product reads of the plan."""
    return plan.order, tiles.expert, tiles.first, tiles.end, tiles.count


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
        "WHOLE": whole,
        "num_warps": block.warps,
        "num_stages": block.stages,
    }


def _dense_shape(width: int) -> dict[str, int]:
    """Launch constants; a tile of 160 runs as one of 256 whose end is masked."""
    return {
        "BM": DENSE.features,
        "BN": triton.next_power_of_2(width),
        "BK": DENSE.step,
        "num_warps": DENSE.warps if width < FULL else 2 * DENSE.warps,
        "num_stages": DENSE.stages,
    }


def _combine(
    outputs: torch.Tensor,
    weights: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
) -> None:
    tokens, latent = out.shape
    combine_kernel[(tokens,)](
        outputs, weights, norm, out, eps,
        WIDTH=latent, K=weights.shape[1], NORM=norm is not None,
        BLOCK=triton.next_power_of_2(latent), num_warps=8 if latent > 1024 else 4,
    )  # fmt: skip
