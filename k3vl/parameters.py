"""Uninitialised weights: how both models allocate them before a checkpoint fills them."""

from __future__ import annotations

import torch
from torch import nn


def linear(inputs: int, outputs: int, dtype: torch.dtype, device: torch.device | str) -> nn.Linear:
    """A bias-free projection with uninitialised weights [outputs, inputs]."""
    layer: nn.Linear = nn.utils.skip_init(
        nn.Linear, inputs, outputs, bias=False, dtype=dtype, device=device
    )
    return layer


def parameter(
    *shape: int, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> nn.Parameter:
    """An uninitialised weight."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
