"""Run a kernel's pieces of machine language for all warps of a cluster, in an order left to chance.

As much of PTX as the project writes. A warp takes some statements at a time, and any warp may be
next that does not wait for a barrier; what is sent to another multiprocessor's memory arrives at
some later time. Nobody may use a barrier that has not been made, read what has not been written,
write a place twice, or send to a multiprocessor that has ended.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOM = 4096
"""Where shared memory that a piece declares begins."""

PATIENCE = 50_000
"""Turns until a loop counts as one without end."""

_PLAIN = {
    "mov": lambda a: a,
    "shr": lambda a, b: a >> b,
    "add": lambda a, b: a + b,
    "mad": lambda a, b, c: a * b + c,
    "and": lambda a, b: a & b,
    "setp.eq": lambda a, b: a == b,
    "setp.ne": lambda a, b: a != b,
    "setp.lt": lambda a, b: a < b,
    "selp": lambda a, b, which: a if which else b,
    "mapa": lambda address, rank: (rank, address),
}


class Barrier:
    """Its phase ends when all have arrived and all announced bytes are there."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.phase = self.bytes = 0

    def change(self, *, arrived: int = 0, expected: int = 0) -> None:
        self.missing -= arrived
        self.bytes += expected
        assert self.missing >= 0, "more arrivals than were announced"
        if not self.missing and not self.bytes:
            self.phase ^= 1
            self.missing = self.count


class Multiprocessor:
    """Shared memory, barriers, and how often its warps have met."""

    def __init__(self, warps: int) -> None:
        self.memory: dict[int, Any] = {}
        self.barriers: dict[int, Barrier] = {}
        self.warps, self.living, self.met = warps, warps, 0

    def barrier(self, where: int) -> Barrier:
        assert where in self.barriers, "a barrier that nobody has made"
        return self.barriers[where]

    def write(self, where: int, value: Any) -> None:
        assert where not in self.memory, "two threads write one place"
        self.memory[where] = value


class Cluster:
    """``run`` takes all warps through some pieces of machine language."""

    def __init__(self, multiprocessors: int, threads: int, seed: int = 0) -> None:
        self.places = [Multiprocessor(threads // 32) for _ in range(multiprocessors)]
        self.chance = random.Random(seed)
        self.sent: list[tuple[int, int, Any, int]] = []
        self.arrived = 0

    def run(self, *pieces: tuple[Any, ...]) -> list[list[Any]]:
        """``$0`` of every thread after every piece.

        A piece is its text and what ``$1`` and so on are: values of all threads, or the number of
        the piece whose ``$0`` it is.
        """
        count = sum(place.warps for place in self.places)
        outs: list[list[Any]] = [[None] * 32 * count for _ in pieces]
        ways, first = {}, 0
        for rank, place in enumerate(self.places):
            for number in range(place.warps):
                warp = Warp(self, rank, number, first)
                ways[warp] = warp.take(pieces, outs)
                first += 32
        for _ in range(PATIENCE):
            for _ in range(self.chance.randrange(min(len(self.sent), 50) + 1)):
                self._deliver(self.sent.pop(self.chance.randrange(len(self.sent))))
            if not ways and not self.sent:
                return outs
            warp = self.chance.choice(list(ways)) if ways else None
            for _ in range(self.chance.choice((1, 10, 100))):
                if warp in ways and next(ways[warp], warp) is warp:
                    del ways[warp]
                    self.places[warp.rank].living -= 1
        raise AssertionError("nobody came")

    def _deliver(self, message: tuple[int, int, Any, int]) -> None:
        rank, where, value, barrier = message
        assert self.places[rank].living, "sent to a multiprocessor that has ended"
        self.places[rank].write(where, value)
        self.places[rank].barrier(barrier).change(expected=-4)


class Warp:
    """Registers of 32 threads."""

    def __init__(self, cluster: Cluster, rank: int, number: int, first: int) -> None:
        self.cluster, self.place = cluster, cluster.places[rank]
        self.rank, self.number, self.first = rank, number, first
        self.lanes: list[dict[str, Any]] = []

    def take(self, pieces: tuple[tuple[Any, ...], ...], outs: list[list[Any]]) -> Iterator[None]:
        """Ends with the last piece; comes back after every statement, and while it has to wait."""
        for piece, (text, *inputs) in enumerate(pieces):
            given = [outs[x] if isinstance(x, int) else x for x in inputs]
            self.lanes = [
                {
                    "%cluster_ctarank": self.rank,
                    "%tid.x": self.number * 32 + lane,
                    "%laneid": lane,
                    "room": ROOM,
                    "0f00000000": 0.0,
                    **{f"${1 + i}": values[self.first + lane] for i, values in enumerate(given)},
                }
                for lane in range(32)
            ]
            yield from self._piece([x.strip() for x in text.strip("{} \n").split(";")])
            for lane, registers in enumerate(self.lanes):
                outs[piece][self.first + lane] = registers["$0"]

    def _piece(self, statements: list[str]) -> Iterator[None]:
        again = next((i for i, x in enumerate(statements) if x.startswith("again:")), 0)
        at = 0
        while at < len(statements):
            statement = statements[at].removeprefix("again:").strip()
            at += 1
            if not statement or statement.startswith("."):
                continue
            when, name, rest = re.fullmatch(
                r"(?:@(!?)(\w+)\s+)?(\S+)\s*(.*)", statement, re.S
            ).group(2, 3, 4)
            no = statement.startswith("@!")
            live = [x for x in self.lanes if when is None or x[when] is not no]
            if name == "bra":
                assert len(live) in (0, 32)
                at = again if live else at
            elif name == "bar.sync":
                self.place.met += 1
                turn = -(-self.place.met // self.place.warps)
                while self.place.met < turn * self.place.warps:
                    yield
            elif name.startswith("barrier.cluster.arrive"):
                self.cluster.arrived += 1
            elif name.startswith("barrier.cluster.wait"):
                while self.cluster.arrived < sum(x.warps for x in self.cluster.places):
                    yield
            elif not name.startswith("fence"):
                operands = re.findall(r"\{.*?\}|\[.*?\]|[^\s,]+", rest, re.S)
                self._one(name, operands, live)
            yield

    def _one(self, name: str, operands: list[str], live: list[dict[str, Any]]) -> None:
        to, *source = operands
        if "shfl" in name:
            self._exchange(to, source, by_lane=".idx." in name)
            return
        for lane in live:
            plain = next((f for key, f in _PLAIN.items() if name.startswith(key + ".")), None)
            if plain:
                lane[to] = plain(*(_value(lane, x) for x in source))
            elif name.startswith("ld.shared::cta."):
                where = _address(lane, source[0])
                for i, register in enumerate(to.strip("{}").split(",")):
                    assert where + 4 * i in self.place.memory, "read before it was written"
                    lane[register.strip()] = self.place.memory[where + 4 * i]
            elif name == "st.shared::cta.f32":
                self.place.write(_address(lane, to), _value(lane, source[0]))
            elif name.startswith("st.async."):
                (rank, where), (same, barrier) = _address(lane, to), _address(lane, source[1])
                assert rank == same
                self.cluster.sent.append((rank, where, _value(lane, source[0]), barrier))
            else:
                self._of_barrier(name, operands, lane)

    def _of_barrier(self, name: str, operands: list[str], lane: dict[str, Any]) -> None:
        if name.startswith("mbarrier.init."):
            where = _address(lane, operands[0])
            assert where not in self.place.barriers, "made twice"
            self.place.barriers[where] = Barrier(int(operands[1]))
            return
        barrier = self.place.barrier(_address(lane, operands[1]))
        if name.startswith("mbarrier.arrive.expect_tx."):
            barrier.change(expected=int(operands[2]))
            barrier.change(arrived=1)
        else:
            assert re.match(r"mbarrier\.(try|test)_wait\.parity\.", name), name
            lane[operands[0]] = barrier.phase != int(operands[2])

    def _exchange(self, to: str, source: list[str], *, by_lane: bool) -> None:
        given = [_value(lane, source[0]) for lane in self.lanes]
        other = int(source[1])
        for i, lane in enumerate(self.lanes):
            lane[to] = given[other if by_lane else i ^ other]


def _value(lane: dict[str, Any], name: str) -> Any:
    return lane[name] if name in lane else int(name)


def _address(lane: dict[str, Any], text: str) -> Any:
    """Of ``[register + offset]``; ``mapa`` gives pairs of multiprocessor and address."""
    name, _, offset = text.strip("[]").partition("+")
    base, more = _value(lane, name.strip()), int(offset or 0)
    return (base[0], base[1] + more) if isinstance(base, tuple) else base + more
