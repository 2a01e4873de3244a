"""The position formulas, one patch and one pair at a time, for tests to compare with."""

from __future__ import annotations

import cmath
import math

import torch


def resize_position_table_reference(table: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Sample an [H, W, D] table bilinearly at half-pixel centres; float64 [rows * columns, D]."""
    height, width, _ = table.shape
    table = table.double()
    out = []
    for row in range(rows):
        top, bottom, down = _neighbours(row, rows, height)
        for column in range(columns):
            left, right, across = _neighbours(column, columns, width)
            upper = table[top, left] * (1 - across) + table[top, right] * across
            lower = table[bottom, left] * (1 - across) + table[bottom, right] * across
            out.append(upper * (1 - down) + lower * down)
    return torch.stack(out)


def _neighbours(index: int, count: int, size: int) -> tuple[int, int, float]:
    """The two source cells of an output cell and the weight of the second."""
    centre = max((index + 0.5) * size / count - 0.5, 0.0)
    first = min(int(centre), size - 1)
    return first, min(first + 1, size - 1), centre - first


def rotate_reference(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Rotate [frames * rows * columns, H, K] heads as complex numbers; float64 out."""
    out = x.double().clone()
    width = x.shape[-1]
    for patch in range(x.shape[0]):
        row, column = divmod(patch % (rows * columns), columns)
        for pair in range(width // 2):
            place = column if pair % 2 == 0 else row
            turn = cmath.exp(1j * place * 10000.0 ** (-4 * (pair // 2) / width))
            for head in range(x.shape[1]):
                even, odd = (out[patch, head, 2 * pair + i].item() for i in (0, 1))
                turned = complex(even, odd) * turn
                out[patch, head, 2 * pair] = turned.real
                out[patch, head, 2 * pair + 1] = turned.imag
    return out


def temporal_rows_reference(frames: int, width: int) -> torch.Tensor:
    """Sines, then cosines, of frame number times frequency; float64 [frames, width]."""
    half = width // 2
    rows = []
    for frame in range(frames):
        angles = [frame / 10000.0 ** (j / half) for j in range(half)]
        rows.append([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
    return torch.tensor(rows, dtype=torch.float64)
