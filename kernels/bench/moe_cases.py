"""K3's routed experts at real width: 896 experts in 4 bits, 16 a token, 3584 to 3072 and back.

And the whole layer around them: router, latent projections, shared experts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from k3vl.kernels.bench import sglang_moe
from k3vl.kernels.bench.case import Case, Peer, Work, normal
from k3vl.kernels.choice import reference_kernels, triton_kernels
from k3vl.kernels.moe import moe_experts, route
from k3vl.kernels.moe.gpu import (
    JOINED_PAIRS,
    combine,
    moe_experts_mxfp4_gpu,
    plan_gpu,
    products_of_many,
    route_gpu,
)
from k3vl.kernels.moe.latent import MoEWeights
from k3vl.kernels.moe.mxfp4 import Mxfp4Experts
from k3vl.kernels.rms_norm import rms_norm
from k3vl.kernels.situ import SituGLU
from k3vl.kernels.situ.gpu import glu_gpu
from k3vl.kernels.weight import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_E, _K, _L, _I = 896, 16, 3584, 3072
_D, _S = 7168, 6144
_BYTES_OF_ONE = 3 * _L * _I * 17 // 32  # 4 bits and one scale byte per 32
_SITU = SituGLU(beta=4.0, linear_beta=25.0)


def _random_experts() -> Mxfp4Experts:
    """Any words are valid codes; the scales keep the outputs near one."""

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(117, 121, shape, dtype=torch.uint8, device="cuda")

    return Mxfp4Experts(
        w13=words(_E, 2 * _I, _L // 8),
        w13_scale=scales(_E, 2 * _I, _L // 32),
        w2=words(_E, _L, _I // 8),
        w2_scale=scales(_E, _L, _I // 32),
    )


def moe_cases() -> Iterator[Case]:
    """Plan, both products, weighted sum and norm; routing uniform at random."""
    stored = _random_experts()
    norm = normal(_L).abs() + 0.5
    marlin = sglang_moe.repacked_once(stored)
    for tokens in (1, 8, 32, 128, 256, 384, 512, 2048, 4096, 8192, 16384):
        x = normal(tokens, _L)
        weights, chosen = route(
            normal(tokens, _E, dtype=torch.float32),
            normal(_E, dtype=torch.float32) * 0.01,
            _K,
            renormalise=True,
            scale=1.0,
        )
        touched = chosen.unique()
        ours = partial(moe_experts_mxfp4_gpu, x, weights, chosen, stored, _SITU, norm, 1e-5)
        yield Case(
            op="moe_experts_mxfp4",
            shape=f"T{tokens}, 16 of 896, {len(touched)} experts read",
            ours=ours,
            want=partial(_want, x, weights, chosen, stored, norm) if tokens <= 8 else None,
            limit=8e-3,
            bytes=len(touched) * _BYTES_OF_ONE + 4 * tokens * _L,
            flops=2 * tokens * _K * 3 * _L * _I,
            # Few tokens have products of their own; these do better from a few more on.
            variants={"one product a step": partial(_many, x, weights, chosen, stored, norm)}
            if 256 <= tokens < JOINED_PAIRS * _E // _K
            else {},
            compared=True,
            peers={
                **_peers(tokens, chosen),
                **sglang_moe.experts_peers(x, weights, chosen, marlin, _SITU, norm, 1e-5),
            },
        )


def _many(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    stored: Mxfp4Experts,
    norm: torch.Tensor,
) -> torch.Tensor:
    """As for many tokens."""
    outputs = products_of_many(x, chosen, stored, _SITU)
    return combine(outputs, weights, norm, 1e-5, torch.empty_like(x))


def _want(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    stored: Mxfp4Experts,
    norm: torch.Tensor,
) -> torch.Tensor:
    """The reference over the experts that are read."""
    touched, places = chosen.unique(return_inverse=True)
    few = replace(
        stored,
        w13=stored.w13[touched],
        w13_scale=stored.w13_scale[touched],
        w2=stored.w2[touched],
        w2_scale=stored.w2_scale[touched],
    )
    return moe_experts(x.float(), weights, places, few, _SITU, norm.float(), 1e-5)


def _peers(tokens: int, chosen: torch.Tensor) -> dict[str, Peer]:
    """PyTorch's grouped product has no 4-bit form: weights in bfloat16, 3.8 times the bytes."""
    if tokens != 8192:
        return {}
    name = "PyTorch grouped_mm over bfloat16 (sorted before; no weighted sum, no norm)"
    return {name: Peer(partial(_grouped, tokens, chosen))}


def _grouped(tokens: int, chosen: torch.Tensor) -> Work:
    w13 = normal(_E, 2 * _I, _L)
    w2 = normal(_E, _L, _I)
    x = normal(tokens * _K, _L)
    ends = torch.bincount(chosen.flatten(), minlength=_E).cumsum(0).int()

    def products() -> torch.Tensor:
        hidden = _SITU(torch._grouped_mm(x, w13.mT, ends))
        return torch._grouped_mm(hidden, w2.mT, ends)

    return Work(products)


def layer_cases() -> Iterator[Case]:
    """Router to sum, shared experts included."""
    weights = MoEWeights(
        router=normal(_E, _D) / _D**0.5,
        router_bias=normal(_E, dtype=torch.float32) * 0.01,
        down=normal(_L, _D) / _D**0.5,
        experts=_random_experts(),
        norm=normal(_L).abs() + 0.5,
        up=normal(_D, _L) / _L**0.5,
        shared_gate_up=normal(2 * _S, _D) / _D**0.5,
        shared_down=normal(_D, _S) / _S**0.5,
        activation=_SITU,
        top_k=_K,
        renormalise=True,
        scale=1.0,
        eps=1e-5,
    )
    ours = triton_kernels("measured").latent_moe_mxfp4
    plain = reference_kernels("compared with").latent_moe_mxfp4
    assert ours is not None
    assert plain is not None
    always = (_E * _D + 2 * _D * _L + 3 * _D * _S) * 2
    for tokens in (1, 8, 32, 128, 2048, 8192):
        x = normal(tokens, _D)
        touched = _E * (1 - (1 - _K / _E) ** tokens)
        yield Case(
            op="latent_moe_mxfp4",
            shape=f"T{tokens} D{_D}, 16 of 896 in 4 bits, shared {_S}",
            ours=partial(ours, x, weights),
            want=partial(plain, x.float(), _widened(weights)) if tokens <= 8 else None,
            limit=8e-3,
            bytes=touched * _BYTES_OF_ONE + always + 4 * tokens * _D,
            flops=2 * tokens * (_K * 3 * _L * _I + 3 * _S * _D + 2 * _L * _D + _E * _D),
        )


def _widened(weights: MoEWeights[Mxfp4Experts]) -> MoEWeights[Mxfp4Experts]:
    """In float32, all but the packed experts."""
    w = weights
    assert w.down is not None
    assert w.up is not None
    assert w.norm is not None
    return replace(
        w,
        down=plain(w.down).float(),
        up=plain(w.up).float(),
        norm=w.norm.float(),
        shared_gate_up=plain(w.shared_gate_up).float(),
        shared_down=plain(w.shared_down).float(),
    )


def route_cases() -> Iterator[Case]:
    """Sigmoid, biased top 16 of 896, weights."""
    for tokens in (1, 32, 8192, 32768):
        logits = normal(tokens, _E, dtype=torch.float32)
        bias = normal(_E, dtype=torch.float32) * 0.01
        ours = partial(route_gpu, logits, bias, _K, renormalise=True, scale=1.0)
        plain = partial(route, logits, bias, _K, renormalise=True, scale=1.0)
        yield Case(
            op="route",
            shape=f"T{tokens}, 16 of 896",
            ours=partial(_sorted, ours),
            timed=ours,
            want=partial(_sorted, plain),
            limit=1e-5,
            bytes=tokens * (_E * 4 + _K * 12),
            flops=tokens * _E * 20,
            peers={"PyTorch": plain, **sglang_moe.route_peers(logits, bias, _K, _sorted)},
        )


def _sorted(run: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Weights in the order of the experts, and the experts."""
    weights, experts = run()
    experts, order = experts.sort(1)
    return torch.cat([weights.gather(1, order), experts.float()], 1)


def glu_cases() -> Iterator[Case]:
    """SiTU-GLU of a dense layer and of the shared experts."""
    for tokens, inner in ((1, 33792), (1, _S), (32, 33792), (8192, 33792), (8192, _S)):
        gate_up = normal(tokens, 2 * inner) * 4
        yield Case(
            op="situ_glu",
            shape=f"T{tokens} I{inner}",
            ours=partial(glu_gpu, gate_up, _SITU),
            want=partial(_SITU, gate_up.float()),
            limit=8e-3,
            bytes=6 * tokens * inner,
            flops=30 * tokens * inner,
            peers={"PyTorch": partial(_SITU, gate_up)},
        )


def combine_cases() -> Iterator[Case]:
    """Sum and norm behind the products."""
    norm = normal(_L).abs() + 0.5
    for tokens in (1, 32, 512, 8192):
        y, out = normal(tokens * _K, _L), normal(tokens, _L)
        weights = torch.rand(tokens, _K, device="cuda")
        yield Case(
            op="combine",
            shape=f"T{tokens}, {_K} outputs a token",
            ours=partial(combine, y, weights, norm, 1e-5, out),
            want=partial(_summed, y, weights, norm),
            limit=8e-3,
            bytes=2 * (tokens + 1) * _K * _L,
            flops=2 * tokens * _K * _L,
        )


def _summed(y: torch.Tensor, weights: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    total = torch.bmm(weights.unsqueeze(1), y.float().unflatten(0, weights.shape)).squeeze(1)
    return rms_norm(total, norm.float(), 1e-5)


def plan_cases() -> Iterator[Case]:
    """The launch before the products; its limit is a launch."""
    for tokens in (1, 32, 256):
        chosen = torch.rand(tokens, _E, device="cuda").topk(_K, 1).indices
        yield Case(
            op="plan_experts",
            shape=f"T{tokens}, 16 of 896",
            ours=partial(_order, chosen),
            want=None,
            limit=0.0,
            bytes=tokens * _K * 12,
            flops=0,
        )


def _order(chosen: torch.Tensor) -> torch.Tensor:
    return plan_gpu(chosen, _E).order
