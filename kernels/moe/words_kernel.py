"""Codes of MXFP4 weights out of stored words, on the device, for products in Triton.

A word has two columns' worth of four codes each, of which one instruction scales two (``mxfp4.py``
has the bits). Every element of what machine code makes here is made of the same element of what it
is given: Triton says in which order threads hold elements, and says otherwise in later versions.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl


def decoded(word: str, field: int, factor: str, to: str) -> list[str]:
    """Machine code: a code of either half of a word times a factor, as two of bfloat16.

    Registers by name; it uses ``m`` and ``s``. A code's three magnitude bits, put at the border of
    bfloat16's exponent and fraction, are the magnitude times 2^-126, subnormals included; the
    factor 2^126 is part of the other operand.
    """
    if field == 3:
        lines = [
            f"shr.b32 m, {word}, 4;",
            "and.b32 m, m, 0x00C000C0;",
            f"shr.b32 s, {word}, 5;",
            "lop3.b32 m, s, 0x01000100, m, 0xEA;",
            f"shl.b32 s, {word}, 1;",
            "lop3.b32 m, s, 0x80008000, m, 0xEA;",
        ]
    else:
        lines = [f"shl.b32 m, {word}, {3 * field};", "and.b32 m, m, 0x81C081C0;"]
    return [*lines, f"mul.rn.bf16x2 {to}, m, {factor};"]


FIRST, SECOND, THIRD, FOURTH = (
    tl.constexpr("\n".join(["{ .reg .b32 m, s;", *decoded("$1", n, "$2", "$0"), "}"]))
    for n in range(4)
)


def by_machine_code(x: torch.Tensor) -> bool:
    """Whether weights for these tokens are decoded so: bfloat16, and Triton compiles."""
    return x.dtype == torch.bfloat16 and x.device.type != "cpu"


@triton.jit
def of_both_halves(codes, factor, CODE: tl.constexpr):
    """What a code of either half is worth, [..., 2].

    codes: words. factor: of each the scale times 2^126, as bfloat16, twice. CODE: which of four.
    """
    two = tl.inline_asm_elementwise(
        CODE, "=r,r,r", [codes, factor], dtype=tl.int32, is_pure=True, pack=1
    )
    low = two.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (two >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)
