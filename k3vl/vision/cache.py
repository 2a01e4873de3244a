"""Features of pictures that were seen before, by content.

Here: look-up, byte budget, pins, eviction. Not here: what the digest covers (``processor.py``), and
computing features (``encoder.py``). A cache belongs to one encoder: a digest says nothing about
weights. It is used from one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What a cache holds and has done since it was made.

    Attributes:
        entries: media items held.
        pins: holds on entries that must stay.
        bytes: of all features held; ``pinned_bytes`` of those that must stay.
        hits, misses: look-ups by outcome.
        evictions: entries given up to make room.
        refused: features that found no room, because they or the pinned ones are too large.
    """

    entries: int
    pins: int
    bytes: int
    pinned_bytes: int
    hits: int
    misses: int
    evictions: int
    refused: int


@dataclass(slots=True)
class _Entry:
    features: torch.Tensor
    pins: int = 0


class EncoderCache:
    """Least-recently-used features within a byte budget.

    Args:
        max_bytes: of features held at once, pinned ones included.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # last used is last
        self._bytes = 0
        self._hits = self._misses = self._evictions = self._refused = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def get(self, digest: str) -> torch.Tensor | None:
        """Look up features and mark them as used; the tensor is shared, not to be written."""
        if (entry := self._entries.get(digest)) is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(digest)
        return entry.features

    def fits(self, nbytes: int) -> bool:
        """Whether that much would find room if every unpinned entry went."""
        return nbytes + self._pinned_bytes() <= self.max_bytes

    def put(self, digest: str, features: torch.Tensor) -> bool:
        """Hold features, at the cost of the least recently used unpinned ones.

        A digest that is held already keeps its features, so that all requests share one tensor.

        Returns:
            Whether the digest is held now; without room nothing is evicted for it.
        """
        if digest in self._entries:
            self._entries.move_to_end(digest)
            return True
        if not self.fits(features.nbytes):
            self._refused += 1
            return False
        self._make_room(features.nbytes)
        # A slice of a batch would keep the whole batch alive.
        owned = features.untyped_storage().nbytes() == features.nbytes
        self._entries[digest] = _Entry(features if owned else features.clone())
        self._bytes += features.nbytes
        return True

    def pin(self, digest: str) -> bool:
        """Keep an entry from eviction, once more; False when it is not held."""
        if (entry := self._entries.get(digest)) is None:
            return False
        entry.pins += 1
        return True

    def unpin(self, digest: str) -> None:
        """Take back one successful :meth:`pin`."""
        entry = self._entries.get(digest)
        assert entry is not None, f"unpin of {digest[:12]}, which is not held"
        assert entry.pins > 0, f"unpin of {digest[:12]}, which is not pinned"
        entry.pins -= 1

    def stats(self) -> CacheStats:
        """Count what is held and what has happened."""
        return CacheStats(
            entries=len(self._entries),
            pins=sum(entry.pins for entry in list(self._entries.values())),
            bytes=self._bytes,
            pinned_bytes=self._pinned_bytes(),
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            refused=self._refused,
        )

    def check_integrity(self) -> None:
        """Assert that the books agree with what is held."""
        held = sum(entry.features.nbytes for entry in self._entries.values())
        assert held == self._bytes, f"{held} bytes are held, {self._bytes} are counted"
        assert held <= self.max_bytes, f"{held} bytes are held, {self.max_bytes} are allowed"
        for digest, entry in self._entries.items():
            assert entry.pins >= 0, f"{digest[:12]} has {entry.pins} pins"
            stored = entry.features.untyped_storage().nbytes()
            assert stored == entry.features.nbytes, f"{digest[:12]} keeps {stored} bytes alive"

    def _make_room(self, nbytes: int) -> None:
        for digest in [d for d, entry in self._entries.items() if not entry.pins]:
            if self._bytes + nbytes <= self.max_bytes:
                return
            self._evict(digest)

    def _evict(self, digest: str) -> None:
        self._bytes -= self._entries.pop(digest).features.nbytes
        self._evictions += 1

    def _pinned_bytes(self) -> int:
        return sum(e.features.nbytes for e in list(self._entries.values()) if e.pins)
