"""Launches of the products in ``alone_kernel.py``: the experts of a single token, on Hopper."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import triton

from k3vl.errors import ShapeError
from k3vl.kernels.situ import SituGLU, caps

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.kernels.moe.mxfp4 import Mxfp4Experts
    from k3vl.kernels.situ import GatedActivation

_STEP_COLUMNS = 128
_FEATURES_IN, _FEATURES_BACK = 24, 28
"""Of a warp: with K3's widths 2,048 warps, which the device holds at once."""
_REGISTERS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How a product is cut.

    Attributes:
        warps: of a program.
        depth: steps of 128 columns whose weights are asked for at once.
        early: the next weights are asked for before the present ones are decoded.
        tiled: so many rows lie together, by steps of 128 columns; 0: every row by itself.
        trio: two warps share a third block of rows, each with half of its columns.
        plain: scales multiply sums, not weights; 256 columns at once, so ``depth`` is 2 or 4.
    """

    warps: int
    depth: int
    early: bool = False
    tiled: int = 0
    trio: bool = False
    plain: bool = False

    def fits(self, features: int, warp: int, columns: int) -> bool:
        """Whether programs divide a matrix, so many features a warp."""
        return (
            not features % (warp * self.warps)
            and not columns % (_STEP_COLUMNS * self.depth)
            and (self.depth in (2, 4) or not self.plain)
            and (not columns % (4 * _STEP_COLUMNS) or not self.trio)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneShapes:
    """The way in and the way back.

    Attributes:
        gate_up, down: the products.
        summed: a program of the way back takes the same features of all of a token's experts, one
            a warp, and adds them up.
    """

    gate_up: Share
    down: Share
    summed: bool = False


ALONE = AloneShapes(
    gate_up=Share(warps=4, depth=2, plain=True),
    down=Share(warps=16, depth=2, early=True, plain=True),
    summed=True,
)
"""As they are taken."""


def can_take_alone(stored: Mxfp4Experts, shapes: AloneShapes, top_k: int) -> bool:
    """Whether programs fit into the experts' widths, and into their number."""
    latent, inner = stored.latent, stored.inner
    down = shapes.down
    if shapes.summed:
        if top_k != down.warps:
            return False
        down = replace(down, warps=1)
    return shapes.gate_up.fits(inner, _FEATURES_IN, latent) and down.fits(
        latent, _FEATURES_BACK, inner
    )


def alone_outputs(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    stored: Mxfp4Experts,
    activation: GatedActivation,
    shapes: AloneShapes,
    launch: Callable[..., None] | None = None,
) -> torch.Tensor:
    """What a token's experts give.

    Args:
        x: [1, L] bfloat16.
        weights, experts: [1, k], float32 and int64.
        stored: the experts; see :func:`can_take_alone`.
        activation: theirs.
        shapes: how the products are cut.
        launch: takes kernel, grid, arguments and constants; None starts it on the device.

    Returns:
        Every pair's output by itself, [k, L] in the dtype of ``x``; where they are ``summed``,
        their sum by their weights, [L] float32.

    Raises:
        ShapeError: the programs do not fit.
    """
    top_k = experts.shape[1]
    if not can_take_alone(stored, shapes, top_k):
        raise ShapeError(f"one token: L {stored.latent}, I {stored.inner}, k {top_k}, {shapes}")
    start = launch or _start
    hidden = x.new_empty(top_k, stored.inner)
    experts = experts.reshape(-1)
    cut = shapes.gate_up
    from k3vl.kernels.moe import alone_kernel as kernels

    into = (
        x.contiguous().view(torch.int32), stored.w13, stored.w13_scale.view(torch.int32), experts,
        hidden, *caps(activation),
    )  # fmt: skip
    sizes = {"WIDTH": stored.latent, "INNER": stored.inner, "OVERLAP": True}
    kernel, constants = kernels.gate_up_alone_kernel, _constants(cut)
    if cut.trio:
        kernel = kernels.gate_up_trio_kernel
        constants = {name: constants[name] for name in ("WARPS", "num_warps", "maxnreg")}
    start(
        kernel, (stored.inner // (_FEATURES_IN * cut.warps), top_k), *into,
        SITU=isinstance(activation, SituGLU), **{**sizes, **constants},
    )  # fmt: skip
    given = hidden.view(torch.int32), stored.w2, stored.w2_scale.view(torch.int32), experts
    cut = shapes.down
    sizes = {"INNER": stored.inner, "WIDTH": stored.latent, "launch_pdl": True}
    if shapes.summed:
        out = x.new_empty(stored.latent, dtype=torch.float32)
        start(
            kernels.down_sum_kernel, (stored.latent // _FEATURES_BACK, 1),
            *given, weights.reshape(-1), out, 0, **sizes, **_constants(cut),
        )  # fmt: skip
        return out
    out = x.new_empty(top_k, stored.latent)
    start(
        kernels.down_alone_kernel, (stored.latent // (_FEATURES_BACK * cut.warps), top_k),
        *given, out, 0, **sizes, **_constants(cut),
    )  # fmt: skip
    return out


def rounded_and_normed(
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
        total, norm, out, eps, WIDTH=latent, NORM=norm is not None, OVERLAP=True,
        BLOCK=triton.next_power_of_2(latent), num_warps=16 if latent > 1024 else 4, launch_pdl=True,
    )  # fmt: skip
    return out


def _constants(shape: Share) -> dict[str, int | bool]:
    return {
        "WARPS": shape.warps,
        "DEPTH": shape.depth,
        "EARLY": shape.early,
        "TILED": shape.tiled,
        "PLAINLY": shape.plain,
        "OVERLAP": True,
        "num_warps": shape.warps,
        "maxnreg": _REGISTERS,
    }


def _start(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel[grid](*args, **options)
