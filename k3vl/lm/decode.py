"""One decode step, from rows to tokens: how its inputs get to the device and its tokens come back.

On a CPU (:class:`DirectDecode`) a step is what it costs: as many rows as there are requests. On a
CUDA device (:class:`StaticDecode`) its hundreds of launches cost more than they compute, so they
are recorded once and replayed. A replay reads the same memory each time, so inputs lie in buffers
of a few sizes, and a step is padded to the next one. Per step there are one copy to the device, the
model, then, while it runs, the masks and their copy, the sampling, and one small copy back.

Where the caller lets it, the step behind is begun before that copy is waited for: its tokens are on
the device already, and all else is known. So the device does not wait for the host between steps. A
request that turns out to have ended was then advanced by a token more, in units that are nobody's:
whoever gets them next clears or fills them behind that.

A padding row has cells, cache rows and a length that say so: it changes no state, attends to
nothing and its token goes nowhere (``kda_decode``, ``mla_store`` and ``mla_decode``).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, cycle
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

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
    from collections.abc import Callable, Iterator, Sequence

    from k3vl.kernels.recording import Runner, Step
    from k3vl.lm.batch import Row
    from k3vl.lm.cache import HybridCache
    from k3vl.lm.model import K3Model
    from k3vl.lm.sampler import Ask, Chooser


class Decode(Protocol):
    """Decode steps of one model over one cache."""

    def run(
        self, rows: Sequence[Row], choosers: Sequence[Chooser], *, ahead: bool = False
    ) -> list[int]:
        """Advance every row by its one token.

        Args:
            rows: of the step, at most as many as the engine runs requests.
            choosers: of those rows that want logits, in order.
            ahead: the next thing that is asked of this object is a step of the same rows, each a
                token longer, but for those that have ended or must begin anew; or :meth:`land`.

        Returns:
            Their tokens.
        """

    def land(self) -> None:
        """No step of those rows follows: nobody wants what was begun ahead."""

    def renew(self, model: K3Model) -> None:
        """Go on with another model of the same configuration; nothing of the old one is kept."""


class DirectDecode:
    """Every step by itself, nothing padded."""

    def __init__(self, model: K3Model, cache: HybridCache) -> None:
        """Hold both."""
        self.model, self.cache = model, cache

    def run(
        self, rows: Sequence[Row], choosers: Sequence[Chooser], *, ahead: bool = False
    ) -> list[int]:
        """See :class:`Decode`; nothing is done ahead."""
        return choose(self.model(build_batch(rows, self.cache), self.cache), choosers)

    def land(self) -> None:
        """See :class:`Decode`."""

    def renew(self, model: K3Model) -> None:
        """See :class:`Decode`."""
        self.model = model


def decoder(model: K3Model, cache: HybridCache) -> Decode:
    """How a model decodes on the cache's device."""
    if cache.buffer.device.type == "cuda" and model.kernels.recordable:
        return StaticDecode(model, cache, GraphRunner())
    return DirectDecode(model, cache)


# ------------------------------------------------------------------ recorded steps


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A step that has been launched and not waited for.

    Attributes:
        size: of the step.
        contexts: of its rows.
        choosers, asks: of its rows; no chooser for those that want no token.
        fetch: waits for what was chosen.
    """

    size: _Size
    contexts: list[int]
    choosers: list[Chooser | None]
    asks: list[Ask]
    fetch: Callable[[], torch.Tensor]

    def is_of(self, contexts: list[int], choosers: list[Chooser | None]) -> bool:
        """Whether it is the step of exactly these rows."""
        return (contexts, choosers) == (self.contexts, self.choosers)


class StaticDecode:
    """Steps of a few sizes over fixed memory, made ready by a :class:`Runner`."""

    def __init__(self, model: K3Model, cache: HybridCache, runner: Runner) -> None:
        """Nothing is made before it is wanted."""
        self.model, self.cache, self.runner = model, cache, runner
        self._sizes: dict[int, _Size] = {}
        self._flight: _Flight | None = None
        # What a request asked for in a step that nobody wanted: it has drawn for it.
        self._unused: WeakKeyDictionary[Chooser, Ask] = WeakKeyDictionary()

    def run(
        self, rows: Sequence[Row], choosers: Sequence[Chooser], *, ahead: bool = False
    ) -> list[int]:
        """See :class:`Decode`."""
        contexts = [row.context_len for row in rows]
        waiting = iter(choosers)
        by_row = [next(waiting) if row.wants_logits else None for row in rows]
        flight, self._flight = self._flight, None
        if flight is None:
            flight = self._launch(rows, by_row)
        if ahead and flight.is_of(contexts, by_row) and self._may_follow(rows, by_row):
            self._flight = self._launch(rows, by_row, behind=flight)
        return self._taken(flight, contexts, by_row)

    def land(self) -> None:
        """See :class:`Decode`."""
        if self._flight is not None:
            self._taken(self._flight, [], [])
            self._flight = None

    def renew(self, model: K3Model) -> None:
        """See :class:`Decode`; what was recorded reads the old weights."""
        self.land()
        self.model = model
        self._sizes.clear()

    def _may_follow(self, rows: Sequence[Row], choosers: Sequence[Chooser | None]) -> bool:
        """Whether the step behind needs nothing that only the host will know, nor another page."""
        size = self.cache.sizes.page_size
        room = all(row.context_len + 1 < len(row.pages) * size for row in rows)
        return room and all(chooser is not None and chooser.foresees for chooser in choosers)

    def _launch(
        self, rows: Sequence[Row], choosers: list[Chooser | None], behind: _Flight | None = None
    ) -> _Flight:
        """Begin a step; ``behind`` another its rows are a token longer than said."""
        number = padded_size(len(rows))
        if number not in self._sizes:
            self._sizes[number] = _Size(self.model, self.cache, self.runner, number)
        size = self._sizes[number]
        size.begin(rows, ahead=behind is not None)
        asks = [self._ask(chooser) for chooser in choosers]
        contexts = [row.context_len + (behind is not None) for row in rows]
        return _Flight(size, contexts, choosers, asks, size.choose(asks))

    def _ask(self, chooser: Chooser | None) -> Ask:
        if chooser is None:
            return GREEDY
        return self._unused.pop(chooser, None) or chooser.ask()

    def _taken(
        self, flight: _Flight, contexts: list[int], choosers: list[Chooser | None]
    ) -> list[int]:
        """Wait for a flight and hand its tokens to those who are still there."""
        here = dict(zip(map(id, choosers), contexts, strict=True))
        there: list[Chooser | None] = []
        served = 0
        for context, chooser, ask in zip(
            flight.contexts, flight.choosers, flight.asks, strict=True
        ):
            wanted = here.get(id(chooser)) == context
            there.append(chooser if wanted else None)
            served += wanted
            if chooser is not None and not wanted:
                self._unused[chooser] = ask
        assert flight.is_of(contexts, choosers) or served == len(choosers), "a row was not begun"
        return settle(flight.fetch(), flight.asks, there)


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
        self.samplings: dict[SamplingPlan, tuple[Step, _Results]] = {}
        self.logits: torch.Tensor

    def begin(self, rows: Sequence[Row], *, ahead: bool) -> None:
        """Launch the model."""
        self.inputs.fill(rows, ahead=ahead)
        self.logits = self.forward()

    def choose(self, asks: Sequence[Ask]) -> Callable[[], torch.Tensor]:
        """Launch the sampling of those rows; what waits for the tokens."""
        padded = [*asks, *[GREEDY] * (self.inputs.size - len(asks))]
        plan = SamplingPlan.of(padded)
        if plan not in self.samplings:
            self.samplings[plan] = self.runner.make(lambda: self._sampled(plan)), _Results()
        self.wishes.fill(padded, plan)
        step, results = self.samplings[plan]
        return results.take(step(), len(asks))

    def _sampled(self, plan: SamplingPlan) -> torch.Tensor:
        out = sample(self.logits, self.wishes.params, self.wishes.bits, plan)
        self.inputs.follow(out if out.dim() == 1 else out[:, 0])
        return out


class _Results:
    """What was sampled on its way to the host, for two steps in turn."""

    def __init__(self) -> None:
        self._turns: Iterator[tuple[torch.Tensor, torch.cuda.Event]] | None = None

    def take(self, out: torch.Tensor, count: int) -> Callable[[], torch.Tensor]:
        """Begin the copy of what the next step overwrites; what waits for its first rows."""
        if not out.is_cuda:
            copy = out[:count].clone()
            return lambda: copy
        if self._turns is None:
            pairs = [(torch.empty_like(out, device="cpu", pin_memory=True), torch.cuda.Event())]
            pairs += [(torch.empty_like(pairs[0][0], pin_memory=True), torch.cuda.Event())]
            self._turns = cycle(pairs)
        host, there = next(self._turns)
        host.copy_(out, non_blocking=True)
        there.record()

        def wait() -> torch.Tensor:
            there.synchronize()
            return host[:count]

        return wait


class _Inputs:
    """A step's integers in one buffer on the device and its pinned twins, filled by one copy.

    The page table lies last and page after page, so that a copy ends with the longest context.
    Token ids lie first: a step that is begun ahead has the last one's, which that has put there. Of
    two twins the one is written that the last step but one was copied from: its tokens have come.
    """

    def __init__(self, model: K3Model, cache: HybridCache, size: int) -> None:
        sizes, device = cache.sizes, cache.buffer.device
        self.cache, self.size = cache, size
        pages = min(sizes.num_units, sizes.pages(model.config.max_position_embeddings))
        widths = {"token_ids": 1, "cache_rows": 1, "lens": 1, "units": sizes.units_per_slot}
        shapes = {name: (size, width) for name, width in widths.items()} | {"pages": (pages, size)}
        counts = [rows * columns for rows, columns in shapes.values()]
        self._fixed = sum(counts[:-1])
        pinned = device.type == "cuda"
        twins = [torch.zeros(sum(counts), dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._device = torch.zeros_like(twins[0], device=device)

        def views(flat: torch.Tensor) -> dict[str, torch.Tensor]:
            parts = zip(shapes.items(), flat.split(counts), strict=True)
            return {name: part.view(shape) for (name, shape), part in parts}

        self._twins = cycle(
            [(twin, {name: view.numpy() for name, view in views(twin).items()}) for twin in twins]
        )
        self._from = views(self._device)
        self._none = torch.zeros(1, dtype=torch.int64, device=device)
        self.fill(())

    def follow(self, token_ids: torch.Tensor) -> None:
        """Have chosen tokens, [size], as those of the next step, where it is begun ahead."""
        self._from["token_ids"].squeeze(1).copy_(token_ids)

    def fill(self, rows: Sequence[Row], *, ahead: bool = False) -> None:
        """Put a step's rows in; what is left is padding.

        ``ahead``: every row is a token longer than it says, and :meth:`follow` has its token.
        """
        host, to = next(self._twins)
        count, size = len(rows), self.cache.sizes.page_size
        to["token_ids"][count:] = to["lens"][count:] = 0
        to["cache_rows"][count:] = to["units"][count:] = -1
        longest = 0
        if rows:
            assert all(row.num_rows == 1 for row in rows)
            at = np.array([row.context_len + ahead for row in rows])
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
        begin, end = self.size if ahead else 0, self._fixed + longest * self.size
        self._device[begin:end].copy_(host[begin:end], non_blocking=True)

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
    """What the rows of a step ask of their tokens, on the device and twice in pinned memory."""

    def __init__(self, size: int, vocab: int, device: torch.device) -> None:
        pinned, words = device.type == "cuda", num_words(vocab)
        twins = [
            (
                torch.zeros(size, NUM_PARAMS, dtype=torch.float64, pin_memory=pinned),
                torch.zeros(size, words, dtype=torch.int32, pin_memory=pinned),
            )
            for _ in range(2)
        ]
        self._twins = cycle(twins)
        self.params, self.bits = (torch.zeros_like(twin, device=device) for twin in twins[0])

    def fill(self, asks: Sequence[Ask], plan: SamplingPlan) -> None:
        """Copy what the plan reads."""
        params, bits = next(self._twins)
        if plan.drawn or plan.forced:
            params.numpy()[:] = [ask.numbers for ask in asks]
            self.params.copy_(params, non_blocking=True)
        if plan.masked:
            pack(asks, bits.numpy())
            self.bits.copy_(bits, non_blocking=True)
