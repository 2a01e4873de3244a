"""The products for a single token, in Gluon and machine code, on an imitation of both."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from k3vl.errors import ShapeError
from k3vl.kernels.moe import moe_experts
from k3vl.kernels.moe.alone import sum_alone
from k3vl.kernels.moe.mxfp4 import LARGEST_SCALE
from k3vl.kernels.situ import SiluGLU, SituGLU
from tests.kernels.experts_on_cpu import on_cpu, random_experts

EXPERTS, LATENT, INNER = 5, 1792, 768


def test_a_token_alone() -> None:
    torch.manual_seed(1)
    experts = random_experts(EXPERTS, LATENT, INNER)
    activation = SituGLU(beta=4.0, linear_beta=25.0)
    room = torch.full((3, LATENT), float("nan"))
    room[1] = torch.randn(LATENT) * 0.1
    x = room.bfloat16()[1:2]
    chosen, weights = torch.tensor([[3, 1]]), torch.tensor([[0.7, 0.2]])
    got = sum_alone(x, weights, chosen, experts, activation, launch=on_cpu)
    assert got.dtype == torch.float32
    rows, one = x.double().repeat_interleave(2, 0), torch.ones(2, 1)
    want = weights[0].double() @ moe_experts(rows, one, chosen.view(-1, 1), experts, activation)
    apart = got.double() - want
    assert apart.norm() < 4e-3 * want.norm()
    assert apart.abs().max() < 0.03 * want.square().mean().sqrt(), "one row is wrong"


def test_the_largest_scale_and_the_smallest() -> None:
    """Sums by groups stay numbers whatever the scales are."""
    torch.manual_seed(2)
    experts = random_experts(EXPERTS, LATENT, INNER)
    for scale in (experts.w13_scale, experts.w2_scale):
        scale.copy_(torch.tensor([0, 60, LARGEST_SCALE])[torch.randint(3, scale.shape)])
    x = torch.randn(1, LATENT).bfloat16() * 1e-3
    chosen, weights = torch.tensor([[2, 0]]), torch.tensor([[0.5, 0.5]])
    got = sum_alone(x, weights, chosen, experts, SiluGLU(), launch=on_cpu)
    want = moe_experts(x.double(), weights, chosen, experts, SiluGLU())[0]
    assert (got.double() - want).norm() < 4e-3 * want.norm()


def test_programs_have_to_fit() -> None:
    x, weights = torch.zeros(1, LATENT).bfloat16(), torch.ones(1, 3)
    with pytest.raises(ShapeError, match="k 3"):
        sum_alone(
            x,
            weights,
            torch.tensor([[0, 1, 2]]),
            random_experts(EXPERTS, LATENT, INNER),
            SiluGLU(),
            launch=on_cpu,
        )
    x, chosen = torch.zeros(1, 896).bfloat16(), torch.tensor([[0, 1]])
    with pytest.raises(ShapeError, match="L 896"):
        sum_alone(
            x, weights[:, :2], chosen, random_experts(EXPERTS, 896, INNER), SiluGLU(), launch=on_cpu
        )
