"""The latent mixture of experts.

Route on the full width, project down, run the chosen experts in the latent, sum, norm, project up,
add the shared experts. Without a latent (Kimi-Linear) the projections are the identity.
Source: Kimi K3 report, Stable LatentMoE; ``modeling_kimi_linear.py``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from k3vl.kernels.moe.experts import CodedExperts, Experts, FloatExperts
from k3vl.kernels.moe.latent import MoEWeights
from k3vl.kernels.moe.mxfp4 import Mxfp4Experts
from k3vl.kernels.weight import AsAllocated, as_rows
from k3vl.lm.layers import GatedMLP, RMSNorm
from k3vl.parameters import linear, parameter

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.config import TextConfig
    from k3vl.kernels.choice import Kernels
    from k3vl.kernels.moe.experts import ExpertForm
    from k3vl.kernels.situ import GatedActivation
    from k3vl.kernels.weight import Storage

_E = TypeVar("_E", bound=Experts)


class LatentMoE(nn.Module):
    """One MoE layer. The router's products are summed in float32 whatever the model's dtype.

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
        router: torch.dtype = torch.float32,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate uninitialised weights, the routed experts' in the form that is asked for."""
        super().__init__()
        d, latent = config.hidden_size, config.expert_hidden_size
        has_latent = config.routed_expert_hidden_size is not None
        self.router = parameter(config.num_experts, d, dtype=router, device=device)
        self.router_bias = parameter(config.num_experts, device=device)
        self.latent_down = linear(d, latent, dtype, device) if has_latent else None
        self.latent_norm = (
            RMSNorm(latent, config.rms_norm_eps, dtype=dtype, device=device)
            if config.latent_moe_use_norm
            else None
        )
        self.latent_up = linear(latent, d, dtype, device) if has_latent else None
        self.shared = GatedMLP(
            d, config.shared_intermediate_size, activation, kernels, dtype=dtype, device=device
        )
        self.config, self.activation, self.kernels = config, activation, kernels
        self.experts: FloatExperts | Mxfp4Experts = (
            self._float_experts(config, dtype, device)
            if form == "float"
            else self._packed_experts(config, device)
        )
        self.run: Callable[..., torch.Tensor]
        self.bind(AsAllocated())

    def bind(self, storage: Storage) -> None:
        """Gather what the op reads; ``storage`` tells how matrices lie in memory."""
        ops = self.kernels
        if isinstance(self.experts, Mxfp4Experts):
            assert ops.latent_moe_mxfp4 is not None
            packed = self._weights(storage, self.experts)
            self.run = partial(ops.latent_moe_mxfp4, weights=packed)
            return
        w13, w2 = storage.matrices(self.w13), storage.matrices(self.w2)
        if isinstance(w13, torch.Tensor) and isinstance(w2, torch.Tensor):
            floats = self._weights(storage, self.experts)
            self.run = partial(ops.latent_moe, weights=floats)
            return
        assert ops.latent_moe_coded is not None
        coded = CodedExperts(w13=tuple(map(as_rows, w13)), w2=tuple(map(as_rows, w2)))
        self.run = partial(ops.latent_moe_coded, weights=self._weights(storage, coded))

    def forward(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        """[N, D] -> [N, D]; added to ``onto``, which is then what is returned."""
        return self.run(x, onto=onto)

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

    def _weights(self, storage: Storage, experts: _E) -> MoEWeights[_E]:
        config, down, up = self.config, self.latent_down, self.latent_up
        return MoEWeights(
            router=self.router,
            router_bias=self.router_bias,
            down=None if down is None else storage.matrix(down.weight),
            experts=experts,
            norm=None if self.latent_norm is None else self.latent_norm.weight,
            up=None if up is None else storage.matrix(up.weight),
            shared_gate_up=storage.matrix(self.shared.gate_up.weight),
            shared_down=storage.matrix(self.shared.down.weight),
            activation=self.activation,
            top_k=config.num_experts_per_token,
            renormalise=config.moe_renormalize,
            scale=config.routed_scaling_factor,
            eps=config.rms_norm_eps,
        )
