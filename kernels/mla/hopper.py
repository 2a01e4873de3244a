"""MLA decode on compute capability 9.0: which calls the Gluon kernel takes, and how it starts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAMS = 132
"""Multiprocessors of an H100 or H200; each holds one program of a decode kernel."""

HEADS, TILE, COLUMNS = 64, 64, 128
"""Of a program: rows of the queries, latents of a tile; channels of a copy and its product."""

_COPY_ALIGNMENT = 16
"""Bytes: of an address and of the way from one row to the next, for the copy engine."""


class HopperShape(NamedTuple):
    """Parts of a context."""

    splits: int


def hopper_takes(
    q: torch.Tensor, latents: torch.Tensor, rows: torch.Tensor, latent_width: int, page: int
) -> bool:
    """Whether shapes and layout fit: bf16, K3's latents, pages of whole tiles, aligned rows."""
    aligned = not any(
        x.stride(-2) * x.itemsize % _COPY_ALIGNMENT or x.data_ptr() % _COPY_ALIGNMENT
        for x in (q, latents)
    )
    return (
        q.dtype == latents.dtype == torch.bfloat16
        and (latent_width, latents.shape[1]) == (512, 576)
        and page % TILE == 0
        and rows.dtype == torch.int64
        and aligned
    )


def hopper_parts(
    q: torch.Tensor,
    latents: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    latent_width: int,
    scale: float,
    page: int,
    shape: HopperShape,
    *,
    results: tuple[torch.Tensor, torch.Tensor],
    early: bool = False,
    launch: Callable[..., None] | None = None,
) -> None:
    """Fill results: parts [B, SPLITS, H, R], which may be the result, and weights [B, H, SPLITS].

    ``early``: the launch may begin beside the one before. ``launch`` takes kernel, grid and
    arguments; None starts it on the device.
    """
    batch, heads, width = q.shape
    grid = (-(-heads // HEADS), batch, shape.splits)
    queries, shared = q.flatten(0, 1), width - latent_width
    described = (
        (latents, [TILE, COLUMNS]),
        (latents, [TILE, shared]),
        (queries, [HEADS, COLUMNS]),
        (queries, [HEADS, shared]),
    )
    args: tuple[Any, ...] = (
        rows,
        lengths,
        *results,
        *rows.stride(),
        latents.shape[0],
        scale / math.log(2),
        heads,
        shape.splits,
    )
    constants: dict[str, Any] = {
        "R": latent_width,
        "P": shared,
        "PAGE": page,
        "BH": HEADS,
        "BN": TILE,
        "W": COLUMNS,
        "WHOLE": shape.splits == 1,
        "PDL": early,
    }
    from k3vl.kernels.mla.hopper_kernels import mla_decode_sides_kernel as kernel

    if launch is not None:
        launch(kernel, grid, described, *args, **constants)
        return
    from k3vl.kernels.hopper import block_descriptor

    blocks = (block_descriptor(matrix, block) for matrix, block in described)
    kernel[grid](*blocks, *args, **constants, num_warps=4, launch_pdl=early)
