"""Launches of the products in ``few_kernel.py``: experts with up to 16 pairs, on Hopper.

Wider tiles have the products in ``experts_kernel.py``, over the same memory.
"""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from k3vl.errors import ShapeError
from k3vl.kernels.moe.plan import EIGHT, ExpertPlan
from k3vl.kernels.moe.separate import separate_down, separate_gate_up
from k3vl.kernels.situ import SituGLU, caps

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.kernels.moe.mxfp4 import Mxfp4Experts
    from k3vl.kernels.situ import GatedActivation

_STEP_COLUMNS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Few:
    """How a product is cut.

    Attributes:
        warps: of a program.
        depth: steps of 128 columns whose weights are asked for at once.
        registers: of a thread at most; None: as many as it takes.
    """

    warps: int = 4
    depth: int = 2
    registers: int | None = None

    def fits(self, features: int, columns: int) -> bool:
        """Whether blocks divide a matrix; a block of rows has 32, or 16 gates and their ups."""
        return features % self.warps == 0 and columns % (_STEP_COLUMNS * self.depth) == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FewShapes:
    """The way in and the way back."""

    gate_up: Few
    down: Few


SHAPES = FewShapes(gate_up=Few(registers=128), down=Few(warps=2))
"""As they are taken."""


def can_take(stored: Mxfp4Experts, shapes: FewShapes) -> bool:
    """Whether blocks fit into the experts' widths."""
    latent, inner = stored.latent, stored.inner
    return (
        inner % 16 == latent % 32 == 0
        and shapes.gate_up.fits(inner // 16, latent)
        and shapes.down.fits(latent // 32, inner)
    )


def few_products(
    x: torch.Tensor,
    plan: ExpertPlan,
    stored: Mxfp4Experts,
    activation: GatedActivation,
    top_k: int,
    shapes: FewShapes,
    launch: Callable[..., None] | None = None,
) -> torch.Tensor:
    """Every pair's output by itself.

    Args:
        x: [N, L] bfloat16.
        plan: of its pairs, with tiles of EIGHT.
        stored: the experts; see :func:`can_take`.
        activation: theirs.
        top_k: experts a token.
        shapes: how the products are cut.
        launch: takes kernel, grid, arguments and constants; None starts it on the device.

    Returns:
        [N k, L] by pair, in the dtype of ``x``.

    Raises:
        ShapeError: the blocks do not fit.
    """
    if not can_take(stored, shapes):
        raise ShapeError(f"few products: L {stored.latent}, I {stored.inner}, {shapes}")
    pairs = x.shape[0] * top_k
    hidden = x.new_empty(pairs, stored.inner)
    outputs = x.new_empty(pairs, stored.latent)
    lists, tiles = plan.lists(EIGHT), plan.tiles[EIGHT].expert.numel()
    others = {width: given for width, given in plan.tiles.items() if width != EIGHT}
    wide = ExpertPlan(order=plan.order, tiles=others)
    # Of the launches that overlap each waits for the one before, and so for all before that.
    shared = {"OVERLAP": not others}
    start = launch or on_device
    _gate_up(start, shapes.gate_up, tiles, x, stored, lists, hidden, top_k, activation, shared)
    if others:
        separate_gate_up(x, wide, stored, activation, top_k, hidden)
    _down(start, shapes.down, tiles, hidden, stored, lists, outputs, shared)
    if others:
        separate_down(hidden, wide, stored, outputs)
    return outputs


def _gate_up(
    start: Callable[..., None],
    shape: Few,
    tiles: int,
    x: torch.Tensor,
    stored: Mxfp4Experts,
    lists: tuple[torch.Tensor, ...],
    hidden: torch.Tensor,
    top_k: int,
    activation: GatedActivation,
    shared: dict[str, bool],
) -> None:
    from k3vl.kernels.moe.few_kernel import gate_up_few_kernel

    start(
        gate_up_few_kernel, (stored.inner // 16 // shape.warps, tiles),
        x.contiguous().view(torch.int32), stored.w13, stored.w13_scale.view(torch.int32), *lists,
        hidden, top_k, *caps(activation), WIDTH=stored.latent, INNER=stored.inner,
        SITU=isinstance(activation, SituGLU), **_constants(shape), **shared,
    )  # fmt: skip


def _down(
    start: Callable[..., None],
    shape: Few,
    tiles: int,
    hidden: torch.Tensor,
    stored: Mxfp4Experts,
    lists: tuple[torch.Tensor, ...],
    outputs: torch.Tensor,
    shared: dict[str, bool],
) -> None:
    from k3vl.kernels.moe.few_kernel import down_few_kernel

    start(
        down_few_kernel, (stored.latent // 32 // shape.warps, tiles),
        hidden.view(torch.int32), stored.w2, stored.w2_scale.view(torch.int32), *lists, outputs,
        INNER=stored.inner, WIDTH=stored.latent, launch_pdl=shared["OVERLAP"],
        **_constants(shape), **shared,
    )  # fmt: skip


def _constants(shape: Few) -> dict[str, int | None]:
    return {
        "WARPS": shape.warps,
        "DEPTH": shape.depth,
        "num_warps": shape.warps,
        "maxnreg": shape.registers,
    }


def on_device(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start a kernel; where its launch is not given."""
    kernel[grid](*args, **options)
