"""Attention residuals on compute capability 9.0: which calls the cluster takes, how it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_ROWS, WIDEST = 16, 8192
"""Of a mixture, of a row."""

_UNIT = 64
"""Columns: eight a thread, from each of at most eight multiprocessors."""

_LOAD_ALIGNMENT = 16
"""Bytes, of the address of a row."""


class ClusterShape(NamedTuple):
    """Multiprocessors of a token and warps of each, 32 warps in all; how often they meet.

    Once: for as many rows as ``gram_kernel`` takes, on eight.
    """

    multiprocessors: int = 8
    warps: int = 4
    meetings: int = 2
    tokens: int = 1


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
    shape: ClusterShape,
    *,
    early: bool,
    launch: Callable[..., None] | None = None,
) -> None:
    """Fill ``out``, [N, D]; the rest is as in :func:`k3vl.kernels.attn_residual.attn_residual`.

    ``early``: see ``dependent.py``. ``launch`` takes kernel, grid and arguments; None starts it on
    the device.
    """
    depth, tokens, width = rows.shape
    programs = -(-tokens // shape.tokens)
    args: tuple[Any, ...] = (rows, query, norm_weight, out, rows.stride(0), rows.stride(1), eps)
    constants = {"D": width, "R": depth, "PDL": early}
    if shape.meetings == 1:
        from k3vl.kernels.attn_residual.gram_kernel import attn_residual_gram_kernel as kernel

        constants["TOKENS"] = shape.tokens
        args = (*args, tokens)
    else:
        from k3vl.kernels.attn_residual.cluster_kernel import attn_residual_cluster_kernel as kernel

        constants["CLUSTER"] = shape.multiprocessors

    if launch is not None:
        launch(kernel, (programs, 1, 1), *args, **constants)
        return
    how: dict[str, Any] = {
        "num_warps": shape.warps * shape.tokens,
        "num_ctas": shape.multiprocessors,
    }
    kernel[(programs,)](*args, **constants, **how, launch_pdl=early)
