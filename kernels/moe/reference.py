"""Mixture of experts in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.kernels.moe.experts import Experts
    from k3vl.kernels.situ import GatedActivation


def route_reference(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, *, renormalise: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`k3vl.kernels.moe.route`."""
    scores = torch.sigmoid(logits)
    experts = torch.topk(scores + bias, top_k, dim=-1, sorted=False).indices
    weights = scores.gather(-1, experts)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts


def moe_experts_reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    stored: Experts,
    activation: GatedActivation,
) -> torch.Tensor:
    """The chosen experts' sum; one pass over the experts that have tokens.

    Matrices are asked for one by one, so of packed ones a single expert is decoded at a time.
    """
    top_k = experts.shape[1]
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)  # (token, choice) pairs, expert by expert
    counts = torch.bincount(flat, minlength=stored.count).tolist()
    tokens = order // top_k
    # Only the products go expert by expert; on small models the activation's calls would dominate.
    hidden = activation(_by_expert(x[tokens], stored.gate_up, counts))
    outputs = _by_expert(hidden, stored.down, counts)
    weighed = outputs.float() * weights.flatten()[order].unsqueeze(-1)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return total.index_add_(0, tokens, weighed).to(x.dtype)


def _by_expert(
    x: torch.Tensor, matrix: Callable[[int, torch.dtype], torch.Tensor], counts: list[int]
) -> torch.Tensor:
    """Multiply consecutive groups of rows by their experts' matrices."""
    groups = x.split(counts)
    return torch.cat([F.linear(groups[e], matrix(e, x.dtype)) for e, n in enumerate(counts) if n])
