"""The Gluon kernel of attention residuals, on a CPU; its machine language is replaced."""

from __future__ import annotations

import pytest
import torch

from k3vl.errors import ShapeError
from k3vl.kernels.attn_residual.hopper import (
    ClusterShape,
    SpreadShape,
    cluster_mix,
    cluster_takes,
)
from tests.kernels.ptx_on_cpu import Cluster

NAN = float("nan")


def exchange(_room: None, x: torch.Tensor, _which: int, _cluster: int) -> torch.Tensor:
    return x.sum((0, 1), keepdim=True).expand(x.shape)


def fold(numbers: tuple[torch.Tensor, ...], rows: int) -> torch.Tensor:
    lanes = torch.zeros_like(numbers[0])
    for i in range(rows):
        lanes[..., i], lanes[..., 16 + i] = numbers[i].sum(-1), numbers[rows + i].sum(-1)
    return lanes


def stage() -> dict[str, object]:
    """Room for rows; what is taken has to be of a row that was waited for."""
    columns: dict[int, tuple[int, torch.Tensor]] = {}
    begun = landed = 0

    def begin_eight(_stage, first, size, slot: int, _warps: int, last: bool) -> None:
        nonlocal begun
        assert ((size == 16) | (size == 0)).all()
        flat, where, live = (first[..., None] + torch.arange(8)).cells((size > 0)[..., None])
        columns[slot] = begun, torch.where(live, flat[where.long()], 0.0).to(flat.dtype)
        begun += last

    def take_eight(_stage, slot: int, _warps: int, left: int) -> torch.Tensor:
        nonlocal landed
        landed = landed if left < 0 else begun - left
        row, values = columns[slot]
        assert row < landed
        return values

    return {"stage_room": lambda x, _: x, "begin_eight": begin_eight, "take_eight": take_eight}


STAND_INS = {
    "open_room": lambda *_: None,
    "join_chain": lambda x: x,
    "exchange": exchange,
    "fold": fold,
    "from_lane": lambda x, lane: x[..., lane : lane + 1].expand(x.shape),
    "other_half": lambda x: x.roll(16, -1),
}


SHAPES = (
    (ClusterShape(8, 4), False),
    (ClusterShape(4, 8), True),
    (SpreadShape(8, 4), True),
    (SpreadShape(8, 2), False),
    (SpreadShape(2, 8), True),
    (SpreadShape(8, 4, staged=True), False),
    (SpreadShape(4, 4, staged=True), True),
)


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
        launch(kernel, grid, *args, stand_ins=STAND_INS | stage(), **constants)

    tokens = 1
    query, norm = torch.randn(width) / 4, (torch.rand(width) + 0.5).to(dtype)
    rows = torch.full((depth, tokens, width + 8), NAN).to(dtype)[..., :width]
    rows.copy_(torch.randn(depth, tokens, width))
    assert cluster_takes(rows, query, norm) is (dtype == torch.bfloat16)
    want = exactly(rows.double(), query.double(), norm.double())
    for shape, early in SHAPES:
        if shape == SpreadShape(4, 4, staged=True) and depth * width > 16 * 5632:
            with pytest.raises(ShapeError, match="too many"):
                cluster_mix(rows, query, norm, 1e-5, rows[0], shape, early=early, launch=on_cpu)
            continue
        out = torch.full((tokens, width), NAN).to(dtype)
        cluster_mix(rows, query, norm, 1e-5, out, shape, early=early, launch=on_cpu)
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
    got = Cluster(1, 32).run(FOLD.value[rows - 1], *numbers)
    for i in range(16):
        for first, lane in ((0, i), (rows, 16 + i)):
            assert got[lane] == (sum(numbers[first + i]) if i < rows else 0)


@pytest.mark.parametrize("multiprocessors", [4, 8])
def test_exchanges_give_all_threads_the_sums_of_their_lanes(multiprocessors: int) -> None:
    """Twice, behind barriers of their own; nobody waits for bytes that do not come."""
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.attn_residual.cluster_kernel import EXCHANGES, FROM_LANE, OPEN

    cluster = Cluster(multiprocessors, 1024 // multiprocessors)
    room = cluster.run(OPEN.value, [0] * 1024)
    for text in EXCHANGES.value[multiprocessors // 8 * 2 :][:2]:
        x = [float(i) for i in torch.randint(0, 100, (1024,))]
        sums = cluster.run(text, room, x)
        assert sums == [sum(x[i % 32 :: 32]) for i in range(1024)]
    assert cluster.run(FROM_LANE.value[3], sums) == [sums[3]] * 1024


@pytest.mark.parametrize(("multiprocessors", "warps"), [(2, 8), (4, 4), (4, 8), (8, 2)])
def test_two_levels_give_all_threads_the_sums_of_their_lanes(
    multiprocessors: int, warps: int
) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.attn_residual.spread_kernel import EXCHANGES, OPEN, place_of

    threads = multiprocessors * warps * 32
    cluster = Cluster(multiprocessors, warps * 32)
    place = place_of(multiprocessors, warps)
    room = cluster.run(OPEN.value[place], [0] * threads)
    for text in EXCHANGES.value[2 * place :][:2]:
        x = [float(i) for i in torch.randint(0, 100, (threads,))]
        sums = cluster.run(text, room, x)
        assert sums == [sum(x[i % 32 :: 32]) for i in range(threads)]


def test_layouts_are_those_of_their_place() -> None:
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.attn_residual.spread_kernel import COLUMNS_OF, LANES_OF, place_of

    for multiprocessors, warps in ((2, 8), (4, 4), (8, 2)):
        columns = COLUMNS_OF.value[place_of(multiprocessors, warps)]
        assert columns.warps_per_cta == [1, warps, 1, 1]
        assert 2 ** len(columns.cga_layout) == multiprocessors
        assert LANES_OF.value[place_of(multiprocessors, warps)].parent == columns
    with pytest.raises(ValueError, match="not in"):
        place_of(8, 3)


def test_threads_have_room_of_their_own() -> None:
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.attn_residual.spread_kernel import MOST_STAGED, OPEN, STAGE, TAKE

    cluster = Cluster(1, 128)
    assert cluster.run(STAGE.value[72], [0] * 128) == list(range(4096, 4096 + 128 * 16, 16))
    assert f"stage[{512 * 72}]" in STAGE.value[72]
    assert len(STAGE.value) == MOST_STAGED + 1
    rooms = [int(text.split("room[")[1].split("]")[0]) for text in OPEN.value]
    assert 512 * MOST_STAGED + max(rooms) <= 48 << 10
    for left in range(16):
        assert f"cp.async.wait_group {left};" in TAKE.value[left + 1]
    assert "wait" not in TAKE.value[0]
