"""Passes over prompts: as they come, or at a few sizes that are recorded like a decode step.

Launched one by one, a pass of a small model costs the host more than the device computes in it; and
most of its operators give the interpreter's lock away, which threads that read pictures take.

:class:`StaticPrompts` pads a pass to the next size: rows, latents that they see, and sequences. Its
numbers go to the device by one copy, the rows' inputs lie in memory of their own, and all layers
are one step for a :class:`~k3vl.kernels.recording.Runner`. A size is recorded when it comes a
second time; the first is the same work, launched, so no bit depends on which of the two it was.

Rows behind the last token are those of sequences that pad, at least one each, or the last one's. A
sequence that pads has no token; its state is the cache's spare unit, what it sees is blank. No
padding row's latent is kept.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from k3vl.kernels.recording import GraphRunner
from k3vl.lm.batch import Batch, build_batch, find_features, latent_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3vl.kernels.recording import Runner, Step
    from k3vl.lm.batch import Row
    from k3vl.lm.cache import HybridCache
    from k3vl.lm.model import K3Model

LEAST_ROWS = 16
LAYER_BYTES = 1 << 30
"""A layer of fewer bytes is read sooner than its 35 launches are made: in 0.2 ms on an H200. K3's
have sixteen times as many."""
MOST_PAIRS = 4096
"""Tokens times experts a token: up to here the experts' plan is one launch."""
MOST_ROWS = 2048
"""Of a size. Larger passes compute longer than they take to launch."""
MOST_LATENTS = 1 << 14
"""Of a size that is recorded, all sequences together: they are gathered into memory that stays."""
MOST_SIZES = 32
"""Recorded at most; what else comes is launched."""


class Prompts(Protocol):
    """Passes over prompts of one model over one cache.

    Attributes:
        most_rows: tokens of a pass that has a size; 0: none has.
    """

    most_rows: int

    def run(self, rows: Sequence[Row], *, every_row: bool = False) -> torch.Tensor:
        """[R, vocab] float32 logits of rows that want them, or of every token."""

    def renew(self, model: K3Model) -> None:
        """Go on with another model of the same configuration; nothing of the old one is kept."""


class DirectPrompts:
    """Every pass by itself, padded as its rows say."""

    most_rows = 0

    def __init__(self, model: K3Model, cache: HybridCache) -> None:
        """Hold both."""
        self.model, self.cache = model, cache

    def run(self, rows: Sequence[Row], *, every_row: bool = False) -> torch.Tensor:
        """See :class:`Prompts`."""
        batch = build_batch(rows, self.cache)
        if every_row:
            batch = replace(batch, logit_rows=None)
        return self.model(batch, self.cache)

    def renew(self, model: K3Model) -> None:
        """See :class:`Prompts`."""
        self.model = model


def prompts(model: K3Model, cache: HybridCache) -> Prompts:
    """How a model takes prompts on the cache's device."""
    if cache.buffer.device.type == "cuda" and model.kernels.recordable and pays(model):
        return StaticPrompts(model, cache, GraphRunner())
    return DirectPrompts(model, cache)


def pays(model: K3Model) -> bool:
    """Whether passes can be recorded, and are launched longer than the device is busy with them.

    Without the bound KDA goes token by token, on the host.
    """
    bound = model.config.linear_attn_config.gate_lower_bound
    tensors = chain(model.parameters(), model.buffers())
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    small = size < LAYER_BYTES * model.config.num_hidden_layers
    return small and bound is not None and bound >= -5


class Size(NamedTuple):
    """What a pass is padded to: rows, latents that they see, sequences."""

    rows: int
    latents: int
    sequences: int

    @classmethod
    def of(cls, counts: Sequence[int], contexts: Sequence[int]) -> Size:
        """The least for sequences of so many tokens behind so many.

        Powers of two; a sequence that pads has a row. Without contexts rows see rows.
        """
        sequences = _power(len(counts))
        rows = max(LEAST_ROWS, _power(sum(counts) + sequences - len(counts)))
        return cls(rows, rows if not any(contexts) else _power(rows + sum(contexts)), sequences)


class StaticPrompts:
    """Passes of a few sizes over fixed memory; larger ones by themselves."""

    def __init__(self, model: K3Model, cache: HybridCache, runner: Runner) -> None:
        """Nothing is made before it is wanted."""
        self.model, self.cache, self.runner = model, cache, runner
        self.direct = DirectPrompts(model, cache)
        top_k = model.config.num_experts_per_token if model.config.num_experts else 1
        self.most_rows = min(MOST_ROWS, _power(MOST_PAIRS // top_k + 1) // 2)
        self._passes: dict[Size, _Pass] = {}
        self._recorded = 0

    def run(self, rows: Sequence[Row], *, every_row: bool = False) -> torch.Tensor:
        """See :class:`Prompts`."""
        counts = [len(row.token_ids) for row in rows]
        size = Size.of(counts, [row.context_len for row in rows])
        if size.rows > self.most_rows:
            return self.direct.run(rows, every_row=every_row)
        known = self._passes.get(size)
        if known is None:
            known = _Pass(self.model, self.cache, size)
            if size.latents <= MOST_LATENTS and len(self._passes) < MOST_SIZES:
                self._passes[size] = known
        elif not known.recorded:
            known.record(self.runner)
        ends = list(accumulate(counts))
        if every_row:
            wanted = list(range(ends[-1]))
        else:
            wanted = [end - 1 for row, end in zip(rows, ends, strict=True) if row.wants_logits]
        return known.run(rows, wanted)

    def renew(self, model: K3Model) -> None:
        """See :class:`Prompts`; what was recorded reads the old weights."""
        self.model = model
        self.direct.renew(model)
        self._passes.clear()


class _Pass:
    """Everything that passes of one size need."""

    def __init__(self, model: K3Model, cache: HybridCache, size: Size) -> None:
        device, units = cache.buffer.device, cache.sizes.units_per_slot
        self.model, self.cache, self.size = model, cache, size
        self.recorded = False
        shapes = {
            "cells": (size.sequences, units),
            "begins": (size.sequences + 1,),
            "ends": (size.sequences,),
            "keys": (size.sequences + 1,),
            "cache_rows": (size.rows,),
            "latents": (size.latents,),
            "token_ids": (size.rows,),
            "features": (size.rows,),
            "wanted": (size.rows,),
        }
        counts = [int(np.prod(shape)) for shape in shapes.values()]
        # Every part begins at 16 bytes: for other addresses Triton would compile once more.
        *self._begins, total = accumulate((count + count % 2 for count in counts), initial=0)
        self._numbers = torch.zeros(total, dtype=torch.int64, device=device)
        self._given = {
            name: self._numbers[begin : begin + count].view(shape)
            for (name, shape), begin, count in zip(
                shapes.items(), self._begins, counts, strict=True
            )
        }
        self._inputs = model.embedding.new_zeros(size.rows, model.config.hidden_size)
        # Not a method: the old weights would go with Python's next search for circles only.
        self._launched = partial(_hidden, model, cache, size, self._given, self._inputs)
        self._step: Step = self._launched

    def record(self, runner: Runner) -> None:
        """Have the step recorded, over rows that are nobody's."""
        self._fill((), ())
        self._step = runner.make(self._launched)
        self.recorded = True

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], wanted: Sequence[int]) -> torch.Tensor:
        """[R, vocab] logits of the rows ``wanted``."""
        self._fill(rows, wanted)
        torch.index_select(self.model.embedding, 0, self._given["token_ids"], out=self._inputs)
        if features := [values for row in rows for _, values in row.features]:
            values = torch.cat(features).to(self._inputs.dtype)
            self._inputs.index_copy_(0, self._given["features"][: len(values)], values)
        hidden = self._step()
        return self.model.logits(hidden, self._given["wanted"][: len(wanted)])

    def _fill(self, rows: Sequence[Row], wanted: Sequence[int]) -> None:
        """Put a pass' numbers in by one copy; what is left is padding."""
        size, spare = self.size, self.cache.spare
        padding = size.sequences - len(rows)
        tokens = [len(row.token_ids) for row in rows]
        own = [*tokens, *[1] * padding]  # rows of each
        if padding:
            own[len(rows) :] = [(size.rows - sum(tokens)) // padding] * padding
        own[-1] += size.rows - sum(own)
        begins = [0, *accumulate(own)]
        ends = [begin + n for begin, n in zip(begins, [*tokens, *[0] * padding], strict=False)]
        contexts = [*(row.context_len for row in rows), *[0] * padding]
        keys = [0, *accumulate(n + before for n, before in zip(own, contexts, strict=True))]
        seen = [latent_rows(row, row.context_len + len(row.token_ids), self.cache) for row in rows]
        # A padding row's own latent is kept nowhere.
        latents = np.full(size.latents, self.cache.blank, np.int64)
        cache_rows = np.full(size.rows, -1, np.int64)
        for row, at, begin, n, mine in zip(rows, keys, begins, tokens, seen, strict=False):
            latents[at : at + len(mine)] = mine
            cache_rows[begin : begin + n] = mine[row.context_len :]
        units = [*(row.slot for row in rows), *[[spare] * self._given["cells"].shape[1]] * padding]
        token_ids = [token for row in rows for token in row.token_ids]
        featured = find_features(rows, begins)[0]
        parts = (units, begins, ends, keys, cache_rows, latents, token_ids, featured, wanted)
        flat = np.zeros(len(self._numbers), np.int64)
        for at, part in zip(self._begins, parts, strict=True):
            values = np.asarray(part, np.int64).ravel()
            flat[at : at + len(values)] = values
        host = torch.from_numpy(flat)
        if self._numbers.is_cuda:
            host = host.pin_memory()  # its memory is used again when the copy is over
        self._numbers.copy_(host, non_blocking=True)


@torch.inference_mode()
def _hidden(
    model: K3Model,
    cache: HybridCache,
    size: Size,
    given: Mapping[str, torch.Tensor],
    inputs: torch.Tensor,
) -> torch.Tensor:
    """[rows, D] of all rows; whatever is computed here is part of the step."""
    stream = model.stream(size.rows, model.embedding, model.config)
    stream.first.copy_(inputs)
    batch = Batch(
        token_ids=given["token_ids"],
        feature_rows=None,
        features=None,
        num_decodes=0,
        prefill_lens=(size.rows,),
        cells=cache.cells_of(given["cells"]),
        cu_seqlens=given["begins"],
        ends=given["ends"],
        cache_rows=given["cache_rows"],
        decode_rows=given["cache_rows"][:0],
        decode_lens=given["cache_rows"][:0],
        prefill_rows=(given["latents"],),
        logit_rows=None,
        prefill_keys=given["keys"],
    )
    return model.advance(stream, batch, cache)


def _power(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, number - 1).bit_length()
