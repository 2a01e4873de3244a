"""Which implementation of every op a model runs: one value, chosen once when it is made.

A model gets a :class:`Kernels` and calls its fields; it never asks what hardware it is on. Every
implementation keeps the contract of the op's public function, which runs the reference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from k3vl.kernels.argmax import argmax
from k3vl.kernels.attn_residual import AttnResidualOp, attn_residual
from k3vl.kernels.gated_mlp import ComposedGatedMLP, glu_linear
from k3vl.kernels.kda import kda_decode, kda_prefill
from k3vl.kernels.kda.layer import ComposedKDA
from k3vl.kernels.linear import linear
from k3vl.kernels.mla import (
    mla_absorb,
    mla_decode,
    mla_gate,
    mla_prefill,
    mla_prefill_latent,
    mla_store,
    mla_values,
)
from k3vl.kernels.mla.layer import ComposedMLA, ComposedMLALayer
from k3vl.kernels.moe import moe_experts, moe_front, route
from k3vl.kernels.moe.latent import ComposedLatentMoE
from k3vl.kernels.rms_norm import rms_norm
from k3vl.kernels.vision import REFERENCE, VisionKernels, cpu_vision, triton_vision

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.kernels.gated_mlp import GatedMLPOp
    from k3vl.kernels.kda.layer import KDADecode, KDALayerOp, KDAPrefill
    from k3vl.kernels.linear import LinearOp
    from k3vl.kernels.mla.layer import (
        AbsorbOp,
        DecodeOp,
        GateOp,
        MLALayerOp,
        PrefillLatentOp,
        PrefillOp,
        StoreOp,
        ValuesOp,
    )
    from k3vl.kernels.moe.experts import CodedExperts, FloatExperts
    from k3vl.kernels.moe.latent import ExpertsOp, FrontOp, LatentMoEOp, RouteOp
    from k3vl.kernels.moe.mxfp4 import Mxfp4Experts
    from k3vl.kernels.situ import GatedActivation
    from k3vl.kernels.weight import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One implementation of every op that the language model calls.

    Attributes:
        name: ``reference``, or what the implementation is written for.
        reason: why it was chosen, as a clause that follows "because".
        row_independent: no row of any result depends, to the last bit, on the rows beside it or on
            how a sequence is cut into passes.
        linear: projections (:mod:`k3vl.kernels.linear`).
        rms_norm: :mod:`k3vl.kernels.rms_norm`.
        attn_residual: mixture over depth (:mod:`k3vl.kernels.attn_residual`).
        kda: layers of Kimi Delta Attention (:mod:`k3vl.kernels.kda.layer`).
        mla: layers of latent attention (:mod:`k3vl.kernels.mla.layer`).
        latent_moe: mixture of experts (:mod:`k3vl.kernels.moe.latent`).
        latent_moe_coded: the same where products read 8-bit weights as checkpoints store them
            (:mod:`k3vl.kernels.weight`); None: they are decoded where a model is loaded.
        latent_moe_mxfp4: the same over experts that stay in 4 bits; None: they are decoded where
            a model is loaded.
        gated_mlp: dense layers (:mod:`k3vl.kernels.gated_mlp`).
        head: from hidden states to logits; None: as ``linear``.
        argmax: of logits (:mod:`k3vl.kernels.argmax`).
        vision: of the tower.
        recordable: nothing that decodes waits for the device or reads its values on the host, and
            padding rows are skipped, so that a CUDA graph can hold a step.
    """

    name: str
    reason: str
    row_independent: bool
    linear: LinearOp
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    attn_residual: AttnResidualOp
    kda: KDALayerOp
    mla: MLALayerOp
    latent_moe: LatentMoEOp[FloatExperts]
    latent_moe_coded: LatentMoEOp[CodedExperts] | None
    latent_moe_mxfp4: LatentMoEOp[Mxfp4Experts] | None
    gated_mlp: GatedMLPOp
    head: LinearOp | None = None
    argmax: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] = argmax
    vision: VisionKernels = REFERENCE
    recordable: bool = False

    @property
    def keeps_codes(self) -> bool:
        """Whether 8-bit weights are read as they are stored."""
        return self.latent_moe_coded is not None

    @property
    def kept(self) -> frozenset[str]:
        """Encodings of a checkpoint that a model keeps in memory; others are decoded at load."""
        return frozenset() if self.latent_moe_mxfp4 is None else frozenset({"mxfp4"})


def composed_kernels(
    *,
    name: str,
    reason: str,
    kda_decode: KDADecode,
    kda_prefill: KDAPrefill,
    mla_absorb: AbsorbOp,
    mla_decode: DecodeOp,
    mla_prefill: PrefillOp,
    mla_prefill_latent: PrefillLatentOp,
    mla_store: StoreOp,
    mla_values: ValuesOp,
    mla_gate: GateOp,
    attn_residual: AttnResidualOp,
    moe_front: FrontOp,
    route: RouteOp,
    moe_experts: ExpertsOp[FloatExperts],
    moe_experts_mxfp4: ExpertsOp[Mxfp4Experts],
    linear: LinearOp,
    glu_linear: Callable[[torch.Tensor, Weight, GatedActivation], torch.Tensor],
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
    mla_layer: type[ComposedMLALayer] = ComposedMLALayer,
) -> Kernels:
    """Whole layers from smaller ops."""
    gated_mlp = ComposedGatedMLP(glu_linear, linear)

    def latent_moe(experts: ExpertsOp[Any]) -> LatentMoEOp[Any]:
        return ComposedLatentMoE(
            front=moe_front, route=route, moe_experts=experts, gated_mlp=gated_mlp, linear=linear
        )

    return Kernels(
        name=name,
        reason=reason,
        row_independent=False,
        linear=linear,
        rms_norm=rms_norm,
        attn_residual=attn_residual,
        kda=ComposedKDA(linear=linear, kda_decode=kda_decode, kda_prefill=kda_prefill),
        mla=mla_layer(
            linear=linear,
            rms_norm=rms_norm,
            attend=ComposedMLA(
                mla_absorb=mla_absorb,
                mla_decode=mla_decode,
                mla_prefill=mla_prefill,
                mla_prefill_latent=mla_prefill_latent,
                mla_store=mla_store,
                mla_values=mla_values,
                mla_gate=mla_gate,
            ),
        ),
        latent_moe=latent_moe(moe_experts),
        latent_moe_coded=None,
        latent_moe_mxfp4=latent_moe(moe_experts_mxfp4),
        gated_mlp=gated_mlp,
    )


def reference_kernels(reason: str) -> Kernels:
    """Plain PyTorch: runs everywhere, and is what the others are tested against."""
    return composed_kernels(
        name="reference",
        reason=reason,
        kda_decode=kda_decode,
        kda_prefill=kda_prefill,
        mla_absorb=mla_absorb,
        mla_decode=mla_decode,
        mla_prefill=mla_prefill,
        mla_prefill_latent=mla_prefill_latent,
        mla_store=mla_store,
        mla_values=mla_values,
        mla_gate=mla_gate,
        attn_residual=attn_residual,
        moe_front=moe_front,
        route=route,
        moe_experts=moe_experts,
        moe_experts_mxfp4=moe_experts,
        linear=linear,
        glu_linear=glu_linear,
        rms_norm=rms_norm,
    )


def cpu_kernels(reason: str) -> Kernels:
    """Compiled loops for float32 on one CPU thread; compiled at first use and then kept on disk."""
    from k3vl.kernels.attn_residual.cpu import attn_residual_cpu
    from k3vl.kernels.gated_mlp.cpu import GatedMLPCPU
    from k3vl.kernels.kda.cpu import KDALayerCPU
    from k3vl.kernels.linear.cpu import LinearCPU
    from k3vl.kernels.mla.cpu import MLALayerCPU
    from k3vl.kernels.moe.cpu import LatentMoECPU
    from k3vl.kernels.rms_norm.cpu import rms_norm_cpu

    latent_moe = LatentMoECPU()
    return Kernels(
        name="cpu",
        reason=reason,
        row_independent=True,
        linear=LinearCPU(),
        rms_norm=rms_norm_cpu,
        attn_residual=attn_residual_cpu,
        kda=KDALayerCPU(),
        mla=MLALayerCPU(),
        latent_moe=latent_moe,
        latent_moe_coded=latent_moe,
        latent_moe_mxfp4=None,
        gated_mlp=GatedMLPCPU(),
        vision=cpu_vision(),
    )


def triton_kernels(reason: str) -> Kernels:
    """Attention, states, mixtures and experts in Triton; plain matrix products from PyTorch."""
    from k3vl.kernels.argmax.gpu import argmax_gpu
    from k3vl.kernels.attn_residual.gpu import attn_residual
    from k3vl.kernels.kda.gpu import kda_decode, kda_prefill
    from k3vl.kernels.linear.gpu import glu_linear_gpu, linear_gpu
    from k3vl.kernels.mla.alone import MLALayerAlone
    from k3vl.kernels.mla.gpu import (
        mla_absorb,
        mla_decode,
        mla_gate,
        mla_prefill,
        mla_prefill_latent,
        mla_store,
        mla_values,
    )
    from k3vl.kernels.moe.gpu import (
        moe_experts_gpu,
        moe_experts_mxfp4_gpu,
        moe_front_gpu,
        route_gpu,
    )
    from k3vl.kernels.rms_norm.gpu import rms_norm

    language = composed_kernels(
        name="triton",
        reason=reason,
        kda_decode=kda_decode,
        kda_prefill=kda_prefill,
        mla_absorb=mla_absorb,
        mla_decode=mla_decode,
        mla_prefill=mla_prefill,
        mla_prefill_latent=mla_prefill_latent,
        mla_store=mla_store,
        mla_values=mla_values,
        mla_gate=mla_gate,
        attn_residual=attn_residual,
        moe_front=moe_front_gpu,
        route=route_gpu,
        moe_experts=moe_experts_gpu,
        moe_experts_mxfp4=moe_experts_mxfp4_gpu,
        linear=linear_gpu,
        glu_linear=glu_linear_gpu,
        rms_norm=rms_norm,
        mla_layer=MLALayerAlone,
    )
    return replace(language, vision=triton_vision(), argmax=argmax_gpu, recordable=True)


SHARED_MEMORY = 227 << 10
"""Bytes that one block of the Triton kernels may ask for; Hopper has as many."""

COMPARED = (3, 6), (3, 9)
"""The first and the last Triton with which a device has compared the kernels with their references
(docs/gpu.md): another one may make of what is right what is not, and says nothing then."""


def triton_version() -> tuple[int, ...]:
    """Of what is installed, its first two numbers."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2]))


def choose(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The implementation for models of a dtype on a device."""
    if device.type == "cpu" and dtype == torch.float32:
        if find_spec("numba") is None:
            return reference_kernels("numba, which compiles the kernels for CPUs, is not installed")
        return cpu_kernels("the model is float32 on a CPU")
    if device.type == "cuda":
        if find_spec("triton") is None:
            return reference_kernels("triton, which compiles the kernels for GPUs, is missing")
        version = triton_version()
        if not COMPARED[0] <= version <= COMPARED[1]:
            first, last, found = (".".join(map(str, x)) for x in (*COMPARED, version))
            return reference_kernels(
                f"the kernels are known to be right with Triton {first} to {last}, this is {found}"
            )
        properties: Any = torch.cuda.get_device_properties(device)  # the stubs lack the field
        memory = properties.shared_memory_per_block_optin
        if memory >= SHARED_MEMORY:
            return triton_kernels("the device has the shared memory that they are laid out for")
        return reference_kernels(
            f"a block of the device has {memory >> 10} KiB of shared memory, the kernels want "
            f"{SHARED_MEMORY >> 10}"
        )
    name = str(dtype).removeprefix("torch.")
    return reference_kernels(f"nothing else is written for {name} on {device.type}")
