"""SGLang's router and its Marlin runner, which serves K3's MXFP4 experts on Hopper."""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from k3vl.kernels.bench.case import Work
from k3vl.kernels.bench.peers import named

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.kernels.bench.case import Peer
    from k3vl.kernels.moe.mxfp4 import Mxfp4Experts
    from k3vl.kernels.situ import SituGLU


def repacked_once(stored: Mxfp4Experts) -> Callable[[], Any]:
    """A function that brings experts into Marlin's layout at its first call, and keeps them."""
    return cache(partial(_repacked, stored))


def _repacked(stored: Mxfp4Experts) -> SimpleNamespace:
    """Two launches an expert and matrix: some seconds for a layer of K3.

    Returns:
        w13_weight, w13_weight_scale, w2_weight and w2_weight_scale, as its layers have them.
    """
    from sglang.srt.layers.quantization.marlin_utils_fp4 import prepare_moe_mxfp4_layer_for_marlin

    experts, latent, inner = stored.count, stored.latent, stored.inner

    def coded(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(experts, rows, columns, dtype=torch.uint8, device=stored.w13.device)

    layer = SimpleNamespace(
        w13_weight=coded(2 * inner, latent // 2),
        w13_weight_scale=coded(2 * inner, latent // 32),
        w2_weight=coded(latent, inner // 2),
        w2_weight_scale=coded(latent, inner // 32),
    )
    for e in range(experts):
        for part, rows in (("gate", slice(0, inner)), ("up", slice(inner, None))):
            words, scale = stored.taken(e, part)  # type: ignore[arg-type]
            layer.w13_weight[e, rows], layer.w13_weight_scale[e, rows] = words, scale
        layer.w2_weight[e], layer.w2_weight_scale[e] = stored.taken(e, "down")
    prepare_moe_mxfp4_layer_for_marlin(layer)
    return layer


def experts_peers(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    marlin: Callable[[], Any],
    activation: SituGLU,
    norm: torch.Tensor,
    eps: float,
) -> dict[str, Peer]:
    """Routed experts and the norm of their sum; the result is ours, [N, L].

    Args:
        x: [N, L].
        weights: [N, k] float32.
        chosen: [N, k].
        marlin: of :func:`repacked_once`.
        activation: with its constants.
        norm: [L].
        eps: of the norm.
    """
    name = "fused_marlin_moe (MXFP4, SiTU) + RMSNorm"
    return named({name: lambda: _experts(x, weights, chosen, marlin(), activation, norm, eps)})


def _experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    layer: Any,
    activation: SituGLU,
    norm: torch.Tensor,
    eps: float,
) -> Work:
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe import fused_marlin_moe
    from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace

    out_norm = RMSNorm(x.shape[1], eps=eps).to(x.device, x.dtype)
    out_norm.weight.data.copy_(norm)
    ids = chosen.int()

    def run() -> torch.Tensor:
        summed = fused_marlin_moe(
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            gating_output=weights,  # of which only the number of rows is looked at
            topk_weights=weights,
            topk_ids=ids,
            workspace=marlin_make_workspace(x.device, max_blocks_per_sm=4),
            num_bits=4,
            is_k_full=True,
            routed_scaling_factor=1.0,
            clamp_limit=activation.linear_beta,
            gemm1_alpha=activation.beta,
            activation="situ",
        )
        return out_norm(summed)

    return Work(run, run)


def route_peers(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    form: Callable[[Callable[[], tuple[torch.Tensor, torch.Tensor]]], torch.Tensor],
) -> dict[str, Peer]:
    """Sigmoid, biased top k, renormalised.

    Args:
        logits: [N, E] float32.
        bias: [E] float32.
        top_k: k.
        form: brings weights and experts into the form that is compared.
    """

    def prepare() -> Work:
        from sglang.kernels.ops.moe.moe_fused_gate import moe_fused_gate

        run = partial(moe_fused_gate, logits, bias, top_k, scoring_func="sigmoid", renormalize=True)
        return Work(run, partial(form, run))

    return named({"moe_fused_gate (radix select)": prepare})
