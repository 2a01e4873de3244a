"""The decoder of the joined products, written in machine code, on an imitation of its instructions.

The interpreter of Triton runs none of it, and a device has to be at hand for the rest.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch

from k3vl.kernels.moe.mxfp4 import pack_words
from k3vl.kernels.mxfp4 import dequantize_mxfp4

pytest.importorskip("triton")

from k3vl.kernels.moe.joined_kernel import DECODE

if TYPE_CHECKING:
    from collections.abc import Callable

LOW = 0xFFFFFFFF


def run(code: str, operands: dict[int, int], lane: int) -> dict[str, int]:
    """All registers after the code; operands by their number."""
    registers = {f"${n}": value & LOW for n, value in operands.items()} | {"%laneid": lane}

    def value(text: str) -> int:
        return registers[text] if text in registers else int(text, 0)

    for line in re.findall(r"[^;{}]+;", code):
        name, *rest = line.strip(" \n;").split(None, 1)
        if name == ".reg":
            continue
        to, *source = [part.strip() for part in rest[0].split(",")]
        a, *more = map(value, source)
        registers[to] = OPERATIONS[name](a, *more) & LOW
    return registers


def permuted(a: int, b: int, selector: int) -> int:
    both = (a | b << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(both[selector >> 4 * i & 7] for i in range(4)), "little")


def halves_times(a: int, b: int) -> int:
    """Two products of bfloat16."""
    numbers = torch.tensor([a, b]).to(torch.int32).view(torch.bfloat16).view(2, 2)
    product = (numbers[0].float() * numbers[1].float()).bfloat16()
    return int(product.view(torch.int32))


def signed(a: int) -> int:
    return a - (1 << 32) if a >> 31 else a


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.u32": lambda a: a,
    "shl.b32": lambda a, by: a << by,
    "shr.b32": lambda a, by: a >> by,
    "and.b32": lambda a, b: a & b,
    "add.u32": lambda a, b: a + b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "prmt.b32": permuted,
    "lop3.b32": lambda a, b, c, table: {0xEA: (a & b) | c}[table],
    "mul.rn.bf16x2": lambda a, b: halves_times(signed(a), signed(b)),
}


@pytest.mark.parametrize("lane", [0, 1, 2, 3, 30])
def test_a_thread_decodes_its_share(lane: int) -> None:
    """Rows r and r + 8, columns j, j + 1, j + 8, j + 9 of sixteen, for all eight n."""
    generator = torch.Generator().manual_seed(lane)
    packed = torch.randint(0, 256, (2, 64), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 129, (2, 4), dtype=torch.uint8, generator=generator)
    want = dequantize_mxfp4(packed, scale, dtype=torch.float32).view(2, 16, 8)
    words = pack_words(packed)
    groups = scale.view(torch.int32)
    elements = [
        (e >> 1 & 1, 2 * (lane % 4) + (e & 1) + 8 * (e >> 2 & 1), e >> 3) for e in range(64)
    ]
    operands = {32 + i: int(words[row, j]) for i, (row, j, _) in enumerate(elements)}
    operands |= {96 + i: int(groups[row, 0]) for i, (row, _, _) in enumerate(elements)}
    registers = run(str(DECODE.value), operands, lane)
    out = torch.tensor([signed(registers[f"${n}"]) for n in range(32)], dtype=torch.int32)
    got = out.view(torch.bfloat16).float().tolist()
    rounded = want.bfloat16().float()
    assert got == [float(rounded[row, j, n]) for row, j, n in elements]
