"""The attention of MLA prefill and of the vision tower on a CUDA device.

No op of its own: ``mla`` and ``vision_attention`` say what it computes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton

from k3vl.errors import ShapeError
from k3vl.kernels.flash_hopper import hopper_flash, hopper_flash_takes
from k3vl.kernels.flash_kernel import flash_kernel
from k3vl.kernels.hopper import hopper_runs

if TYPE_CHECKING:
    from k3vl.kernels.packed import Packed


class FlashShape(NamedTuple):
    """Queries and keys of a program, its warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    queries: Packed,
    keys: Packed,
    causal: bool,
    rest: torch.Tensor | None = None,
    shape: FlashShape | None = None,
) -> torch.Tensor:
    """Attend within every sequence.

    Args:
        q: [N, H, K + P]; the last axis of every argument is contiguous.
        k: [M, H, K] (a head axis may have stride 0), v: [M, H, V].
        scale: of the scores.
        queries: of every sequence, keys: of every sequence, no fewer.
        causal: whether the last query sees all keys and every earlier one a key less.
        rest: [M, H, P], the last part of the keys; None for P = 0.
        shape: of the Triton kernel's programs; None: the best, or the Gluon kernel where it runs.

    Returns:
        [N, H, V] in the dtype of ``q``; softmax in float32.

    Raises:
        ShapeError: a width is no power of two of at least 16 (V: 32), or a row is not contiguous.
    """
    rows, heads, _ = q.shape
    key, value = k.shape[-1], v.shape[-1]
    shared = rest.shape[-1] if rest is not None else 0
    parts = [q, k, v] if rest is None else [q, k, v, rest]
    widths = [key, value] if rest is None else [key, value, shared]
    fits = all(w >= 16 and not w & (w - 1) for w in widths) and q.shape[-1] == key + shared
    fits = fits and value >= 32
    if not fits or any(x.stride(-1) != 1 for x in parts):
        raise ShapeError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)} and {shared}, v {tuple(v.shape)}; "
            "rows must be contiguous and widths powers of two, at least 16"
        )
    if shape is None and by_hopper(q, k, v, rest):
        return hopper_flash(q, k, v, scale, queries=queries, keys=keys, causal=causal, rest=rest)
    out = torch.empty(rows, heads, value, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    half = q.dtype != torch.float32
    longest = max(queries.lengths)
    layout = shape or _shape(longest, key + shared, value, half=half)
    tail = k if rest is None else rest
    grid = (triton.cdiv(longest, layout.queries), heads, len(queries.lengths))
    flash_kernel[grid](
        q,
        k,
        tail,
        v,
        out,
        queries.borders,
        keys.borders,
        *q.stride()[:2],
        *k.stride()[:2],
        *tail.stride()[:2],
        *v.stride()[:2],
        scale / math.log(2),
        heads,
        K=key,
        P=shared,
        V=value,
        BM=layout.queries,
        BN=layout.keys,
        CAUSAL=causal,
        PRECISION="tf32" if half else "tf32x3",
        STAGES=layout.stages,
        num_warps=layout.warps,
    )
    return out


def by_hopper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rest: torch.Tensor | None = None
) -> bool:
    """Whether :func:`flash` has the Gluon kernel do it."""
    return hopper_runs(q.device) and hopper_flash_takes(q, k, v, rest)


def _shape(longest: int, key: int, value: int, *, half: bool) -> FlashShape:
    """The fastest of those that ``bench`` tries on an H200."""
    if not half:  # float32 operands fill shared memory twice as fast
        return FlashShape(16, 16, 4, 1) if value > 256 else FlashShape(32, 32, 4, 1)
    if value > 256:
        return FlashShape(64, 32, 8, 2)
    if longest <= 64 or key + value <= 256:
        return FlashShape(64, 64, 4, 3)
    return FlashShape(128, 64, 8, 3)
