"""Attention on compute capability 9.0: which calls the Gluon kernel takes, and how it starts."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from k3vl.kernels.upload import upload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k3vl.kernels.packed import Packed

QUERIES, KEYS = 128, 128
"""Of a program at a time: two groups of 64 queries, a tile of keys."""

_WIDTHS = ((128, 0, 128), (128, 64, 128))
"""K, P and V that it is compiled for: the tower's and those of expanded latents."""

_COPY_ALIGNMENT = 16
"""Bytes: of addresses and of the way from one row to the next, for the copy engine."""


def hopper_flash_takes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rest: torch.Tensor | None
) -> bool:
    """Whether shapes and layout fit: bf16, known widths, aligned rows; see :func:`hopper_flash`."""
    shared = 0 if rest is None else rest.shape[-1]
    parts = [q, k, v] if rest is None else [q, k, v, rest]
    aligned = all(
        x.dtype == torch.bfloat16
        and x.stride(-1) == 1
        and not x.stride(0) * x.itemsize % _COPY_ALIGNMENT
        and not x.stride(1) * x.itemsize % _COPY_ALIGNMENT
        and not x.data_ptr() % _COPY_ALIGNMENT
        for x in parts
    )
    return aligned and (k.shape[-1], shared, v.shape[-1]) in _WIDTHS


def hopper_flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    queries: Packed,
    keys: Packed,
    causal: bool,
    rest: torch.Tensor | None,
    programs: int | None = None,
    turns: torch.Tensor | None = None,
    early: bool = False,
    fixed: bool = True,
    ordered: bool = True,
    stages: int | None = None,
    launch: Callable[..., None] | None = None,
) -> torch.Tensor:
    """As :func:`k3vl.kernels.flash.flash`, of calls that :func:`hopper_flash_takes`.

    A tile of queries of one head is computed alike whichever program takes it, so ``programs`` and
    the items beside its own change no bit of it. None: one a multiprocessor, each taking every
    so-manieth tile, where all tiles cost the same (equally long items, nothing causal); otherwise
    one a tile, as the device then gives the next to whoever is free.

    ``turns``, [N, K / 2] complex64: queries are turned by them first, and rounded, as
    :mod:`k3vl.kernels.vision_pos` does. ``early``: see ``dependent.py``.

    For measurements, where nothing is causal: ``fixed``, powers are relative to the largest score
    of the first tile, not of all tiles so far; ``ordered``, one group's products begin when the
    other has its scores; ``stages``, tiles of keys and values on their way or in use, None for
    three. Causal attention has none of that: which tile of keys is a query's first depends on the
    queries beside it, but its bits must not depend on where a cached prefix ends. With maxima of
    all tiles so far, one that a query sees nothing of leaves it as it was.

    ``launch`` takes kernel, grid and arguments; None starts it on the device.
    """
    rows, heads, _ = q.shape
    key, value = k.shape[-1], v.shape[-1]
    shared = 0 if rest is None else rest.shape[-1]
    out = torch.empty(rows, heads, value, dtype=q.dtype, device=q.device)
    tiles = _tiles(queries, keys, causal=causal, device=q.device)
    count = tiles.shape[0] * heads
    if not count:
        return out
    both = rest is not None  # else nothing of what has to do with a second part is in the kernel
    parts = (q, q if both else None, k, rest, v)
    flat = [None if x is None else _flat(x) for x in parts]
    blocks = [[64, key], [64, shared], [KEYS, key], [KEYS, shared], [KEYS, value]]
    strides = [0 if x is None else x.stride(1) for x in (q, k, rest, v)]
    pairs = None if turns is None else torch.view_as_real(turns).contiguous()
    if programs is None:
        alike = not causal and len(set(keys.lengths)) == 1
        programs = _multiprocessors(q.device) if alike else count
    grid = (min(programs, count),)
    fixed, again = fixed and not causal, None
    if fixed:
        again = torch.empty(count + grid[0], 2, dtype=torch.int32, device=q.device)
    work = tiles.shape[0], count, k.shape[0] if fixed else 0
    args = (tiles, again, pairs, out, *strides, scale / math.log(2), heads, *work)
    constants: dict[str, Any] = {
        "K": key,
        "P": shared,
        "V": value,
        "BN": KEYS,
        "CAUSAL": causal,
        "TURN": turns is not None,
        "FIXED": fixed,
        "ORDERED": ordered and not causal,
        "STAGES": 2 if causal or both else stages or 3,
        "PDL": early,
    }
    from k3vl.kernels.flash_hopper_kernel import flash_hopper_kernel as kernel

    if launch is not None:
        launch(kernel, grid, flat, blocks, *args, **constants)
        return out
    from k3vl.kernels.hopper import block_descriptor

    described = (
        None if x is None else block_descriptor(x, block)
        for x, block in zip(flat, blocks, strict=True)
    )
    kernel[grid](*described, *args, **constants, num_warps=4, launch_pdl=early)
    return out


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _flat(x: torch.Tensor) -> torch.Tensor:
    """[N, H, D] as rows of everything from the first head to the last."""
    return x.as_strided((x.shape[0], (x.shape[1] - 1) * x.stride(1) + x.shape[2]), (x.stride(0), 1))


def _tiles(queries: Packed, keys: Packed, *, causal: bool, device: torch.device) -> torch.Tensor:
    """The table of ``flash_hopper_kernel`` on the device; kept with the keys' items."""
    key = ("flash_hopper", queries.lengths, causal)
    if (table := keys.tables.get(key)) is None:
        rows = tile_rows(queries.lengths, keys.lengths, causal=causal)
        (table,) = upload(np.reshape(rows, (-1, 5)), device=device)
        keys.tables[key] = table
    return table


def tile_rows(
    lengths: Sequence[int], contexts: Sequence[int], *, causal: bool
) -> list[tuple[int, int, int, int, int]]:
    """A row for each tile of QUERIES queries, those with most keys first.

    Args:
        lengths: queries of every sequence.
        contexts: keys of every sequence, no fewer.
        causal: whether the last query sees all keys and every earlier one a key less.

    Returns:
        First query, queries, first key, keys that any of them sees, keys that the first one sees.
    """
    rows, first, first_key = [], 0, 0
    for length, context in zip(lengths, contexts, strict=True):
        ahead = context - length
        for at in range(0, length, QUERIES):
            live = min(QUERIES, length - at)
            seen = ahead + at + live if causal else context
            sees = ahead + at + 1 if causal else context
            rows.append((first + at, live, first_key, seen, sees))
        first, first_key = first + length, first_key + context
    return sorted(rows, key=lambda row: -row[3])
