"""Attention residuals on compute capability 9.0: which calls the cluster takes, how it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_ROWS, WIDEST = 16, 8192
"""Of a mixture, of a row."""

_UNIT = 64
"""Columns: eight a thread, from each of eight multiprocessors."""

_LOAD_ALIGNMENT = 16
"""Bytes, of the address of a row."""


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
    *,
    early: bool,
    launch: Callable[..., None] | None = None,
) -> None:
    """Fill ``out``, [N, D]; the rest is as in :func:`k3vl.kernels.attn_residual.attn_residual`.

    ``early``: see ``dependent.py``. ``launch`` takes kernel, grid and arguments; None starts it on
    the device.
    """
    depth, tokens, width = rows.shape
    args: tuple[Any, ...] = (rows, query, norm_weight, out, rows.stride(0), rows.stride(1), eps)
    constants = {"D": width, "R": depth, "PDL": early}
    from k3vl.kernels.attn_residual.cluster_kernel import SIZE, WARPS
    from k3vl.kernels.attn_residual.cluster_kernel import attn_residual_cluster_kernel as kernel

    if launch is not None:
        launch(kernel, (tokens, 1, 1), *args, **constants)
        return
    how: dict[str, Any] = {"num_warps": WARPS, "num_ctas": SIZE, "launch_pdl": early}
    kernel[(tokens,)](*args, **constants, **how)
