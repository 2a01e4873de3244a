"""MLA decode turned: which calls the Gluon kernel of 96 heads a program takes, and its start."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from k3vl.kernels.mla.hopper import PROGRAMS, TILE, hopper_takes
from k3vl.kernels.mla.turned_ptx import HEADS

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


_PARTS = 4
"""At most: of one sequence, in 132, this kernel took 65.5 us where the other, slower then, took
39.8."""

_TILES = 16
"""Of a part, at least: what a program takes besides has to count little beside them."""


class TurnedShape(NamedTuple):
    """Parts of a context, each for all heads."""

    splits: int


def turned_takes(
    q: torch.Tensor, latents: torch.Tensor, rows: torch.Tensor, latent_width: int, page: int
) -> bool:
    """Whether shapes and layout fit: as ``hopper_takes``, and the heads."""
    return turned_heads(q.shape[1]) and hopper_takes(q, latents, rows, latent_width, page)


def turned_heads(heads: int) -> bool:
    """Whether a program's 96 columns are enough for so many, and not twice too many."""
    return HEADS // 2 < heads <= HEADS


def turned_shape(batch: int, longest: int) -> TurnedShape | None:
    """Parts that fill the device once, of a table for ``longest`` latents; None: rather the other.

    That has two programs for a sequence, so it fills the device with fewer sequences or shorter
    ones. Of more than 132 it needs three rounds, and a round is shorter than one of the two here.
    """
    splits = PROGRAMS // batch
    if 1 <= splits <= _PARTS and longest >= splits * _TILES * TILE:
        return TurnedShape(splits)
    return None


def turned_parts(
    q: torch.Tensor,
    latents: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    latent_width: int,
    scale: float,
    page: int,
    shape: TurnedShape,
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
    grid = (1, batch, shape.splits)
    blocks = [TILE, latent_width // 2], [TILE, width - latent_width]
    args: tuple[Any, ...] = (
        q,
        rows,
        lengths,
        *results,
        *q.stride()[:2],
        *rows.stride(),
        latents.shape[0],
        scale / math.log(2),
        heads,
        shape.splits,
    )
    constants: dict[str, Any] = {
        "R": latent_width,
        "P": width - latent_width,
        "PAGE": page,
        "BN": TILE,
        "WHOLE": shape.splits == 1,
        "PDL": early,
    }
    from k3vl.kernels.mla.turned_kernels import mla_decode_turned_kernel as kernel

    if launch is not None:
        launch(kernel, grid, latents, blocks, *args, **constants)
        return
    from k3vl.kernels.hopper import block_descriptor

    described = (block_descriptor(latents, block) for block in blocks)
    kernel[grid](*described, *args, **constants, num_warps=8, launch_pdl=early)
