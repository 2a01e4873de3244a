"""Ownership of equal units: which request holds which KDA slot or MLA page. Integers only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Pool:
    """Units 0 .. size-1, each free or owned by one request.

    Freed units are handed out last-in first-out, so a small load keeps touching the same memory.
    """

    def __init__(self, size: int) -> None:
        """All units are free."""
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._owner: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Units that nobody owns."""
        return len(self._free)

    def fits(self, count: int) -> bool:
        """Whether ``count`` units can be taken now."""
        return count <= len(self._free)

    def take(self, count: int, owner: int) -> tuple[int, ...]:
        """Hand ``count`` units to ``owner``; ask :meth:`fits` first."""
        assert self.fits(count), f"{count} units wanted, {len(self._free)} free"
        units = tuple(self._free.pop() for _ in range(count))
        self._owner.update(dict.fromkeys(units, owner))
        return units

    def give_back(self, units: Iterable[int], owner: int) -> None:
        """Free units that ``owner`` holds."""
        for unit in units:
            assert self._owner.get(unit) == owner, f"unit {unit} is not owned by request {owner}"
            del self._owner[unit]
            self._free.append(unit)

    def check_integrity(self) -> None:
        """Free and owned units are disjoint and make the whole."""
        free = set(self._free)
        assert len(free) == len(self._free), "a unit is free twice"
        assert not free & self._owner.keys(), "a unit is free and owned"
        assert len(free) + len(self._owner) == self.size, "a unit is lost"
