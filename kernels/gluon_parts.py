"""What Gluon kernels are made of: names that Triton has changed, and launches that begin early."""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.6 has the second name of each, later ones the first.
meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
begin_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def wait_for_inputs():
    """As in ``dependent``, which is in Triton."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def let_next_begin():
    """As in ``dependent``."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def take_turn(NAME: gl.constexpr):
    """Wait until another group of four warps has given the turn that belongs to a barrier.

    NAME: one of the 16 barriers of a multiprocessor, of those that Triton does not use.
    """
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, 0;", "=r,n", [NAME], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def give_turn(NAME: gl.constexpr):
    """The other half of :func:`take_turn`, by another group; waits for nobody."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.u32 $0, 0;", "=r,n", [NAME], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def bits_of(x):
    """Of float32, as int32."""
    return x.to(gl.int32, bitcast=True)


@gluon.jit
def of_bits(x):
    """The float32 that has the bits of an int32."""
    return x.to(gl.float32, bitcast=True)


@gluon.jit
def exp2_by_products(x):
    """2 to the power of x <= 0, within 1.1e-4 of it, 0 of minus infinity; float32.

    By multiplications and additions, of which a multiprocessor does eight times as many as powers:
    a polynomial of what is left of the next whole number, which goes to the exponent.
    """
    x = gl.maximum(x, -127.0)
    whole = x + 12582912.0  # 1.5 x 2^23: the last bit of a sum is 1
    rest = x - (whole - 12582912.0)
    power = ((rest * 0.05500872 + 0.24221047) * rest + 0.6932829) * rest + 1.0
    return of_bits(bits_of(power) + (bits_of(whole) << 23))


@gluon.jit
def laid_out_as(x, y):
    """``x`` in the layout of ``y``, which has its shape."""
    return gl.convert_layout(x, y.type.layout)
