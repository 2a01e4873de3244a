"""A small block of a matrix product in vector code that the compiler does not get to rearrange.

Written as LLVM's own vectors, which every processor's backend turns into its registers: numba's
loops reach 40 % of what the fused multiply-add units of an AVX-512 core do, these 95 %.

The sum of a row and an output is taken by ``LANES`` partial sums, lane i over the columns
i, i + LANES, ..., each by fused multiply-adds in order; then halves are added to halves. That holds
for every shape of a block, so that blocks may be chosen by what is fast and no bit depends on them.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

_FLOAT, _BYTE = ir.FloatType(), ir.IntType(8)
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _lanes() -> int:
    """float32 values of one vector register of this processor."""
    features = binding.get_host_cpu_features()
    return 16 if features.get("avx512f") else 8 if features.get("avx2") else 4


LANES = _lanes()
"""Partial sums; on another processor the last bit of a product may be another one."""
ROWS = 4
COLUMNS = 4 if LANES == 16 or platform.machine() in ("aarch64", "arm64") else 2
"""Outputs of a block; 32 registers hold 4 x 4 sums, 16 hold 4 x 2."""


def block(rows: int, outputs: int, *, coded: bool, lanes: int = LANES) -> Any:
    """Make ``f(x, x_stride, w, w_stride, inner, scales, groups, y, y_stride)``.

    It writes the products of ``rows`` rows of x with ``outputs`` rows of w, all by address, strides
    in bytes. ``inner`` columns are float32 on both sides, or in w (``coded``) int8, in ``groups``
    groups of columns, each a multiple of 16 wide, of which ``scales`` [outputs, groups] hold the
    float32 factors. A code is multiplied by its factor before anything else, so the result is to
    the last bit that of the decoded weight.
    """

    @intrinsic
    def multiply(
        typing_context: Any,
        x: Any,
        x_stride: Any,
        w: Any,
        w_stride: Any,
        inner: Any,
        scales: Any,
        groups: Any,
        y: Any,
        y_stride: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _Block(builder, rows, outputs, lanes).generate(arguments, coded=coded)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return multiply


@intrinsic
def decode(typing_context: Any, codes: Any, scale: Any, count: Any, out: Any) -> Any:
    """Write ``count`` int8 codes (a multiple of 16) times a float32 scale, all by address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where, scale, count, out = arguments
        b, tile = builder, _Block(builder, 1, 1, LANES)
        tile.w = [where]
        decoded = tile.decoder([b.load(tile.pointer(scale, _FLOAT))])
        steps = cgutils.for_range_slice(b, _long(0), count, _long(LANES), intp=_I64, inc=True)
        with steps as (at, _):
            place = tile.pointer(b.add(out, b.mul(at, _long(4))), tile.vector)
            b.store(decoded(at)[0], place, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


class _Block:
    """One block under construction."""

    def __init__(self, builder: Any, rows: int, outputs: int, lanes: int) -> None:
        self.b, self.rows, self.outputs, self.lanes = builder, rows, outputs, lanes
        self.vector = ir.VectorType(_FLOAT, lanes)
        self.zero = ir.Constant(self.vector, [0.0] * lanes)

    def generate(self, arguments: Any, *, coded: bool) -> None:
        b = self.b
        x, x_stride, w, w_stride, inner, scales, groups, y, y_stride = arguments
        self.x = [b.add(x, b.mul(x_stride, _long(r))) for r in range(self.rows)]
        self.w = [b.add(w, b.mul(w_stride, _long(c))) for c in range(self.outputs)]
        count = self.rows * self.outputs
        self.sums = [cgutils.alloca_once_value(b, self.zero) for _ in range(count)]
        if coded:
            width = b.sdiv(inner, groups)
            with cgutils.for_range(b, groups, intp=_I64) as group:
                first = b.mul(group.index, width)
                factors = []
                for c in range(self.outputs):
                    at = b.add(b.mul(groups, _long(c)), group.index)
                    factor = b.load(self.pointer(b.add(scales, b.mul(at, _long(4))), _FLOAT))
                    factors.append(factor)
                self._columns(first, b.add(first, width), self.decoder(factors))
        else:
            whole = b.and_(inner, _long(-self.lanes))
            self._columns(_long(0), whole, self._load)
            with b.if_then(b.icmp_signed("<", whole, inner), likely=False):
                self._last_columns(whole, inner)
        self._store(self._folded(), y, y_stride)

    # ------------------------------------------------------------------ sums

    def _columns(self, begin: Any, end: Any, weights: Callable[[Any], list[Any]]) -> None:
        """Add columns ``begin .. end``, whole vectors, to the sums."""
        b, step = self.b, _long(self.lanes)
        with cgutils.for_range_slice(b, begin, end, step, intp=_I64, inc=True) as (column, _):
            x = [self._vector(b.add(row, b.mul(column, _long(4)))) for row in self.x]
            self._multiply(x, weights(column))

    def _last_columns(self, begin: Any, end: Any) -> None:
        """The columns that do not fill a vector, with zeros behind them."""
        b = self.b

        def padded(row: Any) -> Any:
            array = ir.ArrayType(_FLOAT, self.lanes)
            place = cgutils.alloca_once(b, array)
            b.store(ir.Constant(array, [0.0] * self.lanes), place)
            with cgutils.for_range(b, b.sub(end, begin), intp=_I64) as rest:
                at = b.add(row, b.mul(b.add(begin, rest.index), _long(4)))
                b.store(b.load(self.pointer(at, _FLOAT)), b.gep(place, [_long(0), rest.index]))
            return b.load(b.bitcast(place, self.vector.as_pointer()), align=4)

        self._multiply([padded(row) for row in self.x], [padded(row) for row in self.w])

    def _multiply(self, x: list[Any], w: list[Any]) -> None:
        """Add the products of one vector of every row and output."""
        b, kind = self.b, ir.FunctionType(self.vector, [self.vector] * 3)
        add = cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{self.lanes}f32")
        pairs = [(value, weight) for value in x for weight in w]
        for (value, weight), place in zip(pairs, self.sums, strict=True):
            b.store(b.call(add, [value, weight, b.load(place)]), place)

    def _load(self, column: Any) -> list[Any]:
        b = self.b
        return [self._vector(b.add(row, b.mul(column, _long(4)))) for row in self.w]

    def decoder(self, factors: list[Any]) -> Callable[[Any], list[Any]]:
        """From a column to a vector of every output's weights, each times its own factor."""
        splats = [self._splat(factor) for factor in factors]

        def decoded(column: Any) -> list[Any]:
            b, found = self.b, []
            for row, factor in zip(self.w, splats, strict=True):
                place = self.pointer(b.add(row, column), ir.VectorType(_BYTE, self.lanes))
                wide = b.sext(b.load(place, align=1), ir.VectorType(_I32, self.lanes))
                found.append(b.fmul(b.sitofp(wide, self.vector), factor))
            return found

        return decoded

    # ------------------------------------------------------------------ from lanes to numbers

    def _folded(self) -> list[Any]:
        """Vectors that hold the sums one after the other.

        Two vectors become one of their halves' sums; when one is left, its own parts are halved.
        """
        b = self.b
        vectors, each = [b.load(place) for place in self.sums], self.lanes
        held = 1  # sums in a vector, ``each`` lanes wide
        while each > 1:
            pairs = [(v, v) for v in vectors]
            if len(vectors) > 1:
                pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
            parts = 2 * held if len(vectors) > 1 else held
            starts = range(0, parts * each, each)
            low = [s + i for s in starts for i in range(each // 2)]
            high = [lane + each // 2 for lane in low]
            vectors = [
                b.fadd(self._picked(first, second, low), self._picked(first, second, high))
                for first, second in pairs
            ]
            held, each = parts, each // 2
        return vectors

    def _store(self, folded: list[Any], y: Any, y_stride: Any) -> None:
        b, each = self.b, self.rows * self.outputs // len(folded)
        kind = ir.VectorType(_FLOAT, self.outputs)
        for r in range(self.rows):
            to = b.add(y, b.mul(y_stride, _long(r)))
            for c in range(0, self.outputs, each):
                vector, lane = divmod(r * self.outputs + c, each)
                lanes = [lane + i for i in range(min(each, self.outputs))]
                kind = ir.VectorType(_FLOAT, len(lanes))
                place = self.pointer(b.add(to, _long(4 * c)), kind)
                b.store(self._picked(folded[vector], folded[vector], lanes), place, align=4)

    # ------------------------------------------------------------------ small words

    def _vector(self, place: Any) -> Any:
        return self.b.load(self.pointer(place, self.vector), align=4)

    def pointer(self, place: Any, kind: Any) -> Any:
        return self.b.inttoptr(place, kind.as_pointer())

    def _splat(self, value: Any) -> Any:
        alone = self.b.insert_element(ir.Constant(self.vector, ir.Undefined), value, _int(0))
        return self._picked(alone, alone, [0] * self.lanes)

    def _picked(self, first: Any, second: Any, lanes: list[int]) -> Any:
        """Lanes of two vectors side by side."""
        mask = ir.Constant(ir.VectorType(_I32, len(lanes)), [_int(lane) for lane in lanes])
        return self.b.shuffle_vector(first, second, mask)


def _int(value: int) -> Any:
    return ir.Constant(_I32, value)


def _long(value: int) -> Any:
    return ir.Constant(_I64, value)
