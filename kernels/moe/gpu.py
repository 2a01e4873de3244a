"""Mixture of experts on a GPU: router, plan, two grouped products over MXFP4 weights, combine.

For few pairs six launches (route, plan, split, gate-up, down, combine), more where tiles have
several widths; on Hopper five without the split, four of a single token (route, gate-up, down,
norm). None waits for the device, so a CUDA graph can hold all of it. Imported only where Triton
runs.
"""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from k3vl.errors import ShapeError
from k3vl.kernels.dependent import begins_early
from k3vl.kernels.hopper import hopper_runs
from k3vl.kernels.linear.gpu import front_gpu, is_row, linear_gpu
from k3vl.kernels.moe import check_experts, router_logits
from k3vl.kernels.moe.alone import norm_alone, sum_alone, takes_alone
from k3vl.kernels.moe.dense_kernel import down_dense_kernel, gate_up_dense_kernel
from k3vl.kernels.moe.experts_kernel import (
    combine_kernel,
    plan_kernel,
    route_kernel,
    route_sorted_kernel,
)
from k3vl.kernels.moe.few import SHAPES, FewShapes, can_take, few_products
from k3vl.kernels.moe.joined import can_join, joined_products
from k3vl.kernels.moe.plan import (
    EIGHT,
    FINE_WIDTHS,
    FULL,
    WIDTHS,
    ExpertPlan,
    Tiles,
    most_tiles,
    plan_experts,
)
from k3vl.kernels.moe.plan_kernel import tiles_kernel
from k3vl.kernels.moe.separate import Block, separate_products
from k3vl.kernels.situ import SituGLU, caps
from k3vl.kernels.weight import plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from k3vl.kernels.moe.experts import FloatExperts
    from k3vl.kernels.moe.mxfp4 import Mxfp4Experts
    from k3vl.kernels.situ import GatedActivation
    from k3vl.kernels.weight import Weight

    Products: TypeAlias = Callable[
        [torch.Tensor, ExpertPlan, Mxfp4Experts, GatedActivation, int], torch.Tensor
    ]

FEW_PAIRS = 4096
"""Up to here one launch plans everything; beyond, sorting costs nothing beside the products."""

SORTED_TOKENS = 512
"""Up to here eight warps sort a token's scores; beyond, one warp looks for the best one each time.

On an H200 8 + 0.015 us a token, and 12 to 14 + 0.007.
"""

JOINED_PAIRS = 5
"""From so many pairs an expert on, one product a step."""

_PROGRAMS_OF_ONE = 6
"""Programs of a multiprocessor that take the blocks of joined products in turn."""

AT_ONCE_TOKENS, AT_ONCE_WARPS = 64, 16
"""Up to so many tokens their outputs are asked for before the first is added."""

DENSE = Block(features=64, step=32, warps=4, stages=3)


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
        few, early = tokens <= SORTED_TOKENS, begins_early(logits)
        (route_sorted_kernel if few else route_kernel)[(tokens,)](
            logits.contiguous(), bias, weights, chosen, scale,
            E=experts, K=top_k, KP=max(2, triton.next_power_of_2(top_k)),
            RENORMALISE=renormalise, BLOCK=max(2, triton.next_power_of_2(experts)), PDL=early,
            num_warps=8 if few else 1 if experts <= 1024 else 4, launch_pdl=early,
        )  # fmt: skip
    return weights, chosen


def moe_front_gpu(
    x: torch.Tensor, router: torch.Tensor, down: Weight | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`k3vl.kernels.moe.moe_front`, of one row in one launch."""
    if down is not None and is_row(x, router, plain(down)):
        return front_gpu(x, router, plain(down))
    return router_logits_gpu(x, router), x if down is None else linear_gpu(x, down)


def router_logits_gpu(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """:func:`k3vl.kernels.moe.router_logits`; products of bfloat16 are exact in float32."""
    if x.dtype == router.dtype == torch.bfloat16:
        return linear_gpu(x, router, dtype=torch.float32)
    return router_logits(x, router)


def plan_gpu(experts: torch.Tensor, num_experts: int, narrow: int = 16) -> ExpertPlan:
    """:func:`plan_experts`, in one launch where there are few pairs."""
    (tokens, top_k), pairs = experts.shape, experts.numel()
    if pairs > FEW_PAIRS:
        return plan_experts(experts, num_experts, narrow)
    bounds = most_tiles(tokens, top_k, num_experts, narrow)
    # Triton compiles for addresses of 16 bytes apart from others: rows are never in between.
    longest = -(-max(bounds.values(), default=0) // 16) * 16

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
        NARROW=narrow,
        BY_PAIR=by_pair,
        BLOCK_P=max(16, triton.next_power_of_2(pairs)),
        BLOCK_E=triton.next_power_of_2(num_experts + 1),
        num_warps=4,
    )
    tiles = {
        width: Tiles(expert=expert[i, : bounds[width]], first=first[i], end=end[i], count=counts[i])
        for i, width in enumerate((narrow, *WIDTHS[1:]))
        if width in bounds
    }
    return ExpertPlan(order=order, tiles=tiles)


def plan_many_gpu(experts: torch.Tensor, num_experts: int) -> ExpertPlan:
    """:func:`plan_experts` in FINE_WIDTHS: sorted by torch, the rest in one launch."""
    (tokens, top_k), pairs = experts.shape, experts.numel()
    bounds = most_tiles(tokens, top_k, num_experts, widths=FINE_WIDTHS)
    longest = max(bounds.values(), default=0)
    # A sort goes over its keys' bits: half of them, half of the time.
    keys = experts.flatten().to(torch.int16 if num_experts < 1 << 15 else torch.int32)
    ascending, order = keys.sort(stable=True)

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=experts.device)

    expert, first, end = (ints(len(bounds), longest) for _ in range(3))
    counts = ints(len(bounds))
    if bounds:
        tiles_kernel[(1,)](
            ascending, expert, first, end, counts, longest, pairs, pairs.bit_length(),
            E=num_experts, NUM=1 + max(FINE_WIDTHS.index(width) for width in bounds),
            SIXTEENTHS=sum(width // 16 << 4 * n for n, width in enumerate(FINE_WIDTHS)),
            JOINED=FINE_WIDTHS[-1] - FULL, FULL=FULL,
            BLOCK=triton.next_power_of_2(num_experts), num_warps=8,
        )  # fmt: skip
    tiles = {
        width: Tiles(expert=expert[i, : bounds[width]], first=first[i], end=end[i], count=counts[i])
        for i, width in enumerate(FINE_WIDTHS)
        if width in bounds
    }
    return ExpertPlan(order=order.int(), tiles=tiles)


def moe_experts_mxfp4_gpu(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    stored: Mxfp4Experts,
    activation: GatedActivation,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    products: Products | None = None,
    few: FewShapes | None = None,
) -> torch.Tensor:
    """:func:`k3vl.kernels.moe.moe_experts` over packed weights, without waiting for the device.

    ``x`` is bfloat16 (any floating dtype in the interpreter). What a token gets does not depend on
    what the others are, only on how many there are and share its experts: that decides about widths
    of tiles and order of sums (float32). ``few`` and ``products`` None: by the device, the experts'
    widths and the number of pairs an expert; else the products for few tokens, cut so, or these.
    """
    check_experts(x, weights, experts, stored, norm)
    tokens, top_k = experts.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    pairs = experts.numel()
    many = pairs >= JOINED_PAIRS * stored.count
    if few is None and products is None and not many and _takes_few(x):
        if tokens == 1 and takes_alone(stored, top_k):
            total = sum_alone(x, weights, experts, stored, activation)
            return norm_alone(total, norm, eps, out)
        few = SHAPES if can_take(stored, SHAPES) else None
    if few is not None:
        plan = plan_gpu(experts, stored.count, EIGHT)
        outputs = few_products(x, plan, stored, activation, top_k, few)
        combine(outputs, weights, norm, eps, out, overlap=True)
        return out
    if products is None and many and can_join(stored, pairs):
        outputs = products_of_many(x, experts, stored, activation)
    else:
        tiles = plan_gpu(experts, stored.count)
        outputs = (products or separate_products)(x, tiles, stored, activation, top_k)
    combine(outputs, weights, norm, eps, out)
    return out


def products_of_many(
    x: torch.Tensor, experts: torch.Tensor, stored: Mxfp4Experts, activation: GatedActivation
) -> torch.Tensor:
    """Every pair's output by itself: in fine tiles, one product a step, by programs in turn.

    Args:
        x: [N, L].
        experts: [N, k] int64.
        stored: the experts; see :func:`~k3vl.kernels.moe.joined.can_join`.
        activation: theirs.

    Returns:
        [N k, L] by pair, in the dtype of ``x``.
    """
    programs = _PROGRAMS_OF_ONE * _multiprocessors(x.device)
    plan = plan_many_gpu(experts, stored.count)
    return joined_products(x, plan, stored, activation, experts.shape[1], programs=programs)


def _multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; elsewhere one stands for all."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _takes_few(x: torch.Tensor) -> bool:
    """Whether the products for few tokens run there, in the dtype that they are written for."""
    return x.dtype == torch.bfloat16 and hopper_runs(x.device)


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
            x, stored.w13, *plan.lists(width), hidden, top_k, *caps(activation),
            WIDTH=latent, INNER=inner, SITU=isinstance(activation, SituGLU), **shape,
        )  # fmt: skip
    for width, tiles in plan.tiles.items():
        shape = _dense_shape(width)
        down_dense_kernel[(triton.cdiv(latent, DENSE.features), tiles.expert.numel())](
            hidden, stored.w2, *plan.lists(width), outputs, INNER=inner, WIDTH=latent, **shape,
        )  # fmt: skip
    combine(outputs, weights, norm, eps, out)
    return out


def _dense_shape(width: int) -> dict[str, int]:
    """Launch constants; a tile of 160 runs as one of 256 whose end is masked."""
    return {
        "BM": DENSE.features,
        "BN": triton.next_power_of_2(width),
        "BK": DENSE.step,
        "num_warps": DENSE.warps if width < FULL else 2 * DENSE.warps,
        "num_stages": DENSE.stages,
    }


def combine(
    outputs: torch.Tensor,
    weights: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    *,
    overlap: bool = False,
    warps: int | None = None,
) -> torch.Tensor:
    """Every token's sum of its outputs by their weights, rounded, and its norm.

    Args:
        outputs: [N k, L] by pair.
        weights: [N, k] float32.
        norm, eps: [L] and its epsilon; None for no norm.
        out: [N, L], filled and returned.
        overlap: start while the launch before ends, which must have allowed it.
        warps: of a token whose outputs are asked for at once; 0: they are not; None: by their
            number. The sums have the same bits; a norm adds up over warps.
    """
    tokens, latent = out.shape
    if warps is None:
        warps = AT_ONCE_WARPS if tokens <= AT_ONCE_TOKENS else 0
    options = {"launch_pdl": True} if overlap else {}
    combine_kernel[(tokens,)](
        outputs, weights, norm, out, eps,
        WIDTH=latent, K=weights.shape[1], NORM=norm is not None, OVERLAP=overlap,
        AT_ONCE=warps > 0, BLOCK=triton.next_power_of_2(latent),
        num_warps=warps or (8 if latent > 1024 else 4), **options,
    )  # fmt: skip
    return out
