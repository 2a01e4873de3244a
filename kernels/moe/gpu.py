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
from k3vl.kernels.moe.experts_kernel import (
    combine_kernel,
    down_mxfp4_kernel,
    gate_up_mxfp4_kernel,
    plan_kernel,
    route_kernel,
)
from k3vl.kernels.moe.plan import FULL, WIDTHS, ExpertPlan, Tiles, most_tiles, plan_experts

if TYPE_CHECKING:
    from k3vl.kernels.moe.mxfp4 import Mxfp4Experts

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Glu:
    """The activation as numbers: SiTU-GLU with its caps, or SwiGLU."""

    situ: bool
    beta: float = 1.0
    linear_beta: float = 1.0


def route_gpu(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, *, renormalise: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`k3vl.kernels.moe.route` in one launch; choices come in falling order."""
    tokens, experts = logits.shape
    if bias.shape != (experts,) or not 0 < top_k <= experts:
        raise ShapeError(
            f"route: logits {tuple(logits.shape)}, bias {tuple(bias.shape)}, top_k {top_k}"
        )
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if tokens:
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
    glu: Glu,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """The chosen experts' sum, and K3's norm of it where a weight is given.

    Args:
        x: [N, L] bfloat16 (any floating dtype in the interpreter).
        weights: [N, k] float32.
        experts: [N, k] int64.
        stored: the layer's experts.
        glu: the activation.
        norm: [L] weight of the RMSNorm behind the sum, or None.
        eps: of that norm.

    Returns:
        [N, L] in the dtype of ``x``. What a token gets does not depend on what the others are, only
        on how many share its experts: tiles of another width add in another order (float32).

    Raises:
        ShapeError: the shapes disagree.
    """
    tokens, top_k = experts.shape
    latent, inner = stored.latent, stored.inner
    if x.shape != (tokens, latent) or weights.shape != experts.shape:
        raise ShapeError(
            f"moe_experts_mxfp4: x {tuple(x.shape)}, weights {tuple(weights.shape)}, "
            f"experts {tuple(experts.shape)}, L {latent}"
        )
    out = torch.empty_like(x)
    if not tokens:
        return out
    plan = plan_gpu(experts, stored.count)
    split = x.view(tokens, latent // 8, 8).transpose(1, 2).contiguous()
    hidden = x.new_empty(tokens * top_k, inner)
    outputs = x.new_empty(tokens * top_k, latent)
    packed = x.dtype == torch.bfloat16 and x.is_cuda
    for width, tiles in plan.tiles.items():
        block = GATE_UP[width]
        grid = (triton.cdiv(inner, block.features), tiles.expert.numel())
        gate_up_mxfp4_kernel[grid](
            split, stored.w13, stored.w13_scale, plan.order,
            tiles.expert, tiles.first, tiles.end, tiles.count, hidden, top_k, glu.beta, glu.linear_beta,
            WIDTH=latent, INNER=inner, SITU=glu.situ, BM=block.features, BN=min(width, FULL), TAIL=max(0, width - FULL), BK=block.step,
            WHOLE=inner % block.features == 0 and latent // 8 % block.step == 0, PACKED=packed, num_warps=block.warps, num_stages=block.stages,
        )  # fmt: skip
    for width, tiles in plan.tiles.items():
        block = DOWN[width]
        grid = (triton.cdiv(latent, block.features), tiles.expert.numel())
        down_mxfp4_kernel[grid](
            hidden, stored.w2, stored.w2_scale, plan.order,
            tiles.expert, tiles.first, tiles.end, tiles.count, outputs,
            INNER=inner, WIDTH=latent, BM=block.features, BN=min(width, FULL), TAIL=max(0, width - FULL), BK=block.step,
            WHOLE=latent % block.features == 0 and inner // 8 % block.step == 0, PACKED=packed, num_warps=block.warps, num_stages=block.stages,
        )  # fmt: skip
    combine_kernel[(tokens,)](
        outputs, weights, norm, out, eps,
        WIDTH=latent, K=top_k, NORM=norm is not None,
        BLOCK=triton.next_power_of_2(latent), num_warps=8 if latent > 1024 else 4,
    )  # fmt: skip
    return out
