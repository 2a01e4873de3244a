"""Kimi Delta Attention on a CPU: the recurrence, token by token, one head at a time.

Decode and prefill are the same instructions, so a token's result does not depend on how its
sequence was cut, to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import njit

from k3vl.errors import ShapeError
from k3vl.kernels.compiled import (
    EXACT,
    address,
    alive,
    compiled,
    dot,
    doubles,
    exp,
    floats,
    ints,
    sigmoid,
)
from k3vl.kernels.kda import check_sequences, check_shapes
from k3vl.kernels.kda.layer import check_weights
from k3vl.kernels.linear import added
from k3vl.kernels.product import Entry, Table, Tables, matrix, product
from k3vl.kernels.vectors import WIDE, fused, load, minus, splat, store, times

if TYPE_CHECKING:
    from k3vl.kernels.kda import KDAWeights
    from k3vl.kernels.kda.layer import KDALayerWeights
    from k3vl.kernels.sequences import Sequences


class KDALayerCPU:
    """See :class:`k3vl.kernels.kda.layer.KDALayerOp`."""

    def __init__(self) -> None:
        """Nothing is known of any weight yet."""
        self._tables: Tables[KDALayerWeights] = Tables(_layer_table)

    def __call__(
        self,
        x: torch.Tensor,
        weights: KDALayerWeights,
        windows: torch.Tensor,
        states: torch.Tensor,
        cells: torch.Tensor,
        sequences: Sequences,
        onto: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[N, D] -> [N, D]."""
        table = self._tables(weights).address
        (count, heads), decodes = cells.shape, sequences.num_decodes
        check_sequences(cells[decodes:], sequences.cu_seqlens, sequences.ends)
        head, rows = states.shape[-1], x.shape[0]
        _check_pool(weights.core, windows, states)
        if x.shape[1] != weights.in_proj.shape[1] or heads != weights.splits[3]:
            raise ShapeError(f"kda: x {tuple(x.shape)}, cells {tuple(cells.shape)}, K {head}")
        out = torch.empty(x.shape)
        _layer(
            *(address(x), x.stride(0), rows, table, address(windows), windows.stride(0)),
            *(address(states), states.stride(0), address(cells, torch.int64)),
            *(decodes, count - decodes, address(sequences.cu_seqlens, torch.int64)),
            *(address(sequences.ends, torch.int64), out.data_ptr()),
        )
        return added(out, onto)


def kda_decode_cpu(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    decay: torch.Tensor,
    write: torch.Tensor,
    weights: KDAWeights,
    windows: torch.Tensor,
    states: torch.Tensor,
    cells: torch.Tensor,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.kda.kda_decode`."""
    check_shapes("kda_decode", qkv, gate, decay, write, weights, windows, states, cells)
    if cells.shape[0] != qkv.shape[0]:
        raise ShapeError(f"kda_decode: qkv {tuple(qkv.shape)}, cells {tuple(cells.shape)}")
    sequences = cells.shape[0], 0, 0, 0
    return _run(qkv, gate, decay, write, weights, windows, states, cells, sequences)


def kda_prefill_cpu(
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
) -> torch.Tensor:
    """See :func:`k3vl.kernels.kda.kda_prefill`."""
    check_shapes("kda_prefill", qkv, gate, decay, write, weights, windows, states, cells)
    check_sequences(cells, cu_seqlens, ends)
    where = address(cu_seqlens, torch.int64), address(ends, torch.int64)
    sequences = 0, cells.shape[0], *where
    return _run(qkv, gate, decay, write, weights, windows, states, cells, sequences)


def _run(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    decay: torch.Tensor,
    write: torch.Tensor,
    weights: KDAWeights,
    windows: torch.Tensor,
    states: torch.Tensor,
    cells: torch.Tensor,
    sequences: tuple[int, int, int, int],
) -> torch.Tensor:
    """Both ops; ``sequences`` are two counts and the addresses of cu_seqlens and ends."""
    _check_pool(weights, windows, states)
    core, out = Table(*_core(weights)), torch.empty(gate.shape)
    _op(
        *(address(qkv), qkv.stride(0), address(gate), gate.stride(0)),
        *(address(decay), decay.stride(0), address(write), write.stride(0), core.address),
        *(address(windows), windows.stride(0), address(states), states.stride(0)),
        *(address(cells, torch.int64), *sequences, out.data_ptr()),
    )
    return out


def _check_pool(core: KDAWeights, windows: torch.Tensor, states: torch.Tensor) -> None:
    head, width = core.o_norm.shape[0], core.conv.shape[1]
    if states.shape[1:] != (head, head) or windows.shape[1:] != (width - 1, 3, head):
        raise ShapeError(f"kda: windows {tuple(windows.shape)}, states {tuple(states.shape)}")
    assert states.stride()[1:] == (head, 1)
    assert windows.stride()[1:] == (3 * head, head, 1)


def _core(weights: KDAWeights) -> tuple[Entry, ...]:
    """Entries of :func:`_recurrence`."""
    w, bound = weights, weights.lower_bound
    head = w.o_norm.shape[0]
    return (
        *(w.a_log.shape[0], head, w.conv.shape[1], float(w.eps)),
        *(int(bound is not None), float(bound or 0), w.conv, w.a_log, w.dt_bias, w.o_norm),
    )


def _layer_table(weights: KDALayerWeights) -> Table:
    w = weights
    (heads,), (head,) = w.core.a_log.shape, w.core.o_norm.shape
    width = w.in_proj.shape[1]
    check_weights(w, heads, head, width)
    return Table(
        *(heads, head, width, w.splits[1], w.splits[2], matrix(w.in_proj)),
        *(w.gate_b if w.gate_b is None else matrix(w.gate_b), matrix(w.decay_b)),
        *(matrix(w.o_proj), *_core(w.core)),
    )


@compiled
def _op(
    qkv: int,
    qkv_stride: int,
    gate: int,
    gate_stride: int,
    decay: int,
    decay_stride: int,
    write: int,
    write_stride: int,
    core: int,
    windows: int,
    window_stride: int,
    states: int,
    state_stride: int,
    cells: int,
    decodes: int,
    others: int,
    cu_seqlens: int,
    ends: int,
    out: int,
) -> None:
    inputs = qkv, qkv_stride, gate, gate_stride, decay, decay_stride, write, write_stride
    pool = windows, window_stride, states, state_stride, cells
    _recurrence(inputs, core, pool, (decodes, others, cu_seqlens, ends), out)


@compiled
def _layer(
    x: int,
    x_stride: int,
    rows: int,
    table: int,
    windows: int,
    window_stride: int,
    states: int,
    state_stride: int,
    cells: int,
    decodes: int,
    others: int,
    cu_seqlens: int,
    ends: int,
    out: int,
) -> None:
    w = ints(table, 9)
    heads, head, width, gate, rank = w[0], w[1], w[2], w[3], w[4]
    in_proj, gate_b, decay_b, o_proj, core = w[5], w[6], w[7], w[8], table + 8 * 9
    inner = heads * head
    total = 3 * inner + gate + rank + heads

    projected = np.empty((rows, total), np.float32)
    qkv = projected.ctypes.data
    product(x, x_stride, rows, in_proj, qkv, total)
    of_gate, of_decay = qkv + 4 * 3 * inner, qkv + 4 * (3 * inner + gate)
    of_write, gate_stride = of_decay + 4 * rank, total
    full_gate = np.empty((rows if gate_b != 0 else 0, inner), np.float32)
    if gate_b != 0:
        product(of_gate, total, rows, gate_b, full_gate.ctypes.data, inner)
        of_gate, gate_stride = full_gate.ctypes.data, inner
    decay = np.empty((rows, inner), np.float32)
    product(of_decay, total, rows, decay_b, decay.ctypes.data, inner)

    mixed = np.empty((rows, inner), np.float32)
    inputs = qkv, total, of_gate, gate_stride, decay.ctypes.data, inner, of_write, total
    pool = windows, window_stride, states, state_stride, cells
    _recurrence(inputs, core, pool, (decodes, others, cu_seqlens, ends), mixed.ctypes.data)
    product(mixed.ctypes.data, inner, rows, o_proj, out, width)
    alive(projected, full_gate, decay, mixed)


@njit(fastmath=EXACT, error_model="numpy")
def _recurrence(inputs: Any, core: int, pool: Any, sequences: Any, out: int) -> None:
    """The op between the projections, over sequences of one row each, then others.

    ``core`` is where the table of the op's weights lies; see :func:`_core`.
    """
    qkv, qkv_stride, gate, gate_stride, decay, decay_stride, write, write_stride = inputs
    windows, window_stride, states, state_stride, cells = pool
    decodes, others, cu_seqlens, ends = sequences
    w, numbers = ints(core, 10), doubles(core, 10)
    heads, head, width, eps = w[0], w[1], w[2], np.float32(numbers[3])
    bounded, lower_bound = w[4] != 0, np.float32(numbers[5])
    conv, a_log, dt_bias, o_norm = w[6], w[7], w[8], w[9]
    taps = _by_tap(conv, 3 * heads * head, width)
    space = np.empty((width - 1) * 3 * head, np.float32)
    vectors = np.empty((6, head), np.float32)
    cell_of = ints(cells, (decodes + others) * heads)
    borders = ints(cu_seqlens, others + 1)
    behind = ints(ends, others)
    for s in range(decodes + others):
        begin, end, limit = s, s + 1, s + 1
        if s >= decodes:
            begin, limit = decodes + borders[s - decodes], decodes + borders[s - decodes + 1]
            end = decodes + behind[s - decodes]
        for h in range(heads):
            cell = cell_of[s * heads + h]
            window = floats(windows + 4 * cell * window_stride, space.size)
            space[:] = window
            state = states + 4 * cell * state_stride
            rate = exp(floats(a_log, heads)[h])
            for t in range(begin, end):
                _convolve(qkv, qkv_stride, t, begin, space, taps, width, h, heads, head, vectors)
                logits = floats(decay + 4 * (t * decay_stride + h * head), head)
                bias = floats(dt_bias + 4 * h * head, head)
                _decay(logits, bias, rate, bounded, lower_bound, vectors[3])
                beta = sigmoid(floats(write + 4 * t * write_stride, heads)[h])
                _step(vectors, beta, state, head)
                _gated_norm(
                    vectors[5],
                    floats(gate + 4 * (t * gate_stride + h * head), head),
                    floats(o_norm, head),
                    eps,
                    floats(out + 4 * (t * heads + h) * head, head),
                )
            for t in range(end, limit):
                floats(out + 4 * (t * heads + h) * head, head)[:] = 0
            for j in range(width - 1):
                row = end - (width - 1) + j
                for part in range(3):
                    to = floats(windows + 4 * (cell * window_stride + (j * 3 + part) * head), head)
                    to[:] = _input(qkv, qkv_stride, row, begin, space, width, part, h, heads, head)
    alive(space, taps)


@njit
def _by_tap(conv: int, channels: int, width: int) -> np.ndarray:
    """[C, W] -> [W, C]."""
    given = floats(conv, channels * width)
    taps = np.empty((width, channels), np.float32)
    for j in range(width):
        for c in range(channels):
            taps[j, c] = given[c * width + j]
    return taps


@njit(inline="always")
def _input(
    qkv: int,
    qkv_stride: int,
    row: int,
    begin: int,
    window: np.ndarray,
    width: int,
    part: int,
    h: int,
    heads: int,
    head: int,
) -> np.ndarray:
    """One head's q, k or v of a row before the convolution; before the first it is the window."""
    where = qkv + 4 * (row * qkv_stride + (part * heads + h) * head)
    if row < begin:
        where = window.ctypes.data + 4 * ((row - begin + width - 1) * 3 + part) * head
    return floats(where, head)


@njit(fastmath=EXACT, error_model="numpy")
def _convolve(
    qkv: int,
    qkv_stride: int,
    t: int,
    begin: int,
    window: np.ndarray,
    taps: np.ndarray,
    width: int,
    h: int,
    heads: int,
    head: int,
    vectors: np.ndarray,
) -> None:
    """q, k and v of one head: convolution, SiLU, unit length of q and k; q scaled."""
    for part in range(3):
        total = vectors[part]
        total[:] = 0
        for j in range(width):
            x = _input(
                qkv, qkv_stride, t - width + 1 + j, begin, window, width, part, h, heads, head
            )
            weight = taps[j, (part * heads + h) * head : (part * heads + h + 1) * head]
            for i in range(head):
                total[i] += weight[i] * x[i]
        for i in range(head):
            total[i] *= sigmoid(total[i])
        if part < 2:
            scale = np.float32(1) / np.sqrt(dot(total, total) + np.float32(1e-6))
            if part == 0:
                scale *= np.float32(1) / np.sqrt(np.float32(head))
            for i in range(head):
                total[i] *= scale


@njit(fastmath=EXACT, error_model="numpy")
def _decay(
    logits: np.ndarray,
    bias: np.ndarray,
    rate: np.float32,
    bounded: bool,
    lower_bound: np.float32,
    out: np.ndarray,
) -> None:
    """The decay itself, not its logarithm."""
    if bounded:
        for i in range(out.size):
            out[i] = exp(lower_bound * sigmoid(rate * (logits[i] + bias[i])))
    else:
        for i in range(out.size):
            x = logits[i] + bias[i]
            softplus = x if x > 20 else np.log1p(np.exp(x))
            out[i] = exp(-rate * softplus)


@njit(fastmath=EXACT, error_model="numpy")
def _step(vectors: np.ndarray, beta: np.float32, state: int, head: int) -> None:
    """The delta rule: q, k, v and decay are vectors 0 to 3, the output becomes vector 5."""
    q, k, values, decay = vectors[0], vectors[1], vectors[2], vectors[3]
    of_values, of_output = values.ctypes.data, vectors[5].ctypes.data
    whole = head - head % WIDE
    for v in range(0, whole, WIDE):
        error = splat(np.float32(0))
        for i in range(head):
            row = load(state + 4 * (i * head + v))
            error = fused(splat(k[i] * decay[i]), row, error)
        u = times(splat(beta), minus(load(of_values + 4 * v), error))
        output = splat(np.float32(0))
        for i in range(head):
            place = state + 4 * (i * head + v)
            row = fused(splat(k[i]), u, times(splat(decay[i]), load(place)))
            store(row, place)
            output = fused(splat(q[i]), row, output)
        store(output, of_output + 4 * v)
    if whole == head:
        return
    error, output = vectors[4, whole:], vectors[5, whole:]
    error[:] = 0
    output[:] = 0
    for i in range(head):
        rest = floats(state + 4 * (i * head + whole), head - whole)
        forgotten = k[i] * decay[i]
        for v in range(rest.size):
            error[v] += forgotten * rest[v]
    for v in range(error.size):
        error[v] = beta * (values[whole + v] - error[v])
    for i in range(head):
        rest = floats(state + 4 * (i * head + whole), head - whole)
        a, key, query = decay[i], k[i], q[i]
        for v in range(rest.size):
            now = a * rest[v] + key * error[v]
            rest[v] = now
            output[v] += query * now


@njit(fastmath=EXACT, error_model="numpy")
def _gated_norm(
    x: np.ndarray, gate: np.ndarray, weight: np.ndarray, eps: np.float32, out: np.ndarray
) -> None:
    scale = np.float32(1) / np.sqrt(dot(x, x) / np.float32(x.size) + eps)
    for i in range(x.size):
        out[i] = x[i] * scale * weight[i] * sigmoid(gate[i])
