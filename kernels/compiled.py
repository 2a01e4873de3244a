"""What the compiled CPU kernels share: memory by address, elementary functions, matrix product.

Imported by the ``cpu.py`` of the ops only, so that numba costs nothing where no model runs.

A row of a result depends on its own inputs and on nothing else, to the last bit: every row goes
through the same instructions, whatever the number of rows beside it. Only long sums are taken in an
order that the compiler chooses (``SUMS``: :func:`dot`, :func:`product`), in loops that write
nothing. A loop that writes exists twice, in vectors and, for when what it reads might be what it
writes, one by one; there the order must be the program's (``EXACT``), or addresses would decide
about the last bit. Numbers that are not finite keep their meaning.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic

EXACT = {"contract"}
"""Fused multiply-add, and nothing else that changes a result."""
SUMS = {"contract", "reassoc", "nsz"}
"""As well: sums in any order."""

ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer in the low bits
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693145751953125), np.float32(1.42860677e-6)
SMALLEST, LARGEST = np.float32(-87.0), np.float32(88.0)


def address(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> int:
    """Where a tensor lies, for a kernel that relies on its type and on contiguous rows."""
    assert x.dtype == dtype
    assert x.is_cpu
    assert x.stride(-1) == 1 or x.shape[-1] <= 1
    return x.data_ptr()


@intrinsic
def _float_pointer(typing_context: Any, where: Any) -> Any:
    """An address as a pointer to float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), generate


@intrinsic
def _int_pointer(typing_context: Any, where: Any) -> Any:
    """An address as a pointer to int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(types.int64), generate


@njit(inline="always")
def floats(where: int, count: int) -> Any:
    """``count`` float32 from an address."""
    return carray(_float_pointer(where), (count,))


@njit(inline="always")
def ints(where: int, count: int) -> Any:
    """``count`` int64 from an address."""
    return carray(_int_pointer(where), (count,))


@njit
def alive(*arrays: Any) -> None:
    """Keep arrays until here; their addresses alone would not."""


@njit(fastmath=EXACT, error_model="numpy")
def exp(x: Any) -> Any:
    """e^x in float32 without a call, so that loops of it become vectors; error below 2 ulp.

    x = n ln 2 + r with |r| < 0.35; e^r by its Taylor series, 2^n by its bits. Below -87 it is
    e^-87, above 88 infinity is not reached but 2^127.
    """
    x = SMALLEST if x < SMALLEST else x  # written so that what is not a number stays so
    x = LARGEST if x > LARGEST else x
    shifted = x * LOG2_E + ROUND
    n = shifted - ROUND
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    power = (np.float32(shifted).view(np.int32) + np.int32(127)) << np.int32(23)
    return p * np.int32(power).view(np.float32)


@njit(fastmath=EXACT, error_model="numpy")
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    return np.float32(1) / (np.float32(1) + exp(-x))


@njit(fastmath=EXACT, error_model="numpy")
def tanh(x: Any) -> Any:
    """Hyperbolic tangent: Lambert's continued fraction to x^7 near zero, by e^2x elsewhere."""
    s = x * x
    top = ((s + np.float32(378)) * s + np.float32(17325)) * s + np.float32(135135)
    bottom = ((np.float32(28) * s + np.float32(3150)) * s + np.float32(62370)) * s
    near = x * top / (bottom + np.float32(135135))
    size = -x if x < 0 else x
    far = np.float32(1) - np.float32(2) / (exp(size + size) + np.float32(1))
    return near if size < 1 else (-far if x < 0 else far)


@njit(fastmath=SUMS, error_model="numpy")
def dot(a: Any, b: Any) -> Any:
    """Sum of the products of two vectors."""
    total = np.float32(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@njit(fastmath=SUMS, error_model="numpy")
def product(
    x: int, x_stride: int, rows: int, w: int, inner: int, outputs: int, y: int, y_stride: int
) -> None:
    """Y = x w^T by addresses: [rows, inner] times [outputs, inner]; rows of ``w`` lie side by side.

    Four rows by four outputs at a time; at the edges the last row or output is computed again.
    """
    block = 16 if inner <= 512 else 8  # of outputs, whose weights stay in the first-level cache
    last, end = rows - 1, outputs - 1
    for begin in range(0, outputs, block):
        for r in range(0, rows, 4):
            x0 = floats(x + 4 * r * x_stride, inner)
            x1 = floats(x + 4 * min(r + 1, last) * x_stride, inner)
            x2 = floats(x + 4 * min(r + 2, last) * x_stride, inner)
            x3 = floats(x + 4 * min(r + 3, last) * x_stride, inner)
            y0 = floats(y + 4 * r * y_stride, outputs)
            y1 = floats(y + 4 * min(r + 1, last) * y_stride, outputs)
            y2 = floats(y + 4 * min(r + 2, last) * y_stride, outputs)
            y3 = floats(y + 4 * min(r + 3, last) * y_stride, outputs)
            for j0 in range(begin, min(begin + block, outputs), 4):
                j1, j2, j3 = min(j0 + 1, end), min(j0 + 2, end), min(j0 + 3, end)
                w0 = floats(w + 4 * j0 * inner, inner)
                w1 = floats(w + 4 * j1 * inner, inner)
                w2 = floats(w + 4 * j2 * inner, inner)
                w3 = floats(w + 4 * j3 * inner, inner)
                a0 = a1 = a2 = a3 = np.float32(0)
                b0 = b1 = b2 = b3 = np.float32(0)
                c0 = c1 = c2 = c3 = np.float32(0)
                d0 = d1 = d2 = d3 = np.float32(0)
                for k in range(inner):
                    p0, p1, p2, p3 = w0[k], w1[k], w2[k], w3[k]
                    v = x0[k]
                    a0 += v * p0
                    a1 += v * p1
                    a2 += v * p2
                    a3 += v * p3
                    v = x1[k]
                    b0 += v * p0
                    b1 += v * p1
                    b2 += v * p2
                    b3 += v * p3
                    v = x2[k]
                    c0 += v * p0
                    c1 += v * p1
                    c2 += v * p2
                    c3 += v * p3
                    v = x3[k]
                    d0 += v * p0
                    d1 += v * p1
                    d2 += v * p2
                    d3 += v * p3
                y0[j0], y0[j1], y0[j2], y0[j3] = a0, a1, a2, a3
                y1[j0], y1[j1], y1[j2], y1[j3] = b0, b1, b2, b3
                y2[j0], y2[j1], y2[j2], y2[j3] = c0, c1, c2, c3
                y3[j0], y3[j1], y3[j2], y3[j3] = d0, d1, d2, d3
