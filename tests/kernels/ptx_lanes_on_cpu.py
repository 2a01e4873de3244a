"""Run the few instructions that inline machine code here is made of, for all threads at once.

A register is a tensor [threads]: int64 with 32 bits, or float32. What a product of the tensor cores
expects of which thread is NVIDIA's description of ``mma.sync`` for 16 x 8 x 16.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

LOW = 0xFFFFFFFF

Register: TypeAlias = torch.Tensor


def run_ptx(code: str, operands: dict[int, Register]) -> dict[str, Register]:
    """All registers after ``code``; operands by number. Threads are those of whole warps."""
    registers = {f"${n}": value for n, value in operands.items()}
    threads = torch.arange(len(next(iter(operands.values()))))

    def value(text: str) -> Register:
        if text in registers:
            return registers[text]
        return torch.full_like(threads, int(text, 0) & LOW)

    for line in code.strip().removeprefix("{").removesuffix("}").split(";"):
        if not (text := line.strip()) or text.startswith(".reg"):
            continue
        name, rest = text.split(None, 1)
        if name.startswith("mma.sync"):
            to, *given = re.findall(r"\{(.*?)\}", rest)
            left, right, sums = ([value(x.strip()) for x in g.split(",")] for g in given)
            for target, result in zip(to.split(","), product(left, right, sums), strict=True):
                registers[target.strip()] = result
            continue
        to, *source = [part.strip() for part in rest.split(",")]
        result = OPERATIONS[name](*map(value, source))
        registers[to] = result if result.dtype == torch.float32 else result & LOW
    return registers


def interpret_machine_code() -> None:
    """Have Triton's interpreter run machine code, which it refuses by itself.

    Only code of one element and one result at a time is taken: all other depends on which elements
    a thread has, of which an interpreter knows nothing.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def run(
        _: Any, code: str, kinds: str, words: list[Any], types: list[Any], pure: bool, pack: int
    ) -> Any:
        assert (len(types), kinds.count("="), pure, pack) == (1, 1, True, 1), code
        registers = {
            i: torch.from_numpy(x.data.reshape(-1).astype("i8")) & LOW
            for i, x in enumerate(words, 1)
        }
        got = signed(run_ptx(code, registers)["$0"]).numpy().reshape(words[0].data.shape)
        return SimpleNamespace(get_result=lambda _: TensorHandle(got, words[0].dtype))

    InterpreterBuilder.create_inline_asm = run


def product(left: list[Register], right: list[Register], sums: list[Register]) -> list[Register]:
    """``mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32``."""
    a = torch.stack([halves(x).view(-1, 8, 4, 2) for x in left], 1)  # warp, r, g, q, half
    a = a.unflatten(1, (2, 2)).permute(0, 2, 3, 1, 4, 5).reshape(-1, 16, 16)
    b = torch.stack([halves(x).view(-1, 8, 4, 2) for x in right], 1)
    b = b.permute(0, 1, 3, 4, 2).reshape(-1, 16, 8)
    c = (a.double() @ b.double()).view(-1, 2, 8, 4, 2).permute(1, 4, 0, 2, 3).reshape(4, -1)
    return [(got + more.double()).float() for got, more in zip(c, sums, strict=True)]


def halves(x: Register) -> torch.Tensor:
    """The two numbers of bfloat16 in a register, low first: [threads, 2] float32."""
    return signed(x).view(-1, 1).view(torch.bfloat16).float()


def signed(x: Register) -> torch.Tensor:
    """32 bits as int32."""
    return torch.where(x >> 31 == 1, x - (1 << 32), x).int()


def floats(x: Register) -> torch.Tensor:
    """The float32 in a register."""
    return x if x.dtype == torch.float32 else signed(x).view(torch.float32)


def _from_neighbour(a: Register, lane: Register, clamp: Register, members: Register) -> Register:
    return _from_lane(a, torch.arange(len(a)) % 32 ^ lane, clamp, members)


def _times(a: Register, b: Register) -> Register:
    return (halves(a) * halves(b)).bfloat16().view(torch.int32).view(-1).long()


def _permuted(a: Register, b: Register, selector: Register) -> Register:
    out = torch.zeros_like(a)
    for i in range(4):
        nth = selector >> 4 * i & 7
        out |= (torch.where(nth < 4, a, b) >> 8 * (nth & 3) & 0xFF) << 8 * i
    return out


def _from_lane(a: Register, lane: Register, clamp: Register, members: Register) -> Register:
    assert (clamp == 31).all()
    assert (members == LOW).all()
    return a[torch.arange(len(a)) // 32 * 32 + lane % 32]


def _lookup(a: Register, b: Register, c: Register, table: Register) -> Register:
    assert (table == 0xEA).all()
    return (a & b) | c


OPERATIONS: dict[str, Callable[..., Register]] = {
    "shl.b32": lambda a, by: a << by,
    "shr.b32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
    "add.u32": lambda a, b: a + b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mul.lo.u32": lambda a, b: a * b,
    "prmt.b32": _permuted,
    "shfl.sync.idx.b32": _from_lane,
    "shfl.sync.bfly.b32": _from_neighbour,
    "lop3.b32": _lookup,
    "mul.rn.bf16x2": _times,
    "mov.b32": lambda a: a,
    "add.f32": lambda a, b: floats(a) + floats(b),
    "fma.rn.f32": lambda a, b, c: (floats(a).double() * floats(b) + floats(c)).float(),
}
