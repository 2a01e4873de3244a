"""Six drawings of every sprite, made once on the device: what the training composer draws from.

Plain; a thin black outline; a thick outline over flattened colour; inked inner edges; line art;
soft. They stand for drawing styles that the atlas does not hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from k3vl.demo.atlas import CELL
from k3vl.demo.shapes import shape_masks

if TYPE_CHECKING:
    from k3vl.demo.atlas import Atlas

VARIANTS = 6
_CHUNK = 512
_INNER = 86  # an outlined sprite is drawn smaller, so that the outline has room


def pack_sprites(rgba: torch.Tensor) -> torch.Tensor:
    """[n, 4, 96, 96] premultiplied float in 0..1 -> [n, 96 * 96] int32, red in the low byte."""
    x = (rgba.clamp(0, 1) * 255).round().int()
    return (x[:, 0] | x[:, 1] << 8 | x[:, 2] << 16 | x[:, 3] << 24).flatten(1)


@torch.no_grad()
def build_variants(atlas: Atlas, device: torch.device | str) -> torch.Tensor:
    """[sprites + 12 shapes, 6, 96 * 96] int32, packed RGBA with premultiplied colour."""
    masks = shape_masks()
    white = np.full((*masks.shape, 4), 255, np.uint8)
    white[..., 3] = (masks * 255).round()
    raw = torch.from_numpy(np.concatenate([atlas.pixels(), white]))
    out = []
    for part in raw.split(_CHUNK):
        sprites = part.to(device).permute(0, 3, 1, 2).float() / 255
        sprites[:, :3] *= sprites[:, 3:]
        out.append(torch.stack([pack_sprites(v) for v in _variants(sprites)], 1))
    return torch.cat(out)


def _variants(plain: torch.Tensor) -> tuple[torch.Tensor, ...]:
    margin = (CELL - _INNER) // 2
    small = F.interpolate(plain, (_INNER, _INNER), mode="bilinear", antialias=True)
    small = F.pad(small, (margin,) * 4)
    alpha = small[:, 3:]
    colour = small[:, :3] / alpha.clamp(min=1e-3)
    flat = (F.avg_pool2d(colour, 5, 1, 2) * 4).round() / 4
    edges = _edges(colour) * (F.avg_pool2d(alpha, 3, 1, 1) > 0.95)
    edges = F.avg_pool2d(F.max_pool2d(edges, 3, 1, 1), 3, 1, 1)
    paper = ((1 - edges) * alpha).expand(-1, 3, -1, -1)
    soft = F.interpolate(plain, (30, 30), mode="bilinear", antialias=True)
    return (
        plain,
        _outlined(small, 2),
        _outlined(torch.cat([flat * alpha, alpha], 1), 4),
        _outlined(torch.cat([flat * alpha * (1 - edges), alpha], 1), 3),
        _outlined(torch.cat([paper, alpha], 1), 3),
        F.interpolate(soft, (CELL, CELL), mode="bilinear"),
    )


def _outlined(sprites: torch.Tensor, pixels: int) -> torch.Tensor:
    """Grow the alpha; what is added is black, because colour is premultiplied."""
    grown = F.max_pool2d(sprites[:, 3:], 2 * pixels + 1, 1, pixels)
    grown = F.avg_pool2d(grown, 3, 1, 1)
    return torch.cat([sprites[:, :3], torch.maximum(grown, sprites[:, 3:])], 1)


def _edges(colour: torch.Tensor) -> torch.Tensor:
    """Where neighbouring colours differ much, [n, 1, h, w] of 0 and 1."""
    across = (colour[..., 2:] - colour[..., :-2]).abs().amax(1, keepdim=True)
    down = (colour[..., 2:, :] - colour[..., :-2, :]).abs().amax(1, keepdim=True)
    return (F.pad(across, (1, 1)) + F.pad(down, (0, 0, 1, 1)) > 0.28).float()
