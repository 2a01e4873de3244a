"""The vision tower and the patch merger of the training model.

A batch has pictures of one size, so attention needs no packing; the shipped engine's tower
(``k3vl.vision``) packs pictures of any sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from k3vl.demo.train_layers import graph, linear, matrix, ones, rms_norm

if TYPE_CHECKING:
    from torch import Tensor

    from k3vl.demo.geometry import Geometry

_VISION_EPS = 1.19e-7  # float32's own, which torch takes where RMSNorm has no eps
_VISION_BASE = 10_000


def _any_size(*tensors: Tensor) -> None:
    """Let one compiled graph serve every picture size."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


@graph
def _tower_in(
    x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor, qkv: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    width = x.shape[-1]
    y = linear(rms_norm(x, norm, _VISION_EPS), qkv.reshape(-1, width))
    q, k, v = y.reshape(-1, 3, heads, width // heads).unbind(1)

    def turned(t: Tensor) -> Tensor:
        a, b = t.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(t.dtype)

    return turned(q), turned(k), v.contiguous()


@graph
def _tower_out(
    x: Tensor, a: Tensor, weight: Tensor, norm: Tensor, fc0: Tensor, fc1: Tensor
) -> Tensor:
    x = x + linear(a, weight)
    y = F.gelu(linear(rms_norm(x, norm, _VISION_EPS), fc0), approximate="tanh")
    return x + linear(y, fc1)


class Block(nn.Module):
    """One block of the tower."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        width = g.vision_width
        self.heads = g.vision_heads
        self.n0, self.n1 = ones(width), ones(width)
        self.qkv, self.o = matrix(3, width, width), matrix(width, width)
        self.fc0 = matrix(g.vision_inner, width)
        self.fc1 = matrix(width, g.vision_inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, items: int) -> Tensor:
        """[patches, d] -> [patches, d]; ``items`` equally large pictures or groups."""
        qkv = _tower_in(x, cos, sin, self.n0, self.qkv, self.heads)
        q, k, v = (t.unflatten(0, (items, -1)).transpose(1, 2) for t in qkv)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        _any_size(a)
        return _tower_out(x, a, self.o, self.n1, self.fc0, self.fc1)


class Vision(nn.Module):
    """MoonViT3d tower, temporal pooling, patch merger."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        width, merged = g.vision_width, 4 * g.vision_width
        self.patch_size, self.width, self.head_dim = g.patch, width, width // g.vision_heads
        self.patch = matrix(width, 3 * g.patch**2)
        self.pos = nn.Parameter(torch.randn(g.table, g.table, width) * 0.02)
        self.blocks = nn.ModuleList(Block(g) for _ in range(g.vision_layers))
        self.norm = ones(width)
        self.p0, self.p2 = matrix(merged, merged), matrix(g.width, merged)
        self.post = ones(g.width)

    def forward(self, pictures: Tensor, frames: int) -> Tensor:
        """[items * frames, 3, H, W] in 0..1 -> [items, H/28 * W/28, d]."""
        n, _, height, width = pictures.shape
        p = self.patch_size
        rows, columns, items = height // p, width // p, n // frames
        x = (pictures - 0.5) * 2
        x = x.reshape(n, 3, rows, p, columns, p).permute(0, 2, 4, 1, 3, 5)
        x = x.reshape(n, rows * columns, -1)
        x = linear(x.to(torch.bfloat16 if x.is_cuda else torch.float32), self.patch)
        x = self._placed(x, rows, columns, frames).reshape(-1, self.width)
        cos, sin = self._angles(rows, columns, items * frames, x.device)
        _any_size(x, cos, sin)
        for block in self.blocks:
            x = block(x, cos, sin, items)
            _any_size(x)
        x = rms_norm(x, self.norm, _VISION_EPS)
        x = x.view(items, frames, rows // 2, 2, columns // 2, 2, self.width)
        x = x.permute(0, 1, 2, 4, 3, 5, 6).float().mean(1).to(x.dtype)
        x = x.reshape(items, rows * columns // 4, -1)
        return rms_norm(linear(F.gelu(linear(x, self.p0)), self.p2), self.post)

    def _placed(self, x: Tensor, rows: int, columns: int, frames: int) -> Tensor:
        """Add the learned table at this size, and the frame's row where there are several."""
        table = self.pos.permute(2, 0, 1)[None]
        table = F.interpolate(table, (rows, columns), mode="bilinear", align_corners=False)
        x = x + table[0].flatten(1).T.to(x.dtype)
        if frames == 1:
            return x
        half = self.width // 2
        frequency = _VISION_BASE ** (-torch.arange(half, device=x.device) / half)
        turn = torch.arange(frames, device=x.device)[:, None] * frequency
        time = torch.cat([turn.sin(), turn.cos()], -1)[:, None].to(x.dtype)
        return (x.unflatten(0, (-1, frames)) + time).flatten(0, 1)

    def _angles(
        self, rows: int, columns: int, pictures: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary angles, column and row by turns, [patches, 1, d/2]."""
        step = torch.arange(0, self.head_dim // 4, device=device) * 4 / self.head_dim
        frequency = _VISION_BASE**-step
        row = torch.arange(rows, device=device).repeat_interleave(columns)
        column = torch.arange(columns, device=device).repeat(rows)
        angles = torch.stack([column[:, None] * frequency, row[:, None] * frequency], -1)
        angles = angles.flatten(1).repeat(pictures, 1)[:, None]
        return angles.cos(), angles.sin()
