"""Bidirectional attention of a vision tower over several media items packed in one row axis.

Here: the block-diagonal product over items. Not here: projections, rotary positions.

Source: Kimi K3 ``modeling_kimi_k3.py`` (MoonViT3d): one joint pass over all frames of an item.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3vl.errors import ShapeError
from k3vl.kernels.vision_attention.grouped import vision_attention_grouped

if TYPE_CHECKING:
    import torch

    from k3vl.kernels.packed import Packed


def vision_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, items: Packed
) -> torch.Tensor:
    """Let every patch see all patches of its own item, scaled by 1/sqrt(K).

    Args:
        q: [P, H, K], queries, any floating dtype; items follow one another.
        k: [P, H, K], keys.
        v: [P, H, K], values.
        items: patches of every item; they add up to P.

    Returns:
        [P, H, K] in the dtype of ``q``; the softmax is float32.

    Raises:
        ShapeError: the shapes disagree, or the lengths do not add up.
    """
    if q.ndim != 3 or q.shape != k.shape or q.shape != v.shape:
        raise ShapeError(
            f"vision_attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    lengths = items.lengths
    if sum(lengths) != q.shape[0] or any(length < 1 for length in lengths):
        raise ShapeError(
            f"vision_attention: {len(lengths)} items of {sum(lengths)} patches in all, "
            f"q {tuple(q.shape)}"
        )
    return vision_attention_grouped(q, k, v, lengths)
