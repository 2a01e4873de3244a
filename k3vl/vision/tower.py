"""MoonViT3d: patches of pictures and video groups to merged cells.

Here: patch embedding, positions, transformer blocks, pooling over time and the 2x2 merge. Not
here: how pixels become patches (``processor.py``), the way to the text width (``projector.py``).

Source: Kimi K3 ``modeling_kimi_k3.py``. Attention is one joint pass over all frames of a group, as
in the released code (the report speaks of two factorised passes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from k3vl.errors import ShapeError
from k3vl.kernels.packed import Packed
from k3vl.kernels.vision import REFERENCE
from k3vl.kernels.vision_block import VisionBlockWeights
from k3vl.kernels.vision_pos import resize_position_table, rotary_table, temporal_rows
from k3vl.parameters import linear, parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3vl.config import MediaConfig, VisionConfig
    from k3vl.kernels.vision import VisionKernels

Grid = tuple[int, int, int]

NORM_EPS = 1.1920929e-07
"""``nn.RMSNorm`` without an eps takes float32's, for bfloat16 inputs too (torch 2.13)."""

_MERGE = 2
_PLAN_BYTES = 128 * 2**20
"""Of grid plans that are kept: six of 74 x 74 patches at K3's width, hundreds of the demo's."""


@dataclass(frozen=True, slots=True, eq=False)
class GridPlan:
    """What the tower derives from a grid alone.

    Attributes:
        place: [t * h * w, width], learned and temporal positions, in the tower's dtype.
        rotary: [t * h * w, head_dim / 2] complex64, the same in every frame.
    """

    place: torch.Tensor
    rotary: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Memory of both."""
        return self.place.nbytes + self.rotary.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """What the tower derives from the grids of a batch: all that a pass needs beside the patches.

    Attributes:
        grids: of the items.
        items: where their patches lie.
        place: [P, width] and rotary: [P, head_dim / 2], the items' own one after the other.
    """

    grids: tuple[Grid, ...]
    items: Packed
    place: torch.Tensor
    rotary: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Memory of its positions."""
        return self.place.nbytes + self.rotary.nbytes


class VisionTower(nn.Module):
    """The vision transformer over packed patches of several items.

    Parameters are left uninitialised: a checkpoint, or whoever trains, fills them.

    Attributes:
        config: geometry.
        eps: of every norm of the tower.

    Activations have the parameters' dtype; positions, rotations and norms are float32 inside.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self,
        config: VisionConfig,
        media: MediaConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        eps: float = NORM_EPS,
        kernels: VisionKernels = REFERENCE,
    ) -> None:
        super().__init__()
        self.config = config
        self.eps = eps
        self.kernels = kernels
        width, patch = config.vt_hidden_size, config.patch_size
        table = (config.init_pos_emb_height, config.init_pos_emb_width, width)
        self.patch_weight = parameter(width, 3, patch, patch, dtype=dtype, device=device)
        self.position_table = parameter(*table, dtype=dtype, device=device)
        self.blocks = nn.ModuleList(
            VisionBlock(config, dtype, device, eps, kernels)
            for _ in range(config.vt_num_hidden_layers)
        )
        self.final_norm = parameter(width, dtype=dtype, device=device)
        moments = torch.tensor([media.image_mean, media.image_std], device=device)
        self.register_buffer("mean", moments[0], persistent=False)
        self.register_buffer("std", moments[1], persistent=False)
        self._plans: dict[Grid, GridPlan] = {}
        self._planned: tuple[object, ...] = ()  # which table they were made from

    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Encode packed patches.

        Args:
            patches: [P, 3, 14, 14]; items follow one another, each frame-major then row-major.
                uint8 pixels are normalised here; floats are taken as normalised.
            grids: frames, patch rows and patch columns of every item.

        Returns:
            [M, 4 * width] in the tower's dtype: ``rows * columns / 4`` cells of every item, each
            the mean over its frames, parts in the order top-left, top-right, bottom-left,
            bottom-right.

        Raises:
            ShapeError: a grid is odd, empty or has too many frames, or the grids and the patches
                do not add up.
        """
        return self.run(patches, self.plan(grids))

    def plan(self, grids: Sequence[Grid]) -> BatchPlan:
        """What :meth:`run` needs to know of a batch with these grids.

        Raises:
            ShapeError: a grid is odd, empty or has too many frames, or there is none.
        """
        self._check(grids)
        plans = [self._plan(grid) for grid in grids]
        lengths = [frames * rows * columns for frames, rows, columns in grids]
        return BatchPlan(
            grids=tuple(grids),
            items=Packed.of(lengths, self.position_table.device),
            place=_joined([plan.place for plan in plans]),
            rotary=_joined([plan.rotary for plan in plans]),
        )

    def run(self, patches: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """As :meth:`forward`, of a batch that is planned: nothing here depends on the host.

        Raises:
            ShapeError: the patches are not those of the plan's grids.
        """
        expected = (sum(plan.items.lengths), *self.patch_weight.shape[1:])
        if tuple(patches.shape) != expected:
            raise ShapeError(
                f"vision tower: patches {tuple(patches.shape)}, {len(plan.grids)} grids need "
                f"{expected}"
            )
        x = self.kernels.linear(self._normalise(patches), self.patch_weight.flatten(1))
        x = x + plan.place
        for block in self.blocks:
            x = block(x, plan.rotary, plan.items)
        x = self.kernels.rms_norm(x, self.final_norm, self.eps)
        grids = stacked(plan.grids)
        lengths = [frames * rows * columns for frames, rows, columns in grids]
        parts = [merge(*item) for item in zip(torch.split(x, lengths), grids, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _check(self, grids: Sequence[Grid]) -> None:
        most = self.config.init_pos_emb_time
        for frames, rows, columns in grids:
            even = rows > 0 < columns and not rows % _MERGE and not columns % _MERGE
            if not even or not 0 < frames <= most:
                raise ShapeError(
                    f"vision tower: grid {frames}x{rows}x{columns}; rows and columns must be even, "
                    f"frames 1 to {most}"
                )
        if not grids:
            raise ShapeError("vision tower: 0 grids")

    def _normalise(self, patches: torch.Tensor) -> torch.Tensor:
        patches = patches.to(self.patch_weight.device, non_blocking=True)
        dtype = self.patch_weight.dtype
        if patches.dtype == torch.uint8:
            return self.kernels.normalise_pixels(patches, self.mean, self.std, dtype)
        return patches.flatten(1).to(dtype)

    @property
    def positions_version(self) -> tuple[object, ...]:
        """Another one, once the table that plans are made from has changed."""
        table = self.position_table
        return (table.data_ptr(), table._version, table.dtype, table.device)

    def _plan(self, grid: Grid) -> GridPlan:
        """Positions of one item; kept, the last used longest, unless the table is being trained."""
        table = self.position_table
        if table.requires_grad:
            return self._make_plan(grid)
        if (made_from := self.positions_version) != self._planned:
            self._plans, self._planned = {}, made_from
        if (plan := self._plans.pop(grid, None)) is None:
            plan = self._make_plan(grid)
        self._plans[grid] = plan
        # Lists: another thread may encode at the same time.
        held = list(self._plans.items())
        total = sum(plan.nbytes for _, plan in held)
        for oldest, left in held:
            if total <= _PLAN_BYTES:
                break
            self._plans.pop(oldest, None)
            total -= left.nbytes
        return plan

    def _make_plan(self, grid: Grid) -> GridPlan:
        frames, rows, columns = grid
        table = self.position_table
        place = resize_position_table(table, rows, columns)
        # A picture is not a clip of one frame: cos(0) = 1 would shift half of its channels.
        if frames > 1:
            time = temporal_rows(frames, place.shape[1], device=place.device)
            place = (place[None] + time[:, None]).flatten(0, 1)
        rotary = rotary_table(rows, columns, self.config.head_dim, device=table.device)
        # Resizing leaves channels apart, and every batch would turn them to rows again.
        return GridPlan(place.to(table.dtype).contiguous(), rotary.repeat(frames, 1))


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """One after the other; a lone one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP; no biases, and an inner width that is not the model's."""

    def __init__(
        self,
        config: VisionConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        eps: float,
        kernels: VisionKernels,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        width, inner, qkv = (
            config.vt_hidden_size,
            config.vt_intermediate_size,
            config.qkv_hidden_size,
        )
        self.attention_norm = parameter(width, dtype=dtype, device=device)
        self.mlp_norm = parameter(width, dtype=dtype, device=device)
        self.qkv = linear(width, 3 * qkv, dtype, device)
        self.out = linear(qkv, width, dtype, device)
        self.up = linear(width, inner, dtype, device)
        self.down = linear(inner, width, dtype, device)
        self.weights = VisionBlockWeights(
            heads=config.vt_num_attention_heads,
            attention_norm=self.attention_norm,
            mlp_norm=self.mlp_norm,
            qkv=self.qkv.weight,
            out=self.out.weight,
            up=self.up.weight,
            down=self.down.weight,
            eps=eps,
        )

    def forward(self, x: torch.Tensor, rotary: torch.Tensor, items: Packed) -> torch.Tensor:
        """Advance [P, width] by one block."""
        return self.kernels.block(x, self.weights, rotary, items)


def stacked(grids: Sequence[Grid]) -> list[Grid]:
    """Grids whose items are merged alike: pictures of one width are one picture, far taller."""
    out: list[Grid] = []
    for frames, rows, columns in grids:
        before = out[-1] if out else (0, 0, 0)
        if frames == before[0] == 1 and columns == before[2]:
            out[-1] = (1, before[1] + rows, columns)
        else:
            out.append((frames, rows, columns))
    return out


def merge(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Pool one item over time and join 2x2 neighbours (``sd2_tpool``).

    Args:
        x: [t * h * w, D], frame-major then row-major.
        grid: t, h, w; h and w even.

    Returns:
        [h * w / 4, 4 * D].
    """
    frames, rows, columns = grid
    cells = x.view(frames, rows // _MERGE, _MERGE, columns // _MERGE, _MERGE, -1)
    mean = cells[0] if frames == 1 else cells.mean(0)
    pooled = mean.transpose(1, 2)  # [h/2, w/2, 2, 2, D]
    return pooled.reshape(rows * columns // _MERGE**2, -1)
