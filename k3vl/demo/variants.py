"""Redrawings of every sprite, made on the device: what the training composer draws from.

The first drawing is plain. The others are drawn anew by chance, with another pen each time: warped,
outlined, inked along inner edges, in flat or other colours, on white paper, thinner or thicker,
softer, with a part cut out. They stand for drawing styles that the atlas does not hold, and
``renew`` draws them again while training goes on, so that none of them can be learned by heart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from k3vl.demo.atlas import CELL
from k3vl.demo.scene import KEEPS_COLOUR, KEEPS_SHAPE, VARIANTS
from k3vl.demo.shapes import shape_masks

if TYPE_CHECKING:
    from k3vl.demo.atlas import Atlas

_CHUNK = 512
# Redrawings keep where everything lies in a drawing, so it can still be learned by heart. A fifth
# of them lose a rectangle with sides of these shares of the cell: no name hangs on a single part.
HIDDEN_SHARE = 0.2
_HIDDEN_SIDES = (0.2, 0.45)
_INNER = 86  # an outlined sprite is drawn smaller, so that the outline has room


def pack_sprites(rgba: torch.Tensor) -> torch.Tensor:
    """[n, 4, 96, 96] premultiplied float in 0..1 -> [n, 96 * 96] int32, red in the low byte."""
    x = (rgba.clamp(0, 1) * 255).round().int()
    return (x[:, 0] | x[:, 1] << 8 | x[:, 2] << 16 | x[:, 3] << 24).flatten(1)


class SpriteBank:
    """All sprites and the twelve shapes in :data:`VARIANTS` drawings.

    Args:
        atlas: the drawings.
        device: where they are kept.
        random: source of chance, on the device.

    Attributes:
        packed: [(sprites + 12) * VARIANTS * 96 * 96] int32, RGBA with premultiplied colour.
    """

    def __init__(self, atlas: Atlas, device: torch.device | str, random: torch.Generator) -> None:
        masks = shape_masks()
        white = np.full((*masks.shape, 4), 255, np.uint8)
        white[..., 3] = (masks * 255).round()
        raw = np.concatenate([atlas.pixels(), white])
        self._raw = torch.from_numpy(raw).to(device)
        self._random = random
        self._next = 0
        size = len(self._raw) * VARIANTS * CELL * CELL
        self.packed = torch.empty(size, dtype=torch.int32, device=device)
        for _ in range(0, len(self._raw), _CHUNK):
            self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        """Draw the next few hundred sprites anew."""
        start, end = self._next, min(self._next + _CHUNK, len(self._raw))
        self._next = end % len(self._raw)
        plain = self._raw[start:end].permute(0, 3, 1, 2).float() / 255
        plain[:, :3] *= plain[:, 3:]
        target = self.packed.view(len(self._raw), VARIANTS, -1)[start:end]
        target[:, 0] = pack_sprites(plain)
        for variant in range(1, VARIANTS):
            drawn = redraw(
                plain,
                self._random,
                shape_only=variant <= KEEPS_SHAPE,
                recolour=variant > KEEPS_COLOUR,
            )
            target[:, variant] = pack_sprites(drawn)


@dataclass(frozen=True, slots=True)
class _Chance:
    """Random numbers for n sprites, shaped to be multiplied with pictures."""

    n: int
    source: torch.Generator

    def uniform(self, low: float, high: float, channels: int = 1) -> torch.Tensor:
        """[n, channels, 1, 1]."""
        size = (self.n, channels, 1, 1)
        numbers = torch.rand(size, device=self.source.device, generator=self.source)
        return low + (high - low) * numbers

    def happens(self, share: float) -> torch.Tensor:
        """[n, 1, 1, 1] bool."""
        return self.uniform(0, 1) < share


def redraw(
    plain: torch.Tensor, source: torch.Generator, *, shape_only: bool, recolour: bool
) -> torch.Tensor:
    """[n, 4, 96, 96] premultiplied sprites, drawn by another hand each.

    Args:
        plain: the originals.
        source: of chance.
        shape_only: warp and change the thickness, no more: what is drawn in one colour loses its
            inside to an outline.
        recolour: colours may change, or go.
    """
    chance = _Chance(len(plain), source)
    small = F.interpolate(plain, (_INNER, _INNER), mode="bilinear", antialias=True)
    sprite = _in_parts(_warped(F.pad(small, ((CELL - _INNER) // 2,) * 4), chance), chance)
    if shape_only:
        return _soft(_thicker(sprite, chance), chance)
    alpha = sprite[:, 3:]
    colour = (sprite[:, :3] / alpha.clamp(min=1e-3)).clamp(0, 1)
    edges = _edges(colour, chance.uniform(0.15, 0.45))
    edges = edges * (F.avg_pool2d(alpha, 3, 1, 1) > 0.9)
    wide = F.max_pool2d(edges, 3, 1, 1)
    edges = F.avg_pool2d(torch.where(chance.happens(0.5), wide, edges), 3, 1, 1)
    colour = torch.where(chance.happens(0.5), _flat(colour, chance), colour)
    bare = torch.zeros_like(alpha[:, :, :1, :1], dtype=torch.bool)
    if recolour:
        colour, bare = _recoloured(colour, chance)
    ink = chance.uniform(0, 0.25, 3) if recolour else chance.uniform(0, 0.1)
    edges = edges * (bare | chance.happens(0.7 if recolour else 0.5))
    colour = colour * (1 - edges) + ink * edges
    drawn = torch.cat([colour * alpha, alpha], 1)
    return _soft(_outlined(drawn, ink, bare, chance), chance)


def _warped(sprite: torch.Tensor, chance: _Chance) -> torch.Tensor:
    """A smooth displacement, shear and stretch; a third of the sprites keep their shape."""
    n = len(sprite)
    device = sprite.device
    line = torch.linspace(-1, 1, CELL, device=device) * (CELL - 1) / CELL
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).expand(n, -1, -1, -1)
    turn = torch.eye(2, device=device).expand(n, 2, 2).clone()
    turn = turn + chance.uniform(-0.22, 0.22, 4).view(n, 2, 2)
    bend = torch.randn(n, 2, 4, 4, device=device, generator=chance.source)
    bend = bend * chance.uniform(0, 0.085)
    bend = F.interpolate(bend, (CELL, CELL), mode="bicubic").permute(0, 2, 3, 1)
    moved = grid @ turn[:, None] + bend
    moved = torch.where(chance.happens(0.7), moved, grid)
    return F.grid_sample(sprite, moved, mode="bilinear", align_corners=False)


def _in_parts(sprite: torch.Tensor, chance: _Chance) -> torch.Tensor:
    """A rectangle of some of the sprites is cut out, of each another one."""
    line = (torch.arange(CELL, device=sprite.device) + 0.5) / CELL
    hidden = chance.happens(HIDDEN_SHARE)
    for along in (line[:, None], line[None]):
        half = chance.uniform(*_HIDDEN_SIDES) / 2
        hidden = hidden & ((along - chance.uniform(0, 1)).abs() < half)
    return sprite * ~hidden


def _thicker(sprite: torch.Tensor, chance: _Chance) -> torch.Tensor:
    """A third grown by a pixel, a quarter shrunk by one."""
    grown = F.max_pool2d(sprite, 3, 1, 1)
    shrunk = -F.max_pool2d(-sprite, 3, 1, 1)
    which = chance.uniform(0, 1)
    return torch.where(which < 0.33, grown, torch.where(which > 0.75, shrunk, sprite))


def _flat(colour: torch.Tensor, chance: _Chance) -> torch.Tensor:
    """Few colours in even patches."""
    levels = chance.uniform(2, 6).round()
    return (F.avg_pool2d(colour, 5, 1, 2) * levels).round() / levels


def _recoloured(colour: torch.Tensor, chance: _Chance) -> tuple[torch.Tensor, torch.Tensor]:
    """White paper, one colour, a ramp of two colours by lightness, inverted, or mixed channels.

    Returns:
        Colours, and where nothing but ink can show what is drawn, [n, 1, 1, 1].
    """
    n = len(colour)
    light = colour.mean(1, keepdim=True)
    one = chance.uniform(0.2, 1, 3).expand_as(colour)
    low, high = chance.uniform(0, 1, 3), chance.uniform(0, 1, 3)
    ramp = low + (high - low) * light
    mix = chance.uniform(-0.6, 1.2, 9).view(n, 3, 3)
    mix = mix / mix.sum(2, keepdim=True).abs().clamp(min=0.5)
    mixed = torch.einsum("nij,njhw->nihw", mix, colour).clamp(0, 1)
    which = chance.uniform(0, 1)
    out = torch.where(which < 0.25, torch.ones_like(colour), mixed)
    out = torch.where((which >= 0.25) & (which < 0.4), one, out)
    out = torch.where((which >= 0.4) & (which < 0.6), ramp, out)
    return torch.where((which >= 0.6) & (which < 0.7), 1 - colour, out), which < 0.4


def _outlined(
    sprite: torch.Tensor, ink: torch.Tensor, always: torch.Tensor, chance: _Chance
) -> torch.Tensor:
    """Grow most sprites by an outline of up to four pixels."""
    alpha = sprite[:, 3:]
    thin, thick = (F.max_pool2d(alpha, 2 * p + 1, 1, p) for p in (2, 4))
    which = chance.uniform(0, 1)
    grown = torch.where((which < 0.35) & ~always, alpha, torch.where(which < 0.75, thin, thick))
    grown = torch.maximum(F.avg_pool2d(grown, 3, 1, 1), alpha)
    return torch.cat([sprite[:, :3] + ink * (grown - alpha), grown], 1)


def _soft(sprite: torch.Tensor, chance: _Chance) -> torch.Tensor:
    """A sixth of the sprites lose their fine detail."""
    coarse = F.interpolate(sprite, (32, 32), mode="bilinear", antialias=True)
    coarse = F.interpolate(coarse, (CELL, CELL), mode="bilinear")
    return torch.where(chance.happens(0.16), coarse, sprite)


def _edges(colour: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Where neighbouring colours differ much, [n, 1, h, w] of 0 and 1."""
    across = (colour[..., 2:] - colour[..., :-2]).abs().amax(1, keepdim=True)
    down = (colour[..., 2:, :] - colour[..., :-2, :]).abs().amax(1, keepdim=True)
    return (F.pad(across, (1, 1)) + F.pad(down, (0, 0, 1, 1)) > threshold).float()
