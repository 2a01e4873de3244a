"""A block of the vision tower: compiled against float64, items to the bit, with poison around."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from k3vl.errors import ShapeError
from k3vl.kernels.vision import REFERENCE, cpu_vision
from k3vl.kernels.vision_block import VisionBlockWeights
from k3vl.kernels.vision_pos import rotary_table
from tests.kernels.test_cpu import columns, normal, relative_error
from tests.kernels.test_vision_attention import packed

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CPU = cpu_vision()
HEADS, HEAD, WIDTH, INNER = 3, 8, 20, 28
EPS = 1e-6


def weights() -> VisionBlockWeights:
    wide = HEADS * HEAD
    return VisionBlockWeights(
        heads=HEADS,
        attention_norm=1 + normal(WIDTH) / 5,
        mlp_norm=1 + normal(WIDTH, seed=1) / 5,
        qkv=normal(3 * wide, WIDTH) / WIDTH**0.5,
        out=normal(WIDTH, wide) / wide**0.5,
        up=normal(INNER, WIDTH) / WIDTH**0.5,
        down=normal(WIDTH, INNER) / INNER**0.5,
        eps=EPS,
    )


def by_hand(x: torch.Tensor, w: VisionBlockWeights, rotary: torch.Tensor) -> torch.Tensor:
    """One item in float64."""

    def norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return values * (values.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()

    def turn(values: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(values.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * rotary.to(torch.complex128)[:, None]).flatten(-2)

    x = x.double()
    qkv = norm(x, w.attention_norm) @ w.qkv.double().t()
    q, k, v = qkv.unflatten(-1, (3, HEADS, HEAD)).unbind(1)
    scores = torch.einsum("ihk,jhk->hij", turn(q), turn(k)) * HEAD**-0.5
    mixed = torch.einsum("hij,jhk->ihk", scores.softmax(-1), v).flatten(1)
    x = x + mixed @ w.out.double().t()
    hidden = F.gelu(norm(x, w.mlp_norm) @ w.up.double().t(), approximate="tanh")
    return x + hidden @ w.down.double().t()


ITEMS = [(1, 1), (2, 3), (5, 13), (4, 16), (11, 12)]
"""Patch grids: a single patch, whole vectors and not, more queries than are held at once."""


def table() -> torch.Tensor:
    return torch.cat([rotary_table(rows, columns, HEAD) for rows, columns in ITEMS])


@pytest.mark.parametrize("kernels", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_a_block_of_several_items(kernels) -> None:
    lengths, w = [rows * across for rows, across in ITEMS], weights()
    x, rotary = normal(sum(lengths), WIDTH), table()
    got = kernels.block(columns(x), w, rotary, packed(lengths))
    parts = zip(x.split(lengths), rotary.split(lengths), strict=True)
    want = torch.cat([by_hand(part, w, turns) for part, turns in parts])
    assert relative_error(got, want) < 1e-6


def test_no_item_depends_on_another() -> None:
    lengths, w = [rows * across for rows, across in ITEMS], weights()
    x, rotary = normal(sum(lengths), WIDTH), table()
    together = CPU.block(x, w, rotary, packed(lengths)).split(lengths)
    for part, turns, want in zip(x.split(lengths), rotary.split(lengths), together, strict=True):
        assert torch.equal(CPU.block(part, w, turns, packed([len(part)])), want)
    poisoned = x.clone()
    poisoned[lengths[0]] = float("nan")
    others = CPU.block(poisoned, w, rotary, packed(lengths)).split(lengths)
    assert others[1].isnan().all()
    assert all(torch.equal(a, b) for a, b in zip(others[2:], together[2:], strict=True))


def test_large_scores_are_softened_by_the_largest() -> None:
    w = weights()
    loud = VisionBlockWeights(
        **{name: getattr(w, name) for name in w.__dataclass_fields__} | {"qkv": 60 * w.qkv}
    )
    x, rotary = normal(132, WIDTH), rotary_table(11, 12, HEAD)
    want = by_hand(x, loud, rotary)
    assert relative_error(CPU.block(x, loud, rotary, packed([132])), want) < 1e-4


@pytest.mark.parametrize("kernels", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_what_does_not_fit_is_refused(kernels) -> None:
    x, rotary = normal(6, WIDTH), rotary_table(2, 3, HEAD)
    with pytest.raises(ShapeError, match=r"vision_block: x \(6, 19\)"):
        kernels.block(x[:, 1:], weights(), rotary, packed([6]))
    with pytest.raises(ShapeError, match=r"rotary \(5, 4\)"):
        kernels.block(x, weights(), rotary[1:], packed([6]))
    with pytest.raises(ShapeError, match=r"2 items of 5 patches"):
        kernels.block(x, weights(), rotary, packed([2, 3]))
