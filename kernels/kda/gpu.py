"""Kimi Delta Attention on a CUDA device: one launch a token, three to five a prefill."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from k3vl.errors import ShapeError
from k3vl.kernels.dependent import begins_early
from k3vl.kernels.hopper import hopper_runs
from k3vl.kernels.kda import check_shapes
from k3vl.kernels.kda.hopper import (
    HopperShape,
    Prepare,
    Walk,
    hopper_prepare,
    hopper_takes,
    hopper_walk,
)
from k3vl.kernels.kda.prepare_kernel import kda_prepare_kernel
from k3vl.kernels.kda.reference import kda_prefill_reference
from k3vl.kernels.kda.step_hopper import hopper_step, hopper_steps
from k3vl.kernels.kda.step_kernel import kda_step_kernel
from k3vl.kernels.kda.walk_kernel import kda_norm_kernel, kda_walk_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.kernels.kda import KDAWeights

CHUNK = 32
"""Tokens, 2^5: decays of exp(-5) over them, split around their middle, still are float32."""
_FEW_HEADS = 16
"""Up to here three quarters of a long sequence are prepared beside the walk; 12 heads are measured.

270 us instead of 299 when it was tried (T8192, 101d791), but 298 as it is now, and why is open;
with 96 heads, whose walk has 96 of 132 multiprocessors, an eighth gained 4 of 979.
"""
_LONG = 64
"""Chunks of a sequence that is long; where few heads begin to gain has not been measured."""
_MANY_HEADS = 64
"""From here on a program of the sequential kernel on Hopper has whole heads, below it halves.

With 12 heads halves take 311 us and wholes 404, with 96 they take 1,087 and 991 (T8192; halves too
with joined products); nothing between is measured.
"""


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
    """

    values: int
    warps: int
    stages: int
    registers: int | None


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
    hopper: bool = True,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.kda.kda_decode`; without ``hopper``, for measurements, in Triton."""
    check_shapes("kda_decode", qkv, gate, decay, write, weights, windows, states, cells)
    _check_layout("kda_decode", qkv, gate, decay, write, windows, states, weights)
    batch, heads = cells.shape
    key, width = states.shape[-1], weights.conv.shape[1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not batch:
        return out
    units, bounded, early = batch * heads, weights.lower_bound is not None, begins_early(qkv)
    args = step_arguments((qkv, gate, decay, write), weights, windows, states, cells, out)
    if hopper and hopper_runs(qkv.device) and hopper_steps(qkv, weights, windows, states):
        hopper_step(args, states, units, bounded=bounded, early=early)
        return out
    kda_step_kernel[(units,)](
        *args,
        K=key,
        BV=min(128, key),
        W=width,
        BOUNDED=bounded,
        PDL=early,
        num_warps=4,
        launch_pdl=early,
    )
    return out


def step_arguments(
    inputs: tuple[torch.Tensor, ...],
    weights: KDAWeights,
    windows: torch.Tensor,
    states: torch.Tensor,
    cells: torch.Tensor,
    out: torch.Tensor,
) -> tuple[Any, ...]:
    """What both kernels of one token take, of ``inputs`` qkv, gate, decay and write."""
    return (
        *inputs,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        weights.o_norm,
        windows,
        states,
        cells,
        out,
        *(x.stride(0) for x in inputs),
        cells.stride(0),
        *windows.stride()[:3],
        states.stride(0),
        weights.eps,
        weights.lower_bound or 0.0,
        cells.shape[1],
    )


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
    shape: PrefillShape | HopperShape | None = None,
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
    out, launches = prefill_launches(
        *(qkv, gate, decay, write, weights, windows, states, cells, cu_seqlens, ends),
        snapshots=snapshots,
        shape=shape,
    )
    for launch in launches.values():
        launch()
    return out


def prefill_launches(
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
    shape: PrefillShape | HopperShape | None = None,
) -> tuple[torch.Tensor, dict[str, Callable[[], None]]]:
    """The result of :func:`kda_prefill`, not yet written, and by name and in order what writes it.

    Arguments are checked by the caller.
    """
    key, half = states.shape[-1], qkv.dtype != torch.float32
    hopper = hopper_runs(qkv.device) and hopper_takes((qkv, gate, decay, write), windows, states)
    layout = shape or _shape(cells.shape[1], key, half=half, hopper=hopper)
    work = _Work(
        inputs=(qkv, gate, decay, write),
        weights=weights,
        pool=_Pool(windows, states, cells, cu_seqlens, ends),
        chunks=_scratch_memory(qkv, cells, states),
        layout=layout,
        snapshots=snapshots,
        taps=torch.empty(weights.conv.shape[::-1], device=qkv.device),
    )
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    launches: dict[str, Callable[[], None]] = {"begin": partial(_begin, work)}
    if isinstance(layout, HopperShape):
        launches |= _hopper_launches(work, layout, out)
    else:
        launches["prepare"] = partial(_prepare, work)
        launches["walk"] = partial(_walk, work, layout, out)
    if layout.values < key:
        launches["norm"] = partial(_norm, work, out)
    return out, launches


class _Pool(NamedTuple):
    """Where the sequences of a call lie: rows of the projections, cells of the pool."""

    windows: torch.Tensor
    states: torch.Tensor
    cells: torch.Tensor
    cu_seqlens: torch.Tensor
    ends: torch.Tensor


class _Chunks(NamedTuple):
    """What is known of every chunk of every head without its state; see ``kda_prepare_kernel``.

    On Hopper w and q have the other sign each: ``kda_prepare_hopper_kernel``.
    """

    wq: torch.Tensor
    u: torch.Tensor
    kl: torch.Tensor
    scores: torch.Tensor
    gamma: torch.Tensor


class _Work(NamedTuple):
    """One prefill.

    Attributes:
        inputs: qkv, gate, decay and write.
        taps: [W, 3 H K] of the convolution, transposed.
    """

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    weights: KDAWeights
    pool: _Pool
    chunks: _Chunks
    layout: PrefillShape | HopperShape
    snapshots: Snapshots | None
    taps: torch.Tensor

    @property
    def early(self) -> bool:
        """Whether a launch may begin before the one in front of it has ended.

        Of halves of heads one case is measured: 299 us instead of 304 (T8192 H12).
        """
        return isinstance(self.layout, HopperShape) and begins_early(self.inputs[0])

    @property
    def slots(self) -> tuple[int, int]:
        """Heads and slots: a program for each."""
        heads = self.pool.cells.shape[1]
        return heads, self.chunks.u.shape[0] // heads

    @property
    def searched(self) -> int:
        """Sequences among which a slot's is found: few sizes, as each is compiled."""
        return max(16, triton.next_power_of_2(self.pool.cells.shape[0]))

    @property
    def common(self) -> dict[str, Any]:
        """Constants of both kernels. Operands are bfloat16: float16 lacks the range of exp(80)."""
        half = self.chunks.u.dtype != torch.float32
        return {
            "C": CHUNK,
            "K": self.pool.states.shape[-1],
            "W": self.weights.conv.shape[1],
            "DTYPE": tl.bfloat16 if half else tl.float32,
            "PRECISION": "tf32" if half else "tf32x3",
        }


def _scratch_memory(qkv: torch.Tensor, cells: torch.Tensor, states: torch.Tensor) -> _Chunks:
    sequences, heads = cells.shape
    blocks, key = (qkv.shape[0] // CHUNK + sequences) * heads, states.shape[-1]
    dtype = torch.float32 if qkv.dtype == torch.float32 else torch.bfloat16

    def scratch(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(blocks, *size, dtype=of, device=qkv.device)

    return _Chunks(
        wq=scratch(2 * CHUNK, key),
        u=scratch(key, CHUNK),
        kl=scratch(CHUNK, key),
        scores=scratch(CHUNK, CHUNK),
        gamma=scratch(key, of=torch.float32),
    )


def _begin(work: _Work) -> None:
    """The taps of the convolution as the parallel kernel reads them; a fast SiLU wants halves."""
    half = work.chunks.u.dtype != torch.float32
    torch.mul(work.weights.conv.t(), 0.5 if half else 1.0, out=work.taps)


def _prepare(work: _Work) -> None:
    """All chunks of all sequences at once."""
    qkv, _, decay, write = work.inputs
    windows, _, cells, cu_seqlens, ends = work.pool
    half = work.chunks.u.dtype != torch.float32
    heads, layout = cells.shape[1], work.layout
    assert isinstance(layout, PrefillShape)
    kda_prepare_kernel[work.slots](
        *(qkv, decay, write, work.taps, work.weights.a_log, work.weights.dt_bias),
        *(windows, cells, cu_seqlens, ends, *work.chunks),
        *(write.stride(0), cells.stride(0), *windows.stride()[:3], work.weights.lower_bound),
        cells.shape[0],
        S_QKV=qkv.stride(0),
        S_DECAY=decay.stride(0),
        H=heads,
        BS=work.searched,
        R=8,
        LEVELS=CHUNK.bit_length() - 1,
        INVERSE=tl.float16 if half else tl.float32,
        FAST=half,
        **work.common,
        num_warps=4,
        maxnreg=layout.registers,
    )


def _hopper_launches(
    work: _Work, layout: HopperShape, out: torch.Tensor
) -> dict[str, Callable[[], None]]:
    """With few heads, most of a long sequence is prepared beside the walk through its beginning.

    The first launch has waited for the inputs; so the one aside, which begins once all programs of
    the walk have, need not, and so the next walk finds what both of them leave.
    """
    slots = work.slots[1]
    long = work.early and len(work.pool.cells) == 1 and slots >= _LONG
    before = slots - int(slots * layout.aside) if long else slots
    tokens = before * CHUNK
    if before == slots:
        return {
            "prepare": partial(_prepare_on_hopper, work, (0, slots)),
            "walk": partial(_walk_on_hopper, work, layout, out),
        }
    rest = (before, slots - before)
    return {
        "prepare": partial(_prepare_on_hopper, work, (0, before)),
        "walk": partial(_walk_on_hopper, work, layout, out, last=tokens),
        "prepare the rest": partial(_prepare_on_hopper, work, rest, aside=True),
        "walk the rest": partial(_walk_on_hopper, work, layout, out, first=tokens),
    }


def _prepare_on_hopper(work: _Work, slots: tuple[int, int], *, aside: bool = False) -> None:
    """As :func:`_prepare`, of some chunks."""
    qkv, _, decay, write = work.inputs
    windows, _, *places = work.pool
    weights = work.weights
    assert weights.lower_bound is not None
    prepare = Prepare(
        inputs=(qkv, decay, write),
        weights=(work.taps, weights.a_log, weights.dt_bias),
        pool=(windows, *places),
        chunks=work.chunks,
        lower_bound=weights.lower_bound,
        searched=work.searched,
        chunk=CHUNK,
        slots=slots,
        aside=aside,
    )
    hopper_prepare(prepare, early=work.early)


def _walk_on_hopper(
    work: _Work, layout: HopperShape, out: torch.Tensor, first: int = 0, last: int | None = None
) -> None:
    """As :func:`_walk`, of some tokens."""
    walk = Walk(
        chunks=work.chunks,
        inputs=work.inputs[:2],
        o_norm=work.weights.o_norm,
        pool=work.pool,
        snapshots=work.snapshots,
        out=out,
        eps=work.weights.eps,
        chunk=CHUNK,
        first=first,
        last=last,
    )
    hopper_walk(walk, layout, early=work.early)


def _walk(work: _Work, layout: PrefillShape, out: torch.Tensor) -> None:
    """Every sequence, chunk after chunk; with the norm where a program holds whole heads."""
    qkv, gate, _, _ = work.inputs
    (sequences, heads), key = work.pool.cells.shape, work.pool.states.shape[-1]
    snapshots, cells = work.snapshots, work.pool.cells
    kda_walk_kernel[(key // layout.values * sequences * heads,)](
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
        *work.pool.windows.stride()[:3],
        work.pool.states.stride(0),
        work.weights.eps,
        heads,
        BV=layout.values,
        FUSED=layout.values == key,
        DEPTHS=snapshots.depths.shape[1] if snapshots else 0,
        STAGES=layout.stages,
        **work.common,
        num_warps=layout.warps,
    )


def _norm(work: _Work, out: torch.Tensor) -> None:
    gate = work.inputs[1]
    kda_norm_kernel[work.slots](
        out,
        gate,
        work.weights.o_norm,
        work.pool.cu_seqlens,
        work.pool.ends,
        gate.stride(0),
        work.weights.eps,
        *work.pool.cells.shape,
        BS=work.searched,
        C=CHUNK,
        K=work.pool.states.shape[-1],
        num_warps=4,
    )


def _shape(heads: int, key: int, *, half: bool, hopper: bool) -> PrefillShape | HopperShape:
    """The fastest of those that ``bench`` tried on an H200.

    By the model alone: what a sequence gets does not depend on the batch. (Whether a part of it is
    prepared beside the walk does, and changes no bit.)
    """
    if hopper:
        few = 3 / 4 if heads <= _FEW_HEADS else 0.0
        return HopperShape(128, 5) if heads >= _MANY_HEADS else HopperShape(64, 3, few)
    return PrefillShape(min(key, 64), 4, *((3, 128) if half else (1, None)))


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
