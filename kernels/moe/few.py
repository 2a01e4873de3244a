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
        parts: groups of warps that share a block of rows, each with its share of the columns.
        depth: steps of 128 columns whose weights are under way.
        registers: of a thread at most; None: as many as it takes.
        together: those of ``depth`` steps are asked for at once.
        staged: those lie in shared memory, not in registers.
        ahead: bring all of a program's weights into the L2 cache by one instruction at its start.
    """

    warps: int = 4
    parts: int = 1
    depth: int = 2
    registers: int | None = None
    together: bool = False
    staged: bool = False
    ahead: bool = False

    def fits(self, features: int, columns: int) -> bool:
        """Whether blocks divide a matrix; a block of rows has 32, or 16 gates and their ups."""
        steps = columns // _STEP_COLUMNS
        return (
            features % (self.warps // self.parts) == 0
            and columns % _STEP_COLUMNS == 0
            and steps % (self.parts * (1 if self.staged else self.depth)) == 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FewShapes:
    """The way in, the way back, and whether launches overlap."""

    gate_up: Few = Few()
    down: Few = Few()
    overlap: bool = True


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
    plan: ExpertPlan | torch.Tensor,
    stored: Mxfp4Experts,
    activation: GatedActivation,
    top_k: int,
    shapes: FewShapes,
    launch: Callable[..., None] | None = None,
) -> torch.Tensor:
    """Every pair's output by itself.

    Args:
        x: [N, L] bfloat16.
        plan: of its pairs, with tiles of EIGHT; or the experts of a single token, [1, k] int64,
            where every pair is a tile and nothing needs to be planned.
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
    latent, inner = stored.latent, stored.inner
    if not can_take(stored, shapes):
        raise ShapeError(f"few products: L {latent}, I {inner}, {shapes}")
    from k3vl.kernels.moe.few_kernel import down_few_kernel, gate_up_few_kernel

    start = launch or _start
    pairs = x.shape[0] * top_k
    hidden = x.new_empty(pairs, inner)
    outputs = x.new_empty(pairs, latent)
    x = x.contiguous()
    if isinstance(plan, ExpertPlan):
        lists: tuple[torch.Tensor, ...] = plan.lists(EIGHT)
        tiles = plan.tiles[EIGHT].expert.numel()
        wide = ExpertPlan(
            order=plan.order, tiles={w: t for w, t in plan.tiles.items() if w != EIGHT}
        )
    else:
        chosen = plan.reshape(-1)
        lists, wide = (chosen,) * 5, None
        tiles = pairs
    alone = wide is None
    # Of the launches that overlap each waits for the one before, and so for all before that.
    overlap = shapes.overlap and not (wide and wide.tiles)
    shape = shapes.gate_up
    start(
        gate_up_few_kernel, (inner // 16 // (shape.warps // shape.parts), tiles),
        x.view(torch.int32), stored.w13, stored.w13_scale.view(torch.int32), *lists, hidden, top_k,
        *caps(activation), WIDTH=latent, INNER=inner, SITU=isinstance(activation, SituGLU),
        **_constants(shape, alone=alone, overlap=overlap), num_warps=shape.warps,
        maxnreg=shape.registers,
    )  # fmt: skip
    if wide is not None:
        separate_gate_up(x, wide, stored, activation, top_k, hidden)
    shape = shapes.down
    start(
        down_few_kernel, (latent // 32 // (shape.warps // shape.parts), tiles),
        hidden.view(torch.int32), stored.w2, stored.w2_scale.view(torch.int32), *lists, outputs,
        INNER=inner, WIDTH=latent, **_constants(shape, alone=alone, overlap=overlap),
        num_warps=shape.warps, maxnreg=shape.registers, launch_pdl=overlap,
    )  # fmt: skip
    if wide is not None:
        separate_down(hidden, wide, stored, outputs)
    return outputs


def _constants(shape: Few, *, alone: bool, overlap: bool) -> dict[str, int | bool]:
    return {
        "WARPS": shape.warps,
        "PARTS": shape.parts,
        "DEPTH": shape.depth,
        "TOGETHER": shape.together,
        "STAGED": shape.staged,
        "AHEAD": shape.ahead,
        "ALONE": alone,
        "OVERLAP": overlap,
    }


def _start(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel[grid](*args, **options)
