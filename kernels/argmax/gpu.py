"""The largest value of a row on a CUDA device; torch clears a counter first and takes longer."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch
import triton

from k3vl.kernels.argmax.argmax_kernel import argmax_merge_kernel, argmax_parts_kernel
from k3vl.kernels.dependent import begins_early

BLOCK = 4096
"""Values of a program: the 163,840 logits of K3 are 40 parts."""


def argmax_gpu(
    x: torch.Tensor, out: torch.Tensor | None = None, *, block: int = BLOCK
) -> torch.Tensor:
    """See :func:`k3vl.kernels.argmax.argmax`; ``block`` is for measurements."""
    rows, width = x.shape
    parts, early = triton.cdiv(width, block), begins_early(x)
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=x.device)
    if rows:
        best = torch.empty(rows, parts, dtype=torch.float32, device=x.device)
        place = torch.empty(rows, parts, dtype=torch.int32, device=x.device)
        argmax_parts_kernel[(rows, parts)](
            x, best, place, x.stride(0), width, BLOCK=block, PDL=early, num_warps=4
        )  # as a step's first launch it has none in front of it that it could begin beside
        argmax_merge_kernel[(rows,)](
            best, place, out, parts, BP=triton.next_power_of_2(parts), PDL=early, num_warps=1,
            launch_pdl=early,
        )  # fmt: skip
    return out
