"""The tower's packed attention on a CUDA device: all items in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3vl.errors import ShapeError
from k3vl.kernels.dependent import begins_early
from k3vl.kernels.flash import by_hopper, flash
from k3vl.kernels.flash_hopper import hopper_flash
from k3vl.kernels.vision_pos.gpu import rotate_in_place

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
) -> torch.Tensor:
    """See :func:`k3vl.kernels.vision_attention.vision_attention`."""
    lengths = items.lengths
    agree = q.ndim == 3 and q.shape == k.shape == v.shape and sum(lengths) == q.shape[0]
    if not agree or any(length < 1 for length in lengths):
        raise ShapeError(
            f"vision_attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, "
            f"{len(lengths)} items of {sum(lengths)} patches"
        )
    scale = q.shape[-1] ** -0.5
    return flash(q, k, v, scale, queries=items, keys=items, causal=False, shape=shape)


def turned_attention(heads: torch.Tensor, turns: torch.Tensor, items: Packed) -> torch.Tensor:
    """Turn queries and keys, then attend.

    Where the kernel of attention can turn queries itself, keys alone are turned before it, half of
    what would be read and written.

    Args:
        heads: [P, 3 H, K], queries, keys, values; overwritten.
        turns: [P, K / 2] complex64; see :func:`k3vl.kernels.vision_pos.rotary_table`.
        items: patches of every item; they add up to P.

    Returns:
        [P, H, K], as :func:`k3vl.kernels.vision_attention.vision_attention`.
    """
    count = heads.shape[1] // 3
    q, k, v = heads.split(count, 1)
    if not by_hopper(q, k, v):
        rotate_in_place(heads[:, : 2 * count], turns)
        return vision_attention(q, k, v, items)
    rotate_in_place(k, turns)
    return hopper_flash(
        q, k, v, q.shape[-1] ** -0.5, queries=items, keys=items, causal=False, rest=None,
        turns=turns, early=begins_early(q),
    )  # fmt: skip
