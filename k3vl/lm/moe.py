"""The latent mixture of experts.

Route on the full width, project down, run the chosen experts in the latent, sum, norm, project up,
add the shared experts. Without a latent (Kimi-Linear) the projections are the identity.
Source: Kimi K3 report, Stable LatentMoE; ``modeling_kimi_linear.py``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from k3vl.kernels.moe.experts import Experts, FloatExperts
from k3vl.kernels.moe.latent import MoEWeights
from k3vl.kernels.moe.mxfp4 import Mxfp4Experts
from k3vl.lm.layers import GatedMLP, RMSNorm
from k3vl.parameters import linear, parameter

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from k3vl.config import TextConfig
    from k3vl.kernels.choice import Kernels
    from k3vl.kernels.moe.experts import ExpertForm
    from k3vl.kernels.situ import GatedActivation

_E = TypeVar("_E", bound=Experts)


class LatentMoE(nn.Module):
    """One MoE layer. The router is float32 whatever the model's dtype.

    Attributes:
        experts: the routed ones. Packed ones are buffers, not parameters: nothing can train them.
    """

    def __init__(
        self,
        config: TextConfig,
        activation: GatedActivation,
        kernels: Kernels,
        *,
        form: ExpertForm = "float",
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate uninitialised weights, the routed experts' in the form that is asked for."""
        super().__init__()
        d, latent = config.hidden_size, config.expert_hidden_size
        has_latent = config.routed_expert_hidden_size is not None
        self.router = parameter(config.num_experts, d, device=device)
        self.router_bias = parameter(config.num_experts, device=device)
        self.latent_down = linear(d, latent, dtype, device) if has_latent else None
        self.latent_norm = (
            RMSNorm(latent, config.rms_norm_eps, kernels, dtype=dtype, device=device)
            if config.latent_moe_use_norm
            else None
        )
        self.latent_up = linear(latent, d, dtype, device) if has_latent else None
        self.shared = GatedMLP(
            d, config.shared_intermediate_size, activation, kernels, dtype=dtype, device=device
        )
        self.experts: FloatExperts | Mxfp4Experts
        self.run: Callable[[torch.Tensor], torch.Tensor]
        if form == "float":
            floats = self._float_experts(config, dtype, device)
            self.experts = floats
            self.run = partial(
                kernels.latent_moe, weights=self._weights(config, activation, floats)
            )
        else:
            assert kernels.latent_moe_mxfp4 is not None
            packed = self._packed_experts(config, device)
            self.experts = packed
            self.run = partial(
                kernels.latent_moe_mxfp4, weights=self._weights(config, activation, packed)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, D] -> [N, D]."""
        return self.run(x)

    def _float_experts(
        self, config: TextConfig, dtype: torch.dtype, device: torch.device
    ) -> FloatExperts:
        count, latent = config.num_experts, config.expert_hidden_size
        inner = config.moe_intermediate_size
        self.w13 = parameter(count, 2 * inner, latent, dtype=dtype, device=device)
        self.w2 = parameter(count, latent, inner, dtype=dtype, device=device)
        return FloatExperts(w13=self.w13, w2=self.w2)

    def _packed_experts(self, config: TextConfig, device: torch.device) -> Mxfp4Experts:
        packed = Mxfp4Experts.empty(
            config.num_experts, config.expert_hidden_size, config.moe_intermediate_size, device
        )
        for name in ("w13", "w13_scale", "w2", "w2_scale"):
            self.register_buffer(name, getattr(packed, name))
        return packed

    def _weights(
        self, config: TextConfig, activation: GatedActivation, experts: _E
    ) -> MoEWeights[_E]:
        return MoEWeights(
            router=self.router,
            router_bias=self.router_bias,
            down=None if self.latent_down is None else self.latent_down.weight,
            experts=experts,
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
