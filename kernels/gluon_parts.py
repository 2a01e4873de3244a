"""What Gluon kernels are made of: names that Triton has changed, and launches that begin early."""
# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.6 has the second name of each, later ones the first.
meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
begin_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
begin_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
wait_for_stores = tma.store_wait

_Shared = gl.shared_memory_descriptor
# Triton 3.9 has the first name, earlier ones the second.
seen_as = _Shared.reinterpret if hasattr(_Shared, "reinterpret") else _Shared._reinterpret


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
