"""KDA prefill on compute capability 9.0: what it takes, how its kernels start."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SIDE, KEY, TAPS = 64, 128, 3
"""Value channels of four warps, and the only widths of heads and of windows."""

_ENDLESS = 1 << 30
"""Tokens."""

_WIDEST = 8
"""Elements of bfloat16 that a thread loads at once."""


class HopperShape(NamedTuple):
    """How prefill is laid out.

    Attributes:
        values: value channels of a program of the sequential kernel, 64 or 128; all: it also norms.
        stages: chunks that it keeps in shared memory.
        aside: part of a long sequence that is prepared beside the walk through what is before it.
    """

    values: int
    stages: int
    aside: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether a program has a whole head."""
        return self.values == KEY


def hopper_takes(
    inputs: tuple[torch.Tensor, ...], windows: torch.Tensor, states: torch.Tensor
) -> bool:
    """Whether dtypes and widths fit: all ``inputs`` in bfloat16, K3's heads and convolution."""
    return (
        all(x.dtype == torch.bfloat16 for x in (*inputs, windows))
        and states.dtype == torch.float32
        and (states.shape[-1], windows.shape[1]) == (KEY, TAPS)
    )


class Prepare(NamedTuple):
    """One launch of the parallel kernel.

    Attributes:
        inputs: qkv, decay and write of the projections.
        weights: halved taps of the convolution [W, 3 H K], a_log and dt_bias, float32.
        pool: windows, cells, cu_seqlens and ends.
        chunks: what it writes: wq, u, kl, scores and gamma.
        lower_bound: of the decays' logarithms, -5 or above.
        searched: a power of two from the number of sequences on.
        chunk: tokens of a chunk.
        slots: those of all chunks that this launch is about: the first, and how many.
        aside: whether it runs beside the launch in front of it, which has waited for its inputs.
    """

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    pool: tuple[torch.Tensor, ...]
    chunks: tuple[torch.Tensor, ...]
    lower_bound: float
    searched: int
    chunk: int
    slots: tuple[int, int]
    aside: bool = False


def hopper_prepare(
    prepare: Prepare, *, early: bool, launch: Callable[..., None] | None = None
) -> None:
    """Fill ``chunks``; ``launch`` as in :func:`hopper_walk`."""
    qkv, decay, write = prepare.inputs
    if decay.stride(0) % 2 or decay.storage_offset() % 2:
        decay = decay.contiguous()
    decay = decay.view(torch.int32)  # the kernel carries pairs
    windows, cells, cu_seqlens, ends = prepare.pool
    wq, u, kl, scores, gamma = prepare.chunks
    (sequences, heads), chunk = cells.shape, prepare.chunk
    blocks = ((wq, [chunk, KEY]), (u, [KEY, chunk]), (scores, [chunk, chunk]))
    matrices = [(x.view(-1, x.shape[-1]), block) for x, block in blocks]
    args: tuple[Any, ...] = (
        *(qkv, decay, write, *prepare.weights, windows, cells, cu_seqlens, ends, wq, kl, gamma),
        *(write.stride(0), cells.stride(0), *windows.stride()[:3], prepare.lower_bound, sequences),
        prepare.slots[0],
        heads * prepare.slots[1],
    )
    constants: dict[str, Any] = {
        "S_QKV": qkv.stride(0),
        "S_DECAY": decay.stride(0),
        "H": heads,
        "BS": prepare.searched,
        "C": chunk,
        "R": 8,
        "LEVELS": chunk.bit_length() - 1,
        "K": KEY,
        "W": windows.shape[1] + 1,
        "ASIDE": prepare.aside,
        "PDL": early,
    }
    items = heads * prepare.slots[1]
    # Beside another launch nobody knows how many are there at once.
    grid = (items if prepare.aside else min(items, _programs(qkv.device)), 1, 1)
    from k3vl.kernels.kda.prepare_hopper_kernel import kda_prepare_hopper_kernel as kernel

    if launch is not None:
        launch(kernel, grid, matrices, *args, **constants)
        return
    # Four programs a multiprocessor.
    options = {"num_warps": 4, "maxnreg": 128, "launch_pdl": early}
    kernel[grid](*_described(matrices), *args, **constants, **options)


@functools.cache
def _programs(device: torch.device) -> int:
    """Of the parallel kernel, that a device has at once; on a CPU one does all, for tests."""
    if device.type != "cuda":
        return 1
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


class Walk(NamedTuple):
    """One launch of the sequential kernel.

    Attributes:
        chunks: what ``kda_prepare_hopper_kernel`` wrote: wq, u, kl, scores and gamma.
        inputs: qkv and gate of the projections.
        o_norm: [K] float32.
        pool: windows, states, cells, cu_seqlens and ends.
        snapshots: depths and cells as in ``Snapshots``; None where nothing is copied.
        out: [N, H K].
        eps: of the norm.
        chunk: tokens of a chunk.
        first, last: the tokens of each sequence that this launch is about, multiples of ``chunk``;
            no ``last``: to the end.
    """

    chunks: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, torch.Tensor]
    o_norm: torch.Tensor
    pool: tuple[torch.Tensor, ...]
    snapshots: tuple[torch.Tensor, torch.Tensor] | None
    out: torch.Tensor
    eps: float
    chunk: int
    first: int = 0
    last: int | None = None


def hopper_walk(
    walk: Walk,
    shape: HopperShape,
    *,
    early: bool,
    launch: Callable[..., None] | None = None,
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
    args: tuple[Any, ...] = (
        *(qkv, gate, walk.o_norm, windows, states, cells, cu_seqlens, ends, depths, copies),
        walk.out,
        qkv.stride(0),
        gate.stride(0) // aligned,
        cells.stride(0),
        *windows.stride()[:3],
        states.stride(0),
        walk.eps,
        walk.first,
        _ENDLESS if walk.last is None else walk.last,
        heads,
    )
    constants: dict[str, Any] = {
        "C": chunk,
        "K": key,
        "BV": shape.values,
        "W": windows.shape[1] + 1,
        "DEPTHS": depths.shape[1] if walk.snapshots else 0,
        "STAGES": shape.stages,
        "OUTS": 2,
        "WARPS": 8 if shape.whole else 2,
        "ALIGNED": aligned,
        "LAST": walk.last is None,
        "PDL": early,
    }
    grid = (key // shape.values * sequences * heads, 1, 1)
    from k3vl.kernels.kda.hopper_kernels import kda_walk_sides_kernel as kernel

    if launch is not None:
        launch(kernel, grid, matrices, *args, **constants)
        return
    # Two programs a multiprocessor where a program is half of a head.
    options = {"num_warps": 4, "maxnreg": None if shape.whole else 128, "launch_pdl": early}
    kernel[grid](*_described(matrices), *args, **constants, **options)


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
