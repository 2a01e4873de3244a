"""Run a kernel's pieces of machine language for all threads of a cluster, statement by statement.

As much of PTX as the project writes. All threads take a statement together; what one multiprocessor
sends to another's memory is counted at the barrier that it names, and a wait that could not end
fails.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROOM = 4096
"""Where shared memory that a piece declares begins."""


class Thread:
    """Its registers, and the special ones."""

    def __init__(self, rank: int, number: int) -> None:
        self.rank, self.number = rank, number
        self.registers: dict[str, Any] = {
            "%cluster_ctarank": rank,
            "%tid.x": number,
            "%laneid": number % 32,
            "room": ROOM,
            "0f00000000": 0.0,
        }

    def value(self, name: str) -> Any:
        return self.registers[name] if name in self.registers else int(name)

    def address(self, text: str) -> Any:
        """Of ``[register + offset]``; ``mapa`` gives pairs of multiprocessor and address."""
        name, _, offset = text.strip("[]").partition("+")
        base = self.value(name.strip())
        return base if not offset else base + int(offset)


class Cluster:
    """Threads of some multiprocessors, their shared memory and its barriers."""

    def __init__(self, multiprocessors: int, threads: int) -> None:
        self.threads = [Thread(r, t) for r in range(multiprocessors) for t in range(threads)]
        self.memory: list[dict[int, float]] = [{} for _ in range(multiprocessors)]
        self.expected: list[Counter[int]] = [Counter() for _ in range(multiprocessors)]
        self.arrived: list[Counter[int]] = [Counter() for _ in range(multiprocessors)]

    def run(self, text: str, *inputs: list[Any]) -> list[Any]:
        """``$0`` of every thread; ``inputs`` are ``$1`` and so on, a value for every thread."""
        for i, values in enumerate(inputs):
            for thread, value in zip(self.threads, values, strict=True):
                thread.registers[f"${1 + i}"] = value
        for statement in re.split(r";\s*", re.sub(r"\bagain:", "", text.strip("{} \n"))):
            if statement.strip():
                self._take(statement.strip())
        return [thread.registers["$0"] for thread in self.threads]

    def _take(self, statement: str) -> None:
        when, name, rest = re.fullmatch(r"(?:@(!?\w+)\s+)?(\S+)\s*(.*)", statement, re.S).groups()
        operands = [x.strip() for x in re.findall(r"\{.*?\}|[^,{}]+", rest, re.S) if x.strip()]
        if name.startswith((".", "bra", "fence", "barrier.cluster", "bar.sync")):
            return
        given = [t.registers.get(operands[1]) for t in self.threads] if "shfl" in name else []
        for index, thread in enumerate(self.threads):
            if when is None or thread.value(when):
                self._one(name, operands, thread, given, index)

    def _one(
        self, name: str, operands: list[str], thread: Thread, given: list[Any], index: int
    ) -> None:
        to, value = thread.registers, thread.value
        simple: dict[str, Callable[[], Any]] = {
            "mov.u32": lambda: value(operands[1]),
            "mov.f32": lambda: value(operands[1]),
            "shr.u32": lambda: value(operands[1]) >> value(operands[2]),
            "add.u32": lambda: value(operands[1]) + value(operands[2]),
            "add.rn.f32": lambda: value(operands[1]) + value(operands[2]),
            "mad.lo.u32": lambda: value(operands[1]) * value(operands[2]) + value(operands[3]),
            "and.b32": lambda: value(operands[1]) & value(operands[2]),
            "setp.eq.u32": lambda: value(operands[1]) == value(operands[2]),
            "setp.lt.u32": lambda: value(operands[1]) < value(operands[2]),
            "setp.ne.u32": lambda: value(operands[1]) != value(operands[2]),
            "selp.f32": lambda: value(operands[1] if value(operands[3]) else operands[2]),
            "selp.b32": lambda: value(operands[1] if value(operands[3]) else operands[2]),
            "shfl.sync.bfly.b32": lambda: given[index ^ int(operands[2])],
            "shfl.sync.idx.b32": lambda: given[index - index % 32 + int(operands[2])],
            "mapa.shared::cluster.u32": lambda: (value(operands[2]), value(operands[1])),
        }
        if name in simple:
            to[operands[0]] = simple[name]()
        elif name.startswith("ld.shared::cta."):
            where = thread.address(operands[1])
            for i, register in enumerate(operands[0].strip("{}").split(",")):
                to[register.strip()] = self.memory[thread.rank][where + 4 * i]
        elif name == "st.shared::cta.f32":
            self._write(thread.rank, thread.address(operands[0]), operands[1], thread)
        elif name == "mbarrier.init.shared::cta.b64":
            assert operands[1] == "1"
        elif name == "mbarrier.arrive.expect_tx.shared::cta.b64":
            self.expected[thread.rank][thread.address(operands[1])] += int(operands[2])
        elif re.fullmatch(r"st\.async\.\S+::bytes(\.v4)?\.f32", name):
            (rank, where), (same, barrier) = (thread.address(operands[i]) for i in (0, 2))
            assert rank == same
            self.arrived[rank][barrier] += self._write(rank, where, operands[1], thread)
        else:
            assert re.fullmatch(r"mbarrier\.(try|test)_wait\.parity\.shared::cta\.b64", name), name
            where = thread.address(operands[1])
            if operands[2] == "1":  # the phase before the first has ended
                to[operands[0]] = True
                return
            assert self.expected[thread.rank][where] == self.arrived[thread.rank][where] > 0
            to[operands[0]] = True

    def _write(self, rank: int, where: int, registers: str, thread: Thread) -> int:
        """How many bytes."""
        names = registers.strip("{}").split(",")
        for i, name in enumerate(names):
            assert where + 4 * i not in self.memory[rank], "two threads write one place"
            self.memory[rank][where + 4 * i] = thread.value(name.strip())
        return 4 * len(names)
