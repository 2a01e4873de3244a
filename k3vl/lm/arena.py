"""One pool of equal units for every kind of state. Integers only: no tensors, no clock.

Who owns a unit::

    free  --take-->  private (a request's slot, its pages, features being made, a checkpoint)
    private --keep-->  entry (what ended or shared work left behind; counted references)
    entry with references  -->  stays
    entry without          -->  idle: goes when somebody takes, cheapest loss per unit first
    private --give_back--> free;  entry --drop or eviction--> free

No ratio between the kinds is configured. Whoever needs units takes free ones, then idle ones in
the order of value lost per unit, aged: an entry's rank is its value plus the rank that the last
evicted entry had when this one was last used (GreedyDual), so what was worth much but is never
asked for goes in time. What is spare, nobody being likely to ask for it, gains nothing by use and
so goes before the rest. Nothing that is referenced is ever moved or taken.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Kind: TypeAlias = Literal["page", "slot", "checkpoint", "features"]
Name: TypeAlias = tuple[Kind, object]
"""Of an entry's content, wherever it lies."""
KINDS: tuple[Kind, ...] = ("page", "slot", "checkpoint", "features")


class Tier(Protocol):
    """Another memory for what is evicted here (``tier.py``)."""

    def __contains__(self, name: Name) -> bool:
        """Whether the content is held."""

    def store(self, name: Name, units: Sequence[int]) -> None:
        """Copy units' content out; what was used longest ago goes for it."""

    def fetch(self, name: Name, units: Sequence[int]) -> bool:
        """Copy content into as many units as it came from; False if it is not held any more."""

    def clear(self) -> None:
        """Forget everything."""


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """Units that are kept for whoever may want their content again.

    Attributes:
        kind: what is in them.
        units: the units.
        value: tokens of prefill per unit that losing it would cost; asked again before eviction.
        on_evict: called when the arena has taken the units.
        spill: called before that, while their content is still there.
        leading: False while other entries depend on this one (a page with pages behind it).
        refs: requests that use it now.
        spare: nobody is likely to ask for it.
    """

    kind: Kind
    units: tuple[int, ...]
    value: Callable[[], float]
    on_evict: Callable[[], None]
    spill: Callable[[], None] | None = None
    leading: bool = True
    refs: int = 0
    spare: bool = False
    kept: bool = field(default=False, init=False)
    used_at: float = field(default=0.0, init=False)
    stamp: int = field(default=-1, init=False)

    @property
    def rank(self) -> float:
        """The lowest goes first."""
        return self.value() if self.spare else self.used_at + self.value()


class Arena:
    """Units 0 .. size-1, each free, private or part of an entry."""

    def __init__(self, size: int) -> None:
        """All units are free; they are handed out last-in first-out."""
        self.size = size
        self.evictions: Counter[Kind] = Counter()
        self._free = list(range(size - 1, -1, -1))
        self._owner: dict[int, Kind] = {}
        self._held: Counter[Kind] = Counter()
        self._entries: set[Entry] = set()
        self._idle_units = self._spare_units = 0
        self._floor = 0.0
        self._queue: list[tuple[float, int, Entry]] = []
        self._stamps = count()

    @property
    def num_free(self) -> int:
        """Units that nobody owns."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Free units and those that idle entries hold."""
        return len(self._free) + self._idle_units

    @property
    def num_spare(self) -> int:
        """Free units and those of idle entries that nobody is likely to ask for."""
        return len(self._free) + self._spare_units

    def units_by_kind(self) -> dict[Kind, int]:
        """How many units every kind owns."""
        return {kind: self._held[kind] for kind in KINDS}

    def fits(self, units: int) -> bool:
        """Whether so many units could be taken; changes nothing."""
        return units <= self.num_available

    def take(self, units: int, kind: Kind) -> tuple[int, ...]:
        """Hand out private units, at the cost of idle entries; ask :meth:`fits` first."""
        assert self.fits(units), f"{units} units wanted, {self.num_available} available"
        while len(self._free) < units:
            self._evict(self._cheapest())
        return self._hand_out(units, kind)

    def try_take(self, units: int, kind: Kind, rank: float) -> tuple[int, ...] | None:
        """Hand out units only at the cost of entries that rank below ``rank``; else None."""
        while len(self._free) < units:
            entry = self._cheapest() if self._idle_units else None
            if entry is None or entry.rank >= rank:
                if entry is not None:
                    self._queue_up(entry)
                return None
            self._evict(entry)
        return self._hand_out(units, kind)

    def give_back(self, units: Iterable[int], kind: Kind) -> None:
        """Free private units."""
        for unit in units:
            assert self._owner.get(unit) == kind, f"unit {unit} is no private {kind}"
            del self._owner[unit]
            self._held[kind] -= 1
            self._free.append(unit)

    def relabel(self, units: Iterable[int], old: Kind, new: Kind) -> None:
        """Private units change what they are for."""
        for unit in units:
            assert self._owner.get(unit) == old, f"unit {unit} is no private {old}"
            self._owner[unit] = new
            self._held[old] -= 1
            self._held[new] += 1

    # ------------------------------------------------------------------ entries

    @property
    def floor(self) -> float:
        """Rank of the last entry that went; new use counts from here."""
        return self._floor

    def keep(self, entry: Entry) -> None:
        """Turn private units into an entry."""
        assert all(self._owner.get(unit) == entry.kind for unit in entry.units)
        assert not entry.kept
        entry.kept = True
        self._entries.add(entry)
        if not entry.refs:
            self._count_idle(entry, 1)
        self.touch(entry)

    def touch(self, entry: Entry) -> None:
        """Note a use."""
        entry.used_at = self._floor
        self._queue_up(entry)

    def hold(self, entry: Entry) -> None:
        """One reference more."""
        assert entry.kept, f"a {entry.kind} that has gone is held"
        if not entry.refs:
            self._count_idle(entry, -1)
        entry.refs += 1

    def release(self, entry: Entry) -> None:
        """One reference less; the last makes it idle."""
        assert entry.refs > 0, f"a {entry.kind} without references is released"
        entry.refs -= 1
        if not entry.refs:
            self._count_idle(entry, 1)
            self._queue_up(entry)

    def lead(self, entry: Entry, *, leading: bool) -> None:
        """Say whether anything depends on an entry; what others depend on is not evicted."""
        entry.leading = leading
        if leading:
            self._queue_up(entry)

    def deem(self, entry: Entry, *, spare: bool) -> None:
        """Say whether anybody is likely to ask for an entry."""
        if entry.spare == spare:
            return
        if entry.kept and not entry.refs:
            self._spare_units += len(entry.units) if spare else -len(entry.units)
        entry.spare = spare
        self._queue_up(entry)

    def drop(self, entry: Entry) -> None:
        """Free an entry that nobody uses."""
        assert entry.kept
        assert not entry.refs
        entry.kept, entry.stamp = False, -1
        self._entries.remove(entry)
        self._count_idle(entry, -1)
        self.give_back(entry.units, entry.kind)

    def drop_idle(self) -> None:
        """Free every entry that nobody uses; what it held is no longer true of anything."""
        while self._idle_units:
            entry = self._cheapest()
            self.drop(entry)
            entry.on_evict()

    def check_integrity(self) -> None:
        """Free + private + kept is the whole, and every count agrees."""
        free = set(self._free)
        assert len(free) == len(self._free), "a unit is free twice"
        assert not free & self._owner.keys(), "a unit is free and owned"
        assert len(free) + len(self._owner) == self.size, "a unit is lost"
        assert +self._held == Counter(self._owner.values()), "a kind's count is off"
        units = [unit for entry in self._entries for unit in entry.units]
        assert len(units) == len(set(units)), "a unit belongs to two entries"
        for entry in self._entries:
            assert entry.kept
            assert entry.refs >= 0
            assert all(self._owner.get(unit) == entry.kind for unit in entry.units)
        idle = sum(len(entry.units) for entry in self._entries if not entry.refs)
        assert idle == self._idle_units, f"{idle} units are idle, {self._idle_units} counted"
        spare = sum(len(entry.units) for entry in self._entries if entry.spare and not entry.refs)
        assert spare == self._spare_units, f"{spare} units are spare, {self._spare_units} counted"

    # ------------------------------------------------------------------ inside

    def _count_idle(self, entry: Entry, sign: int) -> None:
        self._idle_units += sign * len(entry.units)
        self._spare_units += sign * len(entry.units) * entry.spare

    def _hand_out(self, units: int, kind: Kind) -> tuple[int, ...]:
        taken = tuple(self._free.pop() for _ in range(units))
        self._owner.update(dict.fromkeys(taken, kind))
        self._held[kind] += units
        return taken

    def _queue_up(self, entry: Entry) -> None:
        """(Re)enter an entry that can go; older places in the queue become void."""
        if entry.kept and entry.leading and not entry.refs:
            entry.stamp = next(self._stamps)
            heapq.heappush(self._queue, (entry.rank, entry.stamp, entry))
            if len(self._queue) > 4 * len(self._entries) + 64:  # mostly void places
                self._queue = [place for place in self._queue if place[1] == place[2].stamp]
                heapq.heapify(self._queue)

    def _cheapest(self) -> Entry:
        """Remove the entry of least rank from the queue."""
        while True:
            rank, stamp, entry = heapq.heappop(self._queue)
            if stamp != entry.stamp or entry.refs or not entry.leading:
                continue
            if entry.rank > rank:  # its neighbours went, so it is worth more now
                self._queue_up(entry)
                continue
            return entry

    def _evict(self, entry: Entry) -> None:
        self._floor = max(self._floor, entry.rank)
        self.evictions[entry.kind] += 1
        if entry.spill is not None:
            entry.spill()
        self.drop(entry)
        entry.on_evict()
