"""KDA prefill in ranges of slots: each is prepared on one stream and walked on a second.

The sequential kernel leaves most of the device idle; the next range's parallel one fills it. No bit
depends on the ranges.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from k3vl.kernels.kda.rows_kernel import kda_norm_slots_kernel, kda_prepare_rows_kernel
from k3vl.kernels.kda.segments import start_states
from k3vl.kernels.kda.walk_kernel import kda_walk_kernel

if TYPE_CHECKING:
    from k3vl.kernels.kda import KDAWeights
    from k3vl.kernels.kda.gpu import PrefillShape, Snapshots


class Work(NamedTuple):
    """One call.

    Attributes:
        inputs: qkv, gate, decay, write. weights: of the layer.
        pool: windows, states, cells, cu_seqlens, ends.
        chunks: see :func:`scratch_memory`.
        layout, snapshots: as of ``kda_prefill``.
    """

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    weights: KDAWeights
    pool: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    chunks: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    layout: PrefillShape
    snapshots: Snapshots | None


def scratch_memory(
    qkv: torch.Tensor, cells: torch.Tensor, states: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """W and -qg [2C, K], u [V, C], kl [C, K], scores [C, C], gamma [K] of every slot and head."""
    sequences, heads = cells.shape
    blocks, key = (qkv.shape[0] // chunk + sequences) * heads, states.shape[-1]
    dtype = torch.float32 if qkv.dtype == torch.float32 else torch.bfloat16

    def scratch(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(blocks, *size, dtype=of, device=qkv.device)

    matrices = scratch(2 * chunk, key), scratch(key, chunk), scratch(chunk, key)
    return *matrices, scratch(chunk, chunk), scratch(key, of=torch.float32)


def in_parts(work: Work) -> torch.Tensor:
    """The whole prefill; returns its output."""
    qkv, gate, _, _ = work.inputs
    heads = work.pool[2].shape[1]
    device, slots = qkv.device, work.chunks[0].shape[0] // heads
    out = torch.empty(gate.shape, dtype=gate.dtype, device=device)
    taps_first = work.weights.conv.t().contiguous()
    alone = work.layout.parts == 1 or device.type != "cuda"
    side = None if alone else _side_stream(device)
    # Triton compiles for multiples of 16: one kernel then serves every part.
    multiple = 16 if device.type == "cuda" else 1
    step = triton.cdiv(triton.cdiv(slots, work.layout.parts), multiple) * multiple
    if side:
        side.wait_stream(torch.cuda.current_stream(device))  # who else uses the memory of out
    for lowest in range(0, slots, step):
        grid = (heads, min(step, slots - lowest))
        _prepare(work, taps_first, lowest, grid)
        if side:
            side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side) if side else nullcontext():
            _walk(work, out, lowest, step)
            if work.layout.values < work.chunks[0].shape[-1]:
                _norm(work, out, lowest, grid)
    if side:
        torch.cuda.current_stream(device).wait_stream(side)
    return out


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Of high priority: its few programs start before the many of the current stream."""
    return torch.cuda.Stream(device, priority=-1)


def _common(work: Work) -> dict[str, Any]:
    half = work.chunks[0].dtype != torch.float32
    return {
        "C": work.chunks[1].shape[-1],
        "K": work.chunks[0].shape[-1],
        "W": work.weights.conv.shape[1],
        "DTYPE": tl.bfloat16 if half else tl.float32,
        "PRECISION": "tf32" if half else "tf32x3",
    }


def _search(sequences: int) -> int:
    """Few sizes: each is compiled."""
    return max(16, triton.next_power_of_2(sequences))


def _prepare(work: Work, taps_first: torch.Tensor, lowest: int, grid: tuple[int, int]) -> None:
    qkv, _, decay, write = work.inputs
    windows, _, cells, cu_seqlens, ends = work.pool
    half = work.chunks[0].dtype != torch.float32
    kda_prepare_rows_kernel[grid](
        qkv,
        decay,
        write,
        taps_first,
        work.weights.a_log,
        work.weights.dt_bias,
        windows,
        cells,
        cu_seqlens,
        ends,
        *work.chunks,
        qkv.stride(0),
        decay.stride(0),
        write.stride(0),
        cells.stride(0),
        *windows.stride()[:3],
        work.weights.lower_bound,
        *cells.shape,
        lowest,
        BS=_search(cells.shape[0]),
        R=8,
        LEVELS=work.chunks[1].shape[-1].bit_length() - 1,
        INVERSE=tl.float16 if half else tl.float32,
        FAST=half,
        **_common(work),
        num_warps=4,
        maxnreg=work.layout.registers,
    )


def _walk(work: Work, out: torch.Tensor, lowest: int, count: int) -> None:
    qkv, gate, _, _ = work.inputs
    windows, states, cells, cu_seqlens, ends = work.pool
    (sequences, heads), key = cells.shape, states.shape[-1]
    layout, snapshots, starts = work.layout, work.snapshots, out
    grid: tuple[int, ...] = (key // layout.values, sequences * heads)
    if layout.segment:
        of = (states, cells, cu_seqlens, ends, work.chunks)
        starts = start_states(*of, qkv.shape[0], layout.segment)
        grid = (*grid, triton.cdiv(qkv.shape[0], work.chunks[1].shape[-1] * layout.segment))
    kda_walk_kernel[grid](
        qkv,
        gate,
        work.weights.o_norm,
        *work.pool,
        *work.chunks,
        snapshots.depths.contiguous() if snapshots else cells,
        snapshots.cells.contiguous() if snapshots else cells,
        out,
        qkv.stride(0),
        gate.stride(0),
        cells.stride(0),
        *windows.stride()[:3],
        states.stride(0),
        work.weights.eps,
        heads,
        lowest,
        count,
        starts,
        BV=layout.values,
        FUSED=layout.values == key,
        DEPTHS=snapshots.depths.shape[1] if snapshots else 0,
        STAGES=layout.stages,
        SEGMENT=layout.segment,
        **_common(work),
        num_warps=layout.warps,
    )


def _norm(work: Work, out: torch.Tensor, lowest: int, grid: tuple[int, int]) -> None:
    gate = work.inputs[1]
    _, _, cells, cu_seqlens, ends = work.pool
    kda_norm_slots_kernel[grid](
        out,
        gate,
        work.weights.o_norm,
        cu_seqlens,
        ends,
        gate.stride(0),
        work.weights.eps,
        *cells.shape,
        lowest,
        BS=_search(cells.shape[0]),
        C=work.chunks[1].shape[-1],
        K=work.chunks[0].shape[-1],
        num_warps=4,
    )
