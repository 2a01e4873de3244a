"""Rows times a matrix on a CPU, and matrices as tables of numbers that compiled code reads.

A matrix is pieces of rows, one after the other, each float32 or int8 codes with the scales of their
groups: what a checkpoint stores is not decoded before it is used, since a step of few rows takes as
long as its weights take to be read. The decoded value of a code is multiplied, never the code: the
result is to the last bit what the decoded matrix gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from k3vl.kernels.compiled import EXACT, address, alive, compiled_pointer, ints
from k3vl.kernels.int8 import Int8Weight
from k3vl.kernels.tile import COLUMNS, ROWS, block, decode
from k3vl.kernels.weight import pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from k3vl.kernels.weight import Weight

W = TypeVar("W")

_many = block(ROWS, COLUMNS, coded=False)
_many_by_one = block(ROWS, 1, coded=False)
_one = block(1, 8, coded=False)
_one_by_one = block(1, 1, coded=False)
_one_coded = block(1, 8, coded=True)
_one_by_one_coded = block(1, 1, coded=True)

_HEADER, _PIECE = 4, 4
"""Numbers of a table before its pieces, and of each piece; see :func:`matrix`."""


class Table:
    """What a kernel knows of a layer: 64-bit numbers, read by address.

    Attributes:
        address: of the first.
    """

    __slots__ = ("_held", "_numbers", "address")

    def __init__(self, *entries: Entry) -> None:
        """Integers, float64, and where things lie: contiguous tensors, other tables; None is 0."""
        self._held = entries  # what the addresses point to
        self._numbers = np.array([_number(entry) for entry in entries], np.int64)
        self.address: int = self._numbers.ctypes.data


Entry: TypeAlias = int | float | torch.Tensor | Table | None


def _number(entry: Entry) -> int:
    if isinstance(entry, torch.Tensor):
        assert entry.is_contiguous()
        return address(entry, torch.int8 if entry.dtype == torch.int8 else torch.float32)
    if isinstance(entry, Table):
        return entry.address
    if isinstance(entry, float):
        return int(np.float64(entry).view(np.int64))
    return entry or 0


def matrix(weight: Weight) -> Table:
    """Outputs, columns, pieces, who multiplies; of each piece rows, values, scales, groups."""
    found: list[Entry] = []
    for piece in pieces(weight):
        if isinstance(piece, Int8Weight):
            found += [len(piece.codes), piece.codes, piece.scales, piece.scales.shape[1]]
        else:
            found += [len(piece), piece, None, 0]
    return Table(*weight.shape, len(found) // _PIECE, _multiply.address, *found)


def matrices(weights: Iterable[Weight]) -> Table:
    """Tables of weights that are chosen from."""
    return Table(*map(matrix, weights))


class Tables(Generic[W]):
    """Tables of the weights that an op has been called with, for as long as those live."""

    def __init__(self, make: Callable[[W], Table]) -> None:
        """``make`` also checks the weights, once."""
        self._make = make
        self._made: WeakKeyDictionary[W, Table] = WeakKeyDictionary()

    def __call__(self, weights: W) -> Table:
        """The table of a layer's weights."""
        table = self._made.get(weights)
        if table is None:
            table = self._made[weights] = self._make(weights)
        return table


@njit(inline="always")
def product(x: int, x_stride: int, rows: int, table: int, y: int, y_stride: int) -> None:
    """Y = X W^T by addresses: [rows, D] times the matrix of a table."""
    _call(ints(table, _HEADER)[3], x, x_stride, rows, table, y, y_stride)


@intrinsic
def _call(
    typing_context: Any,
    function: Any,
    x: Any,
    x_stride: Any,
    rows: Any,
    matrix: Any,
    y: Any,
    y_stride: Any,
) -> Any:
    """Call :func:`_multiply` by its address, so that kernels do not each contain a copy."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 6)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@njit(fastmath=EXACT, error_model="numpy")
def rows_as_matrix(values: int, rows: int, inner: int, like: int) -> np.ndarray:
    """A table for float32 rows that a kernel has made; multiplied by who multiplies ``like``."""
    table = np.zeros(_HEADER + _PIECE, np.int64)
    table[0], table[1], table[2], table[3] = rows, inner, 1, ints(like, _HEADER)[3]
    table[4], table[5] = rows, values
    return table


@njit(fastmath=EXACT, error_model="numpy")
def _plain_product(
    x: int, x_stride: int, rows: int, w: int, inner: int, outputs: int, y: int, y_stride: int
) -> None:
    """With a float32 matrix [outputs, inner]."""
    some = 16 if inner <= 512 else 8  # outputs whose weights stay in the first-level cache
    for begin in range(0, outputs, some):
        count = min(some, outputs - begin)
        _outputs(x, x_stride, rows, w + 4 * begin * inner, inner, count, y + 4 * begin, y_stride)


@njit(fastmath=EXACT, error_model="numpy")
def _coded_product(
    x: int,
    x_stride: int,
    rows: int,
    values: int,
    scales: int,
    groups: int,
    inner: int,
    outputs: int,
    y: int,
    y_stride: int,
) -> None:
    if rows < ROWS:
        for r in range(rows):
            given, to = x + 4 * r * x_stride, y + 4 * r * y_stride
            for j in range(0, outputs - 7, 8):
                _one_coded(
                    *(given, 0, values + j * inner, inner, inner, scales + 4 * j * groups, groups),
                    *(to + 4 * j, 0),
                )
            for j in range(outputs - outputs % 8, outputs):
                _one_by_one_coded(
                    *(given, 0, values + j * inner, inner, inner, scales + 4 * j * groups, groups),
                    *(to + 4 * j, 0),
                )
        return
    some = 16 if inner <= 512 else 8
    decoded, width = np.empty(some * inner, np.float32), inner // groups
    for begin in range(0, outputs, some):
        count = min(some, outputs - begin)
        for j in range(begin, begin + count):
            for g in range(groups):
                to = decoded.ctypes.data + 4 * ((j - begin) * inner + g * width)
                at = scales + 4 * (j * groups + g)
                decode(values + j * inner + g * width, at, width, to)
        where = decoded.ctypes.data
        _outputs(x, x_stride, rows, where, inner, count, y + 4 * begin, y_stride)
    alive(decoded)


@njit(fastmath=EXACT, error_model="numpy")
def _outputs(
    x: int, x_stride: int, rows: int, w: int, inner: int, outputs: int, y: int, y_stride: int
) -> None:
    """A few outputs of all rows."""
    whole = rows - rows % ROWS
    for r in range(0, whole, ROWS):
        given, to = x + 4 * r * x_stride, y + 4 * r * y_stride
        for j in range(0, outputs - (COLUMNS - 1), COLUMNS):
            _many(
                *(given, 4 * x_stride, w + 4 * j * inner, 4 * inner, inner, 0, 0),
                *(to + 4 * j, 4 * y_stride),
            )
        for j in range(outputs - outputs % COLUMNS, outputs):
            _many_by_one(
                *(given, 4 * x_stride, w + 4 * j * inner, 4 * inner, inner, 0, 0),
                *(to + 4 * j, 4 * y_stride),
            )
    for r in range(whole, rows):
        given, to = x + 4 * r * x_stride, y + 4 * r * y_stride
        for j in range(0, outputs - 7, 8):
            _one(given, 0, w + 4 * j * inner, 4 * inner, inner, 0, 0, to + 4 * j, 0)
        for j in range(outputs - outputs % 8, outputs):
            _one_by_one(given, 0, w + 4 * j * inner, 4 * inner, inner, 0, 0, to + 4 * j, 0)


@compiled_pointer(types.void(*[types.int64] * 6))
def _multiply(x: int, x_stride: int, rows: int, table: int, y: int, y_stride: int) -> None:
    header = ints(table, _HEADER)
    inner = header[1]
    for p in range(header[2]):
        piece = ints(table + 8 * (_HEADER + _PIECE * p), _PIECE)
        outputs, values, scales, groups = piece[0], piece[1], piece[2], piece[3]
        if groups == 0:
            _plain_product(x, x_stride, rows, values, inner, outputs, y, y_stride)
        else:
            _coded_product(x, x_stride, rows, values, scales, groups, inner, outputs, y, y_stride)
        y += 4 * outputs
