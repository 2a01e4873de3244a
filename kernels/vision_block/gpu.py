"""A block of the vision tower on a CUDA device: what surrounds its products is in them.

Its products are the library's, by way of torch: residuals are what they are added to, and GELU is
the end of the one before it. Left are two norms and the rotation, a launch each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F

from k3vl.kernels.vision_block import check_shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.kernels.packed import Packed
    from k3vl.kernels.vision_block import VisionAttention, VisionBlockWeights


class TurningAttention(Protocol):
    """As :class:`k3vl.kernels.vision_block.VisionAttention`, of queries not yet turned."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        items: Packed,
        *,
        turns: torch.Tensor,
    ) -> torch.Tensor:
        """[P, H, K]; ``turns``: [P, K / 2] complex64."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VisionBlockGPU:
    """See :class:`k3vl.kernels.vision_block.VisionBlockOp`; ``x`` is overwritten by the result.

    Attributes:
        norm: RMSNorm.
        rotate: turns queries and keys where they lie.
        attention: :mod:`k3vl.kernels.vision_attention`.
        turning: one that turns queries itself, instead of ``attention``: only keys are turned
            before it, half of what would be read and written.
    """

    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rotate: Callable[[torch.Tensor, torch.Tensor], None]
    attention: VisionAttention
    turning: TurningAttention | None = None
    _zeros: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = field(
        default_factory=dict, repr=False
    )

    def __call__(
        self,
        x: torch.Tensor,
        weights: VisionBlockWeights,
        rotary: torch.Tensor,
        items: Packed,
    ) -> torch.Tensor:
        """See :class:`k3vl.kernels.vision_block.VisionBlockOp`."""
        w = weights
        check_shapes(x, w, rotary, items)
        qkv = F.linear(self.norm(x, w.attention_norm, w.eps), w.qkv)
        heads = qkv.view(x.shape[0], 3 * w.heads, -1)  # [P, 3H, K]
        q, k, v = heads.split(w.heads, 1)
        if self.turning:
            self.rotate(k, rotary)
            mixed = self.turning(q, k, v, items, turns=rotary).flatten(1)
        else:
            self.rotate(heads[:, : 2 * w.heads], rotary)
            mixed = self.attention(q, k, v, items).flatten(1)
        x = x.addmm_(mixed, w.out.t())  # rounded once, in the memory of x
        hidden = self._up(self.norm(x, w.mlp_norm, w.eps), w.up)
        return x.addmm_(hidden, w.down.t())

    def _up(self, normed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The inner activations; GELU of the product before it is rounded."""
        if normed.is_cuda:  # on a CPU torch's is the exact GELU
            key = weight.shape[0], weight.dtype, weight.device
            if (bias := self._zeros.get(key)) is None:  # the product has GELU behind a bias only
                bias = self._zeros[key] = torch.zeros(key[0], dtype=key[1], device=key[2])
            return torch._addmm_activation(bias, normed, weight.t(), use_gelu=True)
        return F.gelu(F.linear(normed, weight), approximate="tanh")
