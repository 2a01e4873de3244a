"""Mixture of experts: the router's choice and the chosen experts' sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional as F

from k3vl.errors import ShapeError
from k3vl.kernels.moe.reference import moe_experts_reference, route_reference
from k3vl.kernels.rms_norm import rms_norm
from k3vl.kernels.weight import plain

if TYPE_CHECKING:
    import torch

    from k3vl.kernels.moe.experts import Experts
    from k3vl.kernels.situ import GatedActivation
    from k3vl.kernels.weight import Weight


def router_logits(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """What experts are chosen by, before the sigmoid; multiplied and summed in float32.

    Args:
        x: [N, D].
        router: [E, D], as it is kept.

    Returns:
        [N, E] float32.
    """
    return F.linear(x.float(), router.float())


def moe_front(
    x: torch.Tensor, router: torch.Tensor, down: Weight | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer of experts takes of its input: logits of the choice, and the latent.

    Args:
        x: [N, D].
        router: [E, D], as it is kept.
        down: [L, D] in the dtype of ``x``; None: the latent is ``x``.

    Returns:
        [N, E] float32, as of :func:`router_logits`, and [N, L] in the dtype of ``x``.
    """
    return router_logits(x, router), x if down is None else F.linear(x, plain(down))


def route(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, *, renormalise: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by biased sigmoid scores and weigh them by the unbiased ones.

    Args:
        logits: [N, E] float32; bfloat16 logits change the choice of one token in twenty.
        bias: [E] float32, added for the choice only.
        top_k: experts a token.
        renormalise: make the weights of a token sum to one.
        scale: multiplies the weights.

    Returns:
        Weights [N, top_k] float32 and expert indices [N, top_k] int64.

    Raises:
        ShapeError: the shapes disagree or ``top_k`` exceeds E.

    Source: Kimi K3 ``modeling_kimi_linear.py`` (``noaux_tc`` with one group).
    """
    if logits.shape[-1:] != bias.shape or not 0 < top_k <= bias.shape[0]:
        raise ShapeError(
            f"route: logits {tuple(logits.shape)}, bias {tuple(bias.shape)}, top_k {top_k}"
        )
    return route_reference(logits, bias, top_k, renormalise=renormalise, scale=scale)


def moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    stored: Experts,
    activation: GatedActivation,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Sum the chosen experts' outputs, each ``w2 activation(w13 x)``, by their weights.

    Args:
        x: [N, L].
        weights: [N, k] float32.
        experts: [N, k] int64; a token's are different ones.
        stored: the layer's experts, in any form.
        activation: [N, 2 I] -> [N, I].
        norm: [L], weight of an RMSNorm of the sum; None for no norm.
        eps: of the norm.

    Returns:
        [N, L] in the dtype of ``x``; the sum is float32, and rounded before the norm.

    Raises:
        ShapeError: the shapes disagree.
    """
    check_experts(x, weights, experts, stored, norm)
    total = moe_experts_reference(x, weights, experts, stored, activation)
    return total if norm is None else rms_norm(total, norm, eps)


def check_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    stored: Experts,
    norm: torch.Tensor | None,
) -> None:
    """Refuse what does not belong together; for every implementation of the op.

    Raises:
        ShapeError: with the shapes.
    """
    agree = (
        x.shape[1:] == (stored.latent,)
        and weights.shape == experts.shape
        and weights.shape[0] == x.shape[0]
        and (norm is None or norm.shape == (stored.latent,))
    )
    if not agree:
        raise ShapeError(
            f"moe_experts: x {tuple(x.shape)}, weights {tuple(weights.shape)}, "
            f"experts {tuple(experts.shape)}, L {stored.latent}"
        )
