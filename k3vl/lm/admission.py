"""Who enters next, and when it is better to wait: eviction weighed against concurrency.

Integers only, no clock. A prefix that was lost and is asked for again must be computed again: those
tokens are counted as they come back, against the work that is done meanwhile. While more than a
third of the work went into them, a request waits rather than take the end of a prefix that somebody
may go on from. Where nothing that goes is ever asked for again, nobody waits.

- Requests that find most of their prompt here go before others, and one that waits is passed by at
  most ``OVERTAKEN`` times. It then goes first, and waits only for others to end.
- What nobody uses at the moment keeps at most half of the arena from those who wait. So when nobody
  runs nobody waits, and neither many running requests nor many idle prefixes squeeze the other out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from k3vl.lm.sequence import media_units

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    from k3vl.lm.arena import Arena
    from k3vl.lm.cache import CacheSizes
    from k3vl.lm.prefix import Node, PrefixTree
    from k3vl.lm.sequence import Sequence

OVERTAKEN = 64
"""Times that the request that has waited longest is passed by."""
TOLERATED = 3
"""One token in so many of the work may be computed again before requests wait. With K3's sizes two
to four give the same under agents; from four on chats that lose little wait too."""
DECODED = 16
"""What a decoded token costs, in prefilled ones: K3 at 64 requests, 4.3 ms against 0.27 ms."""
REMEMBERED = 4096
"""Ends of prefixes that were lost."""


@dataclass(slots=True, kw_only=True)
class Admission:
    """Keeps what was lost, and what asking for it again has cost.

    Attributes:
        sizes, arena, tree: of the scheduler.
        most: bound of the balance either way, tokens: an eighth of what the arena could hold, so
            that the past is forgotten.
        balance: tokens that may still be computed again; requests wait at zero or below.
        lost: depth in pages by mark of a prefix whose end went, the latest last.
        lost_tokens: asked for again so far.
        held_back: steps in which somebody waited for the sake of what is kept.
    """

    sizes: CacheSizes
    arena: Arena
    tree: PrefixTree
    most: int = field(init=False)
    balance: int = field(init=False)
    lost: dict[int, int] = field(default_factory=dict)
    lost_tokens: int = 0
    held_back: int = 0

    def __post_init__(self) -> None:
        """Nothing has been lost."""
        self.most = self.balance = self.sizes.num_units * self.sizes.page_size // 8
        self.tree.on_lost = self.note_lost

    def note_lost(self, node: Node) -> None:
        """The state at a prefix's end has gone, or could not be kept."""
        self.lost.pop(node.mark, None)
        self.lost[node.mark] = node.depth
        if len(self.lost) > REMEMBERED:
            del self.lost[next(iter(self.lost))]

    def note_lookup(self, keys: Items[object], hit: int) -> None:
        """A request begins ``hit`` pages deep; ``keys`` are those it could have begun behind."""
        mark, found = 0, None
        for depth, key in enumerate(keys if self.lost else (), start=1):
            mark = hash((mark, key))
            if depth > hit and mark in self.lost:
                found = mark, depth
        if found is not None:
            del self.lost[found[0]]
            tokens = (found[1] - hit) * self.sizes.page_size
            self.lost_tokens += tokens
            self.balance = max(self.balance - tokens, -self.most)

    def note_work(self, prefilled: int, decoded: int) -> None:
        """A step computes so many tokens."""
        self.balance += (prefilled + DECODED * decoded) // TOLERATED
        self.balance = min(self.balance, self.most)

    def in_turn(self, waiting: Items[Sequence]) -> list[Sequence]:
        """Those who wait, in the order in which they may enter."""
        for sequence in waiting:
            found = sequence.found
            if not sequence.sought or (found is not None and found.checkpoint is None):
                path = self._match(sequence)
                sequence.found = path[-1] if path else None
                if path and not sequence.sought:
                    assert path[-1].checkpoint is not None
                    self.arena.touch(path[-1].checkpoint)  # somebody is sure to want it
                sequence.sought = True
        if not waiting or waiting[0].overtaken >= OVERTAKEN:
            return list(waiting)
        return sorted(waiting, key=lambda s: (not self._is_mostly_here(s), s.order))

    def _match(self, sequence: Sequence) -> tuple[Node, ...]:
        limit = (sequence.num_prefill - 1) // self.sizes.page_size
        return self.tree.match(sequence.keys, limit).path

    def _is_mostly_here(self, sequence: Sequence) -> bool:
        """Whether it has little to compute, or has run already."""
        here = 0 if sequence.found is None else sequence.found.depth * self.sizes.page_size
        return sequence.num_hit is not None or 2 * here >= sequence.num_prefill

    def holds_back(self, sequence: Sequence, hit: int, running: Items[Sequence]) -> bool:
        """Whether a request should wait for others to end rather than take what may be wanted.

        It needs what it takes at once, and room for the state that it will leave at its end; so do
        those who are still on their way to theirs.
        """
        if self.balance > 0 or 2 * self.arena.num_available > self.arena.size:
            return False
        sizes = self.sizes
        ends = 1 + sum(not other.is_decoding for other in running)
        needed = sizes.units_per_slot + sizes.pages(sequence.num_prefill) - hit
        needed += media_units(sequence, sizes) + len(running) + ends * sizes.units_per_checkpoint
        waits = needed > self.arena.num_spare
        self.held_back += waits
        return waits
