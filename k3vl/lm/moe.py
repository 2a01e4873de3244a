"""The latent mixture of experts.

Route on the full width, project down, run the chosen experts in the latent, sum, norm, project up,
add the shared experts. Without a latent (Kimi-Linear) the projections are the identity.
Source: Kimi K3 report, Stable LatentMoE; ``modeling_kimi_linear.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from k3vl.kernels.moe.latent import MoEWeights
from k3vl.lm.layers import GatedMLP, RMSNorm
from k3vl.parameters import linear, parameter

if TYPE_CHECKING:
    import torch

    from k3vl.config import TextConfig
    from k3vl.kernels.choice import Kernels
    from k3vl.kernels.situ import GatedActivation


class LatentMoE(nn.Module):
    """One MoE layer. The router is float32 whatever the model's dtype."""

    def __init__(
        self,
        config: TextConfig,
        activation: GatedActivation,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate uninitialised weights."""
        super().__init__()
        d, latent, inner = (
            config.hidden_size,
            config.expert_hidden_size,
            config.moe_intermediate_size,
        )
        experts = config.num_experts
        has_latent = config.routed_expert_hidden_size is not None
        self.kernels = kernels
        self.router = parameter(experts, d, device=device)
        self.router_bias = parameter(experts, device=device)
        self.latent_down = linear(d, latent, dtype, device) if has_latent else None
        self.w13 = parameter(experts, 2 * inner, latent, dtype=dtype, device=device)
        self.w2 = parameter(experts, latent, inner, dtype=dtype, device=device)
        self.latent_norm = (
            RMSNorm(latent, config.rms_norm_eps, kernels, dtype=dtype, device=device)
            if config.latent_moe_use_norm
            else None
        )
        self.latent_up = linear(latent, d, dtype, device) if has_latent else None
        self.shared = GatedMLP(
            d, config.shared_intermediate_size, activation, kernels, dtype=dtype, device=device
        )
        self.weights = MoEWeights(
            router=self.router,
            router_bias=self.router_bias,
            down=None if self.latent_down is None else self.latent_down.weight,
            w13=self.w13,
            w2=self.w2,
            norm=None if self.latent_norm is None else self.latent_norm.weight,
            up=None if self.latent_up is None else self.latent_up.weight,
            shared_gate_up=self.shared.gate_up.weight,
            shared_down=self.shared.down.weight,
            activation=activation,
            top_k=config.num_experts_per_token,
            renormalise=config.moe_renormalize,
            scale=config.routed_scaling_factor,
            eps=config.rms_norm_eps,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, D] -> [N, D]."""
        return self.kernels.latent_moe(x, self.weights)
