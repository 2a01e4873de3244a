"""Multi-head latent attention in plain PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from k3vl.kernels.rms_norm.reference import rms_norm_reference


def mla_prefill_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.mla.mla_prefill`."""
    if shared is not None:
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, k.shape[1], -1)], dim=-1)
    queries, keys = q.shape[0], k.shape[0]
    mask = None
    if queries != keys:  # the first query already sees the cached prefix
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril_(keys - queries)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.transpose(0, 1),
        v.transpose(0, 1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return out.transpose(0, 1)


def mla_prefill_latent_reference(
    q: torch.Tensor,
    context: torch.Tensor,
    latent_width: int,
    scale: float,
    borders: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.mla.mla_prefill_latent`; sequence by sequence."""
    if borders is not None:
        queries, keys = (border.diff().tolist() for border in borders)
        own = zip(q.split(queries), context[: sum(keys)].split(keys), strict=True)
        return torch.cat([mla_prefill_latent_reference(*part, latent_width, scale) for part in own])
    count, heads = q.shape[:2]
    scores = (q.transpose(0, 1).flatten(0, 1) @ context.mT).float().mul_(scale)  # [H T, L]
    future = torch.ones(count, count, dtype=torch.bool, device=q.device).triu_(1)
    scores.view(heads, count, -1)[..., -count:].masked_fill_(future, float("-inf"))
    mixed = scores.softmax(-1).to(q.dtype) @ context[:, :latent_width]
    return mixed.unflatten(0, (heads, count)).transpose(0, 1)


def mla_decode_reference(
    q: torch.Tensor,
    latents: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    latent_width: int,
    scale: float,
    page: int = 1,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.mla.mla_decode`."""
    rows = token_rows(rows, page)
    context = latents[rows]  # [B, L, R + P]
    past_end = torch.arange(rows.shape[1], device=q.device) >= lengths.unsqueeze(1)  # [B, L]
    # Unused rows may hold anything: 0 x NaN would still be NaN in the product with the values.
    context = context.masked_fill(past_end.unsqueeze(-1), 0.0)
    scores = (q @ context.mT).float() * scale
    weights = scores.masked_fill(past_end.unsqueeze(1), float("-inf")).softmax(-1)
    weights = weights.masked_fill(past_end.unsqueeze(1), 0.0)  # of nothing the softmax is NaN
    return weights.to(q.dtype) @ context[..., :latent_width]


def token_rows(rows: torch.Tensor, page: int) -> torch.Tensor:
    """Where pages begin, [B, L] -> where tokens lie, [B, L page]."""
    if page == 1:
        return rows
    return (rows.unsqueeze(-1) + torch.arange(page, device=rows.device)).flatten(1)


def mla_store_reference(
    c: torch.Tensor,
    shared: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    latents: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """See :func:`k3vl.kernels.mla.mla_store`."""
    real = rows >= 0
    new = torch.cat([rms_norm_reference(c, norm_weight, eps), shared], dim=-1)
    latents[rows[real]] = new[real]


def mla_absorb_reference(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """See :func:`k3vl.kernels.mla.mla_absorb`."""
    q_nope, q_shared = q.split([keys.shape[1], q.shape[-1] - keys.shape[1]], dim=-1)
    absorbed = (q_nope.transpose(0, 1) @ keys).transpose(0, 1)
    return torch.cat([absorbed, q_shared], dim=-1)


def mla_values_reference(
    mixed: torch.Tensor, values: torch.Tensor, gate: torch.Tensor | None
) -> torch.Tensor:
    """See :func:`k3vl.kernels.mla.mla_values`."""
    out = (mixed.transpose(0, 1) @ values.mT).transpose(0, 1)
    return gated(out.flatten(1), gate)


def gated(x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """K3's output gate, element by element before the output projection; Kimi-Linear has none."""
    return x if gate is None else (x.float() * torch.sigmoid(gate.float())).to(x.dtype)
