"""The latent mixture of experts on a CPU, in one call.

Rows of one expert go through its matrices together, so weights are read once; a row's sum over its
experts is taken in the order of the experts, whoever else chose them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import njit

from k3vl.kernels.compiled import EXACT, address, alive, compiled, floats, product, sigmoid
from k3vl.kernels.gated_mlp.cpu import gated_mlp_rows
from k3vl.kernels.moe.latent import check_shapes
from k3vl.kernels.rms_norm.cpu import normalise
from k3vl.kernels.situ import caps

if TYPE_CHECKING:
    from k3vl.kernels.moe.experts import FloatExperts
    from k3vl.kernels.moe.latent import MoEWeights


def latent_moe_cpu(x: torch.Tensor, weights: MoEWeights[FloatExperts]) -> torch.Tensor:
    """See :class:`k3vl.kernels.moe.latent.LatentMoEOp`."""
    w = weights
    check_shapes(x, w)
    (experts, double, latent), (rows, width) = w.experts.w13.shape, x.shape
    assert w.experts.w13.is_contiguous()
    assert w.experts.w2.is_contiguous()
    out = torch.empty(rows, width)
    _latent_moe(
        *(address(x), x.stride(0), rows, width, address(w.router), address(w.router_bias)),
        *(experts, w.top_k, w.renormalise, float(w.scale)),
        *(0 if w.down is None else address(w.down), latent),
        *(address(w.experts.w13), address(w.experts.w2)),
        *(double // 2, 0 if w.norm is None else address(w.norm), float(w.eps)),
        *(0 if w.up is None else address(w.up), address(w.shared_gate_up)),
        *(address(w.shared_down), w.shared_down.shape[1], *caps(w.activation)),
        out.data_ptr(),
    )
    return out


@compiled
def _latent_moe(
    x: int,
    x_stride: int,
    rows: int,
    width: int,
    router: int,
    router_bias: int,
    experts: int,
    top_k: int,
    renormalise: bool,
    scale: float,
    down: int,
    latent: int,
    w13: int,
    w2: int,
    inner: int,
    norm: int,
    eps: float,
    up: int,
    shared_gate_up: int,
    shared_down: int,
    shared: int,
    beta: float,
    linear_beta: float,
    out: int,
) -> None:
    logits = np.empty((rows, experts), np.float32)
    product(x, x_stride, rows, router, width, experts, logits.ctypes.data, experts)
    shares = _route(logits, floats(router_bias, experts), top_k, renormalise, np.float32(scale))

    inputs, stride = x, x_stride
    projected = np.empty((rows if down != 0 else 0, latent), np.float32)
    if down != 0:
        inputs, stride = projected.ctypes.data, latent
        product(x, x_stride, rows, down, width, latent, inputs, latent)
    total = np.zeros((rows, latent), np.float32)
    for e in range(experts):
        matrices = w13 + 4 * e * 2 * inner * latent, w2 + 4 * e * latent * inner
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
        product(total.ctypes.data, latent, rows, up, latent, width, routed.ctypes.data, width)
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
