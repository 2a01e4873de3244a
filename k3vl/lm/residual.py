"""What stands in for the residual stream.

K3 keeps, per token, a bank of frozen block outputs and the running sum of the current block; every
sub-layer reads a learned mixture of them (Block Attention Residuals). Kimi-Linear keeps the plain
sum. Both are values of one forward pass; nothing of them is cached between steps.
Source: Kimi K3 report, section on attention residuals; ``modeling_kimi_linear.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from k3vl.parameters import parameter

if TYPE_CHECKING:
    from k3vl.config import TextConfig
    from k3vl.kernels.choice import Kernels


class ReadWeights(nn.Module):
    """Weights of one read: the mixture's query and the norm that follows it.

    ``query`` is the product of the checkpoint's ``*_res_norm.weight`` and ``*_res_proj.weight``;
    only the product has a meaning. A plain stream has no query.
    """

    def __init__(
        self, config: TextConfig, kernels: Kernels, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate uninitialised weights."""
        super().__init__()
        self.kernels = kernels
        d, self.eps = config.hidden_size, config.rms_norm_eps
        self.norm = parameter(d, dtype=dtype, device=device)
        self.query = parameter(d, device=device) if config.attn_res_block_size else None


class Stream(Protocol):
    """The residual stream of one forward pass.

    Attributes:
        first: [N, D], the embeddings.
    """

    first: torch.Tensor

    def begin_layer(self, layer: int) -> None:
        """Called after the layer's first read."""

    def read(self, weights: ReadWeights) -> torch.Tensor:
        """Normalised input of the next sub-layer, [N, D]."""

    @property
    def sum(self) -> torch.Tensor | None:
        """[N, D], what a sub-layer may add its output to; None: it is the first of its block."""

    def add(self, y: torch.Tensor) -> None:
        """Take a sub-layer's output, [N, D]; :attr:`sum` itself has been added to already."""


class AttentionResidualStream:
    """Bank and running sum in one tensor [R, N, D]: the last live row is the running sum.

    Freezing a block is then a matter of counting one row more. A frozen row is never written again.
    """

    def __init__(self, tokens: int, like: torch.Tensor, config: TextConfig) -> None:
        """Room for N tokens; whoever makes it fills :attr:`first` with their embeddings [N, D]."""
        assert config.attn_res_block_size is not None
        self.block = config.attn_res_block_size
        blocks = -(-config.num_hidden_layers // self.block)
        self.rows = like.new_empty(blocks + 1, tokens, config.hidden_size)
        self.first = self.rows[0]
        self.live = 1
        self.sum: torch.Tensor | None = self.first

    def begin_layer(self, layer: int) -> None:
        """Freeze the running sum at the start of every block."""
        if layer % self.block == 0:
            self.live += 1
            self.sum = None

    def read(self, weights: ReadWeights) -> torch.Tensor:
        """Mix the bank and the running sum, then normalise."""
        assert self.sum is not None
        assert weights.query is not None
        rows = self.rows[: self.live]
        return weights.kernels.attn_residual(rows, weights.query, weights.norm, weights.eps)

    def add(self, y: torch.Tensor) -> None:
        """Add to the running sum of this block."""
        if self.sum is None:
            self.sum = self.rows[self.live - 1].copy_(y)
        elif y is not self.sum:
            self.sum.add_(y)


class PlainStream:
    """The sum of everything so far."""

    def __init__(self, tokens: int, like: torch.Tensor, config: TextConfig) -> None:
        """As of :class:`AttentionResidualStream`."""
        self.sum = self.first = like.new_empty(tokens, config.hidden_size)

    def begin_layer(self, layer: int) -> None:
        """Nothing happens between layers."""

    def read(self, weights: ReadWeights) -> torch.Tensor:
        """Normalise the sum."""
        return weights.kernels.rms_norm(self.sum, weights.norm, weights.eps)

    def add(self, y: torch.Tensor) -> None:
        """Add to the sum."""
        if y is not self.sum:
            self.sum.add_(y)
