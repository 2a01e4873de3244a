"""Attention residuals: a learned mixture over block outputs in place of the residual sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from k3vl.errors import ShapeError
from k3vl.kernels.attn_residual.reference import attn_residual_reference

if TYPE_CHECKING:
    import torch


def attn_residual(
    rows: torch.Tensor,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Mix the rows of every token by attention over depth, then RMS-normalise the mixture.

    ``score_j = sum_d query_d rows_j[d] / rms(rows_j)``, softmax over j without temperature, and
    the mixture is of the un-normalised rows.

    Args:
        rows: [R, N, D]: the frozen block outputs and, last, the running sum of this block.
        query: [D] float32, ``res_norm.weight * res_proj.weight`` (only the product matters).
        norm_weight: [D], the norm that follows the mixture.
        eps: of both norms.

    Returns:
        [N, D] in the dtype of ``rows``; float32 inside.

    Raises:
        ShapeError: the shapes disagree or there is no row.

    Source: Kimi K3 report, Block Attention Residuals; ``modeling_kimi_linear.py``.
    """
    check_shapes(rows, query, norm_weight)
    return attn_residual_reference(rows, query, norm_weight, eps)


class AttnResidualOp(Protocol):
    """An implementation of :func:`attn_residual`."""

    def __call__(
        self,
        rows: torch.Tensor,
        query: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """See :func:`attn_residual`."""


def check_shapes(rows: torch.Tensor, query: torch.Tensor, norm_weight: torch.Tensor) -> None:
    """Refuse what does not belong together; for every implementation of the op.

    Raises:
        ShapeError: with the shapes.
    """
    agree = rows.ndim == 3 and rows.shape[0] and rows.shape[-1:] == query.shape == norm_weight.shape
    if not agree:
        raise ShapeError(
            f"attn_residual: rows {tuple(rows.shape)}, query {tuple(query.shape)}, "
            f"norm_weight {tuple(norm_weight.shape)}"
        )
