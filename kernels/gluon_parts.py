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
