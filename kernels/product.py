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
    from collections.abc import Callable

    from k3vl.kernels.weight import Weight

W = TypeVar("W")

_many = block(ROWS, COLUMNS, coded=False)
_many_by_one = block(ROWS, 1, coded=False)
_one = block(1, 8, coded=False)
_one_by_one = block(1, 1, coded=False)
_one_coded = block(1, 8, coded=True)
_one_by_one_coded = block(1, 1, coded=True)

_HEADER, _PIECE = 4, 4
"""Numbers of a table before its pieces, and of each piece; see :func:`matrix_table`."""

Entry: TypeAlias = "int | float | torch.Tensor | Matrix | Matrices | None"


class Matrix:
    """A weight [O, D] that a kernel multiplies by."""

    __slots__ = ("weight",)

    def __init__(self, weight: Weight) -> None:
        self.weight = weight


class Matrices:
    """Weights of the same shape, to be chosen from."""

    __slots__ = ("weights",)

    def __init__(self, weights: tuple[Weight, ...]) -> None:
        self.weights = weights


class Table:
    """What a kernel knows of a layer: 64-bit numbers, read by address.

    An entry is an integer, a float64, or where something lies: a contiguous float32 tensor, the
    table of a matrix, or a list of such tables. None is 0.

    Attributes:
        address: of the first entry.
    """

    __slots__ = ("_held", "_numbers", "address")

    def __init__(self, *entries: Entry) -> None:
        self._held = entries  # what the addresses point to
        tables: list[list[int]] = []
        for entry in entries:
            if isinstance(entry, Matrix):
                tables.append(matrix_table(entry.weight))
            elif isinstance(entry, Matrices):
                tables.extend(matrix_table(weight) for weight in entry.weights)
        lists = sum(len(e.weights) for e in entries if isinstance(e, Matrices))
        behind = len(entries) + lists
        self._numbers = np.zeros(behind + sum(map(len, tables)), np.int64)
        self.address = self._numbers.ctypes.data
        places = []
        for table in tables:
            self._numbers[behind : behind + len(table)] = table
            places.append(self.address + 8 * behind)
            behind += len(table)
        given, at = iter(places), len(entries)
        for i, entry in enumerate(entries):
            if isinstance(entry, Matrix):
                self._numbers[i] = next(given)
            elif isinstance(entry, Matrices):
                self._numbers[i] = self.address + 8 * at
                for _ in entry.weights:
                    self._numbers[at] = next(given)
                    at += 1
            elif isinstance(entry, torch.Tensor):
                assert entry.is_contiguous()
                self._numbers[i] = address(entry)
            elif isinstance(entry, float):
                self._numbers[i] = np.float64(entry).view(np.int64)
            else:
                self._numbers[i] = entry or 0


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
def product(x: int, x_stride: int, rows: int, matrix: int, y: int, y_stride: int) -> None:
    """Y = X W^T by addresses: [rows, D] times the matrix of a table."""
    _call(ints(matrix, _HEADER)[3], x, x_stride, rows, matrix, y, y_stride)


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


def matrix_table(weight: Weight) -> list[int]:
    """Outputs, columns, pieces, who multiplies; a piece: rows, values, scales, groups."""
    table = [*weight.shape, 0, _multiply.address]
    for piece in pieces(weight):
        if isinstance(piece, Int8Weight):
            codes, scales = piece.codes, piece.scales
            assert codes.is_contiguous()
            assert scales.is_contiguous()
            table += [len(codes), address(codes, torch.int8), address(scales), scales.shape[1]]
        else:
            assert piece.is_contiguous()
            table += [len(piece), address(piece), 0, 0]
        table[2] += 1
    return table


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
def _multiply(x: int, x_stride: int, rows: int, matrix: int, y: int, y_stride: int) -> None:
    header = ints(matrix, _HEADER)
    inner = header[1]
    for p in range(header[2]):
        piece = ints(matrix + 8 * (_HEADER + _PIECE * p), _PIECE)
        outputs, values, scales, groups = piece[0], piece[1], piece[2], piece[3]
        if groups == 0:
            _plain_product(x, x_stride, rows, values, inner, outputs, y, y_stride)
        else:
            _coded_product(x, x_stride, rows, values, scales, groups, inner, outputs, y, y_stride)
        y += 4 * outputs
