"""The latent mixture of experts with its shared experts beside the routed ones, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from k3vl.kernels.dependent import after_all
from k3vl.kernels.moe.latent import ComposedLatentMoE, E, check_shapes
from k3vl.kernels.recording import OwnStream

if TYPE_CHECKING:
    from k3vl.kernels.moe.latent import MoEWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentMoEBeside(ComposedLatentMoE[E]):
    """The layer as a sequence of ops, of which a single token's shared experts do not wait.

    Alone, a token's launches are short and leave gaps, which a second stream fills; with more
    tokens both halves want all of the memory's bandwidth and disturb each other. What comes first,
    logits and latent, does not share it: all that follows waits for that.
    """

    def __call__(
        self, x: torch.Tensor, weights: MoEWeights[E], onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`LatentMoEOp`."""
        if x.shape[0] != 1 or x.device.type != "cuda":
            # slots: super() has no class
            return ComposedLatentMoE.__call__(self, x, weights, onto)
        check_shapes(x, weights)
        here, beside = torch.cuda.current_stream(x.device), _second_stream(x.device).stream
        # What crosses streams belongs to the first one, which waits before it is used or freed.
        both = torch.zeros_like(x) if onto is None else onto
        logits, latent = self.front(x, weights.router, weights.down)
        beside.wait_stream(here)
        with torch.cuda.stream(beside), after_all():
            self.gated_mlp(x, weights.shared, both)
        total = self.routed(logits, latent, weights)
        here.wait_stream(beside)
        with after_all():
            return self.back(total, weights, both)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentMoERoutedFirst(ComposedLatentMoE[E]):
    """The same with the routed experts on a stream whose programs get room before the others'.

    On equal terms shared experts, whose programs come first, keep those of the routed ones from
    multiprocessors, and these fetch their weights in small pieces.
    """

    def __call__(
        self, x: torch.Tensor, weights: MoEWeights[E], onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`LatentMoEOp`."""
        if x.shape[0] != 1 or x.device.type != "cuda":
            return ComposedLatentMoE.__call__(self, x, weights, onto)
        check_shapes(x, weights)
        here, first = torch.cuda.current_stream(x.device), _urgent_stream(x.device)
        logits, latent = self.front(x, weights.router, weights.down)
        first.wait_stream(here)
        # What crosses streams is used again only behind a wait of either stream for the other.
        with torch.cuda.stream(first), after_all():
            total = self.routed(logits, latent, weights)
        with after_all():
            both = self.gated_mlp(x, weights.shared, onto)
            here.wait_stream(first)
            return self.back(total, weights, both)


@lru_cache
def _urgent_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


@lru_cache
def _second_stream(device: torch.device) -> OwnStream:
    return OwnStream(device)
