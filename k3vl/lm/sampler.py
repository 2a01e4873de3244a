"""From logits to the next token: greedy, temperature, top-k, top-p, one seed per request.

A mask takes tokens out before anything else. Log-probabilities are the model's own: before mask and
temperature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from k3vl.errors import RequestError
from k3vl.types import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

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


class Sampler:
    """The choices of one request; repeatable for a seed, whatever else is in the batch."""

    def __init__(self, params: SamplingParams) -> None:
        """Seed the request's own generator."""
        self.params = params
        self.logprobs: TokenLogprob | None = None
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """Choose from [vocab] float32 logits; ties of the greedy choice go to the lowest id.

        ``logprobs`` then holds what the request wants to know of the choice.
        """
        mask = self.params.logit_mask
        bits = None if mask is None else mask.allowed()
        token_id = self._draw(logits if bits is None else _masked(logits, bits))
        if mask is not None:
            mask.accept(token_id)
        if self.params.logprobs is not None:
            self.logprobs = token_logprob(logits, token_id, self.params.logprobs)
        return token_id

    def _draw(self, logits: torch.Tensor) -> int:
        params = self.params
        if params.temperature == 0:
            return int(logits.argmax())
        probabilities, ids = torch.softmax(logits / params.temperature, -1).sort(
            descending=True, stable=True
        )
        keep = torch.ones_like(probabilities, dtype=torch.bool)
        if params.top_k:
            keep[params.top_k :] = False
        # A token stays while the mass before it is below top_p; the likeliest always stays.
        keep &= probabilities.cumsum(-1) - probabilities < params.top_p
        mass = torch.where(keep, probabilities, 0.0).cpu().double().cumsum(-1)
        draw = torch.rand((), generator=self._generator, dtype=torch.float64) * mass[-1]
        return int(ids[int(torch.searchsorted(mass, draw, right=True))])


class Forced:
    """Chooses what it is told to, and reports how likely it was."""

    def __init__(self, token_ids: Sequence[int], num_top: int = 0) -> None:
        """The choices, in order."""
        self.logprobs: TokenLogprob | None = None
        self._left = iter(token_ids)
        self._num_top = num_top

    def choose(self, logits: torch.Tensor) -> int:
        """The next choice; ``logprobs`` then says what [vocab] float32 logits make of it."""
        token_id = next(self._left)
        self.logprobs = token_logprob(logits, token_id, self._num_top)
        return token_id


def _masked(logits: torch.Tensor, bits: np.ndarray) -> torch.Tensor:
    """Logits [vocab] with minus infinity where the bit is 0, or where there is no bit."""
    words = torch.from_numpy(bits).to(logits.device)
    flags = (words[:, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    allowed = flags.flatten()[: logits.shape[-1]].bool()
    if len(allowed) < logits.shape[-1]:
        allowed = torch.nn.functional.pad(allowed, (0, logits.shape[-1] - len(allowed)))
    return logits.masked_fill(~allowed, float("-inf"))


def token_logprob(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """A token's log-probability and the likeliest ones', from [vocab] logits."""
    values = torch.log_softmax(logits.float(), -1)
    best, ids = values.topk(min(num_top, len(values)))
    top = tuple(zip(ids.tolist(), best.tolist(), strict=True))
    return TokenLogprob(token_id, float(values[token_id]), top)
