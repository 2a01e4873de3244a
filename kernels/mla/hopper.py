"""MLA decode on compute capability 9.0: which calls the Gluon kernel takes, and how it starts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

HEADS, TILE = 64, 64
"""Of a program: rows of the queries, latents of a tile."""

_COPY_ALIGNMENT = 16
"""Bytes: of the latents' address and of the way from one to the next, for the copy engine."""


FEW_PARTS = 4
"""Up to so many, lean launches win: 137 us instead of 145 with two (B32 L8192); 66 parts lose."""


class HopperShape(NamedTuple):
    """Parts of a context."""

    splits: int

    @property
    def lean(self) -> bool:
        """Whether a launch is one for few parts.

        Then latents are asked for before queries, it may begin early, and it has parts in bfloat16,
        of which empty ones have a weight too, for one more launch to add in one go.
        """
        return 1 < self.splits <= FEW_PARTS


def hopper_takes(
    q: torch.Tensor, latents: torch.Tensor, rows: torch.Tensor, latent_width: int, page: int
) -> bool:
    """Whether shapes and layout fit: bf16, K3's latents, pages of whole tiles, aligned rows."""
    return (
        q.dtype == latents.dtype == torch.bfloat16
        and (latent_width, latents.shape[1]) == (512, 576)
        and page % TILE == 0
        and rows.dtype == torch.int64
        and not latents.stride(0) * latents.itemsize % _COPY_ALIGNMENT
        and not latents.data_ptr() % _COPY_ALIGNMENT
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
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    early: bool = False,
    launch: Callable[..., None] | None = None,
) -> None:
    """Fill results: [B, H, R], or with several parts theirs and their weights.

    ``early``: a lean launch may begin beside the one before. ``launch`` takes kernel, grid and
    arguments; None starts it on the device.
    """
    batch, heads, width = q.shape
    grid = (-(-heads // HEADS), batch, shape.splits)
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
        "BH": HEADS,
        "BN": TILE,
        "WHOLE": shape.splits == 1,
        "LEAN": shape.lean,
        "PDL": shape.lean and early,
    }
    from k3vl.kernels.mla.hopper_kernels import mla_decode_sides_kernel as kernel

    if launch is not None:
        launch(kernel, grid, latents, blocks, *args, **constants)
        return
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    described = (TensorDescriptor.from_tensor(latents, block, layout) for block in blocks)
    early = constants["PDL"]
    kernel[grid](*described, *args, **constants, num_warps=4, launch_pdl=early)
