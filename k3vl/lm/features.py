"""Which encoder outputs are held, in which units, and who needs them. Integers only.

Keyed by content (and the request's salt), so that a picture, or a group of video frames, that
several requests or overlapping clips share is encoded once. An output is pinned while a request
that was admitted still has to prefill it; afterwards it stays until its units are worth more
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from k3vl.lm.arena import Arena, Entry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from k3vl.lm.arena import Tier
    from k3vl.types import MediaSpan

FeatureKey: TypeAlias = tuple[str | None, str]

TOKENS_PER_PATCH = 0.25
"""What encoding one patch costs, in prefilled tokens: measured with the demo model on a CPU (a
picture of 256 patches takes as long as some 60 tokens). Only the order of evictions depends on it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """What the scheduler knows of a media span.

    Attributes:
        offset, num_tokens: where its rows lie in the prompt.
        patches: work for the encoder.
        key: salt and digest.
    """

    offset: int
    num_tokens: int
    patches: int
    key: FeatureKey

    @property
    def end(self) -> int:
        """First token behind it."""
        return self.offset + self.num_tokens


def media_items(spans: Iterable[MediaSpan], salt: str | None) -> tuple[MediaItem, ...]:
    """The scheduler's view of a prompt's media."""
    return tuple(
        MediaItem(
            offset=span.offset,
            num_tokens=span.item.num_tokens,
            patches=span.item.grid_thw[0] * span.item.grid_thw[1] * span.item.grid_thw[2],
            key=(salt, span.item.digest),
        )
        for span in spans
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Feature:
    """One encoder output; ``ready`` once its rows are written."""

    item: MediaItem
    entry: Entry
    ready: bool = False


class FeatureStore:
    """Encoder outputs in the arena."""

    def __init__(self, arena: Arena, *, keep_idle: bool, tier: Tier | None = None) -> None:
        """Nothing is held; without ``keep_idle`` an output goes with its last user."""
        self.arena, self.tier = arena, tier
        self.keep_idle = keep_idle
        self.hits = self.misses = self.pins = 0
        self._held: dict[FeatureKey, Feature] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: FeatureKey) -> bool:
        return key in self._held

    def pin(self, item: MediaItem) -> Feature | None:
        """Take part in an output that is held or being made."""
        feature = self._held.get(item.key)
        if feature is not None:
            self.hits += 1
            self.pins += 1
            self.arena.touch(feature.entry)
            self.arena.hold(feature.entry)
        return feature

    def make(self, item: MediaItem, units: int) -> Feature:
        """Take units for an output; pinned once. Unless the tier had it, it is to be encoded."""
        self.pins += 1
        tier = self.tier
        entry = Entry(
            kind="features",
            units=self.arena.take(units, "features"),
            value=lambda: item.patches * TOKENS_PER_PATCH / units,
            on_evict=lambda: self._forget(item.key),
            refs=1,
            spare=True,
        )
        self.arena.keep(entry)
        self._held[item.key] = feature = Feature(item=item, entry=entry)
        if tier is not None:
            entry.spill = lambda: tier.store(("features", item.key), entry.units)
            feature.ready = tier.fetch(("features", item.key), entry.units)
        self.hits += feature.ready
        self.misses += not feature.ready
        return feature

    def unpin(self, feature: Feature) -> None:
        """Leave it; an output that was never made, or is not to be kept, goes with the last."""
        self.pins -= 1
        self.arena.release(feature.entry)
        if not feature.entry.refs and not (self.keep_idle and feature.ready):
            self.arena.drop(feature.entry)
            self._forget(feature.item.key)

    def check_integrity(self) -> None:
        """What is held is in the arena, and what is not ready has a user."""
        for feature in self._held.values():
            assert feature.entry.kept
            assert feature.ready or feature.entry.refs
        assert self.pins == sum(feature.entry.refs for feature in self._held.values())

    def _forget(self, key: FeatureKey) -> None:
        del self._held[key]
