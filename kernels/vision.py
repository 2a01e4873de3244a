"""Which implementation of every op a vision tower runs; a part of ``choice.Kernels``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from k3vl.kernels.pixels import normalise_pixels
from k3vl.kernels.vision_attention import vision_attention
from k3vl.kernels.vision_pos import rotate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class VisionAttention(Protocol):
    """See :func:`k3vl.kernels.vision_attention.vision_attention`."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """[P, H, K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionKernels:
    """One implementation of every op of the tower.

    Attributes:
        attention: :mod:`k3vl.kernels.vision_attention`.
        rotate: :mod:`k3vl.kernels.vision_pos`.
        normalise_pixels: :mod:`k3vl.kernels.pixels`.
    """

    attention: VisionAttention
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    normalise_pixels: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor
    ]


REFERENCE = VisionKernels(
    attention=vision_attention, rotate=rotate, normalise_pixels=normalise_pixels
)
"""PyTorch: runs everywhere."""


def triton_vision() -> VisionKernels:
    """Triton kernels for CUDA devices."""
    from k3vl.kernels.pixels.gpu import normalise_pixels
    from k3vl.kernels.vision_attention.gpu import vision_attention
    from k3vl.kernels.vision_pos.gpu import rotate

    return VisionKernels(
        attention=vision_attention, rotate=rotate, normalise_pixels=normalise_pixels
    )
