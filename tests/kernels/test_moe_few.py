"""The products for few tokens, in Gluon and machine code, on an imitation of both."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from k3vl.kernels.moe import moe_experts
from k3vl.kernels.moe.few import SHAPES as TAKEN
from k3vl.kernels.moe.few import Few, FewShapes, few_products
from k3vl.kernels.moe.plan import EIGHT, ExpertPlan, plan_experts
from k3vl.kernels.situ import SituGLU
from tests.kernels.experts_on_cpu import on_cpu, random_experts

if TYPE_CHECKING:
    from k3vl.kernels.moe.mxfp4 import Mxfp4Experts

EXPERTS, LATENT, INNER, TOP_K = 5, 512, 256, 2
SITU = SituGLU(beta=4.0, linear_beta=25.0)
SHAPES = {
    "nothing is left to load": FewShapes(gate_up=Few(warps=4, depth=4), down=Few(warps=4, depth=2)),
    "one step at a time": FewShapes(gate_up=Few(warps=4, depth=1), down=Few(warps=8, depth=1)),
    "taken": TAKEN,
}


def pairs_by_themselves(
    x: torch.Tensor, chosen: torch.Tensor, experts: Mxfp4Experts
) -> torch.Tensor:
    rows = x.double().repeat_interleave(TOP_K, 0)
    one = torch.ones(chosen.numel(), 1)
    return moe_experts(rows, one, chosen.view(-1, 1), experts, SITU)


def planned(chosen: torch.Tensor) -> ExpertPlan:
    plan = plan_experts(chosen, EXPERTS, EIGHT)
    assert not any(int(tiles.count) for width, tiles in plan.tiles.items() if width != EIGHT)
    return replace(plan, tiles={EIGHT: plan.tiles[EIGHT]})


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_that_share_experts(name: str) -> None:
    """Tiles of one, of eight, of nine and of sixteen pairs; the same bits as alone."""
    torch.manual_seed(2)
    experts = random_experts(EXPERTS, LATENT, INNER)
    room = torch.full((18, LATENT), float("nan"))
    room[1:-1] = torch.randn(16, LATENT) * 0.1
    x = room.bfloat16()[1:-1]
    chosen = torch.tensor([[0, 1 + (n > 0) + (n > 8)] for n in range(16)])
    got = few_products(x, planned(chosen), experts, SITU, TOP_K, SHAPES[name], on_cpu)
    want = pairs_by_themselves(x, chosen, experts)
    assert (got.double() - want).norm() < 4e-3 * want.norm()
    for n in (0, 9):
        plan = planned(chosen[n : n + 1])
        alone = few_products(x[n : n + 1], plan, experts, SITU, TOP_K, SHAPES[name], on_cpu)
        assert torch.equal(alone, got[TOP_K * n : TOP_K * n + TOP_K])
