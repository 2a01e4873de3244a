"""Which implementation of every op a model runs: one value, chosen once when it is made.

A model gets a :class:`Kernels` and calls its fields; it never asks what hardware it is on. Every
implementation keeps the contract of the op's public function, which runs the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from k3vl.kernels.attn_residual import attn_residual
from k3vl.kernels.kda import kda_decode, kda_prefill
from k3vl.kernels.mla import mla_decode, mla_prefill, mla_prefill_latent
from k3vl.kernels.moe import moe_experts, route
from k3vl.kernels.rms_norm import rms_norm
from k3vl.kernels.situ import glu

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from k3vl.kernels.kda import KDAWeights
    from k3vl.kernels.situ import GatedActivation


class KDADecode(Protocol):
    """See :func:`k3vl.kernels.kda.kda_decode`."""

    def __call__(
        self,
        qkv: torch.Tensor,
        gate: torch.Tensor,
        decay: torch.Tensor,
        write: torch.Tensor,
        weights: KDAWeights,
        windows: torch.Tensor,
        states: torch.Tensor,
        cells: torch.Tensor,
    ) -> torch.Tensor:
        """[B, H K]."""


class KDAPrefill(Protocol):
    """See :func:`k3vl.kernels.kda.kda_prefill`."""

    def __call__(
        self,
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
        """[N, H K]."""


class MLADecode(Protocol):
    """See :func:`k3vl.kernels.mla.mla_decode`."""

    def __call__(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        latent_width: int,
        scale: float,
    ) -> torch.Tensor:
        """[B, H, R]."""


class Route(Protocol):
    """See :func:`k3vl.kernels.moe.route`."""

    def __call__(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor,
        top_k: int,
        *,
        renormalise: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and experts, [N, top_k] each."""


class MoEExperts(Protocol):
    """See :func:`k3vl.kernels.moe.moe_experts`."""

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        activation: GatedActivation,
    ) -> torch.Tensor:
        """[N, L]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One implementation of every op.

    Attributes:
        name: ``reference``, or what the implementation is written for.
        reason: why it was chosen, as a clause that follows "because".
        kda_decode, kda_prefill: Kimi Delta Attention (:mod:`k3vl.kernels.kda`).
        mla_decode, mla_prefill, mla_prefill_latent: latent attention (:mod:`k3vl.kernels.mla`).
        attn_residual: mixture over depth (:mod:`k3vl.kernels.attn_residual`).
        route, moe_experts: mixture of experts (:mod:`k3vl.kernels.moe`).
        glu: gated activation (:mod:`k3vl.kernels.situ`).
        rms_norm: :mod:`k3vl.kernels.rms_norm`.
    """

    name: str
    reason: str
    kda_decode: KDADecode
    kda_prefill: KDAPrefill
    mla_decode: MLADecode
    mla_prefill: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    mla_prefill_latent: Callable[[torch.Tensor, torch.Tensor, int, float], torch.Tensor]
    attn_residual: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    route: Route
    moe_experts: MoEExperts
    glu: Callable[[torch.Tensor, GatedActivation], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def reference_kernels(reason: str) -> Kernels:
    """Plain PyTorch: runs everywhere, and is what the others are tested against."""
    return Kernels(
        name="reference",
        reason=reason,
        kda_decode=kda_decode,
        kda_prefill=kda_prefill,
        mla_decode=mla_decode,
        mla_prefill=mla_prefill,
        mla_prefill_latent=mla_prefill_latent,
        attn_residual=attn_residual,
        route=route,
        moe_experts=moe_experts,
        glu=glu,
        rms_norm=rms_norm,
    )


def choose(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The implementation for models of a dtype on a device."""
    return reference_kernels(f"nothing else is written for {dtype} on {device.type}")
