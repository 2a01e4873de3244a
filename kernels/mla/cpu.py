"""Latent attention on a CPU: every query by itself in the absorbed form, decode and prefill alike.

The same instructions whatever else is asked in the call, so a token's result does not depend on
how its sequence was cut, to the last bit.
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
from k3vl.kernels.linear import added
from k3vl.kernels.mla.layer import check_shapes, check_weights
from k3vl.kernels.product import Table, Tables, matrix, product
from k3vl.kernels.rms_norm.cpu import normalise

if TYPE_CHECKING:
    from k3vl.kernels.mla.layer import MLALayerWeights
    from k3vl.kernels.sequences import Sequences


class MLALayerCPU:
    """See :class:`k3vl.kernels.mla.layer.MLALayerOp`."""

    def __init__(self) -> None:
        """Nothing is known of any weight yet."""
        self._tables: Tables[MLALayerWeights] = Tables(_layer_table)

    def __call__(
        self,
        x: torch.Tensor,
        weights: MLALayerWeights,
        latents: torch.Tensor,
        sequences: Sequences,
        onto: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[N, D] -> [N, D]."""
        table, rows = self._tables(weights).address, x.shape[0]
        counted = sequences.num_decodes + sum(sequences.prefill_lens)
        written = sequences.cache_rows
        width = weights.in_proj.shape[1]
        if x.shape != (counted, width) or written.shape != (rows,):
            raise ShapeError(
                f"mla: x {tuple(x.shape)}, {counted} rows of sequences, "
                f"{tuple(written.shape)} cache rows"
            )
        if latents.shape[1] != weights.splits[1] + weights.splits[2]:
            raise ShapeError(f"mla: splits {weights.splits}, latents {tuple(latents.shape)}")
        contexts = _contexts(sequences)
        out = torch.empty(x.shape)
        _layer(
            *(address(x), x.stride(0), rows, table, address(latents), latents.stride(0)),
            *(address(written, torch.int64), contexts.ctypes.data, len(contexts)),
            out.data_ptr(),
        )
        return added(out, onto)


class MLACPU:
    """See :class:`k3vl.kernels.mla.layer.MLAOp`; it holds nothing."""

    def decode(
        self,
        q: torch.Tensor,
        kv_b: torch.Tensor,
        latents: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """One token of every sequence."""
        if rows.shape[0] != q.shape[0] or lengths.shape != q.shape[:1]:
            raise ShapeError(
                f"mla: q {tuple(q.shape)}, rows {tuple(rows.shape)}, lengths {tuple(lengths.shape)}"
            )
        contexts = [_context(own[:length]) for own, length in zip(rows, lengths, strict=True)]
        return _run(q, kv_b, latents, contexts, scale)

    def prefill(
        self,
        q: torch.Tensor,
        kv_b: torch.Tensor,
        latents: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """The last T tokens of one sequence."""
        if rows.shape[0] < q.shape[0]:
            raise ShapeError(f"mla: q {tuple(q.shape)}, rows {tuple(rows.shape)}")
        return _run(q, kv_b, latents, [_context(rows, q.shape[0])], scale)


def _contexts(sequences: Sequences) -> np.ndarray:
    """[B, 3] of a pass; see :func:`_context`."""
    found, n = np.empty((sequences.num_decodes + len(sequences.prefill_lens), 3), np.int64), 0
    if n := sequences.num_decodes:
        rows = sequences.decode_rows
        assert sequences.page == 1
        assert rows.shape[0] == n
        assert rows.is_contiguous()
        first = address(rows, torch.int64)
        found[:n, 0] = np.arange(first, first + 8 * rows.shape[1] * n, 8 * rows.shape[1])
        found[:n, 1] = 1
        found[:n, 2] = sequences.decode_lens.numpy()
    parts = zip(sequences.prefill_lens, sequences.prefill_rows, strict=True)
    for i, (count, rows) in enumerate(parts, n):
        found[i] = _context(rows, count)
    return found


def _context(rows: torch.Tensor, queries: int = 1) -> tuple[int, int, int]:
    """Where a sequence's cache rows are listed, its queries, and how many rows the first sees."""
    assert rows.is_contiguous()
    return address(rows, torch.int64), queries, rows.shape[0] - queries + 1


def _run(
    q: torch.Tensor,
    kv_b: torch.Tensor,
    latents: torch.Tensor,
    contexts: list[tuple[int, int, int]],
    scale: float,
) -> torch.Tensor:
    latent, nope, shared = check_shapes(q, kv_b, latents)
    (_, heads, _), value = q.shape, kv_b.shape[1] - nope
    assert kv_b.is_contiguous()
    q = q.flatten(1)
    out, listed = torch.empty(len(q), heads, value), np.array(contexts, np.int64)
    _op(
        *(address(q), q.stride(0), address(kv_b), heads, nope, shared, value, latent),
        *(float(scale), address(latents), latents.stride(0)),
        *(listed.ctypes.data, len(listed), out.data_ptr()),
    )
    return out


def _layer_table(weights: MLALayerWeights) -> Table:
    w = weights
    (heads, expanding, latent), (rank, _, shared, gate) = w.kv_b.shape, w.splits
    width = w.in_proj.shape[1]
    check_weights(w, width)
    queries = rank if w.q_b is None else w.q_b.shape[0]
    nope = queries // heads - shared
    return Table(
        *(heads, nope, shared, expanding - nope, latent, width, rank, gate),
        *(matrix(w.in_proj), w.q_norm, w.q_b if w.q_b is None else matrix(w.q_b), w.kv_norm),
        *(w.kv_b, matrix(w.o_proj), float(w.scale), float(w.eps)),
    )


@compiled
def _layer(
    x: int,
    x_stride: int,
    rows: int,
    table: int,
    latents: int,
    latents_stride: int,
    written: int,
    contexts: int,
    sequences: int,
    out: int,
) -> None:
    w, numbers = ints(table, 16), doubles(table, 16)
    heads, nope, shared, value, latent, width = w[0], w[1], w[2], w[3], w[4], w[5]
    rank, gate, in_proj, q_norm, q_b, kv_norm = w[6], w[7], w[8], w[9], w[10], w[11]
    kv_b, o_proj, scale, eps = w[12], w[13], numbers[14], np.float32(numbers[15])
    total, query = rank + latent + shared + gate, heads * (nope + shared)

    projected = np.empty((rows, total), np.float32)
    q, q_stride = projected.ctypes.data, total
    of_latent, of_gate = q + 4 * rank, q + 4 * (rank + latent + shared)
    product(x, x_stride, rows, in_proj, q, total)
    expanded = np.empty((rows if q_b != 0 else 0, query), np.float32)
    if q_b != 0:
        for r in range(rows):
            low = q + 4 * r * total
            normalise(low, floats(q_norm, rank), eps, low)
        product(q, total, rows, q_b, expanded.ctypes.data, query)
        q, q_stride = expanded.ctypes.data, query
    for r in range(rows):
        own = of_latent + 4 * r * total
        to = latents + 4 * ints(written, rows)[r] * latents_stride
        normalise(own, floats(kv_norm, latent), eps, to)
        common, kept = floats(own + 4 * latent, shared), floats(to + 4 * latent, shared)
        for p in range(shared):
            kept[p] = common[p]

    mixed = np.empty((rows, heads * value), np.float32)
    sizes = heads, nope, shared, value, latent
    pool = latents, latents_stride, contexts, sequences
    _attend(q, q_stride, kv_b, sizes, np.float32(scale), pool, mixed.ctypes.data)
    if gate != 0:
        for r in range(rows):
            logits = floats(of_gate + 4 * r * total, gate)
            for i in range(gate):
                mixed[r, i] *= sigmoid(logits[i])
    product(mixed.ctypes.data, heads * value, rows, o_proj, out, width)
    alive(projected, expanded, mixed)


@compiled
def _op(
    q: int,
    q_stride: int,
    kv_b: int,
    heads: int,
    nope: int,
    shared: int,
    value: int,
    latent: int,
    scale: float,
    latents: int,
    latents_stride: int,
    contexts: int,
    sequences: int,
    out: int,
) -> None:
    sizes = heads, nope, shared, value, latent
    pool = latents, latents_stride, contexts, sequences
    _attend(q, q_stride, kv_b, sizes, np.float32(scale), pool, out)


@njit(fastmath=EXACT, error_model="numpy")
def _attend(
    q: int, q_stride: int, kv_b: int, sizes: Any, scale: np.float32, pool: Any, out: int
) -> None:
    """From queries to mixtures of values; ``contexts`` are rows of :func:`_context`."""
    heads, nope, shared, value, latent = sizes
    latents, latents_stride, contexts, sequences = pool
    listed = ints(contexts, 3 * sequences)
    query = np.empty((heads, latent + shared), np.float32)
    mixed = np.empty((heads, latent), np.float32)
    longest = 0
    for s in range(sequences):
        longest = max(longest, listed[3 * s + 1] + listed[3 * s + 2])
    scores = np.empty((heads, longest), np.float32)
    n = 0
    for s in range(sequences):
        for t in range(listed[3 * s + 1]):
            own = ints(listed[3 * s], listed[3 * s + 2] + t)
            for h in range(heads):
                given = floats(q + 4 * (n * q_stride + h * (nope + shared)), nope + shared)
                keys = kv_b + 4 * h * (nope + value) * latent
                _absorb(given, keys, scale, nope, latent, query[h])
                _scores(query[h], latents, latents_stride, own, scores[h])
                _mix(scores[h], latents, latents_stride, own, mixed[h])
                to = floats(out + 4 * (n * heads + h) * value, value)
                for v in range(value):
                    to[v] = dot(floats(keys + 4 * (nope + v) * latent, latent), mixed[h])
            n += 1


@njit(fastmath=EXACT, error_model="numpy")
def _absorb(
    q: np.ndarray, keys: int, scale: np.float32, nope: int, latent: int, out: np.ndarray
) -> None:
    """One head's query against keys -> against latents, times the scale."""
    out[:] = 0
    for m in range(nope):
        row, by = floats(keys + 4 * m * latent, latent), q[m] * scale
        for r in range(latent):
            out[r] += by * row[r]
    for p in range(out.size - latent):
        out[latent + p] = q[nope + p] * scale


@njit(fastmath=EXACT, error_model="numpy")
def _scores(
    query: np.ndarray, latents: int, stride: int, rows: np.ndarray, scores: np.ndarray
) -> None:
    """Softmax over the rows, not yet divided by its sum."""
    top = np.float32(-np.inf)
    for l in range(rows.size):
        scores[l] = dot(query, floats(latents + 4 * rows[l] * stride, query.size))
        top = max(top, scores[l])
    for l in range(rows.size):
        scores[l] = exp(scores[l] - top)


@njit(fastmath=EXACT, error_model="numpy")
def _mix(scores: np.ndarray, latents: int, stride: int, rows: np.ndarray, out: np.ndarray) -> None:
    """Mixture of the rows' latents by the scores, which need not sum to one."""
    out[:] = 0
    total = np.float32(0)
    for l in range(rows.size):
        row, by = floats(latents + 4 * rows[l] * stride, out.size), scores[l]
        total += by
        for r in range(out.size):
            out[r] += by * row[r]
    for r in range(out.size):
        out[r] /= total
