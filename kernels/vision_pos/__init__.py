"""Where a patch lies: the learned table, its temporal rows, and two-dimensional rotary positions.

Source: Kimi K3 ``modeling_kimi_k3.py`` (``divided_fixed`` position embedding, 2D RoPE). Its
comment names the row first; its code, which counts, rotates by the column first.
"""

from __future__ import annotations

import torch
from torch.nn.functional import interpolate

from k3vl.errors import ShapeError

_BASE = 10000.0


def resize_position_table(table: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Fit a learned position table to a grid of patches.

    Bilinear with half-pixel centres, borders repeated, no antialiasing; a grid of the table's own
    size takes it as it is.

    Args:
        table: [H, W, D].
        rows: of the grid.
        columns: of the grid.

    Returns:
        [rows * columns, D] float32, row-major.

    Raises:
        ShapeError: the table has not three axes, or the grid is empty.
    """
    if table.ndim != 3 or rows < 1 or columns < 1:
        raise ShapeError(
            f"resize_position_table: table {tuple(table.shape)}, grid {rows}x{columns}"
        )
    table = table.float()
    if (rows, columns) != tuple(table.shape[:2]):
        planes = table.permute(2, 0, 1)[None]  # [1, D, H, W]
        resized = interpolate(planes, (rows, columns), mode="bilinear", align_corners=False)
        table = resized[0].permute(1, 2, 0)
    return table.reshape(rows * columns, -1)


def temporal_rows(frames: int, width: int, *, device: torch.device | None = None) -> torch.Tensor:
    """Build the fixed embedding of the frame number.

    Returns:
        [frames, width] float32: row t is sin(t w_j), then cos(t w_j), with
        w_j = 10000^(-j / (width / 2)).

    Raises:
        ShapeError: ``width`` is odd, or there is no frame.
    """
    if width % 2 or frames < 1:
        raise ShapeError(f"temporal_rows: {frames} frames of width {width}, must be even")
    half = width // 2
    # float64 keeps the angles right before they are rounded once.
    steps = torch.arange(half, dtype=torch.float64, device=device)
    times = torch.arange(frames, dtype=torch.float64, device=device)
    angles = torch.outer(times, _BASE ** (-steps / half))
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


def rotary_table(
    rows: int, columns: int, head_dim: int, *, device: torch.device | None = None
) -> torch.Tensor:
    """Build every patch's rotation as unit complex numbers.

    With f_i = 10000^(-4i / K), pair 2i turns by column * f_i and pair 2i + 1 by row * f_i.

    Returns:
        [rows * columns, K / 2] complex64; patches row-major.

    Raises:
        ShapeError: ``head_dim`` is not a multiple of 4, or the grid is empty.
    """
    if head_dim % 4 or rows < 1 or columns < 1:
        raise ShapeError(f"rotary_table: grid {rows}x{columns}, head width {head_dim}")
    steps = torch.arange(head_dim // 4, dtype=torch.float64, device=device)
    frequencies = _BASE ** (-4.0 * steps / head_dim)  # [K/4]
    row = torch.arange(rows, dtype=torch.float64, device=device)[:, None, None]
    column = torch.arange(columns, dtype=torch.float64, device=device)[None, :, None]
    by_column = (column * frequencies).expand(rows, -1, -1)
    by_row = (row * frequencies).expand(-1, columns, -1)
    angles = torch.stack([by_column, by_row], dim=-1).reshape(rows * columns, head_dim // 2)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Turn adjacent pairs of every head by the patch's angles.

    Args:
        x: [P, H, K], any floating dtype.
        table: [P, K / 2] complex64, from :func:`rotary_table`.

    Returns:
        [P, H, K] in the dtype of ``x``; float32 inside.

    Raises:
        ShapeError: the shapes disagree.
    """
    if x.ndim != 3 or x.shape[2] % 2 or tuple(table.shape) != (x.shape[0], x.shape[2] // 2):
        raise ShapeError(f"rotate: x {tuple(x.shape)}, table {tuple(table.shape)}")
    # One complex product instead of four real ones and their strided copies.
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned: torch.Tensor = torch.view_as_real(pairs * table[:, None])
    return turned.flatten(-2).to(x.dtype)
