"""The sequential half of KDA prefill on compute capability 9.0: what it takes, how it starts."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

SIDE, KEY = 64, 128
"""Value channels of four warps, and the only width of keys."""

_WIDEST = 8
"""Elements of bfloat16 that a thread loads at once."""

_LONG = 1024
"""Tokens of a sequence, on average."""


class HopperShape(NamedTuple):
    """How prefill is laid out.

    Attributes:
        values: value channels of a program of the sequential kernel, 64 or 128; all: it also norms.
        stages: chunks that it keeps in shared memory.
        registers: at most so many for a thread of the parallel kernel.
        full: that kernel has code of its own for full chunks.
        group: heads that the two kernels work at together, each chunk as soon as it is prepared;
            a divisor of all. 0: one kernel after the other.
    """

    values: int
    stages: int
    registers: int
    full: bool = True
    group: int = 0

    def together(self, qkv: torch.Tensor, cells: torch.Tensor) -> bool:
        """Whether the kernels run side by side; no bit depends on it.

        Only for sequences so long that there is always a chunk to go on with. Not where one launch
        ends before the next begins: the sequential kernel would wait forever.
        """
        long = qkv.shape[0] >= _LONG * cells.shape[0]
        alone = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
        return bool(self.group) and long and not alone


class Walk(NamedTuple):
    """One launch of the sequential kernel.

    Attributes:
        chunks: what ``kda_prepare_kernel`` wrote: wq, u, kl, scores and gamma.
        inputs: qkv and gate of the projections.
        o_norm: [K] float32.
        pool: windows, states, cells, cu_seqlens and ends.
        snapshots: depths and cells as in ``Snapshots``; None where nothing is copied.
        out: [N, H K].
        eps: of the norm.
        chunk: tokens of a chunk.
        flags: [H * slots] int32, to be set by the launch behind; None: all chunks are prepared.
    """

    chunks: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, torch.Tensor]
    o_norm: torch.Tensor
    pool: tuple[torch.Tensor, ...]
    snapshots: tuple[torch.Tensor, torch.Tensor] | None
    out: torch.Tensor
    eps: float
    chunk: int
    flags: torch.Tensor | None = None


def hopper_walk(
    walk: Walk, shape: HopperShape, *, launch: Callable[..., None] | None = None
) -> None:
    """Fill ``out`` and advance the pool.

    ``launch`` takes kernel, grid, matrices with their blocks and arguments; None starts it on the
    device.
    """
    wq, u, kl, scores, gamma = walk.chunks
    qkv, gate = walk.inputs
    windows, states, cells, cu_seqlens, ends = walk.pool
    (sequences, heads), key, chunk = cells.shape, states.shape[-1], walk.chunk
    depths, copies = (x.contiguous() for x in walk.snapshots or (cells, cells))
    aligned = math.gcd(gate.stride(0), _WIDEST)
    blocks = (
        (wq, [2 * chunk, key]),
        (kl, [chunk, key]),
        (u, [shape.values, chunk]),
        (scores, [chunk, chunk]),
        (gamma, [1, key]),
    )
    matrices = [(x.view(-1, x.shape[-1]), block) for x, block in blocks]
    parts, group = key // shape.values, heads if walk.flags is None else shape.group
    each = sequences if walk.flags is None else 1  # programs for a head
    args: tuple[Any, ...] = (
        cells if walk.flags is None else walk.flags,
        *(qkv, gate, walk.o_norm, windows, states, cells, cu_seqlens, ends, depths, copies),
        walk.out,
        qkv.stride(0),
        gate.stride(0) // aligned,
        cells.stride(0),
        *windows.stride()[:3],
        states.stride(0),
        walk.eps,
        sequences,
        heads,
        u.shape[0] // heads,
        each,
    )
    whole = shape.values == key
    constants: dict[str, Any] = {
        "C": chunk,
        "K": key,
        "BV": shape.values,
        "W": windows.shape[1] + 1,
        "DEPTHS": depths.shape[1] if walk.snapshots else 0,
        "STAGES": shape.stages,
        "OUTS": 2,
        "WARPS": 4 if whole else 2,
        "ALIGNED": aligned,
        "GROUP": group,
        "FLAGS": walk.flags is not None,
    }
    grid = (parts * group * each, 1, 1)
    from k3vl.kernels.kda.hopper_kernels import kda_walk_sides_kernel as kernel

    if launch is not None:
        launch(kernel, grid, matrices, *args, **constants)
        return
    # Two programs a multiprocessor where a program is half of a head, unless others run beside it.
    registers = None if whole or walk.flags is not None else 128
    kernel[grid](*_described(matrices), *args, **constants, num_warps=4, maxnreg=registers)


def _described(matrices: Iterable[tuple[torch.Tensor, list[int]]]) -> list[Any]:
    """Descriptors of blocks for the copy engine, as the kernel lays them out in shared memory."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    described = []
    for x, block in matrices:
        wide = min(128, block[1] * x.itemsize) if x.itemsize == 2 else 0  # gamma is not swizzled
        layout = gl.NVMMASharedLayout(wide, x.itemsize * 8, 2)
        described.append(TensorDescriptor.from_tensor(x, block, layout))
    return described
