"""Uninitialised weights: how both models allocate them before a checkpoint fills them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence


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


@dataclass(frozen=True, slots=True)
class Share:
    """One of equal parts of a tensor, along an axis.

    Attributes:
        axis: of the decoded tensor; of its last, parts of packed groups are whole groups.
        index: which part.
        count: of how many.
    """

    axis: int
    index: int
    count: int

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what a part of this shape is a part of."""
        return tuple(
            size * (self.count if axis == self.axis else 1) for axis, size in enumerate(shape)
        )

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part, a view."""
        size = tensor.shape[self.axis] // self.count
        return tensor.narrow(self.axis, self.index * size, size)


def whole_shape(shape: Sequence[int], share: Share | None) -> tuple[int, ...]:
    """The shape of a whole tensor of which ``share`` has this one; None: it is the whole."""
    return tuple(shape) if share is None else share.whole(shape)
