"""Scenes to pictures and dense labels on the device: the data of a training step.

The sprites stay on the device; a batch brings only where they lie. ``paint_reference`` is the
definition of the picture; on CUDA the same is drawn by one Triton kernel. Appearance noise belongs
here too. Files for the evaluation are made by ``paint``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from k3vl.demo.atlas import CELL, COLOUR_RGB, Atlas
from k3vl.demo.buckets import CELL_PIXELS
from k3vl.demo.scene import CHESSBOARD_SQUARE, MAX_ITEMS, VARIANTS
from k3vl.demo.variants import SpriteBank
from k3vl.demo.words import STRIP_HEIGHT, STRIP_WIDTH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from k3vl.demo.buckets import Bucket

_BLOCK = 1024
_TEXT_SLOT, _EMPTY_SLOT = MAX_ITEMS, MAX_ITEMS + 1
# A cell has the label of what covers more than a quarter of it, and is ground below 8 per cent.
_COVERED, _EMPTY = 0.25, 0.08
IGNORED = -100
# Small pictures are drawn at twice their size and averaged; the sprites are 96 pixels.
_FINE_BELOW = 112


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Everything that one picture is painted from; N pictures, K sprite slots.

    Attributes:
        at: [N, K] int32 offset of the sprite in the packed atlas; below 0: none.
        geometry: [N, K, 5] centre x, y and size in pixels, angle, flip.
        colour: [N, K, 3, 4] matrix from premultiplied RGBA to RGB.
        strips: [N, 48, 256] uint8 alpha of the printed text.
        strip_geometry: [N, 6] x, y, width, height, angle, unused; width below 0: none.
        strip_colour: [N, 2, 3] ink and card; card below 0: none.
        ground: [N, 3, H, W].
    """

    at: Tensor
    geometry: Tensor
    colour: Tensor
    strips: Tensor
    strip_geometry: Tensor
    strip_colour: Tensor
    ground: Tensor


def paint_reference(atlas: Tensor, layers: Layers) -> tuple[Tensor, Tensor]:
    """Sprites bilinearly sampled and laid over the ground in order, then the strip.

    Args:
        atlas: flat int32, packed premultiplied RGBA.
        layers: what to paint.

    Returns:
        [N, 3, H, W] float32 in 0..1, and [N, H, W] uint8: the slot that is seen, K for text and
        K + 1 for ground.
    """
    ground = layers.ground
    _, _, height, width = ground.shape
    y = torch.arange(height, device=ground.device)[None, :, None] + 0.5
    x = torch.arange(width, device=ground.device)[None, None, :] + 0.5
    picture = ground.float()
    slot = torch.full_like(picture[:, 0], _EMPTY_SLOT)
    for k in range(layers.at.shape[1]):
        g = layers.geometry[:, k]
        size = g[:, 2].clamp(min=1)
        u, v = _local(x, y, g[:, :2], g[:, 3], (size, size), g[:, 4], (CELL, CELL))
        on = _wide((layers.at[:, k] >= 0) & (g[:, 2] > 0))
        on = on & (u > -1) & (u < CELL) & (v > -1) & (v < CELL)
        base = _wide(layers.at[:, k].clamp(min=0))
        texel = torch.zeros(4, *u.shape, device=u.device)
        for q, w in _taps(atlas, base, u, v, (CELL, CELL)):
            texel += torch.stack([(q >> 8 * c & 255).float() * w for c in range(4)])
        texel = torch.where(on, texel / 255, 0.0)
        alpha = texel[3]
        colour = torch.einsum("nij,jnhw->nihw", layers.colour[:, k], texel)
        colour = torch.minimum(colour.clamp(min=0), alpha[:, None])
        picture = picture * (1 - alpha[:, None]) + colour
        slot = torch.where(alpha > 0.5, float(k), slot)
    return _paint_strip(picture, slot, layers, x, y)


def _paint_strip(
    picture: Tensor, slot: Tensor, layers: Layers, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    g = layers.strip_geometry
    extent = (g[:, 2].clamp(min=1), g[:, 3].clamp(min=1))
    size = (STRIP_WIDTH, STRIP_HEIGHT)
    u, v = _local(x, y, g[:, :2], g[:, 4], extent, torch.ones_like(g[:, 0]), size)
    on = _wide(g[:, 2] > 0) & (u > -0.5) & (u < size[0] - 0.5) & (v > -0.5) & (v < size[1] - 0.5)
    rows = torch.arange(len(g), device=g.device, dtype=torch.int32)
    base = _wide(rows * (STRIP_WIDTH * STRIP_HEIGHT))
    alpha = torch.zeros_like(u)
    for q, w in _taps(layers.strips.flatten(), base, u, v, size):
        alpha += q.float() * w
    alpha = torch.where(on, alpha / 255, 0.0)[:, None]
    ink, card = layers.strip_colour[:, 0, :, None, None], layers.strip_colour[:, 1, :, None, None]
    under = torch.where(on[:, None] & (card[:, :1] >= 0), card, picture)
    slot = torch.where(on, float(_TEXT_SLOT), slot)
    return under * (1 - alpha) + ink * alpha, slot.to(torch.uint8)


def _wide(values: Tensor) -> Tensor:
    return values[:, None, None]


def _local(
    x: Tensor,
    y: Tensor,
    centre: Tensor,
    angle: Tensor,
    extent: tuple[Tensor, Tensor],
    flip: Tensor,
    size: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Picture coordinates -> texel coordinates of something rotated and scaled."""
    c, s = _wide(angle.cos()), _wide(angle.sin())
    dx, dy = x - _wide(centre[:, 0]), y - _wide(centre[:, 1])
    u = (dx * c + dy * s) / _wide(extent[0]) * _wide(flip)
    v = (dy * c - dx * s) / _wide(extent[1])
    return (u + 0.5) * size[0] - 0.5, (v + 0.5) * size[1] - 0.5


def _taps(
    source: Tensor, base: Tensor, u: Tensor, v: Tensor, size: tuple[int, int]
) -> list[tuple[Tensor, Tensor]]:
    """The four neighbours of a texel coordinate with their weights."""
    width, height = size
    u0, v0 = u.floor(), v.floor()
    out = []
    for right in (0, 1):
        for down in (0, 1):
            i, j = u0.int() + right, v0.int() + down
            inside = (i >= 0) & (i < width) & (j >= 0) & (j < height)
            at = base + j.clamp(0, height - 1) * width + i.clamp(0, width - 1)
            weight = (u - u0 if right else 1 - u + u0) * (v - v0 if down else 1 - v + v0)
            out.append((torch.where(inside, source[at], 0), weight))
    return out


def paint(atlas: Tensor, layers: Layers) -> tuple[Tensor, Tensor]:
    """:func:`paint_reference`, by the Triton kernel on CUDA or in the Triton interpreter."""
    ground = layers.ground
    if not ground.is_cuda and not os.environ.get("TRITON_INTERPRET"):
        return paint_reference(atlas, layers)
    from k3vl.demo.compose_kernel import paint_kernel

    n, _, height, width = ground.shape
    out = torch.empty(n, 3, height, width, device=ground.device)
    slot = torch.empty(n, height, width, device=ground.device, dtype=torch.uint8)
    paint_kernel[(n, -(-height * width // _BLOCK))](
        atlas,
        layers.at.int().contiguous(),
        layers.geometry.float().contiguous(),
        layers.colour.float().contiguous(),
        layers.strips.contiguous(),
        layers.strip_geometry.float().contiguous(),
        layers.strip_colour.float().contiguous(),
        ground.contiguous(),
        out,
        slot,
        height,
        width,
        K=layers.at.shape[1],
        CELL=CELL,
        STRIP_W=STRIP_WIDTH,
        STRIP_H=STRIP_HEIGHT,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out, slot


class Composer:
    """Draws batches.

    Args:
        atlas: the drawings; all of them go to the device.
        device: where to draw.
        seed: of the noise.
    """

    def __init__(self, atlas: Atlas, device: torch.device | str, seed: int = 0) -> None:
        self._device = torch.device(device)
        self._random = torch.Generator(device=device).manual_seed(seed)
        self._bank = SpriteBank(atlas, device, self._random)
        self._rgb = torch.from_numpy(COLOUR_RGB).to(device)
        self._text, self._ground = atlas.text_label, atlas.ground_label

    def renew(self) -> None:
        """Draw a part of the sprites' variants anew."""
        self._bank.renew()

    @torch.no_grad()
    def __call__(
        self, batch: Mapping[str, Tensor], bucket: Bucket, *, noise: bool
    ) -> tuple[Tensor, Tensor]:
        """Draw a batch.

        Args:
            batch: the arrays of a ``batches.Batch`` and ``strips`` [P, 48, 256], on the device.
            bucket: its shapes.
            noise: vary colour, add pixel noise and blur.

        Returns:
            [frames, 3, H, W] float32 in 0..1 (black beyond the picture's own extent), and labels
            [items, cells] of every picture and clip group, ``IGNORED`` where undecided; in the
            order of the rows.
        """
        if "raster" in batch:
            return self._ready(batch, bucket, noise=noise)
        fine = 2 if max(bucket.height, bucket.width) <= _FINE_BELOW else 1
        height, width = bucket.height * fine, bucket.width * fine
        picture, slot = paint(
            self._bank.packed, self._layers(batch, height, width, bucket.frames, fine, noise)
        )
        if fine > 1:
            picture = F.avg_pool2d(picture, fine)
        if noise:
            picture = self._worn(picture)
        extent = _each(batch["extent"], bucket.frames)
        picture = self._inside(picture, extent, bucket)
        return picture, self._labels(slot, batch["label"], bucket, fine)

    # ------------------------------------------------------------------ parts

    def _ready(
        self, batch: Mapping[str, Tensor], bucket: Bucket, *, noise: bool
    ) -> tuple[Tensor, Tensor]:
        """Pictures that came ready; their cells have no labels."""
        picture = batch["raster"].permute(0, 3, 1, 2).float() / 255
        if noise:
            picture = self._worn(picture)
        picture = self._inside(picture, batch["extent"], bucket)
        labels = torch.full((len(picture), bucket.visual), IGNORED, device=self._device)
        return picture, labels

    def _inside(self, picture: Tensor, extent: Tensor, bucket: Bucket) -> Tensor:
        """Black beyond each picture's own extent, and levels of 8 bits."""
        rows = torch.arange(bucket.height, device=self._device)
        columns = torch.arange(bucket.width, device=self._device)
        inside = (rows < extent[:, :1])[:, None, :, None] & (columns < extent[:, 1:])[:, None, None]
        return (picture.clamp(0, 1) * 255).round().div(255) * inside

    def _layers(
        self,
        batch: Mapping[str, Tensor],
        height: int,
        width: int,
        frames: tuple[int, ...],
        fine: int,
        noise: bool,
    ) -> Layers:
        at = (batch["sprite"] * VARIANTS + batch["variant"].int()) * (CELL * CELL)
        geometry = batch["geometry"].clone()
        geometry[..., :3] *= fine
        strip = batch["strip"].clone()
        strip[:, :4] *= fine
        colours = batch["strip_colours"].long()
        card = torch.where(colours[:, 1:] >= 0, self._rgb[colours[:, 1].clamp(min=0)], -1.0)
        return Layers(
            at=_each(torch.where(batch["sprite"] >= 0, at, -1), frames),
            geometry=geometry,
            colour=_each(self._colours(batch, noise), frames),
            strips=_each(batch["strips"], frames),
            strip_geometry=_each(strip, frames),
            strip_colour=_each(torch.stack([self._rgb[colours[:, 0]], card], 1), frames),
            ground=_each(self._grounds(batch["ground"], height, width, fine), frames),
        )

    def _rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self._device, generator=self._random)

    def _grounds(self, ground: Tensor, height: int, width: int, fine: int) -> Tensor:
        """Flat, a gradient, blurred noise, or the chessboard under transparent pictures."""
        first, second = ground[:, :3, None, None], ground[:, 3:6, None, None]
        kind, angle = ground[:, 6].view(-1, 1, 1, 1), ground[:, 7].view(-1, 1, 1, 1)
        y = torch.linspace(-0.5, 0.5, height, device=self._device)[:, None]
        x = torch.linspace(-0.5, 0.5, width, device=self._device)[None]
        along = (x * angle.cos() + y * angle.sin() + 0.5).clamp(0, 1) * 0.6
        coarse = self._rand(len(ground), 3, 7, 7).to(torch.bfloat16)
        cloud = F.interpolate(coarse, (height, width), mode="bilinear", align_corners=False)
        cloudy = (first * 0.7 + cloud * 0.3).clamp(0, 1)
        graded = first * (1 - along) + second * along
        square = CHESSBOARD_SQUARE * fine
        rows = torch.arange(height, device=self._device)[:, None] // square
        columns = torch.arange(width, device=self._device) // square
        board = torch.where((rows + columns) % 2 == 0, first, second)
        chosen = torch.where(kind == 1, graded, torch.where(kind == 2, cloudy, board))
        chosen = torch.where(kind == 0, first, chosen)
        return chosen.to(torch.bfloat16)

    def _colours(self, batch: Mapping[str, Tensor], noise: bool) -> Tensor:
        """Hue turns and gains for most sprites, grey for some; a tint replaces all colour."""
        p, k = batch["sprite"].shape
        matrix = torch.eye(3, device=self._device).expand(p, k, 3, 3)
        if noise:
            free = batch["fixed"] == 0
            turn = (self._rand(p, k) * 2 - 1) * 0.5
            chance = self._rand(p, k)
            turn = torch.where(chance < 0.2, turn * 6, turn)
            gain = 1 + (self._rand(p, k, 3) - 0.5) * 0.5
            shifted = (free & (chance < 0.85))[..., None, None]
            matrix = torch.where(shifted, _hue(turn) * gain[..., None], matrix)
            luminance = torch.tensor([0.3, 0.59, 0.11], device=self._device).expand(3, 3)
            matrix = torch.where((free & (chance > 0.88))[..., None, None], luminance, matrix)
        matrix = F.pad(matrix, (0, 1))
        tint = batch["tint"]
        tinted = torch.cat([torch.zeros_like(matrix[..., :3]), tint[..., None]], -1)
        return torch.where((tint[..., :1] >= 0)[..., None], tinted, matrix)

    def _worn(self, picture: Tensor) -> Tensor:
        """Noise, blur and another contrast, each on some of the pictures."""
        n = len(picture)

        def chance(share: float) -> Tensor:
            return self._rand(n, 1, 1, 1) < share

        contrast = torch.where(chance(0.3), 0.8 + 0.35 * self._rand(n, 1, 1, 1), 1.0)
        picture = (picture - 0.5) * contrast + 0.5
        grain = torch.randn(picture.shape, device=self._device, generator=self._random)
        picture = picture + grain * torch.where(chance(0.3), 0.06 * self._rand(n, 1, 1, 1), 0.0)
        soft = F.avg_pool2d(picture, 3, 1, 1, count_include_pad=False)
        return torch.where(chance(0.15), soft, picture)

    def _labels(self, slot: Tensor, label: Tensor, bucket: Bucket, fine: int) -> Tensor:
        """What covers each 28-pixel cell; a group's frames are averaged as the tower does."""
        shares = torch.stack(
            [
                F.avg_pool2d((slot == k).to(torch.bfloat16)[:, None], CELL_PIXELS * fine)[:, 0]
                for k in range(MAX_ITEMS + 1)
            ],
            1,
        ).float()
        shares = shares.flatten(2).unflatten(0, (-1, sum(bucket.runs)))
        groups = shares.split(list(bucket.runs), 1)
        cells = torch.stack([group.mean(1) for group in groups], 1).flatten(0, 1)
        best, which = cells.max(1)
        text = torch.full((len(label), 1), self._text, device=self._device)
        classes = torch.cat([label.long(), text], 1)
        classes = _each(classes, tuple(len(groups) for groups in bucket.media))
        found = classes.gather(1, which)
        empty = cells.sum(1) < _EMPTY
        return torch.where(best > _COVERED, found, torch.where(empty, self._ground, IGNORED))


def _each(values: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Repeat every value along the first axis, ``counts`` times by turns."""
    if set(counts) == {1}:
        return values
    rows = values.unflatten(0, (-1, len(counts)))
    wide = [rows[:, i : i + 1].expand(-1, n, *rows.shape[2:]) for i, n in enumerate(counts)]
    return torch.cat(wide, 1).flatten(0, 1)


def _hue(angle: Tensor) -> Tensor:
    """[...] radians -> [..., 3, 3] rotation about the grey axis."""
    c, s = angle.cos(), angle.sin()
    a, q = (1 - c) / 3, s * 3**-0.5
    rows = (c + a, a - q, a + q, a + q, c + a, a - q, a - q, a + q, c + a)
    return torch.stack(rows, -1).unflatten(-1, (3, 3))
