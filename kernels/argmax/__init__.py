"""The place of the largest value of a row: what a greedy step takes."""

from __future__ import annotations

import torch


def argmax(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Where every row is largest, the first place of equal ones.

    Args:
        x: [B, N] float32, rows in one run, N at least 1.
        out: [B] int64, filled and returned; None: a new one.

    Returns:
        [B] int64. What is not a number counts as the largest.
    """
    return torch.argmax(x, -1) if out is None else torch.argmax(x, -1, out=out)
