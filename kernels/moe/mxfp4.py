"""Routed experts whose weights stay in 4 bits: the stored form, and its plain meaning.

Source: Kimi K3's checkpoint (``mxfp4-pack-quantized``); ``kernels/mxfp4`` has the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from k3vl.errors import ShapeError, WeightError
from k3vl.kernels.mxfp4 import GROUP_SIZE, dequantize_mxfp4

Part: TypeAlias = Literal["gate", "up", "down"]
"""One of an expert's three matrices: w1, w3 and w2 of the checkpoint."""

LARGEST_SCALE = 128
"""Scale bytes above it (weights over 12) would overflow the bfloat16 factor of the fast decoder."""

TILE_ROWS, TILE_COLUMNS = 8, 128
"""Of a matrix, what lies together: 64 bytes of each of so many rows, and 4 of their scales."""


def tile_rows(columns: int) -> int:
    """How many rows of a matrix lie together; 1 where its columns are no whole tiles."""
    return 1 if columns % TILE_COLUMNS else TILE_ROWS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mxfp4Experts:
    """All routed experts of one layer, 4.25 bits a weight.

    They are rearranged once, at load, in place of work in every product:

    - Rows of ``w13``: inside the gates and inside the ups, features 8 j + n come by n, then j. What
      the first product writes is then already split the way the second one reads it.
    - Words: two neighbouring words hold columns 8 j + n and 8 (j + 1) + n, n = 0..7. Stored, the
      first has n = 0..3 of both, one column in each half, the second n = 4..7. The four codes of a
      half lie so that one shift and one mask bring sign and magnitude to their places in bfloat16
      (bits 15 and 8..6); the bits left over hold the last, which costs a little more.
    - Tiles: a step of a product reads 128 columns of its rows. Those of eight rows lie together,
      row after row, then the next 128 columns of the same rows, and so do their scales: a warp
      reads 512 bytes in a row. Matrices whose columns are no multiple of 128 lie by rows.

    Attributes:
        w13: [E, 2 I, L / 8] int32, gates then ups; as rows, which tiles are not.
        w13_scale: [E, 2 I, L / 32] uint8, so, too.
        w2: [E, L, I / 8] int32, so, too.
        w2_scale: [E, L, I / 32] uint8, so, too.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor

    def __post_init__(self) -> None:
        (count, double, words), latent = self.w13.shape, self.w2.shape[1]
        inner = double // 2
        agree = (
            not inner % GROUP_SIZE
            and not latent % GROUP_SIZE
            and words == latent // 8
            and self.w13_scale.shape == (count, double, latent // GROUP_SIZE)
            and self.w2.shape == (count, latent, inner // 8)
            and self.w2_scale.shape == (count, latent, inner // GROUP_SIZE)
        )
        if not agree:
            raise ShapeError(
                f"experts: w13 {tuple(self.w13.shape)} with scale {tuple(self.w13_scale.shape)}, "
                f"w2 {tuple(self.w2.shape)} with scale {tuple(self.w2_scale.shape)}"
            )

    @classmethod
    def empty(cls, count: int, latent: int, inner: int, device: torch.device) -> Mxfp4Experts:
        """Memory for a layer's experts; what is in it is not defined.

        Raises:
            ShapeError: a width is no multiple of 32.
        """

        def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            w13=make(torch.int32, count, 2 * inner, latent // 8),
            w13_scale=make(torch.uint8, count, 2 * inner, latent // GROUP_SIZE),
            w2=make(torch.int32, count, latent, inner // 8),
            w2_scale=make(torch.uint8, count, latent, inner // GROUP_SIZE),
        )

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

    def gate_up(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """One expert's way in, decoded: [2 I, L], gate rows first."""
        packed = _in_order(unpack_words(in_rows(self.w13[expert])), halves=2)
        scale = _in_order(in_rows(self.w13_scale[expert]), halves=2)
        return dequantize_mxfp4(packed, scale, dtype=dtype)

    def down(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """One expert's way back, decoded: [L, I]."""
        packed = unpack_words(in_rows(self.w2[expert]))
        return dequantize_mxfp4(packed, in_rows(self.w2_scale[expert]), dtype=dtype)

    def put(self, expert: int, part: Part, packed: torch.Tensor, scale: torch.Tensor) -> None:
        """Store one matrix as a checkpoint has it; rearranged on the experts' own device.

        Args:
            expert: which one.
            part: which of its matrices.
            packed: [R, C / 2] uint8.
            scale: [R, C / 32] uint8.

        Raises:
            WeightError: a scale is out of range.
        """
        if (largest := int(scale.max())) > LARGEST_SCALE:
            raise WeightError(
                f"expert {expert}: {part} has a scale byte of {largest}; "
                f"up to {LARGEST_SCALE} can be decoded"
            )
        words, scales = self._place(expert, part)
        # A copy of its own: a mapped file's bytes may begin anywhere, words may not.
        packed = torch.empty(packed.shape, dtype=torch.uint8, device=words.device).copy_(packed)
        scale = scale.to(words.device)
        if part != "down":
            packed, scale = _by_class(packed), _by_class(scale)
        words.copy_(in_tiles(pack_words(packed)))
        scales.copy_(in_tiles(scale))

    def taken(self, expert: int, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """What :meth:`put` was given, on the experts' device."""
        words, scale = map(in_rows, self._place(expert, part))
        packed = unpack_words(words)
        return (packed, scale) if part == "down" else (_in_order(packed), _in_order(scale))

    def _place(self, expert: int, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        if part == "down":
            return self.w2[expert], self.w2_scale[expert]
        rows = slice(0, self.inner) if part == "gate" else slice(self.inner, None)
        return self.w13[expert, rows], self.w13_scale[expert, rows]


def _by_class(rows: torch.Tensor) -> torch.Tensor:
    """Rows 8 j + n by n, then j."""
    return rows.unflatten(0, (-1, 8)).transpose(0, 1).flatten(0, 1)


def _in_order(rows: torch.Tensor, *, halves: int = 1) -> torch.Tensor:
    """The way back from :func:`_by_class`, in each of so many parts."""
    return rows.unflatten(0, (halves, 8, -1)).transpose(1, 2).flatten(0, 2)


def in_tiles(rows: torch.Tensor) -> torch.Tensor:
    """Words [..., R, C / 8] int32 or scales [..., R, C / 32] uint8 as they are stored."""
    if rows.shape[-1] % (step := _step(rows)):
        return rows
    cut = rows.unflatten(-1, (-1, step)).unflatten(-3, (-1, TILE_ROWS))
    return cut.transpose(-3, -2).reshape(rows.shape)


def in_rows(tiles: torch.Tensor) -> torch.Tensor:
    """The way back from :func:`in_tiles`."""
    *_, rows, columns = tiles.shape
    if columns % (step := _step(tiles)):
        return tiles
    cut = tiles.unflatten(-1, (-1, step)).flatten(-3, -2)
    cut = cut.unflatten(-2, (rows // TILE_ROWS, columns // step, TILE_ROWS))
    return cut.transpose(-3, -2).reshape(tiles.shape)


def _step(stored: torch.Tensor) -> int:
    """Elements of a row of a tile: words, or scale bytes."""
    return TILE_COLUMNS // (8 if stored.dtype == torch.int32 else GROUP_SIZE)


_MOVES = ((0x0008, 12), (0x0007, 6), (0x0080, 5), (0xC070, -1), (0x3800, -2), (0x0700, -8))
"""Bits of a half word of four codes, and how far to the left they go; every bit is in one."""


def pack_words(packed: torch.Tensor) -> torch.Tensor:
    """A checkpoint's bytes [..., C / 2] as stored words [..., C / 8] int32; C in steps of 32."""
    first, second = packed.contiguous().view(torch.int32).unflatten(-1, (-1, 2)).unbind(-1)
    low = (first & 0xFFFF) | (second << 16)
    high = ((first >> 16) & 0xFFFF) | (second & -0x10000)
    return torch.stack([_moved(low), _moved(high)], -1).flatten(-2)


def unpack_words(stored: torch.Tensor) -> torch.Tensor:
    """What :func:`pack_words` was given, [..., C / 2] uint8."""
    low, high = (_moved(u, back=True) for u in stored.unflatten(-1, (-1, 2)).unbind(-1))
    first = (low & 0xFFFF) | (high << 16)
    second = ((low >> 16) & 0xFFFF) | (high & -0x10000)
    return torch.stack([first, second], -1).flatten(-2).view(torch.uint8)


def _moved(u: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """Every bit of both halves at its other place."""
    out = torch.zeros_like(u)
    for mask, left in _MOVES:
        there = mask << left if left > 0 else mask >> -left
        by, kept = (-left, mask) if back else (left, there)
        both = (kept | kept << 16) - (kept >> 15 << 32)  # as a signed number
        out |= (u << by if by > 0 else u >> -by) & both
    return out


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
        w13_scale.shape == (experts, double, latent // GROUP_SIZE)
        and w2.shape == (experts, latent, inner // 2)
        and w2_scale.shape == (experts, latent, inner // GROUP_SIZE)
    )
    if not agree:
        raise ShapeError(
            f"prepare_experts: w13 {tuple(w13.shape)} with scale {tuple(w13_scale.shape)}, "
            f"w2 {tuple(w2.shape)} with scale {tuple(w2_scale.shape)}"
        )
    stored = Mxfp4Experts.empty(experts, latent, inner, w13.device)
    for e in range(experts):
        stored.put(e, "gate", w13[e, :inner], w13_scale[e, :inner])
        stored.put(e, "up", w13[e, inner:], w13_scale[e, inner:])
        stored.put(e, "down", w2[e], w2_scale[e])
    return stored
