"""The Gluon kernel of attention residuals, on a CPU; its machine language is replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from k3vl.kernels.attn_residual.hopper import cluster_mix, cluster_takes
from tests.kernels.ptx_lanes_on_cpu import LOW, floats, run_ptx
from tests.kernels.ptx_on_cpu import Cluster

NAN = float("nan")


def fold(numbers: tuple[torch.Tensor, ...], rows: int) -> torch.Tensor:
    lanes = torch.zeros_like(numbers[0])
    for i in range(rows):
        lanes[..., i], lanes[..., 16 + i] = numbers[i].sum(-1), numbers[rows + i].sum(-1)
    return lanes


STAND_INS = {
    "open_room": lambda _: None,
    "meet": lambda _: torch.full((1, 1, 32), 1 << 16),
    "widen": lambda x, _factor, _mask: x.float(),
    "cluster_of": lambda i: i,
    "join_chain": lambda x: x,
    "exchange": lambda _, x: x.sum((0, 1), keepdim=True).expand(x.shape),
    "total_of": lambda _, x: x.sum().expand(x.shape),
    "fold": fold,
    "from_lane": lambda x, lane: x[..., lane : lane + 1].expand(x.shape),
    "other_half": lambda x: x.roll(16, -1),
}


def exactly(rows: torch.Tensor, query: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    scores = (rows * query).sum(-1) * torch.rsqrt(rows.square().mean(-1) + 1e-5)
    mixed = (scores.softmax(0).unsqueeze(-1) * rows).sum(0)
    return mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + 1e-5) * norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("depth", "width"), [(1, 64), (2, 192), (9, 7168), (16, 8192), (5, 512)])
def test_kernel_is_its_reference(depth: int, width: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from tests.kernels.gluon_on_cpu import launch

    def on_cpu(kernel, grid, *args, **constants) -> None:
        launch(kernel, grid, *args, stand_ins=STAND_INS, **constants)

    tokens = 2
    query, norm = torch.randn(width) / 4, (torch.rand(width) + 0.5).to(dtype)
    rows = torch.full((depth, tokens, width + 8), NAN).to(dtype)[..., :width]
    rows.copy_(torch.randn(depth, tokens, width))
    assert cluster_takes(rows, query, norm) is (dtype == torch.bfloat16)
    want = exactly(rows.double(), query.double(), norm.double())
    for early in (False, True):
        out = torch.full((tokens, width), NAN).to(dtype)
        cluster_mix(rows, query, norm, 1e-5, out, early=early, launch=on_cpu)
        assert (out - want).norm() <= (2e-5 if dtype == torch.float32 else 4e-3) * want.norm()


def test_what_the_kernel_does_not_take() -> None:
    rows, w = torch.zeros(9, 2, 256).bfloat16(), torch.zeros(256)
    assert cluster_takes(rows, w, w)
    assert not cluster_takes(rows.float(), w, w), "float32"
    assert not cluster_takes(rows[..., :250], w[:250], w[:250])
    assert not cluster_takes(torch.zeros(9, 2, 260).bfloat16()[..., :256], w, w), "520 bytes"
    assert not cluster_takes(torch.zeros(9, 2, 264).bfloat16()[..., 4:260], w, w), "8 bytes off"
    assert not cluster_takes(torch.zeros(17, 2, 256).bfloat16(), w, w), "17 rows"


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 16])
def test_fold_brings_every_sum_to_its_lane(rows: int) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.attn_residual.cluster_kernel import FOLD

    numbers = [[float(i) for i in torch.randint(0, 100, (32,))] for _ in range(2 * rows)]
    (got,) = Cluster(1, 32).run((FOLD.value[rows - 1], *numbers))
    for i in range(16):
        for first, lane in ((0, i), (rows, 16 + i)):
            assert got[lane] == (sum(numbers[first + i]) if i < rows else 0)


def pieces(numbers: list[float]) -> list[tuple[Any, ...]]:
    from k3vl.kernels.attn_residual.cluster_kernel import EXCHANGE, FROM_LANE, MEET, OPEN, TOTAL

    return [
        (OPEN.value, [0] * 1024),
        (MEET.value, 0),
        (EXCHANGE.value, 0, numbers),
        (FROM_LANE.value[3], 2),
        (TOTAL.value, 0, numbers),
    ]


@pytest.mark.parametrize("seed", range(3))
def test_exchanges_give_all_threads_the_sums_of_lanes_and_of_all(seed: int) -> None:
    """Whoever comes first; nobody uses what is not there, waits for what does not come."""
    pytest.importorskip("triton.experimental.gluon")
    x = [float(i) for i in torch.randint(0, 100, (1024,))]
    _, factors, sums, third, totals = Cluster(8, 128, seed).run(*pieces(x))
    assert factors == [1 << 16] * 1024
    assert sums == [sum(x[i % 32 :: 32]) for i in range(1024)]
    assert third == [sums[3]] * 1024
    assert totals == [sum(x)] * 1024


@pytest.mark.parametrize(
    ("left_out", "of", "found"),
    [
        ("barrier.cluster.wait.acquire.aligned;", 1, "nobody has made"),
        ("bar.sync 0;", 2, "before it was written"),
        ("@!done bra again;", 2, "before it was written"),
        ("@!done bra again;", 4, "before it was written"),
    ],
)
def test_what_is_too_early_is_found(left_out: str, of: int, found: str) -> None:
    pytest.importorskip("triton.experimental.gluon")
    all_pieces = pieces([1.0] * 1024)
    text, *inputs = all_pieces[of]
    assert left_out in text
    all_pieces[of] = (text.replace(left_out, ""), *inputs)
    with pytest.raises(AssertionError, match=found):
        Cluster(8, 128).run(*all_pieces)


def test_rows_are_widened_exactly() -> None:
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.attn_residual.cluster_kernel import WIDEN

    x = torch.randn(64).bfloat16()
    pairs = x.view(torch.int32).long() & LOW
    mask, factor = torch.full_like(pairs, 0xFFFF0000), torch.full_like(pairs, 1 << 16)
    got = run_ptx(WIDEN.value, {2: pairs, 3: factor, 4: factor, 5: mask, 6: mask})
    assert torch.equal(torch.stack([floats(got["$0"]), floats(got["$1"])], 1).flatten(), x.float())
