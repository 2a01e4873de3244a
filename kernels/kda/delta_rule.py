"""The delta rule in plain PyTorch: the recurrence that defines it, and its chunked form.

One head, one token, state ``S`` in R^{K x V}, decay ``a = exp(g)`` per key channel::

    S <- Diag(a) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q

The error is taken against the state *after* the decay, and the output reads it *after* the write.

The chunked form works on tiles of 16 tokens. With G the running sum of g inside a tile::

    A_ij = beta_i sum_d k_i k_j exp(G_i - G_j)   for j < i
    T    = (I + A)^-1,   U = T (beta V),   W = T (beta K exp(G))
    X    = U - W S
    O    = (Q exp(G)) S + tril(sum_d q_i k_j exp(G_i - G_j)) X
    S   <- Diag(exp(G_last)) S + (K exp(G_last - G))^T X

``exp(G_i - G_j)`` is split into ``exp(G_i) exp(-G_j)``. That is safe in float32 because the bounded
gate keeps ``g > -5``, so ``|G| < 80`` over 16 tokens; it is the reason for the bound.

Source: Kimi Linear report (delta rule with per-channel decay), Kimi K3 report section 2.1.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

TILE = 16


def delta_rule_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, token by token, over whole sequences; right for any decay.

    Sequences are padded to a common length; a padded token has ``k``, ``g`` and ``beta`` zero and
    then leaves the state alone.

    Args:
        q, k: [B, T, H, K] float32, L2-normalised over K; q scaled by K^-1/2.
        v: [B, T, H, V] float32.
        g: [B, T, H, K] float32, natural logarithm of the decay.
        beta: [B, T, H] float32 in (0, 1).
        state: [B, H, K, V] float32; not modified.

    Returns:
        Outputs [B, T, H, V] and the state after the last token [B, H, K, V], both float32.
    """
    state = state.clone()
    steps = (
        delta_rule_step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        for t in range(q.shape[1])
    )
    return torch.stack(list(steps), dim=1), state


def delta_rule_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """One token: q, k, g [B, H, K], v [B, H, V], beta [B, H] -> o [B, H, V].

    ``state`` [B, H, K, V] is advanced in place.
    """
    state.mul_(g.exp().unsqueeze(-1))
    # Both reads of the decayed state in one product: S^T k for the error, S^T q for the output.
    reads = torch.stack([k, q], dim=-2) @ state  # [B, H, 2, V]
    u = beta.unsqueeze(-1) * (v - reads[..., 0, :])
    state.addcmul_(k.unsqueeze(-1), u.unsqueeze(-2))
    return reads[..., 1, :] + (q * k).sum(-1, keepdim=True) * u


def delta_rule_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`delta_rule_recurrent`, a tile of 16 tokens at a time; ``g`` must be above -5."""
    length = q.shape[1]
    pad = -length % TILE
    # A padded token neither decays (g = 0) nor writes (beta = 0, k = 0).
    q, k, v, g = (_tiles(F.pad(x, (0, 0, 0, 0, 0, pad))) for x in (q, k, v, g))
    beta = _tiles(F.pad(beta, (0, 0, 0, pad)).unsqueeze(-1))  # [B, H, tiles, 16, 1]

    total = g.cumsum(-2)
    up, down = total.exp(), (-total).exp()
    last = total[..., -1:, :]
    k_up, k_down, q_up = k * up, k * down, q * up
    mix = torch.tril(beta * (k_up @ k_down.mT), -1)
    eye = torch.eye(TILE, dtype=mix.dtype, device=mix.device)
    solved = torch.linalg.solve_triangular(
        mix + eye, torch.cat([beta * v, beta * k_up], dim=-1), upper=False, unitriangular=True
    )
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = torch.tril(q_up @ k_down.mT)
    k_last, decay = (k * (last - total).exp()).mT, last.exp().mT  # [.., K, 16], [.., K, 1]

    outputs = []
    for i in range(q.shape[2]):
        x = u[:, :, i] - w[:, :, i] @ state
        outputs.append(q_up[:, :, i] @ state + scores[:, :, i] @ x)
        state = decay[:, :, i] * state + k_last[:, :, i] @ x
    return torch.cat(outputs, dim=2).transpose(1, 2)[:, :length], state


def _tiles(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] -> [B, H, T / 16, 16, D]."""
    return x.transpose(1, 2).unflatten(2, (-1, TILE))
