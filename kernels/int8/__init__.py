"""8-bit weights: signed integers in groups of input columns that share one float16 scale.

Here: rounding and decoding, symmetric, without zero points. Not here: reading checkpoints.

Source: the ``int-quantized`` layout of compressed-tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from k3vl.errors import ShapeError, WeightError

LARGEST = 127
"""Codes lie in -127..127; -128 would have no positive twin."""

COLUMNS = 16
"""Products read codes in vectors of as many: groups are multiples of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """A matrix as a checkpoint stores it.

    Attributes:
        codes: [R, C] int8.
        scales: [R, G] float32, for G equally wide groups of columns.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the decoded matrix."""
        return tuple(self.codes.shape)


def quantize_int8(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight to 8 bits with one scale for every group of input columns.

    Args:
        weight: [R, ...] floating; the axes after the first are flattened into columns.
        group_size: columns that share a scale; divides the number of columns.

    Returns:
        int8 of the same shape, and float16 [R, columns / group_size].

    Raises:
        ShapeError: the groups do not divide the columns.
        WeightError: a value is not finite, or too large for a float16 scale.
    """
    columns = math.prod(weight.shape[1:])
    if weight.ndim < 2 or not columns or group_size < 1 or columns % group_size:
        raise ShapeError(
            f"quantize_int8: weight {tuple(weight.shape)} into groups of {group_size} columns"
        )
    groups = weight.detach().float().reshape(weight.shape[0], -1, group_size)
    scale = (groups.abs().amax(-1) / LARGEST).half()
    if not scale.isfinite().all():
        raise WeightError("a weight has values that int8 with float16 scales cannot hold")
    # The rounded scale divides, not the exact one: decoding multiplies by the rounded one. Groups
    # too small for any float16 scale become zero.
    divisor = scale.float().masked_fill(scale == 0, math.inf)[..., None]
    codes = (groups / divisor).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return codes.reshape(weight.shape), scale


def dequantize_int8(
    codes: torch.Tensor, scale: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply codes by the scale of their group.

    Args:
        codes: [R, ...] int8.
        scale: [R, G] floating; the flattened columns fall into G equally wide groups.
        dtype: of the result; the product is taken in float32.

    Returns:
        ``dtype``, in the shape of ``codes``.

    Raises:
        ShapeError: the shapes disagree, or the codes are not int8.
    """
    columns = math.prod(codes.shape[1:])
    fits = codes.ndim > 1 and scale.ndim == 2 and scale.shape[0] == codes.shape[0]
    if codes.dtype != torch.int8 or not fits or not scale.shape[1] or columns % scale.shape[1]:
        raise ShapeError(
            f"dequantize_int8: codes {tuple(codes.shape)} {codes.dtype}, scale {tuple(scale.shape)}"
        )
    groups = codes.reshape(*scale.shape, -1).float()
    return (groups * scale.float()[..., None]).reshape(codes.shape).to(dtype)
