"""The Gluon kernel of attention residuals that meets once, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from k3vl.kernels.attn_residual.hopper import ClusterShape, cluster_mix
from tests.kernels.ptx_lanes_on_cpu import signed
from tests.kernels.ptx_on_cpu import Cluster
from tests.kernels.test_attn_residual_cluster import NAN, exactly

pytest.importorskip("triton.experimental.gluon")

from k3vl.kernels.attn_residual import gram_kernel as gram

LANES = torch.arange(32)


class Room:
    """Stand-ins for the kernel's machine language, over all threads of a cluster at once."""

    BEGIN = 48

    def __init__(self) -> None:
        self.memory = torch.full((8, 32768), NAN)  # numbers of two bytes
        self.told: tuple[torch.Tensor, ...] = ()

    def open(self, lanes: torch.Tensor, tokens: int) -> torch.Tensor:
        token = torch.arange(4 * tokens)[None, :, None] // 4
        return self.BEGIN + (token * gram.SIZE.value).expand(lanes.shape)

    def places(self, begin: torch.Tensor) -> torch.Tensor:
        """Of eight numbers a thread: [8, numbers]."""
        assert (begin % 16 == 0).all()
        return ((begin // 2)[..., None] + torch.arange(8)).flatten(1).long()

    def write(self, begin: torch.Tensor, values: torch.Tensor, live: torch.Tensor) -> None:
        for sm, (at, row, writes) in enumerate(
            zip(self.places(begin), values.flatten(1).float(), live.flatten(1), strict=True)
        ):
            writes = writes.repeat_interleave(8)
            self.memory[sm, at[writes]] = row[writes]

    def read(self, begin: torch.Tensor) -> torch.Tensor:
        return self.memory.gather(1, self.places(begin)).view(*begin.shape, 8)

    @staticmethod
    def load(pointers: Any, live: torch.Tensor) -> torch.Tensor:
        """Eight columns a thread; zeros where it has none."""
        at = torch.as_tensor(pointers.at).expand(live.shape)[..., None] + torch.arange(8)
        flat, where, _ = type(pointers)(pointers.tensor, at).cells(live[..., None] > 0)
        return torch.where(live[..., None] > 0, flat[where.long()], 0)

    def keep(self, room: torch.Tensor, query: torch.Tensor, _tokens: int) -> None:
        first = torch.arange(4)[None, :, None] * 32 + LANES
        first = torch.nn.functional.pad(first, (0, 0, 0, room.shape[1] - 4), value=999)
        high = query.bfloat16().float()
        for begin, part in ((0, high), (gram.STRIDE.value, (query - high).bfloat16())):
            at, live = room + begin + 16 * first, (first < 112).expand(room.shape)
            self.write(at.clamp(max=65000 // 16 * 16), part, live)

    def put(
        self,
        p_row: torch.Tensor,
        p_ninth: torch.Tensor,
        upper: torch.Tensor,
        lower: torch.Tensor,
        chunk: int,
    ) -> None:
        self.write(p_row + 256 * chunk, upper, p_row > 0)
        self.write(p_ninth + 256 * chunk, lower, p_ninth > 0)

    def get(self, places: torch.Tensor, row: int) -> torch.Tensor:
        assert (places == places[..., :1]).all()
        return self.read(places[..., 0] + gram.ROWS.value + row * gram.STRIDE.value)

    def join(self, lower: torch.Tensor, p_query: torch.Tensor, chunk: int) -> torch.Tensor:
        return torch.where(
            (p_query > 0)[..., None], self.read(p_query + 256 * chunk), lower.float()
        )

    def multiply(
        self, sums: tuple[torch.Tensor, ...], upper: torch.Tensor, lower: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        upper = upper.float()
        rows = torch.cat([x.unflatten(2, (8, 4)).flatten(3) for x in (upper, lower)], 2)
        square = rows @ rows.mT  # [8, 4, 16, 16]
        g, q = LANES // 4, LANES % 4 * 2
        at = [
            (g + below, q + 8 * right + odd)
            for right in (0, 1)
            for below in (0, 8)
            for odd in (0, 1)
        ]
        new = [square[:, :, row, column] for row, column in at]
        return tuple(old + add for old, add in zip(sums, new, strict=False)) + sums[8:]

    def tell(self, _room: Any, numbers: tuple[torch.Tensor, ...], tokens: int) -> None:
        apart = [x.unflatten(1, (tokens, 4)) for x in numbers]
        self.told = tuple(x.sum((0, 2), keepdim=True).expand(x.shape).flatten(1, 2) for x in apart)

    def names(self) -> dict[str, Any]:
        return {
            "open_room": self.open,
            "put_rows": self.put,
            "get_row": self.get,
            "cluster_of": torch.as_tensor,
            "ask": lambda _: None,
            "join_chain": lambda x: x,
            "load_row": self.load,
            "load_query": self.load,
            "keep_query": self.keep,
            "join_query": self.join,
            "multiply": self.multiply,
            "meet_token": lambda *_: None,
            "tell": self.tell,
            "hear": lambda *_: self.told,
            "of_lane": lambda x, lane: x.gather(-1, lane.long().expand(x.shape)),
            "from_lane": lambda x, lane: x[..., lane : lane + 1].expand(x.shape),
        }


@pytest.mark.parametrize(
    ("depth", "width"), [(1, 64), (2, 192), (9, 7168), (8, 6208), (9, 1088), (5, 512), (3, 4160)]
)
def test_kernel_is_its_reference(depth: int, width: int) -> None:
    from tests.kernels.gluon_on_cpu import launch

    def on_cpu(kernel, grid, *args, **constants) -> None:
        launch(kernel, grid, *args, stand_ins=Room().names(), **constants)

    tokens = 3
    query, norm = torch.randn(width) / 4, (torch.rand(width) + 0.5).bfloat16()
    rows = torch.full((depth, tokens, width + 8), NAN).bfloat16()[..., :width]
    rows.copy_(torch.randn(depth, tokens, width))
    want = exactly(rows.double(), query.double(), norm.double())
    for together in (1, 2):
        out = torch.full((tokens + 1, width), NAN).bfloat16()
        shape = ClusterShape(meetings=1, tokens=together)
        cluster_mix(rows, query, norm, 1e-5, out[:-1], shape, early=True, launch=on_cpu)
        assert (out[:-1] - want).norm() <= 4e-3 * want.norm()
        assert out[-1].isnan().all()


def words(rows: torch.Tensor) -> list[list[int]]:
    """[threads, 8] bfloat16 as four words of every thread."""
    pairs = rows.bfloat16().contiguous().view(torch.int32)
    return [[x & 0xFFFFFFFF for x in column] for column in pairs.T.tolist()]


def join(cluster: Cluster, chunk: int, lower: list[list[int]], asks: list[int]) -> Any:
    """Inputs that are results too have both names."""
    text = gram.JOIN.value[chunk]
    start = "".join(f"mov.b32 ${i}, ${4 + i};" for i in range(4))
    return cluster.run_for(4, text.replace("{", start, 1), *lower, asks)


def test_products_of_rows_and_of_the_query() -> None:
    """Machine code of all threads of a cluster, from the query in registers to products."""
    cluster = Cluster(8, 128)
    room = cluster.run(gram.OPEN.value[0], [0] * 1024)
    query = torch.randint(-100, 100, (8, 1024)) / 64.0 + 2**-12
    p_kept = [x + gram.SIZE.value for x in room]
    cluster.run(gram.KEEP.value[0], p_kept, *query.view(1024, 8).T.tolist())
    lane, chunk = LANES.repeat(32), 5
    upper, lower = torch.randint(-8, 8, (2, 1024, 8)).float()
    lower[lane // 4 > 0] = 0.0
    begin = torch.arange(1024) % 128 // 32 * 64 + lane % 4 * 16 + p_kept[0]
    asks = torch.where(lane // 4 == 2, begin, 0)
    asks = torch.where(lane // 4 == 3, begin + gram.STRIDE.value, asks).tolist()
    before = [[float(i)] * 1024 for i in range(16)]
    joined = join(cluster, chunk, words(lower), asks)
    got = cluster.run_for(16, gram.MULTIPLY.value, *before, *words(upper), *joined)
    for i in range(16):
        cluster_sums = torch.tensor(got[i]).view(8, 4, 32) - i
        got[i] = cluster_sums
    sums = [got[i] + got[8 + i] for i in range(8)]
    rows = torch.cat([x.view(8, 4, 8, 4, 8).flatten(3) for x in (upper, lower)], 2)
    columns = query[:, 128 * chunk :][:, :128].view(8, 4, 32)
    for g, q in ((g, q) for g in range(8) for q in range(4)):
        at = 4 * g + q
        for odd in (0, 1):
            want = (rows[:, :, g] * rows[:, :, 2 * q + odd]).sum(-1)
            assert torch.equal(sums[odd][..., at], want)
        ninth, eighth = rows[:, :, 8], sums[4][..., at] + sums[5][..., at]
        last = sums[6][..., at] + sums[7][..., at]
        if q == 0:
            assert torch.equal(eighth, (rows[:, :, g] * ninth).sum(-1))
            assert g or torch.equal(last, (ninth * ninth).sum(-1))
        if q == 1:
            torch.testing.assert_close(eighth, (rows[:, :, g] * columns).sum(-1))
            if not g:
                torch.testing.assert_close(last, (ninth * columns).sum(-1))


@pytest.mark.parametrize("tokens", [1, 2])
def test_numbers_are_told_to_all(tokens: int) -> None:
    cluster, threads = Cluster(8, 128 * tokens), 1024 * tokens
    room = cluster.run(gram.OPEN.value[tokens - 1], [0] * threads)
    x = torch.randint(0, 100, (4, 8, tokens, 4, 32)).float()
    place = cluster.run(gram.TELL.value[tokens - 1], room, *x.view(4, -1).tolist())
    sums = cluster.run_for(4, gram.HEAR.value, room, place)
    want = x.sum((1, 3), keepdim=True).expand(x.shape)
    assert torch.equal(torch.tensor(sums), want.reshape(4, threads))
    kept = [[float(i + n) for i in range(threads)] for n in range(8)]
    p_kept = [room[0] + tokens * gram.SIZE.value] * threads
    cluster.run(gram.KEEP.value[tokens - 1], p_kept, *kept)  # fails where two write one place


def test_rows_go_through_the_room() -> None:
    cluster = Cluster(1, 32)
    upper, lower = torch.randn(2, 32, 8).bfloat16()
    places, ninth = range(4096, 4096 + 2048, 64), [9216 + 16 * i for i in range(4)] + [0] * 28
    data = (*words(upper), *words(lower))
    cluster.run(gram.PUT.value[3], list(places), ninth, *data)
    begin = gram.ROWS.value + 2 * gram.STRIDE.value - 768
    for rows, at in ((upper, places), (lower[:4], ninth)):
        threads = [[at[i % len(rows)] - begin for i in range(32)]] * 8
        got = cluster.run_for(8, gram.GET.value[2], *threads)
        words_got = signed(torch.tensor(got)).view(torch.float32)
        assert words_got.T[: len(rows)].equal(rows.float())
