"""The latent mixture of experts.

Route on the full width, project down, run the chosen experts in the latent, sum, norm, project up,
add the shared experts. Without a latent (Kimi-Linear) the projections are the identity.
Source: Kimi K3 report, Stable LatentMoE; ``modeling_kimi_linear.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from k3vl.lm.layers import GatedMLP, RMSNorm
from k3vl.parameters import linear, parameter

if TYPE_CHECKING:
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
        self.top_k = config.num_experts_per_token
        self.renormalise, self.scale = config.moe_renormalize, config.routed_scaling_factor
        self.activation = activation
        self.kernels = kernels
        self.router = parameter(experts, d, device=device)
        self.router_bias = parameter(experts, device=device)
        self.latent_down = linear(d, latent, dtype, device) if has_latent else nn.Identity()
        self.w13 = parameter(experts, 2 * inner, latent, dtype=dtype, device=device)
        self.w2 = parameter(experts, latent, inner, dtype=dtype, device=device)
        self.latent_norm = (
            RMSNorm(latent, config.rms_norm_eps, kernels, dtype=dtype, device=device)
            if config.latent_moe_use_norm
            else nn.Identity()
        )
        self.latent_up = linear(latent, d, dtype, device) if has_latent else nn.Identity()
        self.shared = GatedMLP(
            d, config.shared_intermediate_size, activation, kernels, dtype=dtype, device=device
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, D] -> [N, D]."""
        weights, experts = self.kernels.route(
            F.linear(x.float(), self.router),
            self.router_bias,
            self.top_k,
            renormalise=self.renormalise,
            scale=self.scale,
        )
        latent = self.latent_down(x)
        routed = self.kernels.moe_experts(
            latent, weights, experts, self.w13, self.w2, self.activation
        )
        return self.latent_up(self.latent_norm(routed)) + self.shared(x)
