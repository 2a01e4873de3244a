"""One decode step, from rows to tokens: how its inputs get to the device and its tokens come back.

On a CPU (:class:`DirectDecode`) a step is what it costs: as many rows as there are requests. On a
CUDA device (:class:`StaticDecode`) its hundreds of launches cost more than they compute, so they
are recorded once and replayed. A replay reads the same memory each time, so inputs lie in buffers
of a few sizes, and a step is padded to the next one. Per step there are one copy to the device, the
model, then, while it runs, the masks and their copy, the sampling, and one small copy back.

A padding row has cells, cache rows and a length that say so: it changes no state, attends to
nothing and its token goes nowhere (``kda_decode``, ``mla_store`` and ``mla_decode``).
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from k3vl.kernels.recording import GraphRunner
from k3vl.lm.batch import Batch, build_batch
from k3vl.lm.sampler import (
    GREEDY,
    NUM_PARAMS,
    SamplingPlan,
    choose,
    num_words,
    pack,
    sample,
    settle,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3vl.kernels.recording import Runner, Step
    from k3vl.lm.batch import Row
    from k3vl.lm.cache import HybridCache
    from k3vl.lm.model import K3Model
    from k3vl.lm.sampler import Ask, Chooser


class Decode(Protocol):
    """Decode steps of one model over one cache."""

    def run(self, rows: Sequence[Row], choosers: Sequence[Chooser]) -> list[int]:
        """Advance every row by its one token.

        Args:
            rows: of the step, at most as many as the engine runs requests.
            choosers: of those rows that want logits, in order.

        Returns:
            Their tokens.
        """

    def renew(self, model: K3Model) -> None:
        """Go on with another model of the same configuration; nothing of the old one is kept."""


class DirectDecode:
    """Every step by itself, nothing padded."""

    def __init__(self, model: K3Model, cache: HybridCache) -> None:
        """Hold both."""
        self.model, self.cache = model, cache

    def run(self, rows: Sequence[Row], choosers: Sequence[Chooser]) -> list[int]:
        """See :class:`Decode`."""
        return choose(self.model(build_batch(rows, self.cache), self.cache), choosers)

    def renew(self, model: K3Model) -> None:
        """See :class:`Decode`."""
        self.model = model


def decoder(model: K3Model, cache: HybridCache) -> Decode:
    """How a model decodes on the cache's device."""
    if cache.buffer.device.type == "cuda" and model.kernels.recordable:
        return StaticDecode(model, cache, GraphRunner())
    return DirectDecode(model, cache)


# ------------------------------------------------------------------ recorded steps


class StaticDecode:
    """Steps of a few sizes over fixed memory, made ready by a :class:`Runner`."""

    def __init__(self, model: K3Model, cache: HybridCache, runner: Runner) -> None:
        """Nothing is made before it is wanted."""
        self.model, self.cache, self.runner = model, cache, runner
        self._sizes: dict[int, _Size] = {}

    def run(self, rows: Sequence[Row], choosers: Sequence[Chooser]) -> list[int]:
        """See :class:`Decode`."""
        size = padded_size(len(rows))
        if size not in self._sizes:
            self._sizes[size] = _Size(self.model, self.cache, self.runner, size)
        return self._sizes[size].run(rows, choosers)

    def renew(self, model: K3Model) -> None:
        """See :class:`Decode`; what was recorded reads the old weights."""
        self.model = model
        self._sizes.clear()


def padded_size(rows: int) -> int:
    """The size of a step: 1, 2, 4, and multiples of 8."""
    return next((size for size in (1, 2, 4) if rows <= size), -(-rows // 8) * 8)


class _Size:
    """Everything that steps of one size need."""

    def __init__(self, model: K3Model, cache: HybridCache, runner: Runner, size: int) -> None:
        self.inputs = _Inputs(model, cache, size)
        self.wishes = _Wishes(size, model.config.vocab_size, cache.buffer.device)
        self.runner = runner
        self.forward = runner.make(lambda: model(self.inputs.batch(), cache))
        self.samplings: dict[SamplingPlan, Step] = {}

    def run(self, rows: Sequence[Row], choosers: Sequence[Chooser]) -> list[int]:
        self.inputs.fill(rows)
        logits = self.forward()
        waiting = iter(choosers)
        by_row = [next(waiting) if row.wants_logits else None for row in rows]
        by_row += [None] * (self.inputs.size - len(rows))
        asks = [GREEDY if chooser is None else chooser.ask() for chooser in by_row]
        plan = SamplingPlan.of(asks)
        if plan not in self.samplings:
            params, bits = self.wishes.params, self.wishes.bits
            self.samplings[plan] = self.runner.make(lambda: sample(logits, params, bits, plan))
        self.wishes.fill(asks, plan)
        return settle(self.samplings[plan](), asks, by_row)


class _Inputs:
    """A step's integers in one buffer on the device and its pinned twin, filled by one copy.

    The page table lies last and page after page, so that a copy ends with the longest context. The
    twin may be written again because a step ends with its tokens on the host.
    """

    def __init__(self, model: K3Model, cache: HybridCache, size: int) -> None:
        sizes, device = cache.sizes, cache.buffer.device
        self.cache, self.size = cache, size
        pages = min(sizes.num_units, sizes.pages(model.config.max_position_embeddings))
        widths = {"token_ids": 1, "cache_rows": 1, "lens": 1, "units": sizes.units_per_slot}
        shapes = {name: (size, width) for name, width in widths.items()} | {"pages": (pages, size)}
        counts = [rows * columns for rows, columns in shapes.values()]
        self._fixed = sum(counts[:-1])
        self._host = torch.zeros(sum(counts), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros_like(self._host, device=device)

        def views(flat: torch.Tensor) -> dict[str, torch.Tensor]:
            parts = zip(shapes.items(), flat.split(counts), strict=True)
            return {name: part.view(shape) for (name, shape), part in parts}

        self._to = {name: view.numpy() for name, view in views(self._host).items()}
        self._from = views(self._device)
        self._none = torch.zeros(1, dtype=torch.int64, device=device)
        self.fill(())

    def fill(self, rows: Sequence[Row]) -> None:
        """Put a step's rows in; what is left is padding."""
        to, count, size = self._to, len(rows), self.cache.sizes.page_size
        to["token_ids"][count:] = to["lens"][count:] = 0
        to["cache_rows"][count:] = to["units"][count:] = -1
        longest = 0
        if rows:
            assert all(row.num_rows == 1 for row in rows)
            at = np.array([row.context_len for row in rows])
            used = at // size + 1
            longest = int(used.max())
            begins = np.zeros((count, longest), np.int64)
            pages = [row.pages[:own] for row, own in zip(rows, used.tolist(), strict=True)]
            begins[np.arange(longest) < used[:, None]] = list(chain.from_iterable(pages))
            begins *= self.cache.rows_per_unit
            to["token_ids"][:count, 0] = [row.token_ids[0] for row in rows]
            to["lens"][:count, 0] = at + 1
            to["cache_rows"][:count, 0] = begins[np.arange(count), used - 1] + at % size
            to["units"][:count] = [row.slot for row in rows]
            to["pages"][:longest, :count] = begins.T
        end = self._fixed + longest * self.size
        self._device[:end].copy_(self._host[:end], non_blocking=True)

    def batch(self) -> Batch:
        """The step as the model takes it; whatever is computed here is part of the step."""
        given = self._from
        return Batch(
            token_ids=given["token_ids"].squeeze(1),
            feature_rows=None,
            features=None,
            num_decodes=self.size,
            prefill_lens=(),
            cells=self.cache.cells_of(given["units"]),
            cu_seqlens=self._none,
            ends=self._none[:0],
            cache_rows=given["cache_rows"].squeeze(1),
            decode_rows=given["pages"].T,
            decode_lens=given["lens"].squeeze(1),
            prefill_rows=(),
            logit_rows=None,
            page=self.cache.sizes.page_size,
        )


class _Wishes:
    """What the rows of a step ask of their tokens, on the device and in pinned memory."""

    def __init__(self, size: int, vocab: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._params = torch.zeros(size, NUM_PARAMS, dtype=torch.float64, pin_memory=pinned)
        self._bits = torch.zeros(size, num_words(vocab), dtype=torch.int32, pin_memory=pinned)
        self.params = torch.zeros_like(self._params, device=device)
        self.bits = torch.zeros_like(self._bits, device=device)

    def fill(self, asks: Sequence[Ask], plan: SamplingPlan) -> None:
        """Copy what the plan reads."""
        if plan.drawn or plan.forced:
            self._params.numpy()[:] = [ask.numbers for ask in asks]
            self.params.copy_(self._params, non_blocking=True)
        if plan.masked:
            pack(asks, self._bits.numpy())
            self.bits.copy_(self._bits, non_blocking=True)
