"""Attention residuals on compute capability 9.0: which calls the cluster takes, how it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

MOST_ROWS, WIDEST = 16, 8192
"""Of a mixture, of a row."""

_UNIT = 64
"""Columns: eight a thread, from each of eight multiprocessors."""

_LOAD_ALIGNMENT = 16
"""Bytes, of the address of a row."""


def cluster_takes(
    rows: torch.Tensor,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    added: torch.Tensor | None,
) -> bool:
    """Whether shapes and layout fit."""
    read = [(rows, rows.stride()[:2])]
    if added is not None:
        read.append((added, added.stride()[:1]))
    aligned = not any(
        n * x.itemsize % _LOAD_ALIGNMENT for x, steps in read for n in (*steps, x.storage_offset())
    )
    packed = query.is_contiguous() and norm_weight.is_contiguous()
    return (
        aligned
        and packed
        and rows.shape[0] <= MOST_ROWS
        and rows.shape[-1] <= WIDEST
        and not rows.shape[-1] % _UNIT
    )


def cluster_mix(
    rows: torch.Tensor,
    query: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    added: torch.Tensor | None,
    fresh: bool,
    out: torch.Tensor,
    *,
    launch: Callable[..., None] | None = None,
) -> None:
    """Fill ``out``, [N, D]; the rest is as in :func:`k3vl.kernels.attn_residual.attn_residual`.

    ``launch`` takes kernel, grid and arguments; None starts it on the device.
    """
    depth, tokens, width = rows.shape
    taken = rows if added is None else added
    args: tuple[Any, ...] = (
        rows,
        query,
        norm_weight,
        taken,
        out,
        rows.stride(0),
        rows.stride(1),
        taken.stride(0),
        eps,
    )
    constants = {"D": width, "R": depth, "ADDED": added is not None, "FRESH": fresh}
    from k3vl.kernels.attn_residual.cluster_kernel import CLUSTER, WARPS
    from k3vl.kernels.attn_residual.cluster_kernel import attn_residual_cluster_kernel as kernel

    if launch is not None:
        launch(kernel, (tokens, 1, 1), *args, **constants)
        return
    kernel[(tokens,)](*args, **constants, num_warps=WARPS, num_ctas=CLUSTER)
