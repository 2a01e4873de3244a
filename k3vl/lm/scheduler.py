"""Who runs in the next step, how many tokens of each, what is encoded. Plain Python over integers.

No tensors, no device, no clock: a step is a mapping from requests to token counts, and a list of
encoder outputs to make. The rules:

- Admission when a slot, the prompt's pages and its media fit now, in order of arrival as far as
  ``admission.py`` does not say otherwise; what could not run even alone is refused before it is
  queued. A request whose beginning another one is computing right now waits for that one's
  checkpoint, so that a prefix is computed once.
- Prompts advance by whole pages (their last one may be partial), generated tokens one by one.
  Pages and states that decoding completed are left to others where ``keep_decoded`` says that they
  are the same to the bit; the end of an answer so far then has a checkpoint that moves with it.
- Pages of generated tokens and encoder outputs are taken when they are needed. If idle units do not
  suffice, whoever arrived last gives way: its pages and state go where their content may be found
  again (the prefix tree), and it queues in its old place. The oldest never gives way and alone fits
  by admission, so every step advances something and every request ends.
- A request that a step had no room for goes first in the next.
- Where the encoder runs beside the steps, a prompt waits for its media. What lies before them is
  computed if somebody waits for that, or nobody has anything else to do: another pass costs more
  than the few tokens it brings forward.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from k3vl.errors import CapacityError
from k3vl.lm.admission import OVERTAKEN, Admission
from k3vl.lm.arena import Arena
from k3vl.lm.features import FeatureStore
from k3vl.lm.plan import Counts, Step
from k3vl.lm.prefix import Match, PrefixTree
from k3vl.lm.sequence import Sequence, media_units

if TYPE_CHECKING:
    from k3vl.lm.arena import Tier
    from k3vl.lm.cache import CacheSizes
    from k3vl.lm.features import Feature


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """First come, first served, over one arena.

    Attributes:
        sizes: units of the arena and what they hold.
        max_step_tokens: tokens of a step, at least a page; bounds the wait for a long prompt.
        prefill_chunk: most prompt tokens of one sequence in a step, at least a page.
        max_step_patches: patches encoded in a step, or under way at once; a larger item is encoded
            alone.
        max_requests: sequences that run at once.
        reuse: keep what ended requests leave behind.
        keep_decoded: decoding leaves the bits that prefill would (kernels with independent rows),
            so its pages and states are kept too, and nothing is replayed token by token.
        tier: where evicted entries go and come back from, if anywhere.
        encodes_beside: encoder outputs may come later than the step that has them made; nobody
            runs into one that is not ready, and prompts have them made before they get there.
    """

    sizes: CacheSizes
    max_step_tokens: int
    prefill_chunk: int
    max_step_patches: int = 1 << 14
    max_requests: int = 1 << 30
    reuse: bool = True
    keep_decoded: bool = False
    tier: Tier | None = None
    encodes_beside: bool = False
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)
    counts: Counts = field(default_factory=Counts)
    arena: Arena = field(init=False)
    tree: PrefixTree = field(init=False)
    features: FeatureStore = field(init=False)
    admission: Admission = field(init=False)
    _making: list[Feature] = field(default_factory=list, init=False)
    _encoder_full: bool = field(default=False, init=False)
    _awaited: set[int] = field(default_factory=set, init=False)
    _orders: count[int] = field(default_factory=count, init=False)

    def __post_init__(self) -> None:
        """Create the arena and what hangs on it."""
        assert self.max_step_tokens >= self.sizes.page_size <= self.prefill_chunk
        self.arena = Arena(self.sizes.num_units)
        self.tree = PrefixTree(
            self.arena,
            page_size=self.sizes.page_size,
            units_per_checkpoint=self.sizes.units_per_checkpoint,
            tier=self.tier,
        )
        self.features = FeatureStore(self.arena, keep_idle=self.reuse, tier=self.tier)
        self.admission = Admission(sizes=self.sizes, arena=self.arena, tree=self.tree)

    # ------------------------------------------------------------------ coming and going

    def check_fits(self, sequence: Sequence) -> None:
        """Refuse what could not run even alone; reads only constants, safe on any thread.

        Raises:
            CapacityError: with the units it needs and those that exist.
        """
        pages = self.sizes.pages(sequence.num_prompt + sequence.max_new)
        media = media_units(sequence, self.sizes)
        needed = self.sizes.units_per_slot + pages + media
        if needed > self.sizes.num_units:
            raise CapacityError(
                f"{sequence.num_prompt} prompt tokens and up to {sequence.max_new} new ones need "
                f"{pages} pages of {self.sizes.page_size} tokens, {self.sizes.units_per_slot} "
                f"units of state and {media} of media features; the cache has "
                f"{self.sizes.num_units} units"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that :meth:`check_fits` has let through."""
        sequence.order = next(self._orders)
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Free what a sequence holds, wherever it is in its life."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)

    def forget(self) -> None:
        """Drop all that was left for later requests; there must be none now."""
        assert not self.running
        assert not self.waiting
        self.arena.drop_idle()
        if self.tier is not None:
            self.tier.clear()

    # ------------------------------------------------------------------ a step

    def plan(self) -> Step:
        """Admit what fits and choose the next step's work; empty when nothing is left."""
        admitted = self._admit()
        making = self._making = [f for f in self._making if f.entry.kept and not f.ready]
        under_way, self._encoder_full = len(making), False
        budget = self.max_step_tokens
        chosen: list[tuple[Sequence, int]] = []
        early: list[tuple[Sequence, int]] = []
        for sequence in sorted(self.running, key=self._urgency):
            if sequence.slot is None:
                continue  # it has just given way
            room = len(sequence.pages) * self._page - sequence.num_cached
            if budget and room > 0 and sequence.is_decoding:  # as below, without its calls
                chosen.append((sequence, 1))
                budget -= 1
                continue
            tokens, waits = self._equip(sequence, self._share(sequence, budget))
            if tokens and waits and sequence.id not in self._awaited:
                early.append((sequence, tokens))
            elif tokens:
                chosen.append((sequence, tokens))
                budget -= tokens
        if self.encodes_beside:
            self._look_ahead()
        tokens_of = tuple((s, n) for s, n in chosen if s.slot is not None)
        if not tokens_of:
            tokens_of = tuple((s, n) for s, n in early if s.slot is not None)[:1]
        self.left_out = {s.id for s in self.running} - {s.id for s, _ in tokens_of}
        decoded = sum(sequence.is_decoding for sequence, _ in tokens_of)
        self.admission.note_work(sum(n for _, n in tokens_of) - decoded, decoded)
        self.counts.steps += bool(tokens_of)
        self.counts.running_steps += len(self.running) if tokens_of else 0
        self.counts.peak_running = max(self.counts.peak_running, len(self.running))
        return Step(
            admitted=tuple(s for s in admitted if s.slot is not None),
            tokens=tokens_of,
            encode=tuple(feature for feature in making[under_way:] if feature.entry.kept),
        )

    def restored(self, sequence: Sequence) -> None:
        """The sequence's slot has been filled."""
        if sequence.restore is not None:
            self.arena.release(sequence.restore)
            sequence.restore = None

    def advance(self, sequence: Sequence, tokens: int) -> tuple[int, ...] | None:
        """Note that the model has seen ``tokens`` more, at most up to the next page border.

        Returns:
            Units into which the sequence's slot must be copied before anything else is done, as a
            checkpoint of this very depth; None for none.
        """
        sequence.num_cached += tokens
        for index, feature in list(sequence.pinned.items()):
            if sequence.media[index].end <= sequence.num_cached:
                self.features.unpin(feature)
                del sequence.pinned[index]
        depth, rest = divmod(sequence.num_cached, self.sizes.page_size)
        if rest or depth > len(sequence.keys) or not self.reuse:
            return None
        self._share_page(sequence, depth)
        if sequence.num_cached > sequence.num_prefill:
            return self._checkpoint_answer(sequence, depth)
        return self._checkpoint(sequence, depth) if depth in sequence.wanted else None

    def check_integrity(self) -> None:
        """Every unit is free, kept, or owned by exactly one running sequence; references add up."""
        self.arena.check_integrity()
        self.tree.check_integrity()
        self.features.check_integrity()
        held = Counter(node for s in self.running for node in s.path)
        for node in self.tree.nodes():
            assert node.page is not None
            assert node.page.refs == held[node], "references of a page do not add up"
        pins = Counter(feature for s in self.running for feature in s.pinned.values())
        assert all(feature.entry.refs == number for feature, number in pins.items())
        private = sum(len(s.slot or ()) + len(s.pages) - len(s.path) for s in self.running)
        kinds = self.arena.units_by_kind()
        assert kinds["slot"] == len(self.running) * self.sizes.units_per_slot
        kept = len(self.tree.nodes())
        assert kinds["slot"] + kinds["page"] == private + kept, "a page has no owner"
        assert all(s.slot is None and not s.pages and not s.pinned for s in self.waiting)

    # ------------------------------------------------------------------ admission

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        ahead: set[int] = set()
        self._awaited.clear()
        for sequence in self.admission.in_turn(self.waiting):
            oldest = self.waiting[0]
            passes = sequence is not oldest and oldest.id not in ahead
            if len(self.running) >= self.max_requests or (passes and oldest.overtaken >= OVERTAKEN):
                break
            limit = (sequence.num_prefill - 1) // self._page
            match = self.tree.match(sequence.keys, limit)
            if self._is_ahead(sequence, match):
                ahead.add(sequence.id)
                continue
            if self.admission.holds_back(sequence, len(match.path), self.running):
                break
            if self.tier is not None and self._has_room_to_revive(sequence):
                self.tree.revive(sequence.keys, limit)
                match = self.tree.match(sequence.keys, limit)
            # Alone it may even do without its hit: the checkpoint and the slot it is copied into
            # may be more than the arena holds.
            if not self._enter(sequence, match) and (
                self.running or not self._enter(sequence, Match((), match.known))
            ):
                break
            oldest.overtaken += passes
            self.waiting.remove(sequence)
            admitted.append(sequence)
        return admitted

    def _is_ahead(self, sequence: Sequence, match: Match) -> bool:
        """Whether a running sequence is about to compute more of this one's beginning.

        That one is then asked to leave a checkpoint where the two part.
        """
        if not self.reuse:
            return False
        limit = (sequence.num_prefill - 1) // self._page
        for other in self.running:
            if other.is_decoding:
                continue
            common = _common(sequence.keys[:limit], other.keys)
            if common > max(len(match.path), other.num_cached // self._page):
                other.wanted.add(common)
                other.asked.add(common)
                self._awaited.add(other.id)
                return True
        return False

    def _has_room_to_revive(self, sequence: Sequence) -> bool:
        """Whether it can enter beside its pages and a checkpoint that come back for it."""
        sizes = self.sizes
        state = sizes.units_per_slot + sizes.units_per_checkpoint
        spare = media_units(sequence, sizes) + len(self.running)
        return self._fits(state, sizes.pages(sequence.num_prefill) + spare)

    def _enter(self, sequence: Sequence, match: Match) -> bool:
        """Take a slot and the prompt's pages, if they fit beside what runs."""
        for node in match.path:
            self.tree.hold(node)
        checkpoint = match.path[-1].checkpoint if match.path else None
        if checkpoint is not None:
            self.arena.hold(checkpoint)
        slot, hit = self.sizes.units_per_slot, len(match.path)
        pages = self.sizes.pages(sequence.num_prefill) - hit
        # One page for everybody who runs, lest the newcomer is turned out again at once.
        spare = media_units(sequence, self.sizes) + len(self.running)
        if not self._fits(slot, pages + spare):
            if checkpoint is not None:
                self.arena.release(checkpoint)
            for node in reversed(match.path):
                self.tree.release(node)
            return False
        sequence.slot = self.arena.take(slot, "slot")
        own = self.arena.take(pages, "page")
        sequence.path = list(match.path)
        sequence.pages = [*(unit for node in match.path for unit in node.page.units), *own]  # type: ignore[union-attr]
        sequence.restore, sequence.num_cached = checkpoint, hit * self._page
        assert checkpoint is None or match.path[-1].depth * self._page == sequence.num_cached
        if checkpoint is not None:
            self.arena.touch(checkpoint)
        self._note_lookup(sequence, match)
        self.running.append(sequence)
        return True

    def _fits(self, state: int, rest: int) -> bool:
        """Whether a slot and so many other units can be had."""
        return self.arena.fits(state + rest)

    def _note_lookup(self, sequence: Sequence, match: Match) -> None:
        hit, limit = len(match.path), (sequence.num_prefill - 1) // self._page
        if match.known > hit:  # a fork seen twice: leave a checkpoint there
            sequence.wanted.add(min(match.known, limit))
            sequence.asked.add(min(match.known, limit))
        if sequence.num_hit is not None:
            self.counts.recomputed_tokens += sequence.num_known - sequence.num_cached
            return
        sequence.num_hit = sequence.num_cached
        self.admission.note_lookup(sequence.keys[:limit], hit)
        self.counts.prompt_tokens += sequence.num_prompt
        self.counts.hit_tokens += sequence.num_hit
        if not limit or not sequence.keys:
            reason = "short"
        elif hit == limit:
            reason = "hit"
        elif min(match.known, limit) > hit:
            reason = "no_checkpoint"
        else:
            reason = "partial" if hit else "unknown"
        self.counts.lookups[reason] += 1

    # ------------------------------------------------------------------ shares of a step

    @property
    def _page(self) -> int:
        return self.sizes.page_size

    def _urgency(self, sequence: Sequence) -> tuple[bool, bool, int]:
        """Whom the last step had no room for, then who decodes, then the rest; by arrival."""
        return (sequence.id not in self.left_out, not sequence.is_decoding, sequence.order)

    def _share(self, sequence: Sequence, budget: int) -> int:
        """Tokens that a step's budget allows: one, or whole pages, or the rest of the prompt."""
        if sequence.is_decoding:
            return min(1, budget)
        rest = sequence.num_prefill - sequence.num_cached
        most = min(self.prefill_chunk, budget)
        return rest if rest <= most else most // self._page * self._page

    def _equip(self, sequence: Sequence, tokens: int) -> tuple[int, bool]:
        """Get the units for so many tokens, or for fewer.

        Returns:
            How many can run, and whether there would be more but for media that are being encoded.
        """
        begin = sequence.num_cached
        if tokens and sequence.is_decoding:
            if begin >= len(sequence.pages) * self._page:
                if not self._make_room(sequence, 1):
                    return 0, False
                sequence.pages += self.arena.take(1, "page")
            return tokens, False
        end, waits = begin + tokens, False
        for index in sequence.overlapping(begin, end):
            pinned = index in sequence.pinned or self._pin(sequence, index)
            late = pinned and self.encodes_beside and not sequence.pinned[index].ready
            if late or not pinned:
                end = min(end, max(begin, sequence.media[index].offset // self._page * self._page))
                waits |= late
            if not pinned:
                break
        return end - begin, waits

    def _look_ahead(self) -> None:
        """Have media made that prompts will come to, as far as nobody must give way for them."""
        ahead = [sequence for sequence in self.running if not sequence.is_decoding]
        for sequence in sorted(ahead, key=lambda other: other.order):
            for index in sequence.overlapping(sequence.num_cached, sequence.num_prompt):
                units = self.sizes.feature_units(sequence.media[index].num_tokens)
                if index not in sequence.pinned and not (
                    self.arena.fits(units) and self._pin(sequence, index)
                ):
                    break  # in order: what is held further on must not be in its own way

    def _pin(self, sequence: Sequence, index: int) -> bool:
        """Hold a media item's features, or have them made."""
        item = sequence.media[index]
        feature = self.features.pin(item)
        if feature is None:
            if self._encoder_full:
                return False
            patches = sum(made.item.patches for made in self._making) + item.patches
            # Small items do not pass by a large one for ever.
            self._encoder_full |= bool(self._making) and patches > self.max_step_patches
            if self._encoder_full:
                return False
            units = self.sizes.feature_units(item.num_tokens)
            if not self._make_room(sequence, units):
                return False
            feature = self.features.make(item, units)
            if not feature.ready:
                self._making.append(feature)
        sequence.pinned[index] = feature
        return True

    def _make_room(self, sequence: Sequence, units: int) -> bool:
        """Let later arrivals give way, the latest first, until so many units are available."""
        while not self.arena.fits(units):
            latest = max(self.running, key=lambda other: other.order)
            if latest is sequence:
                return False
            self._preempt(latest)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Free what a sequence holds and queue it in its old place."""
        self.counts.preemptions += 1
        depth, rest = divmod(sequence.num_cached, self._page)
        at_border = not rest and 0 < depth == len(sequence.path) and sequence.restore is None
        as_it_is = at_border and not self.sizes.packed_units
        if as_it_is and sequence.path[-1].checkpoint is None and sequence.slot is not None:
            # Its state is the state of a page's end: keep it as it lies, nobody writes it any more.
            self.arena.relabel(sequence.slot, "slot", "checkpoint")
            self.tree.attach(sequence.path[-1], sequence.slot, depth)
            sequence.slot = ()
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_cached = 0
        if self.keep_decoded:
            sequence.num_prefill = sequence.num_known
        place = next(
            (i for i, other in enumerate(self.waiting) if other.order > sequence.order),
            len(self.waiting),
        )
        self.waiting.insert(place, sequence)

    def _release(self, sequence: Sequence) -> None:
        """Give back or leave to others everything that a sequence holds."""
        self.restored(sequence)
        for feature in sequence.pinned.values():
            self.features.unpin(feature)
        self.arena.give_back(sequence.pages[len(sequence.path) :], "page")
        for node in reversed(sequence.path):
            self.tree.release(node)
        self.arena.give_back(sequence.slot or (), "slot")
        sequence.slot, sequence.pages, sequence.path = None, [], []
        sequence.pinned = {}

    # ------------------------------------------------------------------ what is left behind

    def _share_page(self, sequence: Sequence, depth: int) -> None:
        """Hand the page that has just been completed to the tree, or take the tree's own."""
        index = depth - 1
        assert len(sequence.path) == index
        parent = sequence.path[-1] if sequence.path else self.tree.root
        unit = sequence.pages[index]
        node, taken = self.tree.insert(parent, sequence.keys[index], unit)
        self.tree.hold(node)
        sequence.path.append(node)
        if not taken:
            assert node.page is not None
            self.arena.give_back([unit], "page")
            # Another list: whoever has seen this one may rely on what was in it.
            sequence.pages = [*sequence.pages[:index], *node.page.units, *sequence.pages[depth:]]

    def _checkpoint_answer(self, sequence: Sequence, depth: int) -> tuple[int, ...] | None:
        """Move the state at the end of the answer so far to where the answer has come."""
        latest = sequence.latest
        if latest is not None and latest.kept and not latest.refs:
            self.arena.drop(latest)
            latest.on_evict()
        units = self._checkpoint(sequence, depth)
        sequence.latest = None if units is None else sequence.path[-1].checkpoint
        return units

    def _checkpoint(self, sequence: Sequence, depth: int) -> tuple[int, ...] | None:
        node = sequence.path[-1]
        if node.checkpoint is not None:
            self.arena.touch(node.checkpoint)
            return None
        passed = depth not in sequence.asked and depth < max(sequence.wanted, default=0)
        units = self.tree.reserve(node, passed=passed)
        if units is None:
            self.counts.checkpoints_skipped += 1
            if not passed:
                self.admission.note_lost(node)
            return None
        self.tree.attach(node, units, depth)
        self.counts.checkpoints += 1
        return units


def _common(a: tuple[object, ...], b: tuple[object, ...]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
