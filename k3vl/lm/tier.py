"""A second memory for what the arena lets go.

Units are copied out before they are taken, and come back when somebody asks for their content.
Meant for a GPU, whose host has more memory than it has; nothing here depends on that. Copies are
ordered with everything else on the engine's stream, so a unit may be written again at once, and so
may a row of this memory: the host itself never reads it. What is kept is named by content (whole
prefix, salt, media), never by place.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k3vl.lm.arena import Name
    from k3vl.lm.cache import HybridCache

_PIECES = range(28, 23, -1)
"""Powers of two: 256 MiB of memory at once, at last 16."""


class HostTier:
    """A :class:`~k3vl.lm.arena.Tier` in host memory; what was used longest ago goes first.

    Attributes:
        stored, fetched: units copied out and back.
    """

    def __init__(self, cache: HybridCache, max_bytes: int) -> None:
        """Take the memory, page-locked beside a GPU."""
        self.cache = cache
        self.stored = self.fetched = 0
        unit_bytes, (_, width) = cache.sizes.unit_bytes, cache.units.shape
        kind, locked = cache.units.dtype, cache.buffer.is_cuda
        self._rows = [
            row
            for count in pieces(max_bytes // unit_bytes, unit_bytes)
            for row in torch.empty(count, width, dtype=kind, pin_memory=locked)
        ]
        self._free = list(range(len(self._rows)))
        self._held: OrderedDict[Name, list[int]] = OrderedDict()

    def __contains__(self, name: Name) -> bool:
        """See :class:`~k3vl.lm.arena.Tier`."""
        return name in self._held

    @property
    def held_bytes(self) -> int:
        """Bytes in use."""
        return (len(self._rows) - len(self._free)) * self.cache.sizes.unit_bytes

    def store(self, name: Name, units: Sequence[int]) -> None:
        """See :class:`~k3vl.lm.arena.Tier`."""
        if name in self._held:
            self._held.move_to_end(name)
            return
        if len(units) > len(self._rows):
            return
        while len(self._free) < len(units):
            self._free += self._held.popitem(last=False)[1]
        rows = [self._free.pop() for _ in units]
        for row, unit in zip(rows, units, strict=True):
            self._rows[row].copy_(self.cache.units[unit], non_blocking=True)
        self._held[name] = rows
        self.stored += len(rows)

    def fetch(self, name: Name, units: Sequence[int]) -> bool:
        """See :class:`~k3vl.lm.arena.Tier`."""
        rows = self._held.get(name)
        if rows is None:
            return False
        self._held.move_to_end(name)
        for row, unit in zip(rows, units, strict=True):
            self.cache.units[unit].copy_(self._rows[row], non_blocking=True)
        self.fetched += len(rows)
        return True

    def clear(self) -> None:
        """See :class:`~k3vl.lm.arena.Tier`."""
        for rows in self._held.values():
            self._free += rows
        self._held.clear()


def pieces(rows: int, row_bytes: int) -> Iterator[int]:
    """Rows that are allocated together.

    What torch locks it rounds up to a power of two: in one piece, 36 GiB would be 64. Of these it
    wastes less than a row each, and less than 16 MiB in the last.
    """
    for power in _PIECES:
        while rows >= (whole := 2**power // row_bytes) > 0:
            yield whole
            rows -= whole
    if rows:
        yield rows
