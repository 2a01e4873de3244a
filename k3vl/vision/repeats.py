"""Batches whose grids come again: tower and projector as one recorded step over fixed memory.

Here: which batches are recorded, and how they are made alike. Not here: how a step is recorded
(``kernels/recording.py``), who is in a batch (``encoder.py``).

A batch of equal grids is filled up to one of a few counts, so that pictures of one size need a few
records whatever the number of them that come together. No item's rows depend on another's values,
so it does not matter what fills it up; nor does it matter for a batch whether it is recorded yet.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, TypeAlias

import torch

from k3vl.vision.tower import Grid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3vl.kernels.recording import Runner, Step
    from k3vl.vision.projector import PatchMerger
    from k3vl.vision.tower import VisionTower

Key: TypeAlias = tuple[tuple[Grid, ...], torch.dtype]

_MOST_PATCHES = 4096
"""Of a batch that is recorded. K3's tower and projector are 284 launches, some 4 ms of the host
whatever the batch; an H200 computes as long on about 2,000 patches (0.9 GFLOP each; both estimated,
``benchmarks/vision_repeats.py`` measures). Twice that, because the thread that launches is the one
that decodes: its 4 ms are everybody's. A patch costs 7 kB of every record that holds it, and some
30 kB of the workspace they share."""
_MOST_RECORDS = 16
"""Two sizes of pictures at all their counts. CUDA's own memory for a graph is not known here."""
_MOST_BYTES = 128 * 2**20
"""Of inputs, positions and results of all records; the workspace they share comes on top."""
_MOST_SEEN = 64
"""Batches that are remembered as seen once."""
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Of equal grids: less than a third of a batch is filled up for nothing."""


class Repeats:
    """Runs batches, and records those that come a second time.

    Args:
        tower, projector: of one checkpoint. Weights that change in place are seen, others are not:
            an encoder of other weights has repeats of its own.
        runner: what records.
    """

    def __init__(self, tower: VisionTower, projector: PatchMerger, runner: Runner) -> None:
        self.tower, self.projector, self.runner = tower, projector, runner
        self._records: OrderedDict[Key, _Batch] = OrderedDict()  # the last used last
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._positions: object = None

    def run(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Compute a batch.

        Args:
            patches: [P, 3, 14, 14] in host memory, page-locked where the tower is on a device.
            grids: of the items, equal ones next to each other.

        Returns:
            [M', text width], the rows of the items and, behind them, of what fills the batch up.
            They hold until the next call.
        """
        if patches.shape[0] > _MOST_PATCHES:
            return self.projector(self.tower(patches, grids))
        if self._positions != self.tower.positions_version:  # records hold what came from them
            self._records.clear()
            self._positions = self.tower.positions_version
        key = filled_up(grids), patches.dtype
        batch = self._records.pop(key, None) or _Batch(self.tower, self.projector, key)
        if not batch.recorded:
            if key not in self._seen:
                self._see(key)
                return batch.run(patches)
            del self._seen[key]  # should it fail, the next two are as the first two
            batch.record(self.runner)
            self._make_room(batch.nbytes)
        self._records[key] = batch
        return batch.run(patches)

    def _see(self, key: Key) -> None:
        self._seen[key] = None
        if len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)

    def _make_room(self, nbytes: int) -> None:
        """Drop records, the one used longest ago first."""
        total = sum(batch.nbytes for batch in self._records.values()) + nbytes
        while self._records and (len(self._records) >= _MOST_RECORDS or total > _MOST_BYTES):
            _, oldest = self._records.popitem(last=False)
            total -= oldest.nbytes


class _Batch:
    """Fixed memory for the patches of some grids, and the pass over it."""

    def __init__(self, tower: VisionTower, projector: PatchMerger, key: Key) -> None:
        grids, dtype = key
        # A graph knows addresses, not tensors: what it reads is held here.
        self.plan = plan = tower.plan(grids)
        patches = tower.patch_weight.new_zeros(
            (sum(plan.items.lengths), *tower.patch_weight.shape[1:]), dtype=dtype
        )
        cells = sum(rows * columns // 4 for _, rows, columns in grids)
        self.patches, self.recorded = patches, False
        self.nbytes = patches.nbytes + plan.nbytes + cells * projector.norm.nbytes
        self._step: Step = lambda: projector(tower.run(patches, plan))

    def record(self, runner: Runner) -> None:
        """Make the pass ready to be repeated."""
        self._step = runner.make(self._step)
        self.recorded = True

    def run(self, patches: torch.Tensor) -> torch.Tensor:
        """Rows of patches and of whatever lies behind them."""
        self.patches[: patches.shape[0]].copy_(patches, non_blocking=True)
        return self._step()


def filled_up(grids: Sequence[Grid]) -> tuple[Grid, ...]:
    """Grids of a batch that holds these: more of equal ones, as far as that is recorded."""
    first, count = grids[0], len(grids)
    if any(grid != first for grid in grids):
        return tuple(grids)
    most = next((size for size in _COUNTS if size >= count), count)
    frames, rows, columns = first
    return (first,) * (most if most * frames * rows * columns <= _MOST_PATCHES else count)
