"""The products for few tokens, in Gluon and machine code, on an imitation of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from k3vl.kernels.moe import moe_experts
from k3vl.kernels.moe.few import ALONE, Blocks, Few, FewShapes, Whole, few_products
from k3vl.kernels.moe.few import SHAPES as TAKEN
from k3vl.kernels.moe.mxfp4 import Mxfp4Experts, prepare_experts
from k3vl.kernels.moe.plan import EIGHT, plan_experts
from k3vl.kernels.situ import SituGLU
from tests.kernels.gluon_on_cpu import Descriptor, launch

EXPERTS, LATENT, INNER, TOP_K = 5, 512, 256, 2
SITU = SituGLU(beta=4.0, linear_beta=25.0)
SHAPES = {
    "warps share rows": FewShapes(
        gate_up=Few(warps=4, parts=2, depth=2), down=Few(warps=4, parts=2, depth=1)
    ),
    "nothing is left to load": FewShapes(
        gate_up=Few(warps=2, parts=2, depth=2), down=Few(warps=2, depth=2)
    ),
    "early": FewShapes(
        gate_up=Few(warps=4, parts=2, depth=1, early=True), down=Few(warps=2, depth=1, early=True)
    ),
    "deep": FewShapes(gate_up=Few(warps=1, depth=4), down=Few(warps=8, depth=2)),
    "taken": TAKEN,
    "of one token": ALONE,
}
COPIED = {
    "a wait each": FewShapes(gate_up=Whole(), down=Whole()),
    "two waits": FewShapes(gate_up=Whole(apart=3), down=Whole(apart=3)),
    "programs that stay": FewShapes(gate_up=Whole(stay=7), down=Whole(apart=8)),
}


def on_cpu(kernel: Any, grid: tuple[int, int], *args: Any, **constants: Any) -> None:
    for option in ("num_warps", "maxnreg", "launch_pdl"):
        constants.pop(option, None)
    described = (Descriptor(x.tensor, x.block) if isinstance(x, Blocks) else x for x in args)
    launch(kernel, (*grid, 1), *described, ordered=True, **constants)


def stored(latent: int = LATENT, inner: int = INNER) -> Mxfp4Experts:
    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(116, 124, shape, dtype=torch.uint8)

    return prepare_experts(
        codes(EXPERTS, 2 * inner, latent // 2),
        scales(EXPERTS, 2 * inner, latent // 32),
        codes(EXPERTS, latent, inner // 2),
        scales(EXPERTS, latent, inner // 32),
    )


def pairs_by_themselves(
    x: torch.Tensor, chosen: torch.Tensor, experts: Mxfp4Experts, top_k: int = TOP_K
) -> torch.Tensor:
    rows = x.double().repeat_interleave(top_k, 0)
    one = torch.ones(chosen.numel(), 1)
    return moe_experts(rows, one, chosen.view(-1, 1), experts, SITU)


def check_alone(experts: Mxfp4Experts, shapes: FewShapes, top_k: int = TOP_K) -> None:
    torch.manual_seed(1)
    room = torch.full((3, experts.latent), float("nan"))
    room[1] = torch.randn(experts.latent) * 0.1
    x = room.bfloat16()[1:2]
    chosen = torch.tensor([[3, 1]])[:, :top_k]
    got = few_products(x, chosen, experts, SITU, top_k, shapes, on_cpu)
    want = pairs_by_themselves(x, chosen, experts, top_k)
    assert (got.double() - want).norm() < 4e-3 * want.norm()


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_alone(name: str) -> None:
    check_alone(stored(), SHAPES[name])


@pytest.mark.parametrize(
    ("name", "latent"), [("a wait each", 1024), ("programs that stay", 1024), ("two waits", 2560)]
)
def test_a_token_alone_copied(name: str, latent: int) -> None:
    """In the widest there are more steps than one load of scales serves."""
    check_alone(stored(latent, 512), COPIED[name], top_k=1)


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_that_share_experts(name: str) -> None:
    check_shared(stored(), SHAPES[name])


@pytest.mark.parametrize("name", ["a wait each", "programs that stay"])
def test_tokens_that_share_experts_copied(name: str) -> None:
    check_shared(stored(512, 512), COPIED[name], beside=(9,))


def check_shared(
    experts: Mxfp4Experts, shapes: FewShapes, beside: tuple[int, ...] = (0, 9)
) -> None:
    """Tiles of one, of eight, of nine and of sixteen pairs; the same bits as alone."""
    torch.manual_seed(2)
    x = (torch.randn(16, experts.latent) * 0.1).bfloat16()
    chosen = torch.tensor([[0, 1 + (n > 0) + (n > 8)] for n in range(16)])
    plan = plan_experts(chosen, EXPERTS, EIGHT)
    assert not any(int(tiles.count) for width, tiles in plan.tiles.items() if width != EIGHT)
    plan = replace(plan, tiles={EIGHT: plan.tiles[EIGHT]})
    got = few_products(x, plan, experts, SITU, TOP_K, shapes, on_cpu)
    want = pairs_by_themselves(x, chosen, experts)
    assert (got.double() - want).norm() < 4e-3 * want.norm()
    for n in beside:
        one, own = x[n : n + 1], chosen[n : n + 1]
        alone = few_products(one, own, experts, SITU, TOP_K, shapes, on_cpu)
        assert torch.equal(alone, got[TOP_K * n : TOP_K * n + TOP_K])
