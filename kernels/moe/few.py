"""Launches of the products for experts with up to 16 pairs, on Hopper.

``few_kernel.py`` loads words into registers, ``few_whole_kernel.py`` copies them to shared memory.
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
_TURN = (2, 2, 16, 32)
"""Words of one copy: 512 columns of twice 16 rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Few:
    """How a product is cut.

    Attributes:
        warps: of a program.
        parts: groups of warps that share a block of rows, each with its share of the columns.
        depth: steps of 128 columns whose weights are asked for at once.
        registers: of a thread at most; None: as many as it takes.
        early: the next weights are asked for before the present ones are decoded.
    """

    warps: int = 4
    parts: int = 1
    depth: int = 2
    registers: int | None = None
    early: bool = False

    def fits(self, features: int, columns: int) -> bool:
        """Whether blocks divide a matrix; a block of rows has 32, or 16 gates and their ups."""
        steps = columns // _STEP_COLUMNS
        return (
            features % (self.warps // self.parts) == 0
            and columns % _STEP_COLUMNS == 0
            and steps % (self.parts * self.depth) == 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """How a product over whole rows, copied to shared memory at once, is cut.

    Attributes:
        apart: copies, of 512 columns each, that are waited for together.
        stay: programs, on the way in, that take one block behind the other; 0: one for each block.
    """

    apart: int = 1
    stay: int = 0

    def fits(self, features: int, columns: int) -> bool:
        """Whether blocks divide a matrix; any number of blocks of rows does."""
        return features > 0 and columns % (4 * _STEP_COLUMNS) == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FewShapes:
    """The way in and the way back."""

    gate_up: Few | Whole
    down: Few | Whole


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """Words that a kernel copies block by block, for a launch to describe.

    Attributes:
        tensor: of the last axis the elements are neighbours.
        block: size of a copy.
    """

    tensor: torch.Tensor
    block: tuple[int, ...]


SHAPES = FewShapes(gate_up=Few(registers=128, early=True), down=Few(warps=2, early=True))
"""From two tokens on."""

ALONE = FewShapes(gate_up=Few(parts=2, registers=96), down=Few(warps=2))
"""Of a single token."""


def few_shapes(tokens: int, stored: Mxfp4Experts) -> FewShapes | None:
    """How so many tokens' products are cut; None where other products take them."""
    shapes = ALONE if tokens == 1 else SHAPES
    return shapes if can_take(stored, shapes) else None


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
    if not can_take(stored, shapes):
        raise ShapeError(f"few products: L {stored.latent}, I {stored.inner}, {shapes}")
    pairs = x.shape[0] * top_k
    hidden = x.new_empty(pairs, stored.inner)
    outputs = x.new_empty(pairs, stored.latent)
    wide = None
    if isinstance(plan, ExpertPlan):
        lists, tiles = plan.lists(EIGHT), plan.tiles[EIGHT].expert.numel()
        others = {width: given for width, given in plan.tiles.items() if width != EIGHT}
        wide = ExpertPlan(order=plan.order, tiles=others)
    else:
        lists, tiles = (plan.reshape(-1),) * 5, pairs
    alone = wide is None
    # Of the launches that overlap each waits for the one before, and so for all before that.
    overlap = not (wide and wide.tiles)
    shared = {"ALONE": alone, "OVERLAP": overlap}
    start = launch or _start
    _gate_up(start, shapes.gate_up, tiles, x, stored, lists, hidden, top_k, activation, shared)
    if wide:
        separate_gate_up(x, wide, stored, activation, top_k, hidden)
    _down(start, shapes.down, tiles, hidden, stored, lists, outputs, shared)
    if wide:
        separate_down(hidden, wide, stored, outputs)
    return outputs


def _gate_up(
    start: Callable[..., None],
    shape: Few | Whole,
    tiles: int,
    x: torch.Tensor,
    stored: Mxfp4Experts,
    lists: tuple[torch.Tensor, ...],
    hidden: torch.Tensor,
    top_k: int,
    activation: GatedActivation,
    shared: dict[str, bool],
) -> None:
    rest = (
        stored.w13_scale.view(torch.int32), *lists, hidden, top_k, *caps(activation)
    )  # fmt: skip
    constants: dict[str, Any] = {
        "WIDTH": stored.latent,
        "INNER": stored.inner,
        "SITU": isinstance(activation, SituGLU),
        **_constants(shape),
        **shared,
    }
    x = x.contiguous().view(torch.int32)
    blocks = stored.inner // 16
    if isinstance(shape, Whole):
        from k3vl.kernels.moe.few_whole_kernel import gate_up_stay_kernel, gate_up_whole_kernel

        words = _blocks(stored.w13, stored.inner)
        if shape.stay:
            del constants["APART"]
            grid = min(shape.stay, blocks * tiles), 1
            start(gate_up_stay_kernel, grid, x, words, *rest, tiles, **constants)
        else:
            start(gate_up_whole_kernel, (blocks, tiles), x, words, *rest, **constants)
        return
    from k3vl.kernels.moe.few_kernel import gate_up_few_kernel

    grid = blocks // (shape.warps // shape.parts), tiles
    start(gate_up_few_kernel, grid, x, stored.w13, *rest, **constants)


def _down(
    start: Callable[..., None],
    shape: Few | Whole,
    tiles: int,
    hidden: torch.Tensor,
    stored: Mxfp4Experts,
    lists: tuple[torch.Tensor, ...],
    outputs: torch.Tensor,
    shared: dict[str, bool],
) -> None:
    rest = (stored.w2_scale.view(torch.int32), *lists, outputs)
    constants: dict[str, Any] = {
        "INNER": stored.inner,
        "WIDTH": stored.latent,
        "launch_pdl": shared["OVERLAP"],
        **_constants(shape),
        **shared,
    }
    hidden = hidden.view(torch.int32)
    blocks = stored.latent // 32
    if isinstance(shape, Whole):
        from k3vl.kernels.moe.few_whole_kernel import down_whole_kernel

        words = _blocks(stored.w2, 16)
        start(down_whole_kernel, (blocks, tiles), hidden, words, *rest, **constants)
        return
    from k3vl.kernels.moe.few_kernel import down_few_kernel

    grid = blocks // (shape.warps // shape.parts), tiles
    start(down_few_kernel, grid, hidden, stored.w2, *rest, **constants)


def _blocks(words: torch.Tensor, rows: int) -> Blocks:
    """[E, R, C / 8] words as [C / 256, E R / rows, rows, 32]."""
    split = words.view(-1, rows, words.shape[-1] // 32, 32)
    return Blocks(tensor=split.permute(2, 0, 1, 3), block=_TURN)


def _constants(shape: Few | Whole) -> dict[str, int | bool | None]:
    if isinstance(shape, Whole):
        return {"APART": shape.apart, "num_warps": 4}
    return {
        "WARPS": shape.warps,
        "PARTS": shape.parts,
        "DEPTH": shape.depth,
        "EARLY": shape.early,
        "num_warps": shape.warps,
        "maxnreg": shape.registers,
    }


def _start(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel[grid](*map(_described, args), **options)


def _described(arg: Any) -> Any:
    if not isinstance(arg, Blocks):
        return arg
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4)
    return TensorDescriptor.from_tensor(arg.tensor, list(arg.block), layout)
