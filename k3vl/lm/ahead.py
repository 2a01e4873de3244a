"""Media encoded before the engine wants them, on a thread of its own.

While the engine decodes and prefills on one core, the vision tower runs on another, and nobody's
next token waits for somebody else's picture. A request reaches the engine once its media are ready;
one without media does not wait. What could not be kept, or failed, the engine encodes itself as if
there were nothing ahead of it, so this changes when rows are made and never which.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from k3vl.lm.backend import Encoder
    from k3vl.types import EncoderItem

MAX_BYTES = 64 * 2**20
"""Features that wait for the engine to take them: some 160 pictures of the demo model."""


class EncodeAhead:
    """An :class:`~k3vl.lm.backend.Encoder` with a shelf for what was made early.

    Attributes:
        seconds: spent in :meth:`prepare`.
    """

    def __init__(self, encoder: Encoder, *, max_bytes: int = MAX_BYTES) -> None:
        """Put a shelf in front of an encoder.

        Args:
            encoder: does the work, on whichever thread asks.
            max_bytes: of features on the shelf; the oldest goes first.
        """
        self.seconds = 0.0
        self._encoder = encoder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._shelf: OrderedDict[str, tuple[str | None, torch.Tensor]] = OrderedDict()
        self._bytes = 0

    def encode(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        """Features of every item, off the shelf or made now; the engine's thread calls this."""
        found = {item.digest: self._take(item.digest) for item in items}
        missing = [item for item in items if found[item.digest] is None]
        made = iter(self._encoder.encode(missing) if missing else ())
        rows = []
        for item in items:
            ready = found[item.digest]
            rows.append(next(made) if ready is None else ready)
        return rows

    def renew(self, encoder: Encoder) -> None:
        """Go on with another encoder; what the old one made, or is making, is not handed out."""
        with self._lock:
            self._encoder = encoder
            self._shelf.clear()
            self._bytes = 0

    def prepare(self, item: EncoderItem, salt: str | None) -> None:
        """Make an item's features early, unless the same salt has them on the shelf."""
        with self._lock:
            held, encoder = self._shelf.get(item.digest), self._encoder
        if held is not None and held[0] == salt:
            return
        begin = time.perf_counter()
        (rows,) = encoder.encode([item])
        self.seconds += time.perf_counter() - begin
        with self._lock:
            if encoder is not self._encoder:
                return
            self._drop(item.digest)
            self._shelf[item.digest] = (salt, rows)
            self._bytes += rows.nbytes
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._shelf)))

    def _take(self, digest: str) -> torch.Tensor | None:
        with self._lock:
            return self._drop(digest)

    def _drop(self, digest: str) -> torch.Tensor | None:
        _, rows = self._shelf.pop(digest, (None, None))
        if rows is not None:
            self._bytes -= rows.nbytes
        return rows
