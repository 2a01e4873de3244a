"""The demo model written for training: whole rows, no caches, matrices fused by input.

Language activations stay flat, [tokens, width], so that every compiled graph has one shape whatever
the row length; attention and the delta rule see rows. Parameters are float32, products bfloat16 on
CUDA, norms, gates and the router float32. The equations are those of ``k3vl.lm`` and
``k3vl.vision``; ``convert`` maps the parameters to K3's tensors, and a test holds both forwards
against each other.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from k3vl.demo.geometry import DEMO, Geometry
from k3vl.demo.train_layers import Experts, Layer, linear, mixed_norm, ones
from k3vl.demo.train_vision import Vision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class DemoModel(nn.Module):
    """Tower and language model, and the dense head that only training has.

    Args:
        classes: labels of the dense head.
        g: widths and counts.
    """

    def __init__(self, classes: int, g: Geometry = DEMO) -> None:
        super().__init__()
        self.geometry = g
        self.embed = nn.Parameter(torch.randn(g.vocab, g.width) * 0.5)
        self.head = nn.Parameter(torch.randn(g.vocab, g.width) / math.sqrt(g.width) * 0.3)
        self.vision = Vision(g)
        self.layers = nn.ModuleList(Layer(g, i) for i in range(g.layers))
        self.norm, self.rn = ones(g.width), ones(g.width)
        self.rw = nn.Parameter(torch.zeros(g.width))
        self.dense_head = nn.Parameter(torch.randn(classes, g.width) * 0.02)

    def see(self, pictures: Tensor, runs: Sequence[int]) -> Tensor:
        """Features of all media items of a batch of rows.

        Args:
            pictures: [B * sum(runs), 3, H, W] in 0..1, row by row.
            runs: frames of every item of a row.

        Returns:
            [B, items, cells, d].
        """
        total = sum(runs)
        pictures = pictures.unflatten(0, (-1, total))
        parts: list[Tensor] = []
        start = item = 0
        while item < len(runs):
            same = 1
            while item + same < len(runs) and runs[item + same] == runs[item]:
                same += 1
            end = start + same * runs[item]
            seen = self.vision(pictures[:, start:end].flatten(0, 1), runs[item])
            parts.append(seen.unflatten(0, (-1, same)))
            start, item = end, item + same
        return torch.cat(parts, 1)

    def forward(self, ids: Tensor, features: Tensor, slots: Tensor) -> Tensor:
        """Hidden states after the last norm.

        Args:
            ids: [B, S] tokens.
            features: [B, items, cells, d].
            slots: [B, items, cells] positions in the flattened rows that they replace.

        Returns:
            [B * S, d].
        """
        rows, length = ids.shape
        x = F.embedding(ids, self.embed).to(features.dtype).flatten(0, 1)
        x = x.index_copy(0, slots.flatten().long(), features.flatten(0, 2))
        at = torch.arange(length, device=ids.device).repeat(rows)[:, None]
        bank: list[Tensor] = []
        for layer in self.layers:
            bank, x = layer(bank, x, at, rows)
        return mixed_norm([*bank, x], self.rn * self.rw, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, d] -> [N, vocab]."""
        return linear(hidden, self.head)

    def labels(self, features: Tensor) -> Tensor:
        """[..., d] -> [..., classes], float32."""
        return linear(features, self.dense_head).float()

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Nudge the choice bias of every expert towards an even share (no loss term)."""
        even = self.geometry.top / self.geometry.experts
        for layer in self.layers:
            if isinstance(layer.mlp, Experts):
                layer.mlp.bias += rate * torch.sign(even - layer.mlp.load)

    def model_state(self) -> dict[str, Tensor]:
        """Parameters that belong to the checkpoint."""
        return {name: t for name, t in self.state_dict().items() if name != "dense_head"}
