"""Media items to rows of the language model: batching, tower, projector.

Here: who is computed together. Not here: keeping features (``lm/features.py``), pixels
(``processor.py``), the models themselves (``tower.py``, ``projector.py``), where the rows go in a
prompt (``k3vl.pipeline``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from k3vl.errors import ShapeError
from k3vl.vision.repeats import Repeats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from k3vl.kernels.recording import Runner
    from k3vl.types import EncoderItem
    from k3vl.vision.projector import PatchMerger
    from k3vl.vision.tower import VisionTower


def join_patches(parts: Sequence[np.ndarray]) -> torch.Tensor:
    """[P, 3, 14, 14] of all parts; a copy even of one, which may be read-only."""
    return torch.from_numpy(np.concatenate(parts))


def pin_patches(parts: Sequence[np.ndarray]) -> torch.Tensor:
    """As :func:`join_patches`, page-locked: a CUDA device fetches it while the host goes on."""
    count, dtype = sum(len(part) for part in parts), torch.from_numpy(parts[0][:0].copy()).dtype
    patches = torch.empty((count, *parts[0].shape[1:]), dtype=dtype, pin_memory=True)
    np.concatenate(parts, out=patches.numpy())
    return patches


class VisionEncoder:
    """Features of media items; equal items of a call are computed once.

    One item at a time, an item's features depend on that item alone, to the last bit, whatever
    else is asked for. Matrix products of another height may round otherwise, so that items which
    share a batch agree with lone ones to about 1e-6 (float32) only; the compiled kernels of a CPU
    round alike, but gain nothing from batches. A GPU wants them.

    Args:
        tower: made for the same dtype and device as the projector.
        projector: from merged cells to the text width.
        max_patches_per_batch: items are joined up to this many patches, a larger one goes alone;
            None takes one item at a time.
        join: a batch's patches, one after the other in host memory: :func:`join_patches`, or
            :func:`pin_patches` where they go to a device.
        runner: records batches whose grids come again; None runs every batch by itself.
    """

    def __init__(
        self,
        tower: VisionTower,
        projector: PatchMerger,
        *,
        max_patches_per_batch: int | None = None,
        join: Callable[[Sequence[np.ndarray]], torch.Tensor] = join_patches,
        runner: Runner | None = None,
    ) -> None:
        self.tower = tower
        self.projector = projector
        self.max_patches_per_batch = max_patches_per_batch
        self.join = join
        self.repeats = Repeats(tower, projector, runner) if runner is not None else None

    def encode(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        """Compute the features of every item, in order.

        Items with equal digests share one tensor; it is not to be written.

        Returns:
            [num_tokens, text width] for every item, in the models' dtype and on their device.

        Raises:
            ShapeError: an item's patches, grid and token count disagree.
        """
        distinct = list({item.digest: item for item in items}.values())
        for item in distinct:
            _check(item)
        if self.repeats is not None:  # so that the same grids are the same batch
            distinct.sort(key=lambda item: item.grid_thw)
        features: dict[str, torch.Tensor] = {}
        for batch in self._batches(distinct):
            for item, rows in zip(batch, self._compute(batch), strict=True):
                features[item.digest] = rows
        return [features[item.digest] for item in items]

    def _batches(self, items: Sequence[EncoderItem]) -> Iterator[list[EncoderItem]]:
        limit = self.max_patches_per_batch or 0
        batch: list[EncoderItem] = []
        size = 0
        for item in items:
            patches = item.patches.shape[0]
            if batch and size + patches > limit:
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += patches
        if batch:
            yield batch

    @torch.no_grad()
    def _compute(self, batch: Sequence[EncoderItem]) -> list[torch.Tensor]:
        patches = self.join([item.patches for item in batch])
        grids = [item.grid_thw for item in batch]
        sizes = [item.num_tokens for item in batch]
        if self.repeats is not None:
            # What is recorded does not last. One copy for all: so small a batch costs less memory
            # for as long as one of them is used than each costs time to be launched.
            return list(torch.split(self.repeats.run(patches, grids)[: sum(sizes)].clone(), sizes))
        rows = self.projector(self.tower(patches, grids))
        # Slices would keep the whole batch alive as long as one of them is used.
        return [part.clone() for part in torch.split(rows, sizes)]


def _check(item: EncoderItem) -> None:
    frames, rows, columns = item.grid_thw
    if item.patches.shape[0] != frames * rows * columns or item.num_tokens * 4 != rows * columns:
        raise ShapeError(
            f"item {item.digest[:12]}: {item.patches.shape[0]} patches, "
            f"grid {frames}x{rows}x{columns}, {item.num_tokens} tokens"
        )
