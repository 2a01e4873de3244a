"""Prefix reuse over mutable state: a tree of prompt pages with KDA checkpoints at some of them.

Integers only. A node stands for one page of prompt tokens *behind everything above it*; its key is
the page's token ids and, where media lie in it, their digests and where in the page each item
begins, so that pad tokens never match by their id alone. The first page's key holds the salt too.

Who owns what::

    request   root - n1 - n2 - n3 | p4 p5 (tail)      slot (working KDA state, written every token)
    path (references held) ^^^^^^^  ^^^^^ private      ^^^^ private
    checkpoint            at n2: immutable, no references unless somebody copies it right now

A request writes only private units. A page that is complete is handed to the tree; when the tree
has it already (two requests computed the same prefix), the request's copy is freed and the tree's
is used: both hold the same bits. A hit takes the pages down to the deepest checkpoint, and copies
the checkpoint into the request's own slot. What decoding computed enters the tree only where it is
what prefill would have computed, bit for bit; a warm answer must equal a cold one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, TypeAlias

from k3vl.lm.arena import Arena, Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k3vl.lm.arena import Tier
    from k3vl.types import MediaSpan

PageKey: TypeAlias = tuple[object, ...]


def page_keys(
    token_ids: Sequence[int], spans: Sequence[MediaSpan], page_size: int, salt: str | None
) -> list[PageKey]:
    """Keys of all whole pages of a prompt."""
    begins = range(0, len(token_ids) - page_size + 1, page_size)
    return [page_key(token_ids, spans, page_size, salt, begin) for begin in begins]


def page_key(
    token_ids: Sequence[int],
    spans: Sequence[MediaSpan],
    page_size: int,
    salt: str | None,
    begin: int,
) -> PageKey:
    """Key of the whole page that begins at token ``begin``."""
    media = tuple(
        (span.item.digest, span.offset - begin)
        for span in spans
        if span.offset < begin + page_size and begin < span.offset + span.item.num_tokens
    )
    page = tuple(token_ids[begin : begin + page_size])
    return (page, media) if begin else (salt, page, media)


def prefix_name(parent: bytes, key: PageKey) -> bytes:
    """A name for a page behind everything above it: a digest of the parent's and of its key."""
    return blake2b(parent + repr(key).encode(), digest_size=20).digest()


PASSED = 1 / 8
"""What a checkpoint is worth that has a deeper one on the only way on, in parts of its worth as an
end: whoever goes on starts from the deeper one, and few leave the way between the two."""


@dataclass(slots=True, eq=False)
class Node:
    """One page of a known prefix.

    Attributes:
        parent: None for the root and for nodes that have gone.
        key: in the parent's ``children``.
        depth: pages from the root to this one's end.
        page: its MLA unit; None for the root.
        checkpoint: the KDA state at exactly ``depth``, if one is kept.
        children: pages that follow.
        name: of the prefix down to here, where a tier keeps what is evicted.
        mark: of the same, as long as the process runs.
        needed: a checkpoint lies here or further on.
    """

    parent: Node | None
    key: PageKey
    depth: int
    page: Entry | None = None
    checkpoint: Entry | None = None
    children: dict[PageKey, Node] = field(default_factory=dict)
    name: bytes = b""
    mark: int = 0
    needed: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree knows of a prompt: ``path`` down to a checkpoint, ``known`` pages in all."""

    path: tuple[Node, ...]
    known: int


class PrefixTree:
    """The tree, and the entries of the arena that it hangs on."""

    def __init__(
        self, arena: Arena, *, page_size: int, units_per_checkpoint: int, tier: Tier | None = None
    ) -> None:
        """An empty tree; what is evicted from it goes to ``tier``."""
        self.arena = arena
        self.page_size = page_size
        self.units_per_checkpoint = units_per_checkpoint
        self.tier = tier
        self.on_lost: Callable[[Node], None] = lambda node: None
        self.root = Node(None, (), 0)

    def match(self, keys: Sequence[PageKey], limit: int) -> Match:
        """Longest known prefix of ``keys``, cut back to a checkpoint at most ``limit`` deep."""
        node, path, hit = self.root, [], 0
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            node = child
            path.append(node)
            if node.checkpoint is not None and node.depth <= limit:
                hit = node.depth
        return Match(tuple(path[:hit]), len(path))

    def insert(self, parent: Node, key: PageKey, unit: int) -> tuple[Node, bool]:
        """Hand a private page over; the node, and whether it took the unit."""
        if (known := parent.children.get(key)) is not None:
            return known, False
        node = Node(parent, key, parent.depth + 1, mark=hash((parent.mark, key)))
        if self.tier is not None:
            node.name = prefix_name(parent.name, key)
        node.page = Entry(
            kind="page",
            units=(unit,),
            value=lambda: 0.0,
            on_evict=lambda: self._forget(node),
            spill=self._spill("page", node, (unit,)),
            spare=True,
        )
        parent.children[key] = node
        self._judge(parent)
        if parent.page is not None:
            self.arena.lead(parent.page, leading=False)
        self.arena.keep(node.page)
        return node, True

    def hold(self, node: Node) -> None:
        """A request uses the node's page."""
        assert node.page is not None
        self.arena.hold(node.page)

    def release(self, node: Node) -> None:
        """A request no longer does."""
        assert node.page is not None
        self.arena.release(node.page)

    def worth(self, node: Node) -> float:
        """Tokens that a checkpoint at ``node`` saves, per unit of it and the pages only it needs.

        A page without a checkpoint at or behind it saves nothing; its value counts here. Those that
        have been passed go before this one, so they do not take part in its saving.
        """
        passed = node.checkpoint is not None and node.checkpoint.spare
        return self._saving(node, passed=passed)

    def reserve(self, node: Node, *, passed: bool) -> tuple[int, ...] | None:
        """Units for a checkpoint at ``node``, or None: nothing cheaper is there to give way.

        One that will be passed at once by who makes it takes nothing from ends.
        """
        assert node.checkpoint is None
        rank = self._saving(node, passed=passed) + (0 if passed else self.arena.floor)
        return self.arena.try_take(self.units_per_checkpoint, "checkpoint", rank)

    def _saving(self, node: Node, *, passed: bool) -> float:
        above = node.parent
        while above is not None and above.depth:
            if above.checkpoint is not None and (passed or not above.checkpoint.spare):
                break
            above = above.parent
        pages = node.depth - (above.depth if above is not None else 0)
        saving = pages * self.page_size / (self.units_per_checkpoint + pages)
        return saving * PASSED if passed else saving

    def attach(self, node: Node, units: tuple[int, ...], depth: int) -> None:
        """Keep a state that was copied into ``units``; it must be the state at the node's depth."""
        assert depth == node.depth, f"state of page {depth} attached to page {node.depth}"
        assert node.page is not None
        assert node.page.kept
        node.checkpoint = Entry(
            kind="checkpoint",
            units=units,
            value=lambda: self.worth(node),
            on_evict=lambda: self._lose_checkpoint(node),
            spill=self._spill("checkpoint", node, units),
        )
        self.arena.lead(node.page, leading=False)
        self.arena.keep(node.checkpoint)
        self._judge(node)
        self._judge(node.parent)
        above: Node | None = node
        while above is not None and above.page is not None and not above.needed:
            above.needed = True
            self.arena.deem(above.page, spare=False)
            above = above.parent

    def revive(self, keys: Sequence[PageKey], limit: int) -> None:
        """Bring back from the tier what makes a deeper hit, as idle entries; there must be room."""
        if self.tier is None:
            return
        known, node, names = self.match(keys, limit), self.root, [b""]
        deepest = len(known.path)
        for depth, key in enumerate(keys[:limit], start=1):
            names.append(prefix_name(names[-1], key))
            if depth > known.known and ("page", names[depth]) not in self.tier:
                break
            if ("checkpoint", names[depth]) in self.tier:
                deepest = max(deepest, depth)
        if deepest == len(known.path):
            return
        held = []
        for depth, key in enumerate(keys[:deepest], start=1):
            child = node.children.get(key) or self._revive_page(node, key, names[depth])
            if child is None:
                break  # the tier gave it up for what has just gone there
            node = child
            self.hold(node)
            held.append(node)
        if node.depth == deepest and node.checkpoint is None:
            units = self.arena.take(self.units_per_checkpoint, "checkpoint")
            if self.tier.fetch(("checkpoint", node.name), units):
                self.attach(node, units, deepest)
            else:
                self.arena.give_back(units, "checkpoint")
        for node in reversed(held):
            self.release(node)

    def _revive_page(self, parent: Node, key: PageKey, name: bytes) -> Node | None:
        assert self.tier is not None
        units = self.arena.take(1, "page")
        if self.tier.fetch(("page", name), units):
            return self.insert(parent, key, units[0])[0]
        self.arena.give_back(units, "page")
        return None

    def _spill(
        self, kind: Literal["page", "checkpoint"], node: Node, units: tuple[int, ...]
    ) -> Callable[[], None] | None:
        """What copies an entry's content out before it goes."""
        tier = self.tier
        return None if tier is None else lambda: tier.store((kind, node.name), units)

    def nodes(self) -> list[Node]:
        """Every node but the root."""
        found, todo = [], [self.root]
        while todo:
            children = list(todo.pop().children.values())
            found += children
            todo += children
        return found

    def check_integrity(self) -> None:
        """References grow towards the root, depths count, what others need cannot be evicted."""
        for node in self.nodes():
            assert node.parent is not None
            assert node.page is not None
            assert node.page.kept
            assert node.depth == node.parent.depth + 1
            assert node.parent.children[node.key] is node
            if node.parent.page is not None:
                assert node.parent.page.refs >= node.page.refs
            assert node.page.leading == (not node.children and node.checkpoint is None)
            assert node.checkpoint is None or node.checkpoint.kept
            further = any(child.needed for child in node.children.values())
            assert node.needed == (node.checkpoint is not None or further) != node.page.spare
            assert node.checkpoint is None or node.checkpoint.spare == self._is_passed(node)

    def _forget(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[node.key]
        node.parent = None
        self._loosen(parent)
        self._judge(parent)

    def _lose_checkpoint(self, node: Node) -> None:
        assert node.checkpoint is not None
        if not node.checkpoint.spare:
            self.on_lost(node)
        node.checkpoint = None
        self._loosen(node)
        self._judge(node)
        above: Node | None = node
        while above is not None and above.page is not None and above.checkpoint is None:
            if any(child.needed for child in above.children.values()):
                break
            above.needed = False
            self.arena.deem(above.page, spare=True)
            above = above.parent

    def _judge(self, node: Node | None) -> None:
        """Say anew of the nearest checkpoint upwards whether it has been passed."""
        while node is not None and node.checkpoint is None:
            node = node.parent
        if node is not None and node.checkpoint is not None:
            self.arena.deem(node.checkpoint, spare=self._is_passed(node))

    def _is_passed(self, node: Node) -> bool:
        """Whether a deeper checkpoint lies on the only way on."""
        while len(node.children) == 1:
            (node,) = node.children.values()
            if node.checkpoint is not None:
                return True
        return False

    def _loosen(self, node: Node) -> None:
        """Nothing depends on the page any more, if so: let it go when units are wanted."""
        if node.page is not None and not node.children and node.checkpoint is None:
            self.arena.lead(node.page, leading=True)
