"""Normalised pixels on a CUDA device: one launch, one byte read and one value written."""

from __future__ import annotations

import torch
import triton

from k3vl.kernels.pixels import check_shapes
from k3vl.kernels.pixels.pixel_kernel import pixel_kernel

_BLOCK = 4096


def normalise_pixels(
    patches: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See :func:`k3vl.kernels.pixels.normalise_pixels`."""
    check_shapes(patches, mean, deviation)
    count, channels, height, width = patches.shape
    out = torch.empty(count, channels * height * width, dtype=dtype, device=patches.device)
    if out.numel():
        pixel_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
            patches.contiguous(),
            mean,
            deviation,
            out,
            out.numel(),
            C=channels,
            AREA=height * width,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return out
