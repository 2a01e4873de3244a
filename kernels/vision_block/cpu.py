"""A block of the vision tower on a CPU, in one call; no item depends on another, to the last bit.

A head's queries, keys and values are laid out for the product of ``product.py``: the values as
columns, and both they and the scores with zeros up to a whole vector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import njit

from k3vl.kernels.compiled import (
    EXACT,
    SUMS,
    address,
    alive,
    compiled,
    doubles,
    exp,
    floats,
    ints,
    sigmoid,
)
from k3vl.kernels.product import Table, Tables, matrix, product, rows_as_matrix
from k3vl.kernels.rms_norm.cpu import normalise
from k3vl.kernels.vision_block import VisionBlockWeights, check_shapes

if TYPE_CHECKING:
    from k3vl.kernels.packed import Packed

_QUERIES = 64
"""Whose scores are held at once."""
_VECTOR = 16
_GELU = np.float32(2 * 0.7978845608028654)  # 2 sqrt(2 / pi): half of 1 + tanh(u) is sigmoid(2 u)


class VisionBlockCPU:
    """See :class:`k3vl.kernels.vision_block.VisionBlockOp`."""

    def __init__(self) -> None:
        """Nothing is known of any weight yet."""
        self._tables: Tables[VisionBlockWeights] = Tables(_table)

    def __call__(
        self,
        x: torch.Tensor,
        weights: VisionBlockWeights,
        rotary: torch.Tensor,
        items: Packed,
    ) -> torch.Tensor:
        """[P, D] -> [P, D]."""
        check_shapes(x, weights, rotary, items)
        turns, counts = torch.view_as_real(rotary), np.array(items.lengths, np.int64)
        assert turns.is_contiguous()
        out = torch.empty(x.shape)
        _block(
            *(address(x), x.stride(0), x.shape[0], self._tables(weights).address, address(turns)),
            *(counts.ctypes.data, len(counts), out.data_ptr()),
        )
        return out


def _table(weights: VisionBlockWeights) -> Table:
    w = weights
    return Table(
        *(w.heads, w.out.shape[1] // w.heads, w.out.shape[0], w.up.shape[0]),
        *(w.attention_norm, w.mlp_norm, matrix(w.qkv), matrix(w.out)),
        *(matrix(w.up), matrix(w.down), float(w.eps)),
    )


@compiled
def _block(
    x: int, x_stride: int, rows: int, table: int, rotary: int, lengths: int, items: int, out: int
) -> None:
    w, eps = ints(table, 11), np.float32(doubles(table, 11)[10])
    heads, head, width, inner = w[0], w[1], w[2], w[3]
    attention_norm, mlp_norm, qkv, o, up, down = w[4], w[5], w[6], w[7], w[8], w[9]
    wide = heads * head

    normed = np.empty((rows, width), np.float32)
    where = normed.ctypes.data
    for r in range(rows):
        place = where + 4 * r * width
        normalise(x + 4 * r * x_stride, floats(attention_norm, width), eps, place)
    projected = np.empty((rows, 3 * wide), np.float32)
    product(where, width, rows, qkv, projected.ctypes.data, 3 * wide)
    mixed = np.empty((rows, wide), np.float32)
    first = 0
    for i in range(items):
        count = ints(lengths, items)[i]
        for h in range(heads):
            _attend(projected, rotary, first, count, h, heads, head, qkv, mixed)
        first += count
    product(mixed.ctypes.data, wide, rows, o, out, width)
    for r in range(rows):
        given, to = floats(x + 4 * r * x_stride, width), floats(out + 4 * r * width, width)
        for c in range(width):
            to[c] += given[c]

    for r in range(rows):
        place = where + 4 * r * width
        normalise(out + 4 * r * width, floats(mlp_norm, width), eps, place)
    hidden = np.empty((rows, inner), np.float32)
    product(where, width, rows, up, hidden.ctypes.data, inner)
    for r in range(rows):
        _gelu(hidden[r])
    product(hidden.ctypes.data, inner, rows, down, where, width)
    for r in range(rows):
        to = floats(out + 4 * r * width, width)
        for c in range(width):
            to[c] += normed[r, c]
    alive(normed, projected, mixed, hidden)


@njit(fastmath=EXACT, error_model="numpy")
def _gelu(x: np.ndarray) -> None:
    """In place, by the tanh form."""
    for i in range(x.size):
        v = x[i]
        x[i] = v * sigmoid(_GELU * (v + np.float32(0.044715) * v * v * v))


@njit(fastmath=EXACT, error_model="numpy")
def _attend(
    projected: np.ndarray,
    rotary: int,
    first: int,
    count: int,
    h: int,
    heads: int,
    head: int,
    like: int,
    mixed: np.ndarray,
) -> None:
    """One head of one item; ``like`` is any matrix, for :func:`rows_as_matrix`."""
    padded = -(-count // _VECTOR) * _VECTOR
    q = np.empty((count, head), np.float32)
    k = np.empty((count, head), np.float32)
    v = np.zeros((head, padded), np.float32)
    scale = np.float32(1) / np.sqrt(np.float32(head))
    for n in range(count):
        row, turns = projected[first + n], floats(rotary + 4 * (first + n) * head, head)
        _turn(row[h * head : (h + 1) * head], turns, scale, q[n])
        _turn(row[(heads + h) * head : (heads + h + 1) * head], turns, np.float32(1), k[n])
        for c in range(head):
            v[c, n] = row[(2 * heads + h) * head + c]
    scores = np.zeros((_QUERIES, padded), np.float32)
    where, wide = scores.ctypes.data, heads * head
    keys = rows_as_matrix(k.ctypes.data, count, head, like)
    values = rows_as_matrix(v.ctypes.data, head, padded, like)
    for begin in range(0, count, _QUERIES):
        some = min(_QUERIES, count - begin)
        queries = q.ctypes.data + 4 * begin * head
        product(queries, head, some, keys.ctypes.data, where, padded)
        for n in range(some):
            _softmax(scores[n, :count])
        to = mixed.ctypes.data + 4 * ((first + begin) * wide + h * head)
        product(where, padded, some, values.ctypes.data, to, wide)
    alive(q, k, v, scores, keys, values)


@njit(fastmath=EXACT, error_model="numpy")
def _turn(x: np.ndarray, turns: np.ndarray, scale: np.float32, out: np.ndarray) -> None:
    """Turn adjacent pairs by cosine and sine of ``turns``."""
    for i in range(x.size // 2):
        even, odd = x[2 * i] * scale, x[2 * i + 1] * scale
        cosine, sine = turns[2 * i], turns[2 * i + 1]
        out[2 * i] = even * cosine - odd * sine
        out[2 * i + 1] = even * sine + odd * cosine


@njit(fastmath=EXACT, error_model="numpy")
def _softmax(x: np.ndarray) -> None:
    """In place."""
    tops = np.empty(_VECTOR, np.float32)  # one for every lane: a single one would be a chain
    for i in range(_VECTOR):
        tops[i] = x[0]
    for begin in range(0, x.size - _VECTOR + 1, _VECTOR):
        part = x[begin : begin + _VECTOR]
        for i in range(_VECTOR):
            tops[i] = part[i] if part[i] > tops[i] else tops[i]
    top = tops[0]
    for i in range(_VECTOR):
        top = max(top, tops[i])
    for i in range(x.size - x.size % _VECTOR, x.size):
        top = max(top, x[i])
    for i in range(x.size):
        x[i] = exp(x[i] - top)
    share = np.float32(1) / _sum(x)
    for i in range(x.size):
        x[i] *= share


@njit(fastmath=SUMS, error_model="numpy")
def _sum(x: np.ndarray) -> np.float32:
    total = np.float32(0)
    for i in range(x.size):
        total += x[i]
    return total
