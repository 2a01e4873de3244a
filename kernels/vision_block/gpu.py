"""A block of the vision tower on a CUDA device: what surrounds its products is in them.

Its products are the library's, by way of torch: residuals are what they are added to, and GELU is
the end of the one before it. Left are two norms and what turns queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from k3vl.kernels.vision_block import check_shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.kernels.packed import Packed
    from k3vl.kernels.vision_block import VisionBlockWeights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VisionBlockGPU:
    """See :class:`k3vl.kernels.vision_block.VisionBlockOp`; ``x`` is overwritten by the result.

    Attributes:
        norm: RMSNorm.
        attention: turns queries and keys, and attends
            (:func:`k3vl.kernels.vision_attention.gpu.turned_attention`).
    """

    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    attention: Callable[[torch.Tensor, torch.Tensor, Packed], torch.Tensor]
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
        mixed = self.attention(heads, rotary, items).flatten(1)
        x = x.addmm_(mixed, w.out.t())  # rounded once, in the memory of x
        hidden = self._up(self.norm(x, w.mlp_norm, w.eps), w.up)
        return x.addmm_(hidden, w.down.t())

    def _up(self, normed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The inner activations; GELU of the product before it is rounded."""
        if normed.device.type != "cpu":  # on a CPU torch's is the exact GELU
            key = weight.shape[0], weight.dtype, weight.device
            if (bias := self._zeros.get(key)) is None:  # the product has GELU behind a bias only
                bias = self._zeros[key] = torch.zeros(key[0], dtype=key[1], device=key[2])
            return torch._addmm_activation(bias, normed, weight.t(), use_gelu=True)
        return F.gelu(F.linear(normed, weight), approximate="tanh")
