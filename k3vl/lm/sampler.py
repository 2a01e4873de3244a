"""From logits to the next tokens: greedy, temperature, top-k, top-p, one seed per request.

One implementation for every device: :func:`sample` works on the rows of a step where the logits
are, and asks the host for nothing, so that a CUDA graph can hold it. What it needs to know of every
request is a row of numbers, the uniform draw among them: that comes from the request's own
generator on the host, and is the same whatever else is in the batch.

A mask takes tokens out before anything else. Log-probabilities are the model's own: before mask and
temperature.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from k3vl.errors import RequestError
from k3vl.kernels.argmax import argmax
from k3vl.types import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k3vl.types import SamplingParams


def check_sampling(params: SamplingParams) -> None:
    """Refuse parameters without a meaning.

    Raises:
        RequestError: naming the field, its value and the range.
    """
    checks = {
        "max_tokens": (params.max_tokens >= 1, "at least 1"),
        "temperature": (0 <= params.temperature < float("inf"), "0 or more"),
        "top_p": (0 < params.top_p <= 1, "above 0, at most 1"),
        "top_k": (params.top_k >= 0, "0 or more"),
        "logprobs": (params.logprobs is None or params.logprobs >= 0, "0 or more"),
        "stop": (all(params.stop), "non-empty strings"),
    }
    for name, (fine, wanted) in checks.items():
        if not fine:
            value = getattr(params, name)
            raise RequestError(f"{name} is {value}, must be {wanted}", param=name)


# ------------------------------------------------------------------ what a request wants


@dataclass(slots=True, kw_only=True)
class Ask:
    """What one request wants of its next token; not frozen, for that would double its cost.

    Attributes:
        temperature: 0 is greedy.
        top_k, top_p: as of :class:`~k3vl.types.SamplingParams`.
        uniform: where in the cumulated probabilities the draw falls, from 0 to below 1.
        forced: the token to take whatever the logits say, or -1.
        bits: [W] int32, the tokens that may come; None allows all.
        num_top: log-probabilities to report beside the token's own; None reports nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    uniform: float = 0.0
    forced: int = -1
    bits: np.ndarray | None = None
    num_top: int | None = None

    @property
    def numbers(self) -> tuple[float, ...]:
        """The row of ``params`` in :func:`sample`; float64 holds all of them exactly."""
        return self.temperature, self.top_k, self.top_p, self.uniform, self.forced


GREEDY = Ask()
NUM_PARAMS = len(GREEDY.numbers)


class Chooser(Protocol):
    """Who decides on one request's tokens: :meth:`ask`, then :meth:`take`, every token.

    Attributes:
        logprobs: of the last token.
        asks_ahead: the next token can be asked for before this one is known; the last may then be
            asked for in vain.
    """

    logprobs: TokenLogprob | None

    @property
    def asks_ahead(self) -> bool:
        """See above."""

    def ask(self) -> Ask:
        """What it wants of the next token."""

    def take(self, token_id: int, logprobs: TokenLogprob | None) -> None:
        """The token was chosen; ``logprobs`` as asked for."""


DRAWS = 32
"""Numbers that a request's generator makes at once; one by one each costs an operator's call."""


class Sampler:
    """The choices of one request; repeatable for a seed, whatever else is in the batch."""

    def __init__(self, params: SamplingParams) -> None:
        """Nothing is drawn yet."""
        self.params = params
        self.logprobs: TokenLogprob | None = None
        self._ask = Ask(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            num_top=params.logprobs,
        )
        if params.temperature == 0 and params.logprobs is None:
            self._ask = GREEDY
        self._draws: list[float] = []
        self._generator: torch.Generator | None = None  # until it is wanted

    @property
    def asks_ahead(self) -> bool:
        """See :class:`Chooser`; a mask is made of the tokens before it."""
        return self.params.logit_mask is None

    def ask(self) -> Ask:
        """See :class:`Chooser`; draws, and computes the mask."""
        ask, params = self._ask, self.params
        if params.temperature > 0:
            if not self._draws:
                self._draw()
            ask = Ask(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                uniform=self._draws.pop(),
                num_top=params.logprobs,
            )
        if self.params.logit_mask is not None:
            ask = replace(ask, bits=self.params.logit_mask.allowed())
        return ask

    def take(self, token_id: int, logprobs: TokenLogprob | None) -> None:
        """See :class:`Chooser`."""
        if self.params.logit_mask is not None:
            self.params.logit_mask.accept(token_id)
        self.logprobs = logprobs

    def _draw(self) -> None:
        """The next numbers of the request's own generator."""
        if self._generator is None:
            self._generator = torch.Generator()
            if self.params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self.params.seed)
        draws = torch.rand(DRAWS, generator=self._generator, dtype=torch.float64)
        self._draws = draws.tolist()[::-1]


class Forced:
    """Chooses what it is told to, and reports how likely it was."""

    asks_ahead = True

    def __init__(self, token_ids: Sequence[int], num_top: int = 0) -> None:
        """The choices, in order."""
        self.logprobs: TokenLogprob | None = None
        self._left = iter(token_ids)
        self._num_top = num_top

    def ask(self) -> Ask:
        """See :class:`Chooser`."""
        return Ask(forced=next(self._left), num_top=self._num_top)

    def take(self, token_id: int, logprobs: TokenLogprob | None) -> None:
        """See :class:`Chooser`."""
        self.logprobs = logprobs


# ------------------------------------------------------------------ on the logits' device


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """Which parts of :func:`sample` a step needs; one plan is one sequence of operators.

    Attributes:
        drawn: some row is not greedy.
        forced: some row's token is known.
        masked: some row has a mask.
        num_top: the most log-probabilities that a row reports beside its own; None is no report.
    """

    drawn: bool
    forced: bool
    masked: bool
    num_top: int | None

    @classmethod
    def of(cls, asks: Sequence[Ask]) -> SamplingPlan:
        """The least that serves all rows."""
        asks = [ask for ask in asks if ask is not GREEDY]
        return cls(
            drawn=any(ask.temperature > 0 for ask in asks),
            forced=any(ask.forced >= 0 for ask in asks),
            masked=any(ask.bits is not None for ask in asks),
            num_top=max((ask.num_top for ask in asks if ask.num_top is not None), default=None),
        )


def sample(
    logits: torch.Tensor,
    params: torch.Tensor | None,
    bits: torch.Tensor | None,
    plan: SamplingPlan,
    into: torch.Tensor | None = None,
    largest: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] = argmax,
) -> torch.Tensor:
    """Choose a token from every row; nothing waits for the device.

    Of equally likely tokens the greedy choice is the one with the lowest id.

    Args:
        logits: [B, vocab] float32.
        params: [B, NUM_PARAMS] float64, :attr:`Ask.numbers`; unused by greedy steps.
        bits: [B, ceil(vocab / 32)] int32, lowest bit first; unused without masks.
        plan: what to do.
        into: [B] int64, where the tokens are left in any case.
        largest: :func:`k3vl.kernels.argmax.argmax`.

    Returns:
        [B] int64 tokens; or, with log-probabilities, [B, 2 + 2 n] float64: the token, its own, the
        n likeliest tokens and theirs.
    """
    allowed = logits
    if plan.masked:
        assert bits is not None
        allowed = logits.masked_fill(~_unpack(bits, logits.shape[-1]), float("-inf"))
    ids = largest(allowed, into)
    if plan.drawn:
        assert params is not None
        ids = torch.where(params[:, 0] > 0, _draw(allowed, params), ids)
    if plan.forced:
        assert params is not None
        forced = params[:, 4].long()
        ids = torch.where(forced >= 0, forced, ids)
    if into is not None and ids is not into:
        into.copy_(ids)
    if plan.num_top is None:
        return ids
    values = torch.log_softmax(logits.float(), -1)
    best, at = values.topk(min(plan.num_top, values.shape[-1]), -1)
    ids = ids.unsqueeze(-1)
    return torch.cat([x.double() for x in (ids, values.gather(-1, ids), at, best)], -1)


def _draw(logits: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """A token from every row's cut-off distribution; a greedy row's is not used."""
    temperature, top_k, top_p, uniform = (x.unsqueeze(-1) for x in params[:, :4].unbind(-1))
    temperature = temperature.masked_fill(temperature == 0, 1.0).float()
    probabilities, ids = torch.softmax(logits / temperature, -1).sort(
        dim=-1, descending=True, stable=True
    )
    rank = torch.arange(logits.shape[-1], device=logits.device)
    top_k = top_k.long()
    keep = (top_k == 0) | (rank < top_k)
    # A token stays while the mass before it is below top_p; the likeliest always stays.
    keep &= probabilities.cumsum(-1) - probabilities < top_p.float()
    mass = probabilities.masked_fill(~keep, 0.0).double().cumsum(-1)
    total = mass[:, -1:].contiguous()
    drawn = torch.searchsorted(mass, uniform * total, right=True)
    # Rounding may take the product up to the total; the draw is then the last that stays.
    last = torch.searchsorted(mass, total)
    return ids.gather(-1, torch.minimum(drawn, last)).squeeze(-1)


def _unpack(bits: torch.Tensor, vocab: int) -> torch.Tensor:
    """[B, W] words -> [B, vocab] bool."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, :vocab].bool()


# ------------------------------------------------------------------ on the host


def choose(logits: torch.Tensor, choosers: Sequence[Chooser]) -> list[int]:
    """Ask everybody, choose, and tell them; one copy to the host.

    Args:
        logits: [B, vocab] float32.
        choosers: of the rows.
    """
    if not choosers:
        return []
    asks = [chooser.ask() for chooser in choosers]
    plan = SamplingPlan.of(asks)
    params = bits = None
    if plan.drawn or plan.forced:
        params = torch.tensor([ask.numbers for ask in asks], dtype=torch.float64)
        params = params.to(logits.device)
    if plan.masked:
        words = np.empty((len(asks), num_words(logits.shape[-1])), np.int32)
        pack(asks, words)
        bits = torch.from_numpy(words).to(logits.device)
    return settle(sample(logits, params, bits, plan), asks, choosers)


def num_words(vocab: int) -> int:
    """Words of a mask over so many tokens."""
    return -(-vocab // 32)


def pack(asks: Sequence[Ask], words: np.ndarray) -> None:
    """Fill [B, W] int32 words with masks: all bits without one, none behind a mask's end."""
    for row, ask in zip(words, asks, strict=True):
        if ask.bits is None:
            row[:] = -1
        else:
            count = min(len(row), len(ask.bits))
            row[:count], row[count:] = ask.bits[:count], 0


class Sampled(Protocol):
    """What :func:`sample` has returned, or will have."""

    def tolist(self) -> Any:
        """Its rows, when they are there."""


def settle(sampled: Sampled, asks: Sequence[Ask], choosers: Sequence[Chooser | None]) -> list[int]:
    """Wait for what :func:`sample` has chosen and pass it on; returns the tokens of somebody."""
    token_ids = []
    for row, ask, chooser in zip(sampled.tolist(), asks, choosers, strict=True):
        if chooser is None:
            continue
        token_id, logprobs = row, None
        if isinstance(row, list):
            token_id = int(row[0])
            if ask.num_top is not None:
                most = len(row) // 2 - 1
                best, values = row[2 : 2 + most][: ask.num_top], row[2 + most :]
                top = tuple((int(i), value) for i, value in zip(best, values, strict=False))
                logprobs = TokenLogprob(token_id, row[1], top)
        chooser.take(token_id, logprobs)
        token_ids.append(token_id)
    return token_ids


def token_logprob(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """A token's log-probability and the likeliest ones', from [vocab] logits."""
    values = torch.log_softmax(logits.float(), -1)
    best, ids = values.topk(min(num_top, len(values)))
    top = tuple(zip(ids.tolist(), best.tolist(), strict=True))
    return TokenLogprob(token_id, float(values[token_id]), top)
