"""The tower's packed attention on a CUDA device: all items in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3vl.errors import ShapeError
from k3vl.kernels.flash import flash

if TYPE_CHECKING:
    import torch

    from k3vl.kernels.flash import FlashShape
    from k3vl.kernels.packed import Packed


def vision_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    items: Packed,
    *,
    shape: FlashShape | None = None,
    turns: torch.Tensor | None = None,
    early: bool = False,
    fixed: bool = False,
    ordered: bool = False,
    stages: int = 2,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.vision_attention.vision_attention`.

    All from ``turns`` on is for measurements: see :func:`k3vl.kernels.flash_hopper.hopper_flash`.
    """
    lengths = items.lengths
    agree = q.ndim == 3 and q.shape == k.shape == v.shape and sum(lengths) == q.shape[0]
    if not agree or any(length < 1 for length in lengths):
        raise ShapeError(
            f"vision_attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, "
            f"{len(lengths)} items of {sum(lengths)} patches"
        )
    scale = q.shape[-1] ** -0.5
    return flash(
        q, k, v, scale, queries=items, keys=items, causal=False, shape=shape, turns=turns,
        early=early, fixed=fixed, ordered=ordered, stages=stages,
    )  # fmt: skip
