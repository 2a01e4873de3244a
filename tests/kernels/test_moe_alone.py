"""The products for a single token, in Gluon and machine code, on an imitation of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from k3vl.errors import ShapeError
from k3vl.kernels.moe import moe_experts
from k3vl.kernels.moe.alone import AloneShapes, Share, alone_outputs
from k3vl.kernels.moe.mxfp4 import Mxfp4Experts, prepare_experts
from k3vl.kernels.situ import SiluGLU, SituGLU
from tests.kernels.gluon_on_cpu import launch

EXPERTS, INNER = 5, 768
SHAPES = {
    "by itself": (
        1792,
        AloneShapes(gate_up=Share(warps=16, depth=2), down=Share(warps=16, depth=2, early=True)),
    ),
    "plain": (
        1792,
        AloneShapes(
            gate_up=Share(warps=16, depth=2, plain=True),
            down=Share(warps=16, depth=2, early=True, plain=True),
        ),
    ),
    "trios": (
        3584,
        AloneShapes(gate_up=Share(warps=16, depth=2, trio=True), down=Share(warps=16, depth=2)),
    ),
    "early": (
        896,
        AloneShapes(
            gate_up=Share(warps=16, depth=1, early=True),
            down=Share(warps=8, depth=3),
        ),
    ),
    "summed": (
        896,
        AloneShapes(
            gate_up=Share(warps=16, depth=1), down=Share(warps=4, depth=2, early=True), summed=True
        ),
    ),
}


def on_cpu(kernel: Any, grid: tuple[int, int], *args: Any, **constants: Any) -> None:
    for option in ("num_warps", "maxnreg", "launch_pdl"):
        constants.pop(option, None)
    launch(kernel, (*grid, 1), *args, **constants)


def stored(latent: int) -> Mxfp4Experts:
    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(116, 124, shape, dtype=torch.uint8)

    return prepare_experts(
        codes(EXPERTS, 2 * INNER, latent // 2),
        scales(EXPERTS, 2 * INNER, latent // 32),
        codes(EXPERTS, latent, INNER // 2),
        scales(EXPERTS, latent, INNER // 32),
    )


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_alone(name: str) -> None:
    torch.manual_seed(1)
    latent, shapes = SHAPES[name]
    experts = stored(latent)
    activation = SiluGLU() if name == "early" else SituGLU(beta=4.0, linear_beta=25.0)
    room = torch.full((3, latent), float("nan"))
    room[1] = torch.randn(latent) * 0.1
    x = room.bfloat16()[1:2]
    chosen = torch.tensor([[3, 1, 4, 0] if shapes.summed else [3, 1]])
    weights = torch.tensor([[0.7, 0.2, 0.5, 0.3]])[:, : chosen.shape[1]]
    got = alone_outputs(x, weights, chosen, experts, activation, shapes, on_cpu)
    rows = x.double().repeat_interleave(chosen.shape[1], 0)
    one = torch.ones(chosen.shape[1], 1)
    want = moe_experts(rows, one, chosen.view(-1, 1), experts, activation)
    if shapes.summed:
        want = weights[0].double() @ want
        assert got.dtype == torch.float32
    assert got.shape == want.shape
    apart = got.double() - want
    assert apart.norm() < 4e-3 * want.norm()
    assert apart.abs().max() < 0.03 * want.square().mean().sqrt(), "one row is wrong"


def test_programs_have_to_fit() -> None:
    x, weights = torch.zeros(1, 896).bfloat16(), torch.ones(1, 3)
    chosen, experts = torch.tensor([[0, 1, 2]]), stored(896)
    with pytest.raises(ShapeError, match="k 3"):
        alone_outputs(x, weights, chosen, experts, SiluGLU(), SHAPES["summed"][1], on_cpu)
    with pytest.raises(ShapeError, match="L 896"):
        alone_outputs(x, weights, chosen, experts, SiluGLU(), SHAPES["by itself"][1], on_cpu)
