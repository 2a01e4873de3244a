"""Attention residuals on compute capability 9.0: which calls the cluster takes, how it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from k3vl.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_ROWS, WIDEST = 16, 8192
"""Of a mixture, of a row."""

_UNIT = 64
"""Columns: eight a thread, from each of at most eight multiprocessors."""

_LOAD_ALIGNMENT = 16
"""Bytes, of the address of a row."""


class ClusterShape(NamedTuple):
    """Multiprocessors of a token and warps of each; 32 warps in all."""

    multiprocessors: int = 8
    warps: int = 4


class SpreadShape(NamedTuple):
    """Multiprocessors of a token and warps of each, both of the lists in ``spread_kernel.py``.

    ``staged``: rows lie in shared memory and not in registers.
    """

    multiprocessors: int
    warps: int
    staged: bool = False


def cluster_takes(rows: torch.Tensor, query: torch.Tensor, norm_weight: torch.Tensor) -> bool:
    """Whether shapes and layout fit: bf16, at most 16 rows, widths and addresses of whole loads."""
    where = (*rows.stride()[:2], rows.storage_offset())
    aligned = not any(n * rows.itemsize % _LOAD_ALIGNMENT for n in where)
    packed = query.is_contiguous() and norm_weight.is_contiguous()
    return (
        aligned
        and packed
        and rows.dtype == torch.bfloat16
        and rows.shape[0] <= MOST_ROWS
        and rows.shape[-1] <= WIDEST
        and not rows.shape[-1] % _UNIT
    )


def cluster_mix(
    rows: torch.Tensor,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    shape: ClusterShape | SpreadShape,
    *,
    early: bool,
    launch: Callable[..., None] | None = None,
) -> None:
    """Fill ``out``, [N, D]; the rest is as in :func:`k3vl.kernels.attn_residual.attn_residual`.

    ``early``: see ``dependent.py``. ``launch`` takes kernel, grid and arguments; None starts it on
    the device.

    Raises:
        ShapeError: rows that are to lie in shared memory have no room there.
    """
    depth, tokens, width = rows.shape
    args: tuple[Any, ...] = (rows, query, norm_weight, out, rows.stride(0), rows.stride(1), eps)
    constants = {"D": width, "R": depth, "CLUSTER": shape.multiprocessors, "PDL": early}
    if isinstance(shape, SpreadShape):
        from k3vl.kernels.attn_residual.spread_kernel import MOST_STAGED, place_of, staged
        from k3vl.kernels.attn_residual.spread_kernel import (
            attn_residual_spread_kernel as kernel,
        )

        if shape.staged and staged(depth, width, *shape[:2]) > MOST_STAGED:
            raise ShapeError(f"attn_residual: {depth} rows of {width} are too many for {shape}")
        constants |= {"WARPS": shape.warps, "SHAPE": place_of(*shape[:2]), "STAGED": shape.staged}
    else:
        from k3vl.kernels.attn_residual.cluster_kernel import (
            attn_residual_cluster_kernel as kernel,
        )

    if launch is not None:
        launch(kernel, (tokens, 1, 1), *args, **constants)
        return
    how: dict[str, Any] = {"num_warps": shape.warps, "num_ctas": shape.multiprocessors}
    kernel[(tokens,)](*args, **constants, **how, launch_pdl=early)
