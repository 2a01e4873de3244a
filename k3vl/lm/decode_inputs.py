"""What recorded decode steps read: the numbers of a step, on the device and on their way there.

A step may be filled while the one before it waits for the device with what it was given, so there
are two pinned copies, which steps use in turn. What the device has already is not sent again.
"""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import TYPE_CHECKING

import numpy as np
import torch

from k3vl.lm.batch import Batch
from k3vl.lm.sampler import GREEDY, NUM_PARAMS, num_words, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from k3vl.lm.batch import Row
    from k3vl.lm.cache import HybridCache
    from k3vl.lm.model import K3Model
    from k3vl.lm.sampler import Ask, SamplingPlan


class Staged:
    """A flat tensor on the device, filled from two pinned ones in turn.

    Whoever sends knows that the device has taken what was sent in the same turn before.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        """All zeros."""
        self.tensor = torch.zeros(count, dtype=dtype, device=device)
        self._pinned = device.type == "cuda"
        self._twins = [torch.empty(0, dtype=dtype) for _ in range(2)]

    def room(self, turn: int, count: int) -> NDArray[np.generic]:
        """The first ``count`` numbers of a twin, to be written; they hold anything."""
        if len(self._twins[turn]) < count:
            size = min(1 << (count - 1).bit_length(), len(self.tensor))
            dtype = self.tensor.dtype
            self._twins[turn] = torch.empty(size, dtype=dtype, pin_memory=self._pinned)
        array: NDArray[np.generic] = self._twins[turn].numpy()[:count]
        return array

    def send(self, turn: int, begin: int, end: int) -> None:
        """Copy a part of a twin to its place."""
        self.tensor[begin:end].copy_(self._twins[turn][begin:end], non_blocking=True)


class StepInputs:
    """A step's integers, sent by one copy.

    In order: token ids, lengths and cache rows, [size] each; units [size, units of a slot]; the
    page table, page after page, [pages, size]. So a copy ends with the longest context, or before
    the units when neither they nor the table have changed, and begins behind the token ids when
    the device has them.
    """

    def __init__(self, model: K3Model, cache: HybridCache, size: int) -> None:
        """Room for the longest context; everything is padding."""
        sizes, device = cache.sizes, cache.buffer.device
        self.cache, self.size = cache, size
        pages = min(sizes.num_units, sizes.pages(model.config.max_position_embeddings))
        self._fixed = size * (3 + sizes.units_per_slot)
        self._staged = Staged(self._fixed + pages * size, torch.int64, device)
        flat = self._staged.tensor
        self.token_ids, self._lens, self._cache_rows = flat[: 3 * size].view(3, size)
        self._units = flat[3 * size : self._fixed].view(size, sizes.units_per_slot)
        self._pages = flat[self._fixed :].view(pages, size)
        self._none = torch.zeros(1, dtype=torch.int64, device=device)
        # What the device has: units, first rows of pages, whose they are, and how many of each.
        self._held_units = np.empty((size, sizes.units_per_slot), np.int64)
        self._held = np.zeros((pages, size), np.int64)
        self._lists: list[Sequence[int]] | None = None
        self._counts = np.zeros(0, np.int64)
        self._units.fill_(-1)
        self._cache_rows.fill_(-1)

    def fill(self, rows: Sequence[Row], turn: int, *, known: bool = True) -> None:
        """Put a step's rows in; what is left is padding.

        Args:
            rows: of one token each.
            turn: which pinned memory to use.
            known: the rows' tokens are; otherwise the device's stay as they are.
        """
        count, size = len(rows), self.cache.sizes.page_size
        at = np.fromiter((row.context_len for row in rows), np.int64, count)
        page, place = np.divmod(at, size)
        changed = self._hold(rows, page + 1)
        longest = int(page.max()) + 1 if count else 0
        end = self._fixed + longest * self.size if changed else 3 * self.size
        flat = self._staged.room(turn, end)
        token_ids, lens, cache_rows = flat[: 3 * self.size].reshape(3, self.size)
        token_ids[count:] = lens[count:] = 0
        cache_rows[count:] = -1
        if known:
            token_ids[:count] = [row.token_ids[0] for row in rows]
        lens[:count] = at + 1
        cache_rows[:count] = self._held[page, np.arange(count)] + place
        if changed:
            flat[3 * self.size : self._fixed] = self._held_units.ravel()
            flat[self._fixed :] = self._held[:longest].ravel()
        self._staged.send(turn, 0 if known else self.size, end)

    def _hold(self, rows: Sequence[Row], used: NDArray[np.int64]) -> bool:
        """Note units and the pages in use of every row; whether that is news to the device."""
        lists, before = [row.pages for row in rows], self._lists
        per_unit, count = self.cache.rows_per_unit, len(rows)
        if before is not None and len(before) == count and all(map(is_, lists, before)):
            grown = np.flatnonzero(used > self._counts).tolist()
            for row in grown:
                new = slice(int(self._counts[row]), int(used[row]))
                self._held[new, row] = np.multiply(lists[row][new], per_unit)
            self._counts = np.maximum(used, self._counts)
            return bool(grown)
        self._held_units[count:] = -1
        if rows:
            units = chain.from_iterable(row.slot for row in rows)
            self._held_units[:count] = np.fromiter(units, np.int64).reshape(count, -1)
            longest = int(used.max())
            begins = np.zeros((count, longest), np.int64)
            pages = [own[:own_used] for own, own_used in zip(lists, used.tolist(), strict=True)]
            begins[np.arange(longest) < used[:, None]] = list(chain.from_iterable(pages))
            self._held[:longest, :count] = begins.T * per_unit
        self._lists, self._counts = lists, used
        return True

    def batch(self) -> Batch:
        """The step as the model takes it; whatever is computed here is part of the step."""
        return Batch(
            token_ids=self.token_ids,
            feature_rows=None,
            features=None,
            num_decodes=self.size,
            prefill_lens=(),
            cells=self.cache.cells_of(self._units),
            cu_seqlens=self._none,
            ends=self._none[:0],
            cache_rows=self._cache_rows,
            decode_rows=self._pages.T,
            decode_lens=self._lens,
            prefill_rows=(),
            logit_rows=None,
            page=self.cache.sizes.page_size,
        )


class Wishes:
    """What the rows of a step ask of their tokens.

    Attributes:
        params, bits: on the device, as :func:`~k3vl.lm.sampler.sample` takes them.
    """

    def __init__(self, size: int, vocab: int, device: torch.device) -> None:
        """Nothing is asked for."""
        words = num_words(vocab)
        self._params = Staged(size * NUM_PARAMS, torch.float64, device)
        self._bits = Staged(size * words, torch.int32, device)
        self.params = self._params.tensor.view(size, NUM_PARAMS)
        self.bits = self._bits.tensor.view(size, words)

    def fill(self, asks: Sequence[Ask], plan: SamplingPlan, turn: int) -> None:
        """Send what the plan reads; rows behind ``asks`` are padding."""
        if plan.drawn or plan.forced:
            count = len(self.params) * NUM_PARAMS
            numbers = self._params.room(turn, count).reshape(-1, NUM_PARAMS)
            numbers[: len(asks)] = [ask.numbers for ask in asks]
            numbers[len(asks) :] = GREEDY.numbers
            self._params.send(turn, 0, count)
        if plan.masked:
            words = self.bits.shape[1]
            count = len(asks) * words
            pack(asks, self._bits.room(turn, count).reshape(-1, words))
            self._bits.send(turn, 0, count)
