"""MXFP4 weights: 4-bit floats (E2M1) in groups of 32 that share a power-of-two scale.

Here: decoding of the packed form that K3's routed experts are stored in. Not here: reading
checkpoints (``k3vl.checkpoint``), matrix products on packed weights.

Source: OCP Microscaling Formats specification 1.0 (E2M1, E8M0); compressed-tensors'
``mxfp4-pack-quantized`` layout as moonshotai/Kimi-K3 stores it.
"""

from __future__ import annotations

import torch

from k3vl.errors import ShapeError
from k3vl.kernels.mxfp4.reference import dequantize_mxfp4_reference

GROUP_SIZE = 32
"""Consecutive input columns that share one scale."""

NAN_SCALE = 255
"""The one scale byte that is not a number."""


def dequantize_mxfp4(
    packed: torch.Tensor, scale: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    """Decode packed rows.

    Args:
        packed: [..., C/2] uint8; byte j holds columns 2j (low nibble) and 2j+1 (high nibble).
        scale: [..., C/32] uint8; byte s means 2^(s-127), and 255 means NaN.
        dtype: of the result. Every finite value is exact in float32 and bfloat16, apart from
            magnitudes of 2^128 and more (scale byte 254 with codes of 2 and more), which become
            infinite.

    Returns:
        [..., C] ``dtype``.

    Raises:
        ShapeError: C is not a multiple of 32, the two shapes disagree, or a tensor is not uint8.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ShapeError(f"MXFP4 needs uint8 twice, got {packed.dtype} and {scale.dtype}")
    expected = (*packed.shape[:-1], packed.shape[-1] * 2 // GROUP_SIZE) if packed.ndim else ()
    if packed.ndim == 0 or packed.shape[-1] * 2 % GROUP_SIZE or tuple(scale.shape) != expected:
        raise ShapeError(
            f"MXFP4 packed {list(packed.shape)} and scale {list(scale.shape)} disagree: "
            f"{GROUP_SIZE // 2} packed bytes belong to one scale"
        )
    return dequantize_mxfp4_reference(packed, scale, dtype=dtype)
