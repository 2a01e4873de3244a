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

    def __call__(
        self,
        x: torch.Tensor,
        weight: Weight,
        *,
        onto: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """[N, D] -> [N, O]."""


def linear(
    x: torch.Tensor,
    weight: Weight,
    *,
    onto: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply every row of ``x`` by a matrix.

    Args:
        x: [N, D]; rows may lie any distance apart.
        weight: [O, D], in the dtype of ``x``.
        onto: [N, O] in the dtype of ``x``, which the result is added to in place.
        dtype: of a result that is added to nothing; None: the dtype of ``x``. Sums are float32,
            but may be rounded to the dtype of ``x`` on the way.

    Returns:
        [N, O]; ``onto`` itself where it is given.

    Raises:
        ShapeError: the widths disagree.
    """
    check_shapes(x, weight, onto)
    y = F.linear(x, plain(weight))
    return added(y if dtype is None else y.to(dtype), onto)


def added(y: torch.Tensor, onto: torch.Tensor | None) -> torch.Tensor:
    """``y``, or what it has been added to."""
    return y if onto is None else onto.add_(y)


def check_shapes(x: torch.Tensor, weight: Weight, onto: torch.Tensor | None = None) -> None:
    """Refuse what does not belong together; for every implementation of the op.

    Raises:
        ShapeError: with the shapes.
    """
    fits = x.dim() == 2 and x.shape[1] == weight.shape[1]
    if not fits or (onto is not None and onto.shape != (x.shape[0], weight.shape[0])):
        where = "" if onto is None else f", onto {tuple(onto.shape)}"
        raise ShapeError(f"linear: x {tuple(x.shape)} and weight {tuple(weight.shape)}{where}")
