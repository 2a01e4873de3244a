"""Wide vectors of float32 as values of compiled code, where a loop must keep its sums in registers.

The compiler puts a sum over an array back into memory after every row, since it cannot know that
the row is not the sum. Source: LLVM's vector types.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

WIDE = 64
"""float32 values of a vector; LLVM spreads it over as many registers as it takes."""


class Vector(types.Type):
    """``WIDE`` float32."""

    def __init__(self) -> None:
        super().__init__(name=f"vector{WIDE}")


_VECTOR = ir.VectorType(ir.FloatType(), WIDE)
vector = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


@intrinsic
def load(typing_context: Any, where: Any) -> Any:
    """The vector at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _VECTOR.as_pointer()), align=4)

    return vector(types.int64), generate


@intrinsic
def store(typing_context: Any, value: Any, where: Any) -> Any:
    """Write a vector to an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, where = arguments
        builder.store(value, builder.inttoptr(where, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(vector, types.int64), generate


@intrinsic
def splat(typing_context: Any, value: Any) -> Any:
    """One number everywhere."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zero = ir.Constant(ir.IntType(32), 0)
        alone = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), arguments[0], zero)
        mask = ir.Constant(ir.VectorType(ir.IntType(32), WIDE), [zero] * WIDE)
        return builder.shuffle_vector(alone, alone, mask)

    return vector(types.float32), generate


@intrinsic
def times(typing_context: Any, a: Any, b: Any) -> Any:
    """The product."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fmul(*arguments)

    return vector(vector, vector), generate


@intrinsic
def minus(typing_context: Any, a: Any, b: Any) -> Any:
    """The difference."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fsub(*arguments)

    return vector(vector, vector), generate


@intrinsic
def fused(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """The sum of a product and a third, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{WIDE}f32")
        return builder.call(function, arguments)

    return vector(vector, vector, vector), generate
