"""One decode step, from rows to tokens: how its inputs get to the device and its tokens come back.

On a CPU (:class:`DirectDecode`) a step is what it costs: as many rows as there are requests. On a
CUDA device (:class:`StaticDecode`) its hundreds of launches cost more than they compute, so they
are recorded once and replayed. A replay reads the same memory each time, so inputs lie in buffers
of a few sizes, and a step is padded to the next one. Per step there are one copy to the device, the
model, then, while it runs, the masks and their copy, the sampling, and one small copy back.

A step can be launched before the tokens of the last one have come back: the sampling leaves them
where the next step of that size reads its tokens.

A padding row has cells, cache rows and a length that say so: it changes no state, attends to
nothing and its token goes nowhere (``kda_decode``, ``mla_store`` and ``mla_decode``).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

import torch

from k3vl.kernels.recording import GraphRunner
from k3vl.kernels.upload import upload
from k3vl.lm.batch import build_batch
from k3vl.lm.decode_inputs import StepInputs, Wishes
from k3vl.lm.sampler import GREEDY, SamplingPlan, choose, sample, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k3vl.kernels.recording import Runner
    from k3vl.lm.batch import Row
    from k3vl.lm.cache import HybridCache
    from k3vl.lm.model import K3Model
    from k3vl.lm.sampler import Ask, Chooser


class Launched(Protocol):
    """A step that the device has been given."""

    def tokens(self) -> list[int]:
        """Wait for it, tell the choosers and return their tokens; once."""


class Decode(Protocol):
    """Decode steps of one model over one cache.

    Attributes:
        overlaps: a step may be launched behind one whose tokens are not known yet.
    """

    overlaps: bool

    def launch(
        self,
        rows: Sequence[Row],
        choosers: Sequence[Chooser],
        *,
        sources: Sequence[int] | None = None,
    ) -> Launched:
        """Advance every row by its one token.

        Args:
            rows: of the step, at most as many as the engine runs requests.
            choosers: of those rows that want logits, in order.
            sources: which row of the step launched last chose each row's token; the rows' own
                ``token_ids`` are not read then. Only where it ``overlaps``.
        """

    def renew(self, model: K3Model) -> None:
        """Go on with another model of the same configuration; nothing of the old one is kept."""


class DirectDecode:
    """Every step by itself, nothing padded, over when it has been launched."""

    overlaps = False

    def __init__(self, model: K3Model, cache: HybridCache) -> None:
        """Hold both."""
        self.model, self.cache = model, cache

    def launch(
        self,
        rows: Sequence[Row],
        choosers: Sequence[Chooser],
        *,
        sources: Sequence[int] | None = None,
    ) -> Launched:
        """See :class:`Decode`."""
        assert sources is None
        return _Done(choose(self.model(build_batch(rows, self.cache), self.cache), choosers))

    def renew(self, model: K3Model) -> None:
        """See :class:`Decode`."""
        self.model = model


class _Done:
    """A step that is over."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def tokens(self) -> list[int]:
        return self._token_ids


def decoder(model: K3Model, cache: HybridCache) -> Decode:
    """How a model decodes on the cache's device."""
    if cache.buffer.device.type == "cuda" and model.kernels.recordable:
        return StaticDecode(model, cache, GraphRunner())
    return DirectDecode(model, cache)


# ------------------------------------------------------------------ recorded steps


class StaticDecode:
    """Steps of a few sizes over fixed memory, made ready by a :class:`Runner`.

    Two steps at most are on their way. What lies in pinned memory, a step's inputs and its results,
    exists twice for that; which of the two a step uses is its turn.
    """

    def __init__(
        self, model: K3Model, cache: HybridCache, runner: Runner, *, overlaps: bool = True
    ) -> None:
        """Nothing is made before it is wanted."""
        self.model, self.cache, self.runner = model, cache, runner
        self.overlaps = overlaps
        self._sizes: dict[int, _Size] = {}
        self._on_their_way: deque[_Recorded] = deque(maxlen=2)
        self._turn = 0

    def launch(
        self,
        rows: Sequence[Row],
        choosers: Sequence[Chooser],
        *,
        sources: Sequence[int] | None = None,
    ) -> Launched:
        """See :class:`Decode`."""
        size = padded_size(len(rows))
        if size not in self._sizes:
            self._sizes[size] = _Size(self.model, self.cache, self.runner, size)
        if len(self._on_their_way) == 2:
            self._on_their_way[0].wait()
        self._turn ^= 1
        before = None
        if sources is not None:
            before = self._on_their_way[-1].token_ids, sources
        try:
            launched = self._sizes[size].launch(rows, choosers, self._turn, before)
        except BaseException:
            # Part of it may be on its way, out of memory that is another step's next.
            if (end := mark(self.cache.buffer.device)) is not None:
                end.synchronize()
            raise
        self._on_their_way.append(launched)
        return launched

    def renew(self, model: K3Model) -> None:
        """See :class:`Decode`; what was recorded reads the old weights."""
        for launched in self._on_their_way:
            launched.wait()
        self.model = model
        self._on_their_way.clear()
        self._sizes.clear()


def padded_size(rows: int) -> int:
    """The size of a step: 1, 2, 4, multiples of 8 up to 64, and eight to every power of two above.

    Every size is recorded in the middle of what it is wanted for, so that with hundreds of requests
    there should be few; and what pads is next to nothing to compute, but less than a quarter.
    """
    step = max(8, (1 << (rows - 1).bit_length()) // 8)
    return next((size for size in (1, 2, 4) if rows <= size), -(-rows // step) * step)


class _Size:
    """Everything that steps of one size need."""

    def __init__(self, model: K3Model, cache: HybridCache, runner: Runner, size: int) -> None:
        self.inputs = inputs = StepInputs(model, cache, size)
        self.wishes = Wishes(size, model.config.vocab_size, cache.buffer.device)
        self.runner = runner
        self.largest = model.kernels.argmax
        # Not of ``self``: who holds what is recorded would be held by it, the old weights as well.
        self.forward = runner.make(lambda: model(inputs.batch(), cache))
        self.samplings: dict[SamplingPlan, _Sampling] = {}

    def launch(
        self,
        rows: Sequence[Row],
        choosers: Sequence[Chooser],
        turn: int,
        before: tuple[torch.Tensor, Sequence[int]] | None,
    ) -> _Recorded:
        """``before``: tokens of the step before [B] int64, and which of them are these rows'."""
        self.inputs.fill(rows, turn, known=before is None)
        token_ids = self.inputs.token_ids
        if before is not None:
            _carry(*before, token_ids)
        logits = self.forward()
        waiting = iter(choosers)
        by_row = [next(waiting) if row.wants_logits else None for row in rows]
        asks = [GREEDY if chooser is None else chooser.ask() for chooser in by_row]
        plan = SamplingPlan.of(asks)
        if plan not in self.samplings:
            params, bits, largest = self.wishes.params, self.wishes.bits, self.largest
            self.samplings[plan] = _Sampling(
                self.runner, lambda: sample(logits, params, bits, plan, token_ids, largest)
            )
        self.wishes.fill(asks, plan, turn)
        return _Recorded(self.samplings[plan].launch(turn), asks, by_row, token_ids)


def _carry(tokens: torch.Tensor, sources: Sequence[int], to: torch.Tensor) -> None:
    """Bring tokens from where one step has left them to where the next reads them."""
    count = len(sources)
    if tokens is to and all(at == source for at, source in enumerate(sources)):
        return
    places = upload(sources, device=tokens.device)[0]
    to[:count] = tokens.index_select(0, places)
    to[count:] = 0


class _Sampling:
    """A recorded sampling, and pinned memory for its results."""

    def __init__(self, runner: Runner, step: Callable[[], torch.Tensor]) -> None:
        self._step = runner.make(step)
        self._results: list[torch.Tensor] = []

    def launch(self, turn: int) -> torch.Tensor:
        """The host's memory of the result, to be filled."""
        sampled = self._step()
        if not self._results:
            self._results = [
                torch.empty(sampled.shape, dtype=sampled.dtype, pin_memory=sampled.is_cuda)
                for _ in range(2)
            ]
        return self._results[turn].copy_(sampled, non_blocking=True)


class Mark(Protocol):
    """A place in what a device has been given to do."""

    def synchronize(self) -> object:
        """Return when the device has come to it."""


def mark(device: torch.device) -> Mark | None:
    """Where its current stream ends now; None where nothing is ever on its way."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class _Recorded:
    """A recorded step that the device has been given; ``token_ids`` is where it leaves them."""

    def __init__(
        self,
        result: torch.Tensor,
        asks: Sequence[Ask],
        by_row: Sequence[Chooser | None],
        token_ids: torch.Tensor,
    ) -> None:
        self.token_ids = token_ids
        self._result, self._asks, self._by_row = result, asks, by_row
        self._end = mark(token_ids.device)

    def wait(self) -> None:
        """Return when its memory may be used again."""
        if self._end is not None:
            self._end.synchronize()
            self._end = None

    def tolist(self) -> list[int] | list[list[float]]:
        """The result's rows, padding left out."""
        self.wait()
        rows: list[int] | list[list[float]] = self._result[: len(self._by_row)].tolist()
        return rows

    def tokens(self) -> list[int]:
        return settle(self, self._asks, self._by_row)
