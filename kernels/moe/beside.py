"""The latent mixture of experts with its shared experts beside the routed ones, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from k3vl.kernels.moe.latent import ComposedLatentMoE, E, check_shapes

if TYPE_CHECKING:
    from k3vl.kernels.moe.latent import MoEWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentMoEBeside(ComposedLatentMoE[E]):
    """The layer as a sequence of ops, of which a single token's shared experts do not wait.

    Alone, a token's launches are short and leave gaps, which a second stream fills; with more
    tokens both halves want all of the memory's bandwidth and disturb each other.
    """

    def __call__(self, x: torch.Tensor, weights: MoEWeights[E]) -> torch.Tensor:
        """See :class:`LatentMoEOp`."""
        if x.shape[0] != 1 or x.device.type != "cuda":
            return ComposedLatentMoE.__call__(self, x, weights)  # slots: super() has no class
        check_shapes(x, weights)
        here, beside = torch.cuda.current_stream(x.device), _second_stream(x.device)
        # What crosses streams belongs to the first one, which waits before it is used or freed.
        shared = torch.empty_like(x)
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            shared.copy_(self.gated_mlp(x, weights.shared))
        routed = self.routed(x, weights)
        here.wait_stream(beside)
        return routed + shared


@lru_cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
