"""KDA decode on compute capability 9.0: which calls the Gluon kernel takes, and how it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.kernels.kda import KDAWeights

KEY, WIDTH = 128, 4
"""Of a head, of its convolution."""

_COPY_ALIGNMENT = 16
"""Bytes: of the first state's address and of the way from one to the next, for the copy engine."""


class StepShape(NamedTuple):
    """How the kernel is laid out.

    Attributes:
        asked: the descriptor of the states is fetched while the cell is.
        first: the output comes before the state is stored.
        copied: states go back by the copy engine, not by threads; with ``first``.
        four: programs a multiprocessor, the last 32 rows of their states in registers; not three.
        ahead: the L2 cache is asked for the window of the program so much further on.
        whole: and for its state.
        cluster: programs that begin at once, near one another.
    """

    asked: bool = False
    first: bool = False
    copied: bool = False
    four: bool = False
    ahead: int = 0
    whole: bool = False
    cluster: int = 1


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
    shape: StepShape = StepShape(),  # noqa: B008
    launch: Callable[..., None] | None = None,
) -> None:
    """Start it with what ``kda_step_kernel`` is given (``gpu.step_arguments``).

    Args:
        args: tensors, strides and numbers.
        states: of the pool; among ``args``, too.
        units: heads of sequences.
        bounded: whether the decay is.
        early: it begins as soon as the launch before it lets it, and waits (``dependent``).
        shape: how the kernel is laid out.
        launch: takes kernel, grid and arguments; None starts it on the device.
    """
    parts, rows, registers = (3, 32, 128) if shape.four else (2, 64, 168)
    constants: dict[str, Any] = {"K": KEY, "PARTS": parts, "HELD": rows}
    constants |= {"BOUNDED": bounded, "PDL": early, "ASKED": shape.asked, "FIRST": shape.first}
    constants |= {"COPIED": shape.copied, "AHEAD": shape.ahead, "WHOLE": shape.whole}
    constants["CLUSTER"] = shape.cluster
    from k3vl.kernels.kda.step_hopper_kernel import kda_step_hopper_kernel as kernel

    block = [1, rows, KEY]
    if launch is not None:
        launch(kernel, (units, 1, 1), states, block, *args, **constants)
        return
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    pool = TensorDescriptor.from_tensor(states, block, layout)
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": registers, "launch_pdl": early}
    if shape.cluster > 1:
        compiled = kernel.warmup(pool, *args, **constants, **options, grid=(units,))
        compiled.packed_metadata = (4, shape.cluster, compiled.metadata.shared)
    kernel[(units // shape.cluster,)](pool, *args, **constants, **options)
