"""Whether all that a Gluon kernel does to shared memory is in an order that barriers enforce.

Vector clocks: an access is ordered behind another when its clock has come to know of it. Nothing
depends on what happened to come first, so a missing barrier is found in every run. Rules:

- The four warps of a group are two: the one whose first thread arrives and copies for all, and the
  rest. What the rest did, the first knows from the last ``meet`` on. What a group's own warps store
  and load is not checked against each other: there the compiler places barriers.
- A wait tells all warps what those who arrived, or began a copy, knew by then.
- A copy's writes are known to who has waited for its barrier himself.
- A product reads from its issue until it is waited for; then each warp knows of its own share of
  the reads alone.
- What was stored by threads is there for products and copies after the storing warps' fence, for
  those who know of that: a fence behind the last meeting is the first's and the rest's own.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import threading
from collections import Counter
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

Clock: TypeAlias = Counter[str]
"""How far somebody knows of everybody: time by name."""
COPY = "copy"


class RaceError(AssertionError):
    """Two accesses of the same memory that nothing orders, or that lack a fence between them."""


class Group:
    """Warps that run the same code: the first one and the rest."""

    def __init__(self, name: str, known: Clock | None = None) -> None:
        self.first, self.rest = f"{name}, first warp", f"{name}, other warps"
        self.clocks = {self.first: Counter(known), self.rest: Counter(known)}
        self.unfenced: list[Cell] = []

    def tick(self) -> Clock:
        """The time of a new access."""
        now: Clock = Counter()
        for name, clock in self.clocks.items():
            clock[name] += 1
            now[name] = clock[name]
        return now

    def learn(self, what: Clock) -> None:
        """All warps come to know of it."""
        for clock in self.clocks.values():
            clock |= what

    def meet(self) -> None:
        """All warps know of all that one of them does."""
        self.learn(self.clocks[self.first] | self.clocks[self.rest])

    def fence(self) -> None:
        """What the group has stored is there for products and copies."""
        if self.unfenced:
            now = self.tick()
            for cell in self.unfenced:
                cell.unfenced, cell.fence = False, now
            self.unfenced.clear()

    def tells(self) -> Clock:
        """What an arrival of the first warp makes known."""
        known = self.clocks[self.first].items()
        return Counter({name: time for name, time in known if not name.startswith(COPY)})


class Cell:
    """A part of shared memory, and the last accesses of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.writes: Clock = Counter()
        self.reads: Clock = Counter()
        self.product_reads: Clock = Counter()
        self.open = 0
        self.unfenced = False
        self.fence: Clock = Counter()

    def load(self, group: Group) -> None:
        """By threads."""
        self._there("load")
        self._known("load", self.writes, group, own=False)
        self.reads |= group.tick()

    def store(self, group: Group) -> None:
        """By threads; over what the group's own products read it has to have met."""
        self._unread("store")
        self._known("store", self.writes | self.reads, group, own=False)
        self._known("store", self.product_reads, group, own=True)
        self._written(group.tick())
        self.unfenced = True
        group.unfenced.append(self)

    def begin_product(self, group: Group) -> None:
        """It reads until :meth:`end_product`."""
        self._there("product")
        self._fenced("product")
        self._known("product", self.writes | self.fence, group, own=True)
        self.open += 1

    def end_product(self, now: Clock) -> None:
        """The group has waited for it: by ``now`` each warp has read its share."""
        self.open -= 1
        self.product_reads |= now

    def copy(self, group: Group) -> Clock:
        """A copy into it begins, by the first warp; returns what its end tells."""
        self._unread("copy")
        self._fenced("copy")
        read = self.reads | self.product_reads
        # Whoever has read what a copy wrote had waited for it, so that its end comes before theirs.
        written = {name: t for name, t in self.writes.items() if not (read and name[:4] == COPY)}
        before = read | Counter(written) | self.fence
        self._check("copy", before, group.clocks[group.first])
        told: Clock = Counter({f"{COPY} {next(_copies)}": 1})
        self._written(told)
        return told

    def _written(self, when: Clock) -> None:
        self.writes, self.fence = Counter(when), Counter()
        self.reads, self.product_reads = Counter(), Counter()

    def _known(self, what: str, before: Clock, group: Group, *, own: bool) -> None:
        names = set() if own else {group.first, group.rest}
        seen = Counter({name: time for name, time in before.items() if name not in names})
        for clock in group.clocks.values():
            self._check(what, seen, clock)

    def _check(self, what: str, before: Clock, known: Clock) -> None:
        late = sorted(name for name, time in before.items() if known[name] < time)
        if late:
            raise RaceError(f"{what} of {self.name} without knowing of: {', '.join(late)}")

    def _there(self, what: str) -> None:
        if not self.writes:
            raise RaceError(f"{what} of {self.name}, which nobody has written")

    def _unread(self, what: str) -> None:
        if self.open:
            raise RaceError(f"{what} of {self.name} while a product reads it")

    def _fenced(self, what: str) -> None:
        if self.unfenced:
            raise RaceError(f"{what} of {self.name} without a fence behind the store")


_copies = itertools.count()
_here = threading.local()


def group() -> Group | None:
    """Of this thread; None where nobody keeps order."""
    found: Group | None = getattr(_here, "group", None)
    return found


def become(one: Group | None) -> None:
    """This thread is that group."""
    _here.group = one


def without(text: str, before: str, left_out: str) -> str:
    """A kernel's text less the one line behind ``before``; ``*`` in it stands for anything."""
    line = re.escape(left_out).replace(re.escape("*"), ".*")
    text, found = re.subn(f"({re.escape(before)} *){line}\n", r"\1pass\n", text)
    assert found == 1
    return text


def module_of(text: str, folder: Path) -> ModuleType:
    """A kernel's file from which something was left out, as a module."""
    file = folder / "changed.py"
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("changed", file)
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed
