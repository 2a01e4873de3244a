"""The latent mixture of experts of a single token as one chain of launches, on a GPU.

The choice of experts, one program, is part of the launch that multiplies the shared experts' gates
and ups, which takes longer. While the routed experts' outputs are added up and normalised, one
program too, the next weights come to the L2 cache. The two products that end the layer, from the
latent and from the shared experts, are one launch. And where all launches are one chain, each may
begin before the one in front of it has ended (``dependent.py``); on two streams they may not.
"""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from k3vl.kernels.linear import gpu as linear
from k3vl.kernels.moe.chain_kernel import route_and_glu_kernel
from k3vl.kernels.moe.latent import ComposedLatentMoE, E, check_shapes
from k3vl.kernels.situ import SituGLU, caps
from k3vl.kernels.weight import plain

if TYPE_CHECKING:
    from k3vl.kernels.moe.latent import MoEWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentMoEChain(ComposedLatentMoE[E]):
    """The layer as a sequence of ops; of a single token, of fewer launches."""

    def __call__(
        self, x: torch.Tensor, weights: MoEWeights[E], onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`LatentMoEOp`."""
        w = weights
        if not _takes(x, w):
            # slots: super() has no class
            return ComposedLatentMoE.__call__(self, x, w, onto)
        assert w.up is not None
        check_shapes(x, w)
        logits, latent = self.front(x, w.router, w.down)
        chosen, experts, hidden = route_and_glu(logits, x, w)
        total = self.moe_experts(latent, chosen, experts, w.experts, w.activation, w.norm, w.eps)
        return linear.row_pair(hidden, plain(w.shared_down), total, plain(w.up), onto)


def _takes(x: torch.Tensor, weights: MoEWeights[E]) -> bool:
    if weights.up is None or not linear.is_row(x, plain(weights.shared_gate_up)):
        return False
    return linear.can_stream(x.dtype, plain(weights.shared_down), plain(weights.up))


def route_and_glu(
    logits: torch.Tensor, x: torch.Tensor, weights: MoEWeights[E]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`k3vl.kernels.moe.route` and the shared experts' activation, of one token.

    Args:
        logits: [1, E] float32.
        x: [1, D].
        weights: of the layer; D is a multiple of 16.

    Returns:
        Weights [1, k] float32, experts [1, k] int64, and [1, S] in the dtype of ``x``.
    """
    w = weights
    gates, ups = plain(w.shared_gate_up).chunk(2)
    count, width = logits.shape[1], gates.shape[1]
    chosen = torch.empty(1, w.top_k, dtype=torch.float32, device=x.device)
    experts = torch.empty(1, w.top_k, dtype=torch.int64, device=x.device)
    hidden = x.new_empty(1, gates.shape[0])
    shape = linear.row_shape(width)
    route_and_glu_kernel[(1 + triton.cdiv(gates.shape[0], shape.rows),)](
        logits, w.router_bias, chosen, experts, w.scale,
        x, gates, ups, hidden, *caps(w.activation), gates.shape[0],
        E=count, K=w.top_k, KP=max(2, triton.next_power_of_2(w.top_k)), RENORMALISE=w.renormalise,
        BLOCK=max(2, triton.next_power_of_2(count)), SITU=isinstance(w.activation, SituGLU),
        D=width, **linear.launch_options(shape, x, width),
    )  # fmt: skip
    return chosen, experts, hidden
