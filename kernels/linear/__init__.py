"""Projections without a bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch.nn import functional as F

from k3vl.errors import ShapeError
from k3vl.kernels.weight import plain

if TYPE_CHECKING:
    import torch

    from k3vl.kernels.weight import Weight


class LinearOp(Protocol):
    """See :func:`linear`; ``weight`` is [O, D]."""

    def __call__(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """[N, D] -> [N, O]."""


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Multiply every row of ``x`` by a matrix.

    Args:
        x: [N, D]; rows may lie any distance apart.
        weight: [O, D], in the dtype of ``x``.

    Returns:
        [N, O] in the dtype of ``x``; sums in float32.

    Raises:
        ShapeError: the widths disagree.
    """
    check_shapes(x, weight)
    return F.linear(x, plain(weight))


def check_shapes(x: torch.Tensor, weight: Weight) -> None:
    """Refuse what does not belong together; for every implementation of the op.

    Raises:
        ShapeError: with the shapes.
    """
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ShapeError(f"linear: x {tuple(x.shape)} and weight {tuple(weight.shape)}")
