"""What the compiled CPU kernels share: memory by address and elementary functions.

Imported by the ``cpu.py`` of the ops only, so that numba costs nothing where no model runs.

A row of a result depends on its own inputs and on nothing else, to the last bit: every row goes
through the same instructions, whatever the number of rows beside it. Only long sums are taken in an
order that the compiler chooses (``SUMS``: :func:`dot`), in loops that write nothing; matrix
products have an order of their own (``tile.py``). A loop that writes exists twice, in vectors and,
for when what it reads might be what it writes, one by one; there the order must be the program's
(``EXACT``), or addresses would decide about the last bit. Numbers that are not finite keep their
meaning.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

EXACT = {"contract"}
"""Fused multiply-add, and nothing else that changes a result."""
SUMS = {"contract", "reassoc", "nsz"}
"""As well: sums in any order."""

ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer in the low bits
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693145751953125), np.float32(1.42860677e-6)
SMALLEST, LARGEST = np.float32(-87.0), np.float32(88.0)

COMMON = ("compiled.py", "product.py", "tile.py", "vectors.py")
"""Compiled code that belongs to no op."""


def sources_digest(folder: Path) -> str:
    """A name for the text of all compiled kernels in a folder: :data:`COMMON`, every ``cpu.py``."""
    digest = sha256()
    for path in sorted([*(folder / name for name in COMMON), *folder.glob("*/cpu.py")]):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


_FOLDER = Path(__file__).parent
_CACHE = _FOLDER / "__pycache__" / f"compiled-{sources_digest(_FOLDER)}"


def compiled(function: Any) -> Any:
    """Compile at the first call, and keep the result on disk.

    numba compares a kept result with the file of the function alone, and would run stale code after
    a change in anything that it calls. Here all kernels of one text have a folder of their own;
    where it cannot be written, numba takes the user's cache directory.
    """
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_CACHE)  # read while the function is wrapped
    try:
        return njit(cache=True, nogil=True, fastmath=EXACT, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before


def compiled_pointer(signature: Any) -> Any:
    """As :func:`compiled`, at once, as a function that others call by its ``address``."""

    def wrapped(function: Any) -> Any:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(_CACHE)
        try:
            return cfunc(signature, cache=True, fastmath=EXACT, error_model="numpy")(function)
        finally:
            numba.config.CACHE_DIR = before

    return wrapped


def address(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> int:
    """Where a tensor lies, for a kernel that relies on its type and on contiguous rows."""
    assert x.dtype == dtype
    assert x.is_cpu
    assert x.stride(-1) == 1 or x.shape[-1] <= 1
    return x.data_ptr()


def _pointer(kind: types.Type) -> Any:
    """Make ``f(where)``: an address as a pointer to values of a type."""

    @intrinsic
    def pointer(typing_context: Any, where: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


_float_pointer = _pointer(types.float32)
_double_pointer = _pointer(types.float64)
_int_pointer = _pointer(types.int64)


@njit(inline="always")
def floats(where: int, count: int) -> Any:
    """``count`` float32 from an address."""
    return carray(_float_pointer(where), (count,))


@njit(inline="always")
def doubles(where: int, count: int) -> Any:
    """``count`` float64 from an address."""
    return carray(_double_pointer(where), (count,))


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
