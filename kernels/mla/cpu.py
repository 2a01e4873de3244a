"""Latent attention on a CPU: every query by itself in the absorbed form, decode and prefill alike.

The same instructions whatever else is asked in the call, so a token's result does not depend on
how its sequence was cut, to the last bit.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from k3vl.errors import ShapeError
from k3vl.kernels.compiled import EXACT, address, dot, exp, floats, ints
from k3vl.kernels.mla.layer import check_shapes


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
        return _run(q, kv_b, latents, rows, rows.stride(0), address(lengths, torch.int64), 0, scale)

    def prefill(
        self,
        q: torch.Tensor,
        kv_b: torch.Tensor,
        latents: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """The last T tokens of one sequence."""
        before = rows.shape[0] - q.shape[0]
        if before < 0:
            raise ShapeError(f"mla: q {tuple(q.shape)}, rows {tuple(rows.shape)}")
        return _run(q, kv_b, latents, rows, 0, 0, before + 1, scale)


def _run(
    q: torch.Tensor,
    kv_b: torch.Tensor,
    latents: torch.Tensor,
    rows: torch.Tensor,
    rows_stride: int,
    lengths: int,
    first: int,
    scale: float,
) -> torch.Tensor:
    """Query n sees as many rows as ``lengths`` (an address) say, or ``first + n`` without it."""
    latent, nope, shared = check_shapes(q, kv_b, latents)
    (queries, heads, _), value = q.shape, kv_b.shape[1] - nope
    assert kv_b.is_contiguous()
    q = q.flatten(1)
    out = torch.empty(queries, heads, value)
    _attend(
        *(address(q), q.stride(0), queries, heads, nope, shared, value, latent, address(kv_b)),
        *(address(latents), latents.stride(0), address(rows, torch.int64), rows_stride),
        *(rows.shape[-1], lengths, first, float(scale), out.data_ptr()),
    )
    return out


@njit(cache=True, nogil=True, fastmath=EXACT, error_model="numpy")
def _attend(
    q: int,
    q_stride: int,
    queries: int,
    heads: int,
    nope: int,
    shared: int,
    value: int,
    latent: int,
    kv_b: int,
    latents: int,
    latents_stride: int,
    rows: int,
    rows_stride: int,
    rows_count: int,
    lengths: int,
    first: int,
    scale: float,
    out: int,
) -> None:
    width = latent + shared
    query = np.empty((heads, width), np.float32)
    mixed = np.empty((heads, latent), np.float32)
    scores = np.empty((heads, rows_count), np.float32)
    counts = ints(lengths, queries)
    for n in range(queries):
        length = counts[n] if lengths != 0 else first + n
        own = ints(rows + 8 * n * rows_stride, rows_count)[:length]
        for h in range(heads):
            given = floats(q + 4 * (n * q_stride + h * (nope + shared)), nope + shared)
            keys = kv_b + 4 * h * (nope + value) * latent
            _absorb(given, keys, np.float32(scale), nope, latent, query[h])
            _scores(query[h], latents, latents_stride, own, scores[h])
            _mix(scores[h], latents, latents_stride, own, mixed[h])
            to = floats(out + 4 * (n * heads + h) * value, value)
            for v in range(value):
                to[v] = dot(floats(keys + 4 * (nope + v) * latent, latent), mixed[h])


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
