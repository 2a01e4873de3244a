"""RMSNorm on a CUDA device, in one launch; imported only where Triton runs."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch
import triton

from k3vl.errors import ShapeError
from k3vl.kernels.dependent import begins_early
from k3vl.kernels.rms_norm.norm_kernel import rms_norm_kernel


def rms_norm_gpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """:func:`k3vl.kernels.rms_norm.rms_norm`; plain PyTorch takes four launches in 16 bits."""
    if x.shape[-1:] != weight.shape:
        raise ShapeError(f"rms_norm: x {tuple(x.shape)} and weight {tuple(weight.shape)}")
    d = weight.shape[0]
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, d).contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        early, block = begins_early(x), triton.next_power_of_2(d)
        rms_norm_kernel[(rows.shape[0],)](
            rows, weight, out, rows.stride(0), eps, D=d, BLOCK=block, PDL=early,
            num_warps=1 if block <= 512 else 4 if block <= 4096 else 8, launch_pdl=early,
        )  # fmt: skip
    return out.view(x.shape)
