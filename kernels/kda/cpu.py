"""Kimi Delta Attention on a CPU: the recurrence, token by token, one head at a time.

Decode and prefill are the same instructions, so a token's result does not depend on how its
sequence was cut, to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import njit

from k3vl.errors import ShapeError
from k3vl.kernels.compiled import EXACT, address, alive, dot, exp, floats, ints, sigmoid
from k3vl.kernels.kda import check_sequences, check_shapes

if TYPE_CHECKING:
    from k3vl.kernels.kda import KDAWeights


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
    return _run(qkv, gate, decay, write, weights, windows, states, cells, (0, 0))


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
    return _run(qkv, gate, decay, write, weights, windows, states, cells, where)


def _run(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    decay: torch.Tensor,
    write: torch.Tensor,
    weights: KDAWeights,
    windows: torch.Tensor,
    states: torch.Tensor,
    cells: torch.Tensor,
    sequences: tuple[int, int],
) -> torch.Tensor:
    """Both ops; ``sequences`` are addresses of cu_seqlens and ends, 0 for one token each."""
    assert cells.is_contiguous()
    assert weights.conv.is_contiguous()
    assert states.stride()[1:] == (states.shape[2], 1)
    assert windows.stride()[1:] == (3 * windows.shape[3], windows.shape[3], 1)
    out = torch.empty(gate.shape)
    bound = weights.lower_bound
    _recurrence(
        *(address(qkv), qkv.stride(0), address(gate), gate.stride(0)),
        *(address(decay), decay.stride(0), address(write), write.stride(0)),
        *(address(weights.conv), weights.conv.shape[1], address(weights.a_log)),
        *(address(weights.dt_bias), address(weights.o_norm), weights.eps),
        *(bound is not None, bound or 0.0),
        *(address(windows), windows.stride(0), address(states), states.stride(0)),
        *(address(cells, torch.int64), *cells.shape, states.shape[-1], *sequences),
        *(out.data_ptr(), out.shape[0]),
    )
    return out


@njit(cache=True, nogil=True, fastmath=EXACT, error_model="numpy")
def _recurrence(
    qkv: int,
    qkv_stride: int,
    gate: int,
    gate_stride: int,
    decay: int,
    decay_stride: int,
    write: int,
    write_stride: int,
    conv: int,
    width: int,
    a_log: int,
    dt_bias: int,
    o_norm: int,
    eps: float,
    bounded: bool,
    lower_bound: float,
    windows: int,
    window_stride: int,
    states: int,
    state_stride: int,
    cells: int,
    sequences: int,
    heads: int,
    head: int,
    cu_seqlens: int,
    ends: int,
    out: int,
    rows: int,
) -> None:
    taps = _by_tap(conv, 3 * heads * head, width)
    space = np.empty((width - 1) * 3 * head, np.float32)
    vectors = np.empty((6, head), np.float32)
    cell_of = ints(cells, sequences * heads)
    borders = ints(cu_seqlens, sequences + 1)
    behind = ints(ends, sequences)
    for s in range(sequences):
        begin, end, limit = s, s + 1, s + 1
        if cu_seqlens != 0:
            begin, end, limit = borders[s], behind[s], borders[s + 1]
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
                _decay(logits, bias, rate, bounded, np.float32(lower_bound), vectors[3])
                beta = sigmoid(floats(write + 4 * t * write_stride, heads)[h])
                _step(vectors, beta, state, head)
                _gated_norm(
                    vectors[5],
                    floats(gate + 4 * (t * gate_stride + h * head), head),
                    floats(o_norm, head),
                    np.float32(eps),
                    floats(out + 4 * (t * heads + h) * head, head),
                )
            for t in range(end, limit):
                floats(out + 4 * (t * heads + h) * head, head)[:] = 0
            for j in range(width - 1):
                row = end - (width - 1) + j
                for part in range(3):
                    to = floats(windows + 4 * (cell * window_stride + (j * 3 + part) * head), head)
                    to[:] = _input(qkv, qkv_stride, row, begin, space, width, part, h, heads, head)
    alive(space)


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
    q, k, u, decay = vectors[0], vectors[1], vectors[2], vectors[3]
    error, output = vectors[4], vectors[5]
    error[:] = 0
    output[:] = 0
    for i in range(head):
        row = floats(state + 4 * i * head, head)
        a, key = decay[i], k[i]
        for v in range(head):
            kept = a * row[v]
            row[v] = kept
            error[v] += key * kept
    for v in range(head):
        u[v] = beta * (u[v] - error[v])
    for i in range(head):
        row = floats(state + 4 * i * head, head)
        key, query = k[i], q[i]
        for v in range(head):
            now = row[v] + key * u[v]
            row[v] = now
            output[v] += query * now


@njit(fastmath=EXACT, error_model="numpy")
def _gated_norm(
    x: np.ndarray, gate: np.ndarray, weight: np.ndarray, eps: np.float32, out: np.ndarray
) -> None:
    scale = np.float32(1) / np.sqrt(dot(x, x) / np.float32(x.size) + eps)
    for i in range(x.size):
        out[i] = x[i] * scale * weight[i] * sigmoid(gate[i])
