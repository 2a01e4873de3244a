"""Routed experts whose weights stay in 4 bits: the stored form, and its plain meaning.

Source: Kimi K3's checkpoint (``mxfp4-pack-quantized``); ``kernels/mxfp4`` has the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3vl.errors import ShapeError, WeightError
from k3vl.kernels.moe.reference import moe_experts_reference
from k3vl.kernels.mxfp4 import dequantize_mxfp4

if TYPE_CHECKING:
    from k3vl.kernels.situ import GatedActivation

LARGEST_SCALE = 128
"""Scale bytes above it (weights over 12) would overflow the bfloat16 factor of the fast decoder."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mxfp4Experts:
    """All routed experts of one layer, 4.25 bits a weight.

    Both are rearranged once, at load, in place of work in every product:

    - Rows of ``w13``: inside the gates and inside the ups, features 8 j + n come by n, then j. What
      the first product writes is then already split the way the second one reads it.
    - Words: two neighbouring words hold columns 8 j + n and 8 (j + 1) + n, n = 0..7. Stored, the
      first has n = 0..3 of both, one column in each half, the second n = 4..7. The four codes of a
      half lie so that one shift and one mask bring sign and magnitude to their places in bfloat16
      (bits 15 and 8..6); the bits left over hold the last, which costs a little more.

    Attributes:
        w13: [E, 2 I, L / 8] int32, gates then ups.
        w13_scale: [E, 2 I, L / 32] uint8.
        w2: [E, L, I / 8] int32.
        w2_scale: [E, L, I / 32] uint8.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor

    @property
    def count(self) -> int:
        """E."""
        return self.w13.shape[0]

    @property
    def inner(self) -> int:
        """I."""
        return self.w13.shape[1] // 2

    @property
    def latent(self) -> int:
        """L."""
        return self.w2.shape[1]


def by_class(width: int, device: torch.device | None = None) -> torch.Tensor:
    """Place in the split order -> column: all columns 8 j, then all 8 j + 1, ...; [width] int64."""
    return torch.arange(width, device=device).view(-1, 8).mT.flatten()


def _row_order(inner: int, device: torch.device) -> torch.Tensor:
    """Stored row -> checkpoint row of ``w13``, [2 I] int64."""
    one = by_class(inner, device)
    return torch.cat([one, one + inner])


def pack_words(packed: torch.Tensor) -> torch.Tensor:
    """A checkpoint's bytes [..., C / 2] as stored words [..., C / 8] int32; C in steps of 32."""
    words = packed.contiguous().view(torch.int32).unflatten(-1, (-1, 2))
    first, second = words.unbind(-1)
    stored = torch.zeros_like(words)
    for n in range(8):
        codes = ((first >> 4 * n) & 15) | (((second >> 4 * n) & 15) << 16)
        sign, size = codes & 0x00080008, codes & 0x00070007
        if n % 4 < 3:
            field = (sign << 12 - 3 * (n % 4)) | (size << 6 - 3 * (n % 4))
        else:
            field = (sign << 11) | ((size & 0x00040004) << 11) | ((size & 0x00030003) << 10)
        stored[..., n // 4] |= field
    return stored.flatten(-2)


def unpack_words(stored: torch.Tensor) -> torch.Tensor:
    """What :func:`pack_words` was given, [..., C / 2] uint8."""
    u = stored.unflatten(-1, (-1, 2))
    words = torch.zeros_like(u)
    for n in range(8):
        field = u[..., n // 4]
        for half in range(2):
            bits = field >> 16 * half
            if n % 4 < 3:
                sign, size = bits >> 15 - 3 * (n % 4), bits >> 6 - 3 * (n % 4)
            else:
                sign, size = bits >> 14, ((bits >> 11) & 4) | ((bits >> 10) & 3)
            words[..., half] |= (((sign & 1) << 3) | (size & 7)) << 4 * n
    return words.flatten(-2).contiguous().view(torch.uint8)


def prepare_experts(
    w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor
) -> Mxfp4Experts:
    """Bring a checkpoint's experts into the stored form.

    Args:
        w13: [E, 2 I, L / 2] uint8, gate rows first, as packed in the checkpoint.
        w13_scale: [E, 2 I, L / 32] uint8.
        w2: [E, L, I / 2] uint8.
        w2_scale: [E, L, I / 32] uint8.

    Raises:
        ShapeError: the shapes disagree.
        WeightError: a scale is out of range.
    """
    experts, double, half = w13.shape
    inner, latent = double // 2, half * 2
    agree = (
        inner % 32 == 0
        and latent % 32 == 0
        and w13_scale.shape == (experts, double, latent // 32)
        and w2.shape == (experts, latent, inner // 2)
        and w2_scale.shape == (experts, latent, inner // 32)
    )
    if not agree:
        raise ShapeError(
            f"prepare_experts: w13 {tuple(w13.shape)} with scale {tuple(w13_scale.shape)}, "
            f"w2 {tuple(w2.shape)} with scale {tuple(w2_scale.shape)}"
        )
    for name, scale in (("w13", w13_scale), ("w2", w2_scale)):
        if int(scale.max()) > LARGEST_SCALE:
            raise WeightError(
                f"an expert's {name} has a scale byte of {int(scale.max())}; "
                f"up to {LARGEST_SCALE} can be decoded"
            )
    rows = _row_order(inner, w13.device)
    return Mxfp4Experts(
        w13=_pack_by_expert(w13, rows),
        w13_scale=w13_scale.index_select(1, rows),
        w2=_pack_by_expert(w2, None),
        w2_scale=w2_scale.contiguous(),
    )


def _pack_by_expert(packed: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Few experts at a time: the temporaries are ten times as large as they are."""
    pieces = (part if rows is None else part.index_select(1, rows) for part in packed.split(16))
    return torch.cat([pack_words(piece) for piece in pieces])


def moe_experts_mxfp4(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    stored: Mxfp4Experts,
    activation: GatedActivation,
) -> torch.Tensor:
    """:func:`k3vl.kernels.moe.moe_experts` on weights in 4 bits; decodes all of them first.

    Args:
        x: [N, L].
        weights: [N, k] float32.
        experts: [N, k] int64.
        stored: the layer's experts.
        activation: the gated activation.

    Returns:
        [N, L] in the dtype of ``x``; the sum is float32.

    Raises:
        ShapeError: the shapes disagree.
    """
    if x.shape[1:] != (stored.latent,) or weights.shape != experts.shape:
        raise ShapeError(
            f"moe_experts_mxfp4: x {tuple(x.shape)}, weights {tuple(weights.shape)}, "
            f"experts {tuple(experts.shape)}, L {stored.latent}"
        )
    w13 = dequantize_mxfp4(unpack_words(stored.w13), stored.w13_scale, dtype=x.dtype)
    w13 = w13[:, _row_order(stored.inner, x.device).argsort()]
    w2 = dequantize_mxfp4(unpack_words(stored.w2), stored.w2_scale, dtype=x.dtype)
    return moe_experts_reference(x, weights, experts, w13, w2, activation)
