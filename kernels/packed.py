"""Items of unequal lengths, one after the other in one row axis."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Self

import torch

from k3vl.kernels.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Where items lie: on the host for whoever launches, on the device for whoever computes.

    Attributes:
        lengths: rows of every item, or at least as many where only the device knows them.
        borders: [S + 1] int64, where their rows begin and end.
        tables: what launches have derived from them for the device, by names of their own.
    """

    lengths: tuple[int, ...]
    borders: torch.Tensor
    tables: dict[object, torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Self:
        """Items in order; the host waits for nothing."""
        if len(lengths) == 1:  # of most prompts, and without a copy
            return cls(tuple(lengths), torch.arange(2, device=device) * lengths[0])
        (borders,) = upload([0, *accumulate(lengths)], device=device)
        return cls(tuple(lengths), borders)
