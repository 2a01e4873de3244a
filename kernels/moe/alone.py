"""Launches of the products in ``alone_kernel.py``: the experts of a single token, on Hopper."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from k3vl.errors import ShapeError
from k3vl.kernels.moe.few import on_device
from k3vl.kernels.situ import SituGLU, caps

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.kernels.moe.mxfp4 import Mxfp4Experts
    from k3vl.kernels.situ import GatedActivation

_COLUMNS = 256
"""Of a pass through the products' loops."""
_FEATURES_IN, _FEATURES_BACK = 24, 28
"""Of a warp: with K3's widths 2,048 warps, which the device holds at once."""
_WARPS_IN = 4
_REGISTERS = 128
"""Of a thread: a multiprocessor holds 16 warps."""


def takes_alone(stored: Mxfp4Experts, top_k: int) -> bool:
    """Whether programs fit into the experts' widths, and into their number."""
    latent, inner = stored.latent, stored.inner
    return (
        top_k in (1, 2, 4, 8, 16)
        and not inner % (_FEATURES_IN * _WARPS_IN)
        and not latent % _FEATURES_BACK
        and latent % _COLUMNS == inner % _COLUMNS == 0
    )


def sum_alone(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    stored: Mxfp4Experts,
    activation: GatedActivation,
    *,
    launch: Callable[..., None] | None = None,
) -> torch.Tensor:
    """What a token's experts give, added up by their weights.

    Args:
        x: [1, L] bfloat16, below 2^63.
        weights, experts: [1, k], float32 and int64.
        stored: the experts; see :func:`takes_alone`.
        activation: theirs.
        launch: takes kernel, grid, arguments and constants; None starts it on the device.

    Returns:
        [L] float32.

    Raises:
        ShapeError: the programs do not fit.
    """
    top_k = experts.shape[1]
    if not takes_alone(stored, top_k):
        raise ShapeError(f"one token: L {stored.latent}, I {stored.inner}, k {top_k}")
    from k3vl.kernels.moe.alone_kernel import down_alone_kernel, gate_up_alone_kernel

    start = launch or on_device
    hidden = x.new_empty(top_k, stored.inner)
    out = x.new_empty(stored.latent, dtype=torch.float32)
    experts = experts.reshape(-1)
    start(
        gate_up_alone_kernel, (stored.inner // (_FEATURES_IN * _WARPS_IN), top_k),
        x.contiguous().view(torch.int32), stored.w13, stored.w13_scale.view(torch.int32), experts,
        hidden, *caps(activation), WIDTH=stored.latent, INNER=stored.inner,
        SITU=isinstance(activation, SituGLU), WARPS=_WARPS_IN, num_warps=_WARPS_IN,
        maxnreg=_REGISTERS,
    )  # fmt: skip
    start(
        down_alone_kernel, (stored.latent // _FEATURES_BACK, 1),
        hidden.view(torch.int32), stored.w2, stored.w2_scale.view(torch.int32), experts,
        weights.reshape(-1), out, 0, INNER=stored.inner, WIDTH=stored.latent, WARPS=top_k,
        num_warps=top_k, maxnreg=_REGISTERS, launch_pdl=True,
    )  # fmt: skip
    return out


def norm_alone(
    total: torch.Tensor, norm: torch.Tensor | None, eps: float, out: torch.Tensor
) -> torch.Tensor:
    """A token's sum, rounded, and its norm; begins while the launch before ends.

    Args:
        total: [L] float32.
        norm, eps: [L] and its epsilon; None for no norm.
        out: [1, L], filled and returned.
    """
    from k3vl.kernels.moe.experts_kernel import norm_sum_kernel

    latent = total.shape[0]
    norm_sum_kernel[(1,)](
        total, norm, out, eps, WIDTH=latent, NORM=norm is not None,
        BLOCK=triton.next_power_of_2(latent), num_warps=16 if latent > 1024 else 4, launch_pdl=True,
    )  # fmt: skip
    return out
