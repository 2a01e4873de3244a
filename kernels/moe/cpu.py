"""The latent mixture of experts on a CPU, in one call.

Rows of one expert go through its matrices together, so weights are read once; a row's sum over its
experts is taken in the order of the experts, whoever else chose them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numba import njit

from k3vl.kernels.compiled import EXACT, address, alive, compiled, doubles, floats, ints, sigmoid
from k3vl.kernels.gated_mlp.cpu import gated_mlp_rows
from k3vl.kernels.linear import added
from k3vl.kernels.moe.latent import check_shapes
from k3vl.kernels.product import Table, Tables, matrices, matrix, product
from k3vl.kernels.rms_norm.cpu import normalise
from k3vl.kernels.situ import caps

if TYPE_CHECKING:
    from k3vl.kernels.moe.experts import CodedExperts, FloatExperts
    from k3vl.kernels.moe.latent import MoEWeights

    CPUMoEWeights: TypeAlias = MoEWeights[FloatExperts | CodedExperts]


class LatentMoECPU:
    """See :class:`k3vl.kernels.moe.latent.LatentMoEOp`."""

    def __init__(self) -> None:
        """Nothing is known of any weight yet."""
        self._tables: Tables[CPUMoEWeights] = Tables(_table)

    def __call__(
        self, x: torch.Tensor, weights: CPUMoEWeights, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[N, D] -> [N, D]."""
        where, (rows, width) = self._tables(weights).address, x.shape
        if width != weights.router.shape[1]:
            check_shapes(x, weights)  # which refuses
        out = torch.empty(rows, width)
        _latent_moe(address(x), x.stride(0), rows, where, out.data_ptr())
        return added(out, onto)


def _table(weights: CPUMoEWeights) -> Table:
    w = weights
    check_shapes(w.router, w)  # rows as wide as the model
    w13, w2 = tuple(w.experts.w13), tuple(w.experts.w2)
    return Table(
        *(w.router.shape[1], len(w13), w.top_k, int(w.renormalise), float(w.scale)),
        *(matrix(w.router), w.router_bias, w.down if w.down is None else matrix(w.down)),
        *(w13[0].shape[1], matrices(w13), matrices(w2), w2[0].shape[1], w.norm, float(w.eps)),
        *(w.up if w.up is None else matrix(w.up), matrix(w.shared_gate_up)),
        *(matrix(w.shared_down), w.shared_down.shape[1], *caps(w.activation)),
    )


@compiled
def _latent_moe(x: int, x_stride: int, rows: int, table: int, out: int) -> None:
    w, numbers = ints(table, 20), doubles(table, 20)
    width, experts, top_k, renormalise, scale = w[0], w[1], w[2], w[3] != 0, numbers[4]
    router, router_bias, down, latent, w13, w2, inner = w[5], w[6], w[7], w[8], w[9], w[10], w[11]
    norm, eps, up, shared_gate_up, shared_down, shared = (
        w[12],
        numbers[13],
        w[14],
        w[15],
        w[16],
        w[17],
    )
    beta, linear_beta = numbers[18], numbers[19]

    logits = np.empty((rows, experts), np.float32)
    product(x, x_stride, rows, router, logits.ctypes.data, experts)
    shares = _route(logits, floats(router_bias, experts), top_k, renormalise, np.float32(scale))

    inputs, stride = x, x_stride
    projected = np.empty((rows if down != 0 else 0, latent), np.float32)
    if down != 0:
        inputs, stride = projected.ctypes.data, latent
        product(x, x_stride, rows, down, inputs, latent)
    total = np.zeros((rows, latent), np.float32)
    for e in range(experts):
        matrices = ints(w13, experts)[e], ints(w2, experts)[e]
        _expert(inputs, stride, shares[:, e], matrices, inner, beta, linear_beta, total)
    if norm != 0:
        for r in range(rows):
            where = total.ctypes.data + 4 * r * latent
            normalise(where, floats(norm, latent), np.float32(eps), where)

    gated_mlp_rows(
        x, x_stride, rows, shared_gate_up, shared_down, shared, width, out, beta, linear_beta
    )
    routed = total
    if up != 0:
        routed = np.empty((rows, width), np.float32)
        product(total.ctypes.data, latent, rows, up, routed.ctypes.data, width)
    for r in range(rows):
        to = floats(out + 4 * r * width, width)
        for i in range(width):
            to[i] += routed[r, i]
    alive(logits, projected, total)


@njit(fastmath=EXACT, error_model="numpy")
def _route(
    logits: np.ndarray, bias: np.ndarray, top_k: int, renormalise: bool, scale: np.float32
) -> np.ndarray:
    """Every expert's weight for every row, [N, E]; below zero where it was not chosen.

    Ties go to the lower expert.
    """
    rows, experts = logits.shape
    shares = np.full((rows, experts), np.float32(-1))
    scores = np.empty(experts, np.float32)
    for r in range(rows):
        for e in range(experts):
            scores[e] = sigmoid(logits[r, e])
        total = np.float32(0)
        for _ in range(top_k):
            best = -1
            for e in range(experts):
                free = shares[r, e] < 0
                if free and (best < 0 or scores[e] + bias[e] > scores[best] + bias[best]):
                    best = e
            shares[r, best] = scores[best]
            total += scores[best]
        factor = scale / (total + np.float32(1e-20)) if renormalise else scale
        for e in range(experts):
            if shares[r, e] >= 0:
                shares[r, e] *= factor
    return shares


@njit(fastmath=EXACT, error_model="numpy")
def _expert(
    x: int,
    x_stride: int,
    shares: np.ndarray,
    matrices: tuple[int, int],
    inner: int,
    beta: float,
    linear_beta: float,
    total: np.ndarray,
) -> None:
    """Add one expert's share of the rows that chose it."""
    latent = total.shape[1]
    chosen = np.empty(total.shape[0], np.int64)
    count = 0
    for r in range(total.shape[0]):
        if not shares[r] < 0:  # also where the row is not a number
            chosen[count] = r
            count += 1
    if count == 0:
        return
    inputs = np.empty((count, latent), np.float32)
    outputs = np.empty((count, latent), np.float32)
    for i in range(count):
        inputs[i] = floats(x + 4 * chosen[i] * x_stride, latent)
    gated_mlp_rows(
        *(inputs.ctypes.data, latent, count, matrices[0], matrices[1], inner, latent),
        *(outputs.ctypes.data, beta, linear_beta),
    )
    for i in range(count):
        for c in range(latent):
            total[chosen[i], c] += shares[chosen[i]] * outputs[i, c]
    alive(inputs)
