"""Which implementation of every op a vision tower runs; a part of ``choice.Kernels``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3vl.kernels.linear import linear
from k3vl.kernels.pixels import normalise_pixels
from k3vl.kernels.rms_norm import rms_norm
from k3vl.kernels.vision_attention import vision_attention
from k3vl.kernels.vision_block import ComposedVisionBlock
from k3vl.kernels.vision_pos import rotate

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from k3vl.kernels.linear import LinearOp
    from k3vl.kernels.vision_block import VisionBlockOp


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionKernels:
    """One implementation of every op of the tower and the projector.

    Attributes:
        normalise_pixels: :mod:`k3vl.kernels.pixels`.
        linear: patch embedding and projector (:mod:`k3vl.kernels.linear`).
        rms_norm: the last norm of each (:mod:`k3vl.kernels.rms_norm`).
        block: :mod:`k3vl.kernels.vision_block`.
    """

    normalise_pixels: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor
    ]
    linear: LinearOp
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    block: VisionBlockOp


REFERENCE = VisionKernels(
    normalise_pixels=normalise_pixels,
    linear=linear,
    rms_norm=rms_norm,
    block=ComposedVisionBlock(attention=vision_attention, rotate=rotate),
)
"""PyTorch: runs everywhere."""


def cpu_vision() -> VisionKernels:
    """Compiled loops for float32 on one CPU thread."""
    from k3vl.kernels.linear.cpu import LinearCPU
    from k3vl.kernels.rms_norm.cpu import rms_norm_cpu
    from k3vl.kernels.vision_block.cpu import VisionBlockCPU

    return VisionKernels(
        normalise_pixels=normalise_pixels,
        linear=LinearCPU(),
        rms_norm=rms_norm_cpu,
        block=VisionBlockCPU(),
    )


def triton_vision() -> VisionKernels:
    """Triton and Gluon kernels for CUDA devices; matrix products from PyTorch."""
    from k3vl.kernels.pixels.gpu import normalise_pixels
    from k3vl.kernels.rms_norm.gpu import rms_norm
    from k3vl.kernels.vision_attention.gpu import turned_attention
    from k3vl.kernels.vision_block.gpu import VisionBlockGPU

    return VisionKernels(
        normalise_pixels=normalise_pixels,
        linear=linear,
        rms_norm=rms_norm,
        block=VisionBlockGPU(norm=rms_norm, attention=turned_attention),
    )
