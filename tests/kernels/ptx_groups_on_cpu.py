"""Run pieces of PTX for two groups of four warps that multiply from shared memory, byte for byte.

How ``wgmma`` finds its operands by matrix descriptors, which thread has which of the results, and
what ``stmatrix`` writes where, is the PTX ISA's description. All threads take a statement together.
"""

from __future__ import annotations

import re
from typing import Any

import torch

THREADS = 256
LOW = 0xFFFFFFFF


def swizzled(address: torch.Tensor) -> torch.Tensor:
    """Where a byte of rows of 128 lies: its sixteen bytes change places by the row."""
    return address ^ (address >> 7 & 7) << 4


def _field(descriptor: int, first: int) -> int:
    return (descriptor >> first & 0x3FFF) << 4


class Machine:
    """Registers of all threads, and a multiprocessor's shared memory."""

    def __init__(self, size: int) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8)
        self.registers: dict[str, Any] = {}

    def view(self, begin: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        return self.memory[begin : begin + count * dtype.itemsize].view(dtype)

    def run(self, code: str, operands: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        threads = torch.arange(THREADS)
        self.registers = {f"${n}": value for n, value in operands.items()}
        self.registers |= {"%tid.x": threads, "global_smem": torch.zeros_like(threads)}
        for line in code.strip().removeprefix("{").removesuffix("}").split(";"):
            text = " ".join(line.split())
            if text and not text.startswith(".reg"):
                self._take(text)
        return self.registers

    def value(self, text: str) -> torch.Tensor:
        if text in self.registers:
            return self.registers[text]
        if text.startswith("0f"):
            bits = torch.tensor(int(text[2:], 16), dtype=torch.int64).int()
            return bits.view(torch.float32).expand(THREADS)
        number = float(text) if "." in text else int(text)
        return torch.full((THREADS,), number)

    def address(self, text: str) -> torch.Tensor:
        name, _, offset = text.strip("[] ").partition("+")
        return self.value(name.strip()) + int(offset or 0)

    def _take(self, text: str) -> None:
        when, name, rest = re.fullmatch(r"(?:@!?(\w+) )?(\S+) ?(.*)", text).groups()
        lists = [[x.strip() for x in y.split(",")] for y in re.findall(r"\{(.*?)\}", rest)]
        plain = [x.strip() for x in re.sub(r"\{.*?\}", "*", rest).split(",")]
        if name.startswith(("wgmma.fence", "wgmma.commit", "wgmma.wait", "bar.")):
            return
        if name.startswith("wgmma.mma_async"):
            self._product(name, lists[0], plain[1:])
        elif name == "mov.b64":
            low, high = map(self.value, lists[0])
            self.registers[plain[0]] = high << 32 | low
        elif name.startswith("stmatrix"):
            assert name == "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
            self._store_matrices(self.address(plain[0]), [self.value(x) for x in lists[0]])
        elif name == "ld.shared.v2.f32":
            where = self.address(plain[1])
            assert not (where % 8).any()
            for i, to in enumerate(lists[0]):
                self.registers[to] = self.memory.view(torch.float32)[where // 4 + i]
        elif name in ("ld.shared.f32", "ld.shared.b32"):
            kind = torch.float32 if name[-3] == "f" else torch.int32
            self.registers[plain[0]] = self.memory.view(kind)[self.address(plain[1]) // 4]
        elif name == "st.shared.b32":
            live = self.value(when) if when else torch.ones(THREADS, dtype=torch.bool)
            where = self.address(plain[0])[live] // 4
            self.memory.view(torch.int32)[where] = self.value(plain[1])[live].int()
        elif name == "st.shared.v2.f32":
            live = self.value(when)
            where = self.address(plain[0])[live] // 4
            for i, source in enumerate(lists[0]):
                self.memory.view(torch.float32)[where + i] = self.value(source)[live]
        elif name == "trap":
            assert not self.value(when).any(), "trap"
        else:
            self.registers[plain[0]] = _SIMPLE[name](*map(self.value, plain[1:]))

    def _store_matrices(self, rows: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Lane 8 q + i says where row i of matrix q, transposed, has its sixteen bytes."""
        assert not (rows % 16).any()
        for q, part in enumerate(parts):
            halves = torch.stack([part & 0xFFFF, part >> 16], 1)  # of thread: two of a row
            matrix = halves.view(-1, 8, 8)  # warp, row, column
            for warp in range(THREADS // 32):
                for i in range(8):
                    at = int(rows[32 * warp + 8 * q + i])
                    column = matrix[warp, :, i]
                    values = torch.where(column > 0x7FFF, column - 0x10000, column)
                    self.view(at, torch.int16, 8).copy_(values)

    def _operand(self, descriptor: int, count: int, *, turned: bool) -> torch.Tensor:
        """[count, 16] of rows or columns and steps."""
        assert descriptor >> 62 == 1
        assert descriptor >> 49 & 7 == 0
        start, group = _field(descriptor, 0), _field(descriptor, 32)
        i, k = torch.arange(count)[:, None], torch.arange(16)[None]
        if turned:
            assert count == 64
            at = start + k // 8 * group + k % 8 * 128 + i * 2
        else:
            at = start + i // 8 * group + i % 8 * 128 + k * 2
        return self.memory.view(torch.bfloat16)[swizzled(at) // 2].double()

    def _product(self, name: str, sums: list[str], rest: list[str]) -> None:
        shape = re.fullmatch(
            r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", name
        )
        columns = int(shape.group(1))
        assert len(sums) == columns // 2
        assert rest[3:5] == ["1", "1"]
        adds, turned = int(rest[2]), rest[5:]
        assert turned[1] == "0"
        got = []
        for first in range(0, THREADS, 128):
            left, right = (self.value(x)[first : first + 128] for x in rest[:2])
            assert (left == left[0]).all()
            assert (right == right[0]).all()
            a = self._operand(int(left[0]), 64, turned=turned[0] == "1")
            b = self._operand(int(right[0]), columns, turned=False)
            # Warp, upper half, row; block of eight columns, pair, which of it.
            c = (a @ b.T).view(4, 2, 8, columns // 8, 4, 2)
            got.append(c.permute(0, 2, 4, 3, 1, 5).reshape(128, columns // 2))
        for i, register in enumerate(sums):
            before = self.registers[register].double() if adds else 0
            self.registers[register] = (torch.cat(got)[:, i] + before).float()


def _pack(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    bits = [x.bfloat16().view(torch.int16).long() & 0xFFFF for x in (high, low)]
    return bits[0] << 16 | bits[1]


def _shift(a: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return a << by & LOW


_SIMPLE = {
    "mov.u32": lambda a: a,
    "mov.b32": lambda a: a,
    "mov.f32": lambda a: a,
    "shl.b32": _shift,
    "shr.u32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "neg.f32": lambda a: -a,
    "fma.rn.f32": lambda a, b, c: (a.double() * b.double() + c.double()).float(),
    "max.f32": torch.maximum,
    "ex2.approx.ftz.f32": torch.exp2,
    "mul.rn.f32": lambda a, b: a * b,
    "selp.b32": lambda a, b, which: torch.where(which, a, b),
    "vote.sync.any.pred": lambda a, _: a.view(-1, 32).any(1).repeat_interleave(32),
    "setp.ge.u32": lambda a, b: a >= b,
    "setp.lt.u32": lambda a, b: a < b,
    "setp.gt.f32": lambda a, b: a > b,
    "setp.neu.f32": lambda a, b: a != b,
    "cvt.rn.bf16x2.f32": _pack,
}
