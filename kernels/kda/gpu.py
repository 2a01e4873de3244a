"""Kimi Delta Attention on a CUDA device: one launch a token, two or three a prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from k3vl.errors import ShapeError
from k3vl.kernels.kda import check_shapes
from k3vl.kernels.kda.chunk_kernels import kda_norm_kernel, kda_prepare_kernel, kda_scan_kernel
from k3vl.kernels.kda.parts import Work, in_parts, scratch_memory
from k3vl.kernels.kda.reference import kda_prefill_reference
from k3vl.kernels.kda.step_kernel import kda_step_kernel
from k3vl.kernels.kda.steps_kernel import kda_steps_kernel

if TYPE_CHECKING:
    from k3vl.kernels.kda import KDAWeights

CHUNK = 32
"""Tokens over which decays of exp(-5), split around their middle, still are float32 numbers."""
_LEVELS = 5  # 2^5 = CHUNK
_PROGRAMS = 132
"""Multiprocessors of an H100 or H200."""


class Snapshots(NamedTuple):
    """States and windows to copy on the way, so that a later request can start from there.

    Attributes:
        depths: [S, E] int64, tokens into the sequence of this call, multiples of ``CHUNK`` and not
            past its end; 0 asks for nothing.
        cells: [S, E, H] int64, where to copy them.
    """

    depths: torch.Tensor
    cells: torch.Tensor


class PrefillShape(NamedTuple):
    """How the two kernels are laid out.

    Attributes:
        values: value channels of a program of the sequential kernel; all of them: it also norms.
        warps, stages: of the sequential kernel, stages of its loads.
        registers: at most so many for a thread of the parallel kernel.
        parts: 0, or by ``rows_kernel`` and ``walk_kernel`` in so many launches each, so that the
            two work side by side; the results do not depend on it.
        segment: chunks that a program of ``walk_kernel`` takes, from a state that ``segments``
            finds first (one part); 0: all. The results do depend on it, in their rounding.
    """

    values: int
    warps: int
    stages: int
    registers: int | None
    parts: int = 0
    segment: int = 0


def kda_decode(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    decay: torch.Tensor,
    write: torch.Tensor,
    weights: KDAWeights,
    windows: torch.Tensor,
    states: torch.Tensor,
    cells: torch.Tensor,
    *,
    tile: int = 128,
    warps: int = 4,
    registers: int | None = None,
    stay: int = 0,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.kda.kda_decode`.

    ``stay`` programs a multiprocessor take one head after the other (``steps_kernel``); 0: every
    head has its own program.
    """
    check_shapes("kda_decode", qkv, gate, decay, write, weights, windows, states, cells)
    _check_layout("kda_decode", qkv, gate, decay, write, windows, states, weights)
    batch, heads = cells.shape
    key, width = states.shape[-1], weights.conv.shape[1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not batch:
        return out
    count = batch * heads
    kernel, grid, sizes = kda_step_kernel, count, {"BV": min(tile, key)}
    if stay:
        kernel, grid = kda_steps_kernel, min(count, stay * _PROGRAMS)
        sizes = {"N": count, "STAGES": 3 if stay == 1 else 2}  # what fits in shared memory
    kernel[(grid,)](
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
        K=key,
        W=width,
        BOUNDED=weights.lower_bound is not None,
        **sizes,
        num_warps=warps,
        maxnreg=registers,
    )
    return out


def kda_prefill(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    decay: torch.Tensor,
    write: torch.Tensor,
    weights: KDAWeights,
    windows: torch.Tensor,
    states: torch.Tensor,
    cells: torch.Tensor,
    cu_seqlens: torch.Tensor,
    ends: torch.Tensor,
    *,
    snapshots: Snapshots | None = None,
    shape: PrefillShape | None = None,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.kda.kda_prefill`.

    Without the bound chunks could overflow: then the reference goes token by token.
    ``snapshots`` copies states on the way; ``shape`` is for measurements.
    """
    check_shapes("kda_prefill", qkv, gate, decay, write, weights, windows, states, cells)
    _check_layout("kda_prefill", qkv, gate, decay, write, windows, states, weights)
    if weights.lower_bound is None or weights.lower_bound < -5:
        assert snapshots is None, "only chunks leave snapshots"
        return kda_prefill_reference(
            qkv, gate, decay, write, weights, windows, states, cells, cu_seqlens, ends
        )
    pool = _Pool(windows, states, cells, cu_seqlens, ends)
    half = qkv.dtype != torch.float32
    layout = shape or _shape(cells.numel(), states.shape[-1], half=half)
    if layout.parts:
        scratch = scratch_memory(qkv, cells, states, CHUNK)
        inputs = (qkv, gate, decay, write)
        return in_parts(Work(inputs, weights, pool, scratch, layout, snapshots))
    chunks = _prepare(qkv, decay, write, weights, pool, layout)
    out = _scan(qkv, gate, weights, pool, chunks, layout, snapshots)
    if layout.values < states.shape[-1]:
        rows, heads, block = gate.shape[0], cells.shape[1], 16
        kda_norm_kernel[(triton.cdiv(rows * heads, block),)](
            out,
            gate,
            weights.o_norm,
            gate.stride(0),
            weights.eps,
            rows,
            heads,
            BH=block,
            K=states.shape[-1],
        )
    return out


class _Pool(NamedTuple):
    """Where the sequences of a call lie: rows of the projections, cells of the pool."""

    windows: torch.Tensor
    states: torch.Tensor
    cells: torch.Tensor
    cu_seqlens: torch.Tensor
    ends: torch.Tensor


class _Chunks(NamedTuple):
    """What is known of every chunk of every head without its state; see the kernel."""

    w: torch.Tensor
    u: torch.Tensor
    qg: torch.Tensor
    kl: torch.Tensor
    scores: torch.Tensor
    gamma: torch.Tensor


def _prepare(
    qkv: torch.Tensor,
    decay: torch.Tensor,
    write: torch.Tensor,
    weights: KDAWeights,
    pool: _Pool,
    layout: PrefillShape,
) -> _Chunks:
    """All chunks of all sequences at once."""
    sequences, heads = pool.cells.shape
    key = pool.states.shape[-1]
    slots = qkv.shape[0] // CHUNK + sequences
    dtype = _operand(qkv)
    half = dtype != torch.float32

    def scratch(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(slots * heads, *size, dtype=of, device=qkv.device)

    chunks = _Chunks(
        w=scratch(CHUNK, key),
        u=scratch(key, CHUNK),
        qg=scratch(CHUNK, key),
        kl=scratch(CHUNK, key),
        scores=scratch(CHUNK, CHUNK),
        gamma=scratch(key, of=torch.float32),
    )
    kda_prepare_kernel[(heads, slots)](
        qkv,
        decay,
        write,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        pool.windows,
        pool.cells,
        pool.cu_seqlens,
        pool.ends,
        *chunks,
        qkv.stride(0),
        decay.stride(0),
        write.stride(0),
        pool.cells.stride(0),
        *pool.windows.stride()[:3],
        weights.lower_bound,
        sequences,
        heads,
        BS=max(16, triton.next_power_of_2(sequences)),  # few sizes: each is compiled
        C=CHUNK,
        LEVELS=_LEVELS,
        K=key,
        W=weights.conv.shape[1],
        DTYPE=tl.bfloat16 if half else tl.float32,
        INVERSE=tl.float16 if half else tl.float32,
        PRECISION="tf32" if half else "tf32x3",
        num_warps=4,
        maxnreg=layout.registers,
    )
    return chunks


def _scan(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    weights: KDAWeights,
    pool: _Pool,
    chunks: _Chunks,
    layout: PrefillShape,
    snapshots: Snapshots | None,
) -> torch.Tensor:
    """Every sequence, chunk after chunk; with the norm where a program holds whole heads."""
    sequences, heads = pool.cells.shape
    key = pool.states.shape[-1]
    half = _operand(qkv) != torch.float32
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    kda_scan_kernel[(sequences * heads, key // layout.values)](
        qkv,
        gate,
        weights.o_norm,
        *pool,
        *chunks,
        snapshots.depths.contiguous() if snapshots else pool.cells,
        snapshots.cells.contiguous() if snapshots else pool.cells,
        out,
        qkv.stride(0),
        gate.stride(0),
        pool.cells.stride(0),
        *pool.windows.stride()[:3],
        pool.states.stride(0),
        weights.eps,
        heads,
        C=CHUNK,
        K=key,
        BV=layout.values,
        W=weights.conv.shape[1],
        DTYPE=tl.bfloat16 if half else tl.float32,
        PRECISION="tf32" if half else "tf32x3",
        FUSED=layout.values == key,
        DEPTHS=snapshots.depths.shape[1] if snapshots else 0,
        STAGES=layout.stages,
        num_warps=layout.warps,
    )
    return out


def _shape(programs: int, key: int, *, half: bool) -> PrefillShape:
    """The fastest of those that ``bench`` tried on an H200, by how many heads there are to walk.

    Whole heads, norm included, where they fill half of the device; else halves, twice as many.
    """
    if not half:
        return PrefillShape(min(key, 64), 4, 1, None)
    if programs >= _PROGRAMS // 2 and key == 128:
        return PrefillShape(key, 8, 3, None)
    return PrefillShape(min(key, 64), 4, 4, 168)


def _operand(qkv: torch.Tensor) -> torch.dtype:
    """Of the products' operands; float16 lacks the range of exp(80)."""
    return torch.float32 if qkv.dtype == torch.float32 else torch.bfloat16


def _check_layout(
    name: str,
    qkv: torch.Tensor,
    gate: torch.Tensor,
    decay: torch.Tensor,
    write: torch.Tensor,
    windows: torch.Tensor,
    states: torch.Tensor,
    weights: KDAWeights,
) -> None:
    """What the kernels take for granted about memory.

    Raises:
        ShapeError: a row is not contiguous, or a width is no power of two.
    """
    rows_lie_flat = all(x.stride(-1) == 1 for x in (qkv, gate, decay, write, windows, states))
    packed = all(x.is_contiguous() for x in (weights.conv, weights.a_log, weights.dt_bias))
    key, width = states.shape[-1], weights.conv.shape[1]
    powers = key >= 16 and not key & (key - 1) and not width & (width - 1)
    if not (rows_lie_flat and packed and states.stride(1) == key and powers):
        raise ShapeError(
            f"{name}: rows must be contiguous, head width {key} (at least 16) and convolution "
            f"width {width} powers of two"
        )
