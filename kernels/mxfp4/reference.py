"""MXFP4 decoding in plain PyTorch; the meaning of the format, on any device."""

from __future__ import annotations

import torch

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODES = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))
_PAIRS = tuple((_CODES[byte & 15], _CODES[byte >> 4]) for byte in range(256))


def dequantize_mxfp4_reference(
    packed: torch.Tensor, scale: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    """Decode [..., C/2] packed bytes with [..., C/32] scale bytes to [..., C].

    Shapes are taken as checked.
    """
    pairs = torch.tensor(_PAIRS, dtype=torch.float32, device=packed.device)
    codes = torch.nn.functional.embedding(packed.int(), pairs)  # [..., C/2, 2]
    groups = codes.reshape(*scale.shape, -1)  # [..., C/32, 32]
    return (groups * _power_of_two(scale)[..., None]).flatten(-2).to(dtype)


def _power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """2^(byte-127) as float32, from its bits: exact on every device, unlike ``exp2``."""
    bits = scale.to(torch.int32) << 23
    bits = bits.masked_fill(scale == 0, 1 << 22)  # 2^-127 is subnormal
    bits = bits.masked_fill(scale == 255, 0x7FC00000)  # NaN
    return bits.view(torch.float32)
