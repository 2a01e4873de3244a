"""The Gluon kernel of MLA decode that is turned, on a CPU."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from k3vl.kernels.mla import turned_ptx as ptx
from k3vl.kernels.mla.reference import mla_decode_reference
from k3vl.kernels.mla.turned import TurnedShape, turned_parts, turned_takes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kernels.ordering import Cell

LATENT, SHARED, PAGE = 512, 64, 64
BF16 = torch.bfloat16
EARLY, LATE, COMMON, QUERIES, PROBABILITIES = (
    x // 4096 for x in (ptx.EARLY, ptx.LATE, ptx.SHARED, ptx.QUERIES, ptx.PROBABILITIES)
)


RAISED: list[int] = []
"""Of every tile that the imitation has seen: whether references were raised."""


class Tile:
    """[64, 256] as four blocks of 64 columns that lie one after the other."""

    shape = (64, 256)

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = blocks.view(4, 64, 64)

    def copy_(self, block: torch.Tensor) -> None:
        self.blocks.copy_(block.view(64, 4, 64).transpose(0, 1))

    def fill_(self, value: float) -> None:
        self.blocks.fill_(value)


class Machine:
    """What the kernel's pieces of PTX do: they stand for them, in terms of whole tensors.

    Products read when they are waited for. Everything that they touch is in the order's books.
    """

    def __init__(self) -> None:
        self.groups: list[tuple[list[Cell], Callable[[], None]]] = []
        self.read: list[torch.Tensor] = []
        self.acc: list[torch.Tensor] = []

    def names(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in (
                "slabs", "keep", "begin_scores", "more_scores", "no_scores", "refer", "verdict",
                "weigh", "aside", "add_up", "mix", "mix_wait", "check_place",
            )
        }  # fmt: skip

    @staticmethod
    def slabs(room: Any, first: int, rows: int, columns: int, at: Any) -> Any:
        from tests.kernels.gluon_on_cpu import Shared

        begin, count = int(first + at), rows * columns // 2048
        assert begin % count == 0, "where the kernel's division leaves a rest"
        part, cells = room.tensor[begin:][:count], room.cells[begin:][:count]
        if (rows, columns) == Tile.shape:
            return Shared(Tile(part), cells)
        return Shared(part.view(rows, columns), cells)

    @staticmethod
    def keep(_room: Any) -> None:
        pass

    @staticmethod
    def check_place(notes: Any) -> None:
        from tests.kernels.gluon_on_cpu import _meeting
        from tests.kernels.ordering import group

        Machine._met(notes.cells[:1], store=False)
        with _meeting:
            notes.cells[0].load(group())
        assert (notes.tensor[:3] == -1e30).all()

    def _begin(self, *parts: Any) -> list[Cell]:
        from tests.kernels.gluon_on_cpu import _meeting
        from tests.kernels.ordering import group

        cells = [cell for part in parts for cell in part]
        with _meeting:
            for cell in cells:
                cell.begin_product(group())
        return cells

    def _end(self, cells: list[Cell]) -> None:
        from tests.kernels.gluon_on_cpu import _meeting
        from tests.kernels.ordering import group

        with _meeting:
            now = group().tick()
            for cell in cells:
                cell.end_product(now)

    def _wait(self, left: int) -> None:
        """Groups of products end in the order in which they began."""
        while len(self.groups) > left:
            cells, then = self.groups.pop(0)
            self._end(cells)
            then()

    def _group(self, then: Callable[[], None], *parts: Any) -> None:
        self.groups.append((self._begin(*parts), then))

    def begin_scores(self, room: Any, offset: torch.Tensor) -> tuple[None, ...]:
        first = EARLY + int(offset.unique()) // 4096
        self.read = []
        self._scores(room, room.cells[first:][:8], room.tensor[first:][:8], 0)
        return (None,) * 3

    def _scores(self, room: Any, cells: Any, tile: torch.Tensor, block: int) -> None:
        read = self.read
        queries = room.tensor[QUERIES + 3 * block :][: 3 * len(tile) // 2]

        def multiply() -> None:
            left = torch.cat(list(tile.reshape(-1, 64, 64)), 1).float()
            read.append(left @ torch.cat(list(queries.reshape(-1, 96, 64)), 1).float().T)

        more = room.cells[QUERIES + 3 * block :][: 3 * len(tile) // 2]
        self._group(multiply, cells, more)

    def no_scores(self, _s: Any) -> None:
        self._wait(0)

    def more_scores(self, room: Any, s: Any, last: Any) -> Any:
        if not last:
            self._scores(room, room.cells[COMMON:][:2], room.tensor[COMMON:][:2], 8)
            return s
        self._scores(room, room.cells[LATE:][:8], room.tensor[LATE:][:8], 4)
        self._wait(0)
        assert len(self.read) == 3
        both = sum(self.read).view(64, 2, 3, 16)  # group, then blocks of 16 heads
        return tuple(both[:, :, n].transpose(0, 1).reshape(128, 16) for n in range(3))

    @staticmethod
    def _met(cells: list[Cell], *, store: bool) -> None:
        """What PTX stores and loads the compiler does not order, not even within the group."""
        from tests.kernels.gluon_on_cpu import _meeting
        from tests.kernels.ordering import group

        with _meeting:
            for cell in cells:
                before = cell.writes | cell.reads if store else cell.writes
                cell._known("PTX", before, group(), own=True)

    @staticmethod
    def _exponents(notes: Any, s: Any, scale: float) -> list[torch.Tensor]:
        from tests.kernels.gluon_on_cpu import _meeting
        from tests.kernels.ordering import group

        Machine._met(notes.cells[:3], store=False)
        with _meeting:
            for cell in notes.cells[:3]:
                cell.load(group())
            references = notes.tensor[:3].view(3, 2, 1, 16).expand(-1, -1, 64, -1).clone()
        return [s[n] * scale - references[n].reshape(128, 16) for n in range(3)]

    @staticmethod
    def refer(notes: Any, s: Any, scale: float) -> None:
        Machine._met(notes.cells[:3], store=True)
        for n in range(3):
            notes.index(n).store(s[n].view(2, 64, 16)[:, 0].reshape(32) * scale)

    @staticmethod
    def verdict(notes: Any) -> int:
        from tests.kernels.gluon_on_cpu import _meeting
        from tests.kernels.ordering import group

        Machine._met(notes.cells[3:4], store=False)
        with _meeting:
            notes.cells[3].load(group())
            raised = int(notes.tensor[3, 0])
        RAISED.append(raised)
        return raised

    def weigh(self, room: Any, notes: Any, s: Any, scale: float) -> None:
        from tests.kernels.gluon_on_cpu import _meeting
        from tests.kernels.ordering import group

        exponents = self._exponents(notes, s, scale)
        self._met([*notes.cells[3:4], *room.cells[PROBABILITIES:]], store=True)
        with _meeting:
            notes.cells[3].store(group())
        if max(float(x.max()) for x in exponents) > ptx.LIMIT:
            notes.tensor[3, 0] = 1.0
        for n, x in enumerate(exponents):
            p = x.exp2().bfloat16().view(2, 64, 16).transpose(1, 2).reshape(32, 64)
            room.index(PROBABILITIES + n).store(p)

    @staticmethod
    def aside(notes: Any) -> Any:
        from tests.kernels.gluon_on_cpu import Shared

        return Shared(notes.tensor[4:8].view(128), notes.cells[4:8])

    def add_up(self, room: Any, notes: Any, total: torch.Tensor) -> torch.Tensor:
        out = total.clone()

        def add() -> None:
            ones = notes.tensor[8:].view(BF16).view(8, 64).float()
            rows = room.tensor[PROBABILITIES:][:3].reshape(96, 64).float()
            out.add_(torch.cat([rows[:64], rows[32:]]) @ ones.T)

        self._group(add, room.cells[PROBABILITIES:][:3], notes.cells[8:])
        return out

    def mix(self, room: Any, acc: Any, offset: Any, late: Any) -> Any:
        if late:
            self.acc = list(acc)
        first = LATE if late else EARLY + int(offset) // 4096
        add = partial(self._add, room, first, 0 if late else 2)
        self._group(add, room.cells[first:][:8], room.cells[PROBABILITIES:][:3])
        return acc

    def _add(self, room: Any, first: int, begin: int) -> None:
        values = room.tensor[first:][:8].reshape(2, 2, 64, 64).float()  # group, block
        weights = room.tensor[PROBABILITIES:][:3].float()
        for block in range(2):
            turned = values[:, block].transpose(1, 2).reshape(128, 64)
            for n in range(3):
                self.acc[3 * (begin + block) + n] = (
                    self.acc[3 * (begin + block) + n] + turned @ weights[n].T
                )

    def mix_wait(self, _acc: Any, left: int) -> Any:
        self._wait(left)
        return tuple(self.acc)


def run_on_cpu(kernel: Any, grid: Any, matrix: Any, blocks: Any, *args: Any, **constants: Any):
    from tests.kernels.gluon_on_cpu import Descriptor, launch

    described = (Descriptor(matrix, tuple(block)) for block in blocks)
    machine = Machine()
    launch(
        kernel, grid, *described, *args, ordered=True, stand_ins=machine.names(), **constants
    )  # fmt: skip


# What orders the kernel's accesses: a line to leave out, found by the text before it.
ORDER = [
    ("o_n = gl.arange(0, 128, gl.SliceLayout(1, S)) % 64\n", "mbarrier.wait(landed.index(0), 0)"),
    ("at + 2 * BN, end, rows_end, PAGE)\n", "mbarrier.wait(landed_shared.index(0), odd)"),
    ("s = more_scores(room, s, False)\n", "mbarrier.wait(landed_late.index(0), odd)"),
    ("refer(notes, s, scale)\n", "meet()"),
    ("meet()\n        weigh(room, notes, s, scale)\n", "fence_async_shared()"),
    ("        weigh(room, notes, s, scale)\n        fence_async_shared()\n", "meet()"),
    ("            weigh(room, notes, s, scale)\n", "fence_async_shared()"),
    ("            weigh(room, notes, s, scale)\n            fence_async_shared()\n", "meet()"),
    ("landed_late.index(0), HALF, pred=more)\n", "meet()"),
    (
        "following = 1 - odd\n",
        "mbarrier.wait(landed.index(following), ((j + 1) >> 1) & 1)",
    ),
    ("landed.index(odd), HALF, pred=more)\n", "meet()"),
    ("no_scores(s)\n", "meet()"),
    ("gl.full([32], TWO_ONES, gl.float32, FLAT))\n", "meet()"),
    ("store_queries(room, b_q)\n", "fence_async_shared()"),
    ("store_queries(room, b_q)\n    fence_async_shared()\n", "meet()"),
    ("gl.zeros([32], gl.float32, FLAT))\n", "meet()"),
]


@pytest.mark.parametrize(("before", "left_out"), ORDER)
def test_whatever_is_left_out_of_the_order_is_a_race(
    tmp_path: Path, before: str, left_out: str
) -> None:
    """Four tiles, the last in part, references raised in the third."""
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.mla import turned_kernels
    from tests.kernels.ordering import RaceError, module_of, without

    text = Path(turned_kernels.__file__).read_text(encoding="utf-8")
    changed = module_of(without(text, before, left_out), tmp_path)

    def on_cpu(_: Any, *args: Any, **constants: Any) -> None:
        run_on_cpu(changed.mla_decode_turned_kernel, *args, **constants)

    q, latents = torch.zeros(1, 96, 576).bfloat16(), torch.zeros(256, 576).bfloat16()
    q[:], latents[130] = 1, 20
    results = torch.zeros(1, 1, 96, 512).bfloat16(), torch.zeros(1, 96, 1)
    with pytest.raises(RaceError):
        turned_parts(
            q, latents, torch.arange(0, 256, 64)[None], torch.tensor([230]), 512, 0.05, 64,
            TurnedShape(1), results=results, launch=on_cpu,
        )  # fmt: skip


@pytest.mark.parametrize(("splits", "heads", "size"), [(1, 96, 1), (2, 90, 1), (3, 96, 30)])
def test_kernel_is_its_reference(splits: int, heads: int, size: float) -> None:
    """Odd lengths, padding, pages apart in any order; NaN in all that is not used."""
    pytest.importorskip("triton.experimental.gluon")
    torch.manual_seed(splits)
    random.seed(splits)
    lengths = torch.tensor([1, 0, 64, 65, 3 * PAGE - 1, 129, 5 * PAGE])
    batch, most = len(lengths), 5
    latents = torch.randn(batch * most * (PAGE + 7), LATENT + SHARED).bfloat16()
    latents *= torch.linspace(1, size, len(latents))[:, None].bfloat16()
    begins = torch.randperm(batch * most).view(batch, most) * (PAGE + 7)
    unused = torch.ones(len(latents), dtype=torch.bool)
    for b, length in enumerate(lengths.tolist()):
        for t in range(length):
            unused[begins[b, t // PAGE] + t % PAGE] = False
    latents[unused] = float("nan")
    clean = begins.clone()
    begins[1] = 2**62  # a padding row's table is never read
    begins = begins.T.contiguous().T
    q = torch.randn(batch, heads, LATENT + SHARED).bfloat16()
    parts = torch.full((batch, splits, heads, LATENT), float("nan"), dtype=torch.bfloat16)
    weights = torch.full((batch, heads, splits), float("nan"))
    assert turned_takes(q, latents, begins, LATENT, PAGE)
    RAISED.clear()
    turned_parts(
        q, latents, begins, lengths, LATENT, 0.05, PAGE, TurnedShape(splits),
        results=(parts, weights), early=True, launch=run_on_cpu,
    )  # fmt: skip
    assert any(RAISED) is (size > 1)
    out = parts[:, 0]
    if splits > 1:
        empty = weights.isneginf()
        assert torch.equal(empty.mT, (parts == 0).all(-1)), "empty parts are zeros"
        share = weights.mul(0.6931471805599453).softmax(-1).nan_to_num()
        out = (share.mT.unsqueeze(-1) * parts.float()).sum(1)
    clean_latents = latents.double().nan_to_num()
    want = mla_decode_reference(q.double(), clean_latents, clean, lengths, LATENT, 0.05, PAGE)
    assert not out[1].any(), "padding gets zeros"
    for b in range(batch):
        assert (out[b] - want[b]).norm() <= 5e-3 * want[b].norm(), lengths[b]


def filled_machine() -> Any:
    """Shared memory with a tile, queries and probabilities as the copies leave them."""
    from tests.kernels.ptx_groups_on_cpu import Machine as Threads
    from tests.kernels.ptx_groups_on_cpu import swizzled

    threads = Threads(ptx.NOTES + 4096)
    torch.manual_seed(0)
    content = torch.randn(ptx.NOTES // 2).bfloat16()
    where = swizzled(torch.arange(0, ptx.NOTES, 2)) // 2
    threads.memory.view(torch.bfloat16)[where] = content
    return threads, content.float()


def spread(matrix: torch.Tensor, columns: int) -> list[torch.Tensor]:
    """A thread's registers of [2 x 64, columns], as the compiler lays out such a tensor."""
    parts = matrix.view(2, 4, 2, 8, columns // 8, 4, 2).permute(0, 1, 3, 5, 4, 2, 6)
    return list(parts.reshape(256, columns // 2).T)


@pytest.mark.parametrize("odd", [0, 1])
def test_scores_in_ptx(odd: int) -> None:
    """Every register of every thread, from a tile and queries in swizzled memory."""
    threads, content = filled_machine()
    offset = torch.full((256,), odd * 4 * ptx.BLOCK)
    got = threads.run(ptx.BEGIN_SCORES, {24: offset})
    for code in (ptx.SHARED_SCORES, ptx.END_SCORES):
        got = threads.run(code, {i: got[f"${i}"] for i in range(24)} | {48: 0 * offset})

    def blocks(begin: int, count: int, rows: int) -> list[torch.Tensor]:
        return list(content[begin // 2 :][: count * rows * 64].view(count, rows, 64))

    tile = blocks(ptx.EARLY + odd * 4 * ptx.BLOCK, 4, 64) + blocks(ptx.LATE, 4, 64)
    latents = torch.cat([*tile, *blocks(ptx.SHARED, 1, 64)], 1)
    queries = torch.cat(blocks(ptx.QUERIES, 9, 96), 1)
    both = (latents @ queries.T).view(64, 2, 3, 16)
    for n in range(3):
        want = spread(both[:, :, n].transpose(0, 1).reshape(128, 16), 16)
        for i in range(8):
            torch.testing.assert_close(got[f"${8 * n + i}"], want[i], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("code", "begin"), [(ptx.MIX_LATE, ptx.LATE), (ptx.MIX_EARLY, ptx.EARLY)])
@pytest.mark.parametrize("odd", [0, 1])
def test_mixtures_in_ptx(code: str, begin: int, odd: int) -> None:
    threads, content = filled_machine()
    start, offset = torch.randn(6, 128, 32), odd * 4 * ptx.BLOCK * (begin == ptx.EARLY)
    given = dict(enumerate(register for x in start for register in spread(x, 32)))
    got = threads.run(code, given | {192: torch.full((256,), offset)})
    weights = content[ptx.PROBABILITIES // 2 :][: 96 * 64].view(96, 64)
    for m in range(2):
        tiles = content[(begin + offset) // 2 :][: 4 * 4096].view(2, 2, 64, 64)[:, m]
        for n in range(3):
            more = torch.einsum("gtc,ht->gch", tiles, weights[32 * n :][:32])
            want = spread(start[3 * m + n] + more.reshape(128, 32), 32)
            for i in range(16):
                register = got[f"${48 * m + 16 * n + i}"]
                torch.testing.assert_close(register, want[i], rtol=1e-4, atol=1e-4)


def test_sums_in_ptx() -> None:
    threads, content = filled_machine()
    threads.view(ptx.ONES, torch.float32, 256).fill_(ptx.TWO_ONES)
    start = torch.randn(128, 8)
    got = threads.run(ptx.ADD, dict(enumerate(spread(start, 8))))
    rows = content[ptx.PROBABILITIES // 2 :][: 96 * 64].view(96, 64).sum(1)
    want = spread(start + torch.cat([rows[:64], rows[32:]])[:, None], 8)
    for i in range(4):
        torch.testing.assert_close(got[f"${i}"], want[i], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("highest", [60.0, 70.0])
def test_softmax_in_ptx(highest: float) -> None:
    """Probabilities to where the products read them; a note if one would become too large."""
    threads, _ = filled_machine()
    threads.memory[ptx.NOTES :] = 0
    references = torch.randn(96)
    threads.view(ptx.NOTES, torch.float32, 96).copy_(references)
    scores, scale = torch.randn(3, 128, 16), 0.5
    scores[:, ::64] = references.view(3, 2, 16) / scale  # of the first latent
    scores[1, 77, 11] = (highest + references[32 + 16 + 11]) / scale
    given = dict(enumerate((r for x in scores for r in spread(x, 16)), 8))
    given[32] = torch.full((256,), scale)
    if highest > ptx.LIMIT:
        threads.memory[ptx.NOTES :] = 0
        threads.run(ptx.REFER, given)
        firsts = scores.view(3, 2, 64, 16)[:, :, 0].reshape(96) * scale
        assert torch.equal(threads.view(ptx.NOTES, torch.float32, 96), firsts)
        references.copy_(firsts)
    threads.run(ptx.WEIGH, given)
    assert int(threads.run(ptx.VERDICT, {})["$0"][0]) == (highest > ptx.LIMIT)
    from tests.kernels.ptx_groups_on_cpu import swizzled

    at = torch.arange(ptx.PROBABILITIES, ptx.PROBABILITIES + 96 * 128, 2)
    got = threads.memory.view(torch.bfloat16)[swizzled(at) // 2].view(3, 2, 16, 64).float()
    exponents = scores.view(3, 2, 64, 16) * scale - references.view(3, 2, 1, 16)
    want = exponents.exp2().bfloat16().float().transpose(2, 3)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=0)
