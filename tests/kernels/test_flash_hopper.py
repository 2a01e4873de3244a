"""The Gluon kernel of packed attention, on a CPU: all that is asynchronous comes late."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from k3vl.kernels import flash_hopper_kernel
from k3vl.kernels.flash_hopper import hopper_flash, hopper_flash_takes, tile_rows
from k3vl.kernels.packed import Packed
from k3vl.kernels.vision_attention import gpu
from k3vl.kernels.vision_pos import rotary_table, rotate
from tests.kernels.gluon_on_cpu import Descriptor, launch
from tests.kernels.ordering import module_of, without

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

CPU = torch.device("cpu")
NAN = float("nan")
HEADS = 2
WAYS = (
    {},
    {"ordered": False, "stages": 2},
    {"fixed": False},
    {"fixed": False, "ordered": False, "stages": 2},
)
"""To launch the kernel where it is not causal."""


def on_cpu(kernel, grid, matrices, blocks, *args, ordered: bool = False, **constants) -> None:
    described = [
        None if x is None else Descriptor(x, tuple(b))
        for x, b in zip(matrices, blocks, strict=True)
    ]
    launch(kernel, grid, *described, *args, ordered=ordered, **constants)


def rows_of(count: int, *shape: int) -> torch.Tensor:
    """Rows with others of NaN beside and behind them, 16 bytes from the beginning of memory."""
    memory = torch.full((count + 9, shape[0] + 1, shape[1]), NAN, dtype=torch.bfloat16)
    view = memory[4 : 4 + count, : shape[0]]
    view.copy_(torch.randn(count, *shape))
    return view


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    contexts: Sequence[int],
    *,
    causal: bool,
) -> torch.Tensor:
    outs = []
    parts = zip(q.split(lengths), k.split(contexts), v.split(contexts), strict=True)
    for qi, ki, vi in parts:
        scores = torch.einsum("ihk,jhk->hij", qi.double(), ki.double()) * q.shape[-1] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[1:]).triu(1 + len(ki) - len(qi)).bool()
            scores = scores.masked_fill(hidden, float("-inf"))
        outs.append(torch.einsum("hij,jhv->ihv", scores.softmax(-1), vi.double()))
    return torch.cat(outs)


def test_items_see_themselves() -> None:
    """Whichever program takes a tile, its bits are the same."""
    torch.manual_seed(1)
    random.seed(1)
    lengths = (1, 64, 65, 128, 129, 300, 520)
    items = Packed.of(lengths, CPU)
    qkv = rows_of(sum(lengths), 3 * HEADS, 128)
    q, k, v = qkv.split(HEADS, 1)
    assert hopper_flash_takes(q, k, v, None)
    want = reference(q, k, v, lengths, lengths, causal=False)
    attend = partial(
        hopper_flash, q, k, v, 128**-0.5, queries=items, keys=items, causal=False, rest=None,
        launch=on_cpu,
    )  # fmt: skip
    got = attend()
    assert torch.equal(attend(programs=3), got)
    for length, a, b in zip(lengths, got.split(lengths), want.split(lengths), strict=True):
        assert (a.double() - b).norm() < 5e-3 * b.norm(), length


def test_queries_are_turned_to_the_bits_of_their_op() -> None:
    """Where they are loaded, whatever lies behind an item."""
    torch.manual_seed(5)
    random.seed(5)
    grids = ((1, 1), (5, 26), (2, 64), (9, 10))
    lengths = tuple(rows * columns for rows, columns in grids)
    table = torch.cat([rotary_table(rows, columns, 128) for rows, columns in grids])
    q, k, v = rows_of(sum(lengths), 3 * HEADS, 128).split(HEADS, 1)
    items = Packed.of(lengths, CPU)
    attend = partial(
        hopper_flash, k=k, v=v, scale=128**-0.5, queries=items, keys=items, causal=False,
        rest=None, programs=3,
    )  # fmt: skip
    for way in WAYS:
        want = attend(rotate(q, table).contiguous(), launch=on_cpu, **way)
        assert torch.equal(attend(q, turns=table, launch=on_cpu, **way), want), way


def test_the_towers_attention_turns_keys_first_and_queries_itself(monkeypatch) -> None:
    torch.manual_seed(7)
    random.seed(7)
    grids = ((5, 26), (9, 10))
    table = torch.cat([rotary_table(rows, columns, 128) for rows, columns in grids])
    items = Packed.of([rows * columns for rows, columns in grids], CPU)
    heads = rows_of(220, 3 * HEADS, 128)
    q, k, v = heads.clone().split(HEADS, 1)
    monkeypatch.setattr(gpu, "by_hopper", lambda *_: True)
    monkeypatch.setattr(gpu, "hopper_flash", partial(hopper_flash, launch=on_cpu))
    monkeypatch.setattr(gpu, "rotate_in_place", lambda x, turns: x.copy_(rotate(x, turns)))
    got = gpu.turned_attention(heads, table, items)
    want = hopper_flash(
        rotate(q, table), rotate(k, table), v, 128**-0.5, queries=items, keys=items, causal=False,
        rest=None, launch=on_cpu,
    )  # fmt: skip
    assert torch.equal(got, want)


@pytest.mark.parametrize("way", WAYS[1:])
def test_other_ways_are_as_near(way) -> None:
    torch.manual_seed(4)
    random.seed(4)
    lengths = (1, 129, 300)
    q, k, v = rows_of(sum(lengths), 3 * HEADS, 128).split(HEADS, 1)
    items = Packed.of(lengths, CPU)
    attend = partial(
        hopper_flash, q, k, v, 128**-0.5, queries=items, keys=items, causal=False, rest=None,
        launch=on_cpu,
    )  # fmt: skip
    got, want = attend(**way), reference(q, k, v, lengths, lengths, causal=False)
    if "fixed" not in way:
        assert torch.equal(got, attend())
    for length, a, b in zip(lengths, got.split(lengths), want.split(lengths), strict=True):
        assert (a.double() - b).norm() < 5e-3 * b.norm(), length


@pytest.mark.parametrize("way", WAYS[:2])
def test_what_outgrows_the_scores_of_its_first_tile_is_attended_again(way) -> None:
    """Only that: its neighbours' bits are those of a lone item."""
    torch.manual_seed(6)
    random.seed(6)
    lengths = (140, 300, 260)
    q, k, v = rows_of(sum(lengths), 3 * HEADS, 128).split(HEADS, 1)
    k[140:200, 1] *= 120
    items = Packed.of(lengths, CPU)
    attend = partial(
        hopper_flash, q, k, v, 128**-0.5, queries=items, keys=items, causal=False, rest=None,
        programs=2, launch=on_cpu,
    )  # fmt: skip
    want = reference(q, k, v, lengths, lengths, causal=False)
    got, careful = attend(**way), attend(fixed=False)
    for a, b in zip(got.split(lengths), want.split(lengths), strict=True):
        assert (a.double() - b).norm() < 5e-3 * b.norm()
    assert torch.equal(got[140:440, 1], careful[140:440, 1])
    k[140:200, 1] /= 120
    others = torch.ones(sum(lengths), HEADS, dtype=torch.bool)
    others[140:440, 1] = False
    assert torch.equal(attend(**way)[others], got[others])


@pytest.mark.parametrize("way", WAYS)
def test_an_item_is_not_touched_by_its_neighbours(way) -> None:
    torch.manual_seed(2)
    random.seed(2)
    lengths = (130, 70, 260)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: Sequence[int]) -> torch.Tensor:
        items = Packed.of(own, CPU)
        return hopper_flash(
            q, k, v, 0.1, queries=items, keys=items, causal=False, rest=None,
            programs=2, launch=on_cpu, **way,
        )  # fmt: skip

    q, k, v = rows_of(sum(lengths), 3 * HEADS, 128).split(HEADS, 1)
    parts = list(zip(*(x.split(lengths) for x in (q, k, v)), strict=True))
    alone = [run(*part, part[0].shape[:1]) for part in parts]
    for x in (q, k, v):
        x[130:200] = NAN
    together = run(q, k, v, lengths).split(lengths)
    assert torch.equal(together[0], alone[0])
    assert together[1].isnan().all()
    assert torch.equal(together[2], alone[2])


def test_queries_see_what_is_before_them() -> None:
    """Keys in two parts, the second one's own or shared by the heads; prefixes; odd lengths."""
    torch.manual_seed(3)
    random.seed(3)
    lengths, contexts = (1, 128, 65, 200, 3), (1, 128, 385, 456, 258)
    q, v = rows_of(sum(lengths), HEADS, 192), rows_of(sum(contexts), HEADS, 128)
    joined, shared = rows_of(sum(contexts), HEADS, 192), rows_of(sum(contexts), 1, 64)
    queries, keys = Packed.of(lengths, CPU), Packed.of(contexts, CPU)
    for rest in (joined[..., 128:], shared.expand(-1, HEADS, -1)):
        k = joined[..., :128]
        assert hopper_flash_takes(q, k, v, rest)
        whole = torch.cat([k, rest], -1)
        want = reference(q, whole, v, lengths, contexts, causal=True)
        attend = partial(
            hopper_flash, q, k, v, 192**-0.5, queries=queries, keys=keys, causal=True, rest=rest,
            launch=on_cpu,
        )  # fmt: skip
        got = attend()
        assert torch.equal(attend(programs=2), got)
        for length, a, b in zip(lengths, got.split(lengths), want.split(lengths), strict=True):
            assert (a.double() - b).norm() < 5e-3 * b.norm(), length


def test_no_bit_depends_on_where_a_prefix_ends() -> None:
    """Queries behind others lie in other tiles, whose last keys they may see nothing of."""
    torch.manual_seed(8)
    random.seed(8)
    q, k = rows_of(400, HEADS, 192), rows_of(400, HEADS, 192)
    v, keys = rows_of(400, HEADS, 128), Packed.of((400,), CPU)

    def behind(begin: int) -> torch.Tensor:
        return hopper_flash(
            q[begin:], k[..., :128], v, 192**-0.5, queries=Packed.of((400 - begin,), CPU),
            keys=keys, causal=True, rest=k[..., 128:], launch=on_cpu,
        )  # fmt: skip

    whole = behind(0)
    for begin in (1, 64, 77, 256):
        assert torch.equal(behind(begin), whole[begin:]), begin


_TURNED = "piece.store(turned.to(gl.bfloat16))\n"
# What orders the kernel's accesses: a line to leave out, found by the text before it.
ORDER = [
    (_TURNED, "fence_async_shared()"),
    (f"{_TURNED}    fence_async_shared()\n", "meet()"),
    ("gl.load(p_tile + 3).to(gl.int32), BN)\n", "mbarrier.wait(used_q.index(0)"),
    ("if j == STAGES:\n", "mbarrier.wait(used_first.index(0)"),
    ("landed_k.index(stage), m_kp.index(stage))\n", "mbarrier.wait(used.index(stage)"),
    ("# Keys of the last tile.\n", "mbarrier.wait(landed_q.index(0)"),
    ("\n    stage = done % STAGES\n", "mbarrier.wait(landed_k.index(stage)"),
    ("\n    s = warpgroup_mma_wait(0, [s])\n", "meet()"),
    ("gl.zeros([ROWS, V], gl.float32, O)\n", "mbarrier.wait(landed_v.index(stage)"),
    ("        phase = done // STAGES & 1\n", "mbarrier.wait(landed_k.index(stage)"),
    ("the product beside it.\n", "mbarrier.wait(landed_v.index(stage)"),
    ("\n        mixed = warpgroup_mma_wait(0, [product])\n", "meet()"),
    ("\n    mixed = warpgroup_mma_wait(0, [product])\n", "meet()"),
]


def ordered(kernel: object) -> Callable[..., None]:
    """A launch of ``kernel``, whatever is asked for, under which every access has to be ordered."""
    return lambda _, *args, **constants: on_cpu(kernel, *args, ordered=True, **constants)


def several_rounds(launch: Callable[..., None], way: Mapping[str, Any]) -> torch.Tensor:
    """Two heads of one and of five whole tiles of keys, by one program that turns queries."""
    q, k, v = rows_of(768, 3 * HEADS, 128).split(HEADS, 1)
    items = Packed.of((640, 128), CPU)
    table = torch.cat([rotary_table(16, 40, 128), rotary_table(8, 16, 128)])
    return hopper_flash(
        q, k, v, 0.1, queries=items, keys=items, causal=False, rest=None, programs=1, turns=table,
        launch=launch, **way,
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_access_is_ordered(way) -> None:
    launch_it = ordered(flash_hopper_kernel.flash_hopper_kernel)
    assert several_rounds(launch_it, way).isfinite().all()


@pytest.mark.parametrize(("before", "left_out"), ORDER)
def test_whatever_is_left_out_of_the_order_is_found(
    tmp_path: Path, before: str, left_out: str
) -> None:
    """As a race, or as a phase of a barrier that is begun before the one before is over."""
    text = Path(flash_hopper_kernel.__file__).read_text(encoding="utf-8")
    changed = module_of(without(text, before, left_out + "*"), tmp_path)
    with pytest.raises(AssertionError, match=r"without|reads it|nobody has written|more arrivals"):
        [several_rounds(ordered(changed.flash_hopper_kernel), way) for way in WAYS[:2]]


def test_a_tile_knows_its_keys() -> None:
    assert tile_rows((130, 5), (130, 5), causal=False) == [
        (0, 128, 0, 130, 130),
        (128, 2, 0, 130, 130),
        (130, 5, 130, 5, 5),
    ]
    assert tile_rows((130, 5), (140, 5), causal=True) == [
        (128, 2, 0, 140, 139),
        (0, 128, 0, 138, 11),
        (130, 5, 140, 5, 1),
    ]


def test_what_the_kernel_does_not_take() -> None:
    x = torch.zeros(7, 3, 256, dtype=torch.bfloat16)
    k, rest = x[..., :128], x[..., 128:192]
    assert hopper_flash_takes(k, k, k, None)
    assert hopper_flash_takes(x[..., :192], k, k, rest)
    assert not hopper_flash_takes(k.float(), k.float(), k.float(), None), "float32"
    assert not hopper_flash_takes(x[..., :64], x[..., :64], k, None), "another width"
    assert not hopper_flash_takes(x[..., 1:129], k, k, None), "2 bytes off"
    odd = torch.zeros(7, 3, 132, dtype=torch.bfloat16)[..., :128]
    assert not hopper_flash_takes(odd, k, k, None), "heads 264 bytes apart"
