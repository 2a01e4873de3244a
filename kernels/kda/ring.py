"""KDA decode on compute capability 9.0: which calls the Gluon kernel takes, and how it starts."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.kernels.kda import KDAWeights

KEY, WIDTH = 128, 4
"""Of a head, of its convolution."""

_COPY_ALIGNMENT = 16
"""Bytes: of the first state's address and of the way from one to the next, for the copy engine."""


class RingShape(NamedTuple):
    """How units, one head of one sequence each, are spread.

    Attributes:
        programs: of a multiprocessor, each of which takes unit after unit; 0: a program for each.
        groups: of four warps in a program, one or two.
        stages: buffers of a program, 64 KiB each.
        keep: whether a state stays in registers, so that its buffer is free as soon as it is read.
        registers: at most so many for a thread.
        store: cache modifier of the states' stores.
    """

    programs: int
    groups: int
    stages: int
    keep: bool
    registers: int | None = None
    store: str = ""


def ring_takes(weights: KDAWeights, windows: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether shapes and layout fit: K3's widths, states that the copy engine can fetch."""
    return (
        states.dtype == torch.float32
        and states.shape[-1] == KEY
        and weights.conv.shape[1] == WIDTH
        and weights.conv.dtype == torch.float32
        and windows.stride(-1) == states.stride(-1) == 1
        and states.stride(1) == KEY
        and not states.stride(0) * states.itemsize % _COPY_ALIGNMENT
        and not states.data_ptr() % _COPY_ALIGNMENT
    )


def ring_step(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    decay: torch.Tensor,
    write: torch.Tensor,
    weights: KDAWeights,
    windows: torch.Tensor,
    states: torch.Tensor,
    cells: torch.Tensor,
    out: torch.Tensor,
    shape: RingShape,
    *,
    launch: Callable[..., None] | None = None,
    processors: int | None = None,
) -> None:
    """Fill ``out``, [B, H K]; the rest is as in :func:`k3vl.kernels.kda.kda_decode`.

    ``launch`` takes kernel, grid and arguments; None starts it on the device, which has so many
    ``processors``.
    """
    batch, heads = cells.shape
    units = batch * heads
    every = units
    if shape.programs:
        every = min(units, shape.programs * (processors or _processors(cells.device)))
    args: tuple[Any, ...] = (
        qkv,
        gate,
        decay,
        write,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        weights.o_norm,
        windows,
        states,
        cells,
        out,
        qkv.stride(0),
        gate.stride(0),
        decay.stride(0),
        write.stride(0),
        cells.stride(0),
        *windows.stride()[:3],
        states.stride(0),
        weights.eps,
        weights.lower_bound or 0.0,
        heads,
        units,
        every,
    )
    constants: dict[str, Any] = {
        "GROUPS": shape.groups,
        "STAGES": shape.stages,
        "K": KEY,
        "BOUNDED": weights.lower_bound is not None,
        "KEEP": shape.keep,
        "STORE": shape.store,
    }
    from k3vl.kernels.kda.ring_kernel import kda_step_ring_kernel as kernel

    block = [1, KEY, KEY]
    if launch is not None:
        launch(kernel, (every, 1, 1), states, block, *args, **constants)
        return
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    pool = TensorDescriptor.from_tensor(states, block, layout)
    kernel[(every,)](pool, *args, **constants, num_warps=4, maxnreg=shape.registers)


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
