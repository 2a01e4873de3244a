"""A block of the vision tower: its contract, and its composition from smaller ops.

Pre-norm attention inside every media item, with two-dimensional rotary positions, and a pre-norm
MLP with the tanh form of GELU; no biases. Source: Kimi K3 ``modeling_kimi_k3.py`` (MoonViT3d).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch.nn import functional as F

from k3vl.errors import ShapeError
from k3vl.kernels.rms_norm import rms_norm

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from k3vl.kernels.packed import Packed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class VisionBlockWeights:
    """One block's weights, in the tower's dtype.

    Attributes:
        heads: H.
        attention_norm: [D] and mlp_norm: [D].
        qkv: [3 H K, D], queries, keys, values; out: [D, H K].
        up: [I, D] and down: [D, I].
        eps: of both norms.
    """

    heads: int
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    eps: float


class VisionBlockOp(Protocol):
    """Advance the patches of several items by one block.

    Args:
        x: [P, D]; items follow one another. Its memory may become the result's.
        weights: of the block.
        rotary: [P, K / 2] complex64; see :func:`k3vl.kernels.vision_pos.rotary_table`.
        items: patches of every item; they add up to P.

    Returns:
        [P, D] in the dtype of ``x``.

    Raises:
        ShapeError: the shapes disagree, or the lengths do not add up.
    """

    def __call__(
        self,
        x: torch.Tensor,
        weights: VisionBlockWeights,
        rotary: torch.Tensor,
        items: Packed,
    ) -> torch.Tensor:
        """[P, D] -> [P, D]."""


class VisionAttention(Protocol):
    """See :func:`k3vl.kernels.vision_attention.vision_attention`."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, items: Packed
    ) -> torch.Tensor:
        """[P, H, K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedVisionBlock:
    """The block as a sequence of ops."""

    attention: VisionAttention
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __call__(
        self,
        x: torch.Tensor,
        weights: VisionBlockWeights,
        rotary: torch.Tensor,
        items: Packed,
    ) -> torch.Tensor:
        """See :class:`VisionBlockOp`."""
        w = weights
        check_shapes(x, w, rotary, items)
        qkv = F.linear(rms_norm(x, w.attention_norm, w.eps), w.qkv)
        heads = qkv.view(x.shape[0], 3 * w.heads, -1)  # [P, 3H, K]
        turned = self.rotate(heads[:, : 2 * w.heads], rotary)
        q, k, v = turned[:, : w.heads], turned[:, w.heads :], heads[:, 2 * w.heads :]
        x = x + F.linear(self.attention(q, k, v, items).flatten(1), w.out)
        hidden = F.linear(rms_norm(x, w.mlp_norm, w.eps), w.up)
        return x + F.linear(F.gelu(hidden, approximate="tanh"), w.down)


def check_shapes(
    x: torch.Tensor, weights: VisionBlockWeights, rotary: torch.Tensor, items: Packed
) -> None:
    """Refuse what does not belong together; for every implementation of the op.

    Raises:
        ShapeError: with the shapes.
    """
    w, (patches, width) = weights, x.shape
    inner = w.out.shape[1]
    agree = (
        w.attention_norm.shape == w.mlp_norm.shape == (width,)
        and w.qkv.shape == (3 * inner, width)
        and w.out.shape[0] == width
        and w.up.shape[1] == width
        and w.down.shape == (width, w.up.shape[0])
        and not inner % (2 * w.heads)
        and rotary.shape == (patches, inner // w.heads // 2)
    )
    if not agree:
        raise ShapeError(
            f"vision_block: x {tuple(x.shape)}, H {w.heads}, qkv {tuple(w.qkv.shape)}, "
            f"out {tuple(w.out.shape)}, up {tuple(w.up.shape)}, down {tuple(w.down.shape)}, "
            f"rotary {tuple(rotary.shape)}"
        )
    lengths = items.lengths
    if sum(lengths) != patches or any(length < 1 for length in lengths):
        raise ShapeError(
            f"vision_block: {len(lengths)} items of {sum(lengths)} patches in all, "
            f"x {tuple(x.shape)}"
        )
