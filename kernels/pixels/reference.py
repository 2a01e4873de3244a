"""Normalised pixels in plain PyTorch."""

from __future__ import annotations

import torch


def normalise_pixels_reference(
    patches: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See :func:`k3vl.kernels.pixels.normalise_pixels`."""
    moments = torch.stack([mean, deviation])[..., None, None]
    return ((patches.float() / 255 - moments[0]) / moments[1]).flatten(1).to(dtype)
