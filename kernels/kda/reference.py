"""Kimi Delta Attention in plain PyTorch, from the projections to the gated output norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from k3vl.kernels.gated_norm.reference import gated_norm_reference
from k3vl.kernels.kda.delta_rule import delta_rule_chunk, delta_rule_recurrent, delta_rule_step
from k3vl.kernels.short_conv.reference import short_conv_reference

if TYPE_CHECKING:
    from k3vl.kernels.kda import KDAWeights


def kda_decode_reference(
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
    real = cells[:, 0] >= 0
    if not real.all():
        inputs = (qkv[real], gate[real], decay[real], write[real])
        out = kda_decode_reference(*inputs, weights, windows, states, cells[real])
        return torch.zeros_like(gate).index_copy_(0, real.nonzero().squeeze(1), out)
    starts = torch.arange(qkv.shape[0] + 1, device=qkv.device)
    q, k, v, g, beta = _inputs(qkv, decay, write, weights, windows, cells, starts, starts[1:])
    state = states[cells]  # a copy [B, H, K, V], so the step may work in place
    out = delta_rule_step(q, k, v, g, beta, state)
    states[cells] = state
    return gated_norm_reference(out, gate, weights.o_norm, weights.eps)


def kda_prefill_reference(
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
    inputs = _inputs(qkv, decay, write, weights, windows, cells, cu_seqlens, ends)
    begins, counts = cu_seqlens[:-1], ends - cu_seqlens[:-1]
    offsets = torch.arange(max(1, int(counts.max())), device=qkv.device)
    real = offsets < counts.unsqueeze(1)  # [S, T]
    rows = torch.where(real, begins.unsqueeze(1) + offsets, qkv.shape[0])
    # [S, T, ...]; a row behind the packed ones is zero.
    q, k, v, g, beta = (F.pad(x, (0, 0) * (x.dim() - 1) + (0, 1))[rows] for x in inputs)
    # Without the bound a 16-token tile can overflow; the recurrence cannot.
    rule = delta_rule_recurrent if weights.lower_bound is None else delta_rule_chunk
    out, states[cells] = rule(q, k, v, g, beta, states[cells])
    normed = gated_norm_reference(out[real], gate[rows[real]], weights.o_norm, weights.eps)
    return torch.zeros_like(gate).index_copy_(0, rows[real], normed)


def kda_decay(
    logits: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """Turn decay logits [N, H K] into the natural logarithm of the decay, [N, H, K] below 0.

    K3: ``lower_bound * sigmoid(exp(a_log) (logits + dt_bias))``, bounded and smooth, not a clamp.
    Kimi-Linear (``lower_bound`` None): ``-exp(a_log) softplus(logits + dt_bias)``.
    """
    heads = a_log.shape[0]
    shifted = (logits.float() + dt_bias).unflatten(-1, (heads, -1))
    rate = a_log.exp().unsqueeze(-1)  # [H, 1]
    if lower_bound is None:
        return -rate * F.softplus(shifted)
    return lower_bound * torch.sigmoid(rate * shifted)


def _inputs(
    qkv: torch.Tensor,
    decay: torch.Tensor,
    write: torch.Tensor,
    weights: KDAWeights,
    windows: torch.Tensor,
    cells: torch.Tensor,
    cu_seqlens: torch.Tensor,
    ends: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """q, k, v, g [N, H, K] and beta [N, H] of the delta rule; the windows advance."""
    heads = cells.shape[1]
    carried = windows[cells].permute(0, 2, 3, 1, 4)  # [S, W-1, 3, H, K]
    convolved, tails = short_conv_reference(qkv, weights.conv, carried.flatten(2), cu_seqlens, ends)
    windows[cells] = tails.view(carried.shape).permute(0, 3, 1, 2, 4)
    q, k, v = convolved.unflatten(-1, (3, heads, -1)).unbind(1)
    q, k = _l2_normalise(q) * q.shape[-1] ** -0.5, _l2_normalise(k)
    g = kda_decay(decay, weights.a_log, weights.dt_bias, weights.lower_bound)
    return q, k, v, g, torch.sigmoid(write.float())


def _l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """Unit length over the last axis; the epsilon is inside the root and on the sum."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
