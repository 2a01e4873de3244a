"""Gated activations on a GPU, in one launch; imported only where Triton runs."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from k3vl.errors import ShapeError
from k3vl.kernels.dependent import begins_early
from k3vl.kernels.situ import SituGLU, caps
from k3vl.kernels.situ.glu_kernel import glu_kernel

if TYPE_CHECKING:
    from k3vl.kernels.situ import GatedActivation


def glu_gpu(gate_up: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """:func:`k3vl.kernels.situ.glu`; plain PyTorch takes ten launches and 15 times the bytes."""
    double = gate_up.shape[-1]
    if double % 2:
        raise ShapeError(f"gate and up halves expected, got {tuple(gate_up.shape)}")
    inner = double // 2
    rows = gate_up.reshape(-1, double).contiguous()
    out = torch.empty(rows.shape[0], inner, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(inner))
    if out.numel():
        early = begins_early(rows)
        glu_kernel[(rows.shape[0], triton.cdiv(inner, block))](
            rows,
            out,
            *caps(activation),
            INNER=inner,
            SITU=isinstance(activation, SituGLU),
            BLOCK=block,
            PDL=early,
            num_warps=4,
            launch_pdl=early,
        )
    return out.view(*gate_up.shape[:-1], inner)
