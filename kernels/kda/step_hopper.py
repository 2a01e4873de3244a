"""KDA decode on compute capability 9.0: which calls the Gluon kernel takes, and how it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.kernels.kda import KDAWeights

KEY, WIDTH = 128, 4
"""Of a head, of its convolution."""

_COPY_ALIGNMENT = 16
"""Bytes: of the first state's address and of the way from one to the next, for the copy engine."""

_PARTS, _PIECES = 2, 4
"""A state lands in two parts, so that the first is read while the other is on its way; it is
fetched and stored in four pieces, so that the first leaves while the next are computed."""

_REGISTERS = 168
"""At most so many for a thread: three programs a multiprocessor, 64 KB of shared memory each."""


def hopper_steps(
    qkv: torch.Tensor, weights: KDAWeights, windows: torch.Tensor, states: torch.Tensor
) -> bool:
    """Whether shapes and layout fit: bf16, K3's widths, states that the copy engine can fetch."""
    return (
        qkv.dtype == windows.dtype == torch.bfloat16
        and states.dtype == torch.float32
        and states.shape[-1] == KEY
        and weights.conv.shape[1] == WIDTH
        and weights.conv.dtype == torch.float32
        and windows.stride(-1) == states.stride(-1) == 1
        and states.stride(1) == KEY
        and not states.stride(0) * states.itemsize % _COPY_ALIGNMENT
        and not states.data_ptr() % _COPY_ALIGNMENT
    )


def hopper_step(
    args: tuple[Any, ...],
    states: torch.Tensor,
    units: int,
    *,
    bounded: bool,
    early: bool,
    launch: Callable[..., None] | None = None,
) -> None:
    """Start it with what ``kda_step_kernel`` is given (``gpu.step_arguments``).

    Args:
        args: tensors, strides and numbers.
        states: of the pool; among ``args``, too.
        units: heads of sequences.
        bounded: whether the decay is.
        early: it begins as soon as the launch before it lets it, and waits (``dependent``).
        launch: takes kernel, grid and arguments; None starts it on the device.
    """
    constants: dict[str, Any] = {"K": KEY, "PARTS": _PARTS, "PIECES": _PIECES}
    constants |= {"BOUNDED": bounded, "PDL": early}
    from k3vl.kernels.kda.step_hopper_kernel import kda_step_hopper_kernel as kernel

    block = [1, KEY // _PIECES, KEY]
    if launch is not None:
        launch(kernel, (units, 1, 1), states, block, *args, **constants)
        return
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    pool = TensorDescriptor.from_tensor(states, block, layout)
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": _REGISTERS, "launch_pdl": early}
    kernel[(units,)](pool, *args, **constants, **options)
