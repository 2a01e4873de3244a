"""A K3 model cut for tensor parallelism: what a rank holds, and ops that add up over ranks.

As docs/slices.md has it: heads of both attentions and the inner width of all MLPs, routed experts
too, are divided; routers, latent and low-rank projections are on every rank, and so are embedding
and head, which are no part of a layer. Two sums a layer: [D] after attention, and [L + D] after the
experts, before their norm (a dense MLP: [D]).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from k3vl.kernels.linear import added
from k3vl.kernels.moe.latent import ComposedLatentMoE
from k3vl.lm.kda import KimiDeltaAttention

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.config import TextConfig
    from k3vl.kernels.choice import Kernels
    from k3vl.kernels.moe.latent import MoEWeights
    from k3vl.lm.model import K3Model, Layer


class Ranks:
    """All ranks, as seen from one; ``adding`` False leaves sums out, to time what is left."""

    adding = True

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``, in its place."""
        if self.adding:
            dist.all_reduce(x)
        return x


@dataclass(frozen=True, slots=True)
class Summed:
    """An op whose results are summands."""

    op: Callable[..., torch.Tensor]
    ranks: Ranks

    def __call__(self, *args: Any, onto: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        return added(self.ranks.add(self.op(*args, **kwargs)), onto)


class SplitLatentMoE:
    """The MoE layer over a rank's part of the inner widths; one sum, before the norm."""

    def __init__(self, op: ComposedLatentMoE, rms_norm: Callable[..., torch.Tensor], ranks: Ranks):
        self.op, self.rms_norm, self.ranks = op, rms_norm, ranks
        self.second = torch.cuda.Stream() if torch.cuda.is_available() else None

    def __call__(
        self, x: torch.Tensor, weights: MoEWeights[Any], onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        w = weights
        assert w.down is not None
        assert w.up is not None
        latent_width, beside = w.down.shape[0], self.second if x.shape[0] == 1 else None
        both = x.new_empty(x.shape[0], latent_width + x.shape[1])
        if beside is not None:  # as the whole layer does it
            here = torch.cuda.current_stream()
            beside.wait_stream(here)
            with torch.cuda.stream(beside):
                both[:, latent_width:] = self.op.gated_mlp(x, w.shared)
        logits, latent = self.op.front(x, w.router, w.down)
        chosen, experts = self.op.route(
            logits, w.router_bias, w.top_k, renormalise=w.renormalise, scale=w.scale
        )
        both[:, :latent_width] = self.op.moe_experts(
            latent, chosen, experts, w.experts, w.activation, None, w.eps
        )
        if beside is None:
            both[:, latent_width:] = self.op.gated_mlp(x, w.shared)
        else:
            here.wait_stream(beside)
        total, shared = self.ranks.add(both).split([latent_width, x.shape[1]], -1)
        if w.norm is not None:
            total = self.rms_norm(total, w.norm, w.eps)
        return self.op.linear(total, w.up, onto=added(shared, onto))


def split_kernels(kernels: Kernels, ranks: Ranks) -> Kernels:
    """The same ops, of which each ends in a sum over ranks."""
    whole = kernels.latent_moe_mxfp4
    assert isinstance(whole, ComposedLatentMoE)
    return replace(
        kernels,
        kda=Summed(kernels.kda, ranks),
        mla=Summed(kernels.mla, ranks),
        gated_mlp=Summed(kernels.gated_mlp, ranks),
        latent_moe_mxfp4=SplitLatentMoE(whole, kernels.rms_norm, ranks),
    )


def part_of(config: TextConfig, ranks: int) -> TextConfig:
    """What one of so many ranks holds."""
    linear = config.linear_attn_config
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // ranks,
        linear_attn_config=replace(linear, num_heads=linear.num_heads // ranks),
        intermediate_size=config.intermediate_size // ranks,
        moe_intermediate_size=config.moe_intermediate_size // ranks,
    )


def fill_part(part: K3Model, whole: K3Model, rank: int, ranks: int) -> None:
    """Give a rank's model its share of the whole one's weights, packed experts included."""
    stored = whole.state_dict()
    for name, target in part.state_dict().items():
        source = stored[name]
        if name.startswith("layers."):
            _, index, inside = name.split(".", 2)
            dim, sections = _sections(whole.layers[int(index)], inside, source.shape)
            pieces = source.split([size for size, _ in sections], dim)
            shares = [
                piece.chunk(ranks, dim)[rank] if divided else piece
                for piece, (_, divided) in zip(pieces, sections, strict=True)
            ]
            source = torch.cat(shares, dim)
        target.copy_(source)


def _sections(layer: Layer, name: str, shape: torch.Size) -> tuple[int, list[tuple[int, bool]]]:
    """Along which axis a tensor is cut, into which lengths, and which of them ranks divide."""
    if name == "attn.in_proj.weight":
        if isinstance(layer.attn, KimiDeltaAttention):
            qkv, gate, rank, write = layer.attn.splits
            return 0, [*[(qkv // 3, True)] * 3, (gate, True), (rank, False), (write, True)]
        *kept, gate = layer.attn.splits
        return 0, [(sum(kept), False), (gate, True)]
    parts = {
        "attn.conv": (0, 3),  # of q, k and v
        "attn.a_log": (0, 1),
        "attn.dt_bias": (0, 1),
        "attn.decay_b.weight": (0, 1),
        "attn.query.expand.weight": (0, 1),
        "attn.kv_b": (0, 1),
        "attn.o_proj.weight": (1, 1),
        "mlp.gate_up.weight": (0, 2),
        "mlp.down.weight": (1, 1),
        "mlp.shared.gate_up.weight": (0, 2),
        "mlp.shared.down.weight": (1, 1),
        "mlp.w13": (1, 16),  # gates and ups, each in eight classes
        "mlp.w13_scale": (1, 16),
        "mlp.w2": (2, 1),
        "mlp.w2_scale": (2, 1),
    }
    if name not in parts:
        return 0, [(shape[0], False)]
    dim, count = parts[name]
    return dim, [(shape[dim] // count, True)] * count
