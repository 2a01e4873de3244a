"""Pixels to what the patch embedding reads: x / 255, minus the mean, over the deviation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3vl.errors import ShapeError
from k3vl.kernels.pixels.reference import normalise_pixels_reference

if TYPE_CHECKING:
    import torch


def normalise_pixels(
    patches: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Normalise uint8 patches, channel by channel.

    Args:
        patches: [P, C, h, w] uint8.
        mean: [C] float32, of values in 0..1.
        deviation: [C] float32.
        dtype: of the result.

    Returns:
        [P, C * h * w], the rows that the patch embedding multiplies.

    Raises:
        ShapeError: the shapes disagree, or the patches are not uint8.
    """
    check_shapes(patches, mean, deviation)
    return normalise_pixels_reference(patches, mean, deviation, dtype)


def check_shapes(patches: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor) -> None:
    """Refuse what does not belong together; for every implementation.

    Raises:
        ShapeError: with the shapes.
    """
    channels = patches.shape[1:2]
    if patches.ndim != 4 or patches.is_floating_point() or mean.shape != channels != ():
        raise ShapeError(
            f"normalise_pixels: patches {tuple(patches.shape)} {patches.dtype}, "
            f"mean {tuple(mean.shape)}"
        )
    if deviation.shape != channels or patches.element_size() != 1:
        raise ShapeError(
            f"normalise_pixels: patches {tuple(patches.shape)} {patches.dtype}, "
            f"deviation {tuple(deviation.shape)}"
        )
