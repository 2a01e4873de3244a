"""Answers as token ids with log-probabilities: what reinforcement learning takes and gives.

Prompts and answers are ids; no text is parsed, so that what is scored or learnt from is exactly
what the model made. Prompts with pictures come from :meth:`k3vl.pipeline.Pipeline.prepare`
(``.prompt``), others may be made of ids by hand: ``Prompt(ids)``.
"""

from __future__ import annotations

import queue
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from k3vl.errors import BackendError, K3VLError, RequestError
from k3vl.lm.backend import Scores

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from k3vl.lm.backend import Backend, ScoreMethod, Token
    from k3vl.types import Prompt, SamplingParams

    Tokens = queue.SimpleQueue[Token | K3VLError]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer.

    Attributes:
        token_ids: the answer, with the stop id that ended it.
        logprobs: natural log-probability of every token, before temperature, top-k, top-p.
        finish: ``stop``, or ``length`` where it was cut.
        cached_tokens: prompt tokens that did not have to be computed.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]
    cached_tokens: int = 0


def rollouts(
    backend: Backend,
    prompts: Iterable[Prompt],
    sampling: SamplingParams,
    *,
    group: int = 1,
    in_flight: int = 32,
) -> Iterator[tuple[Rollout, ...]]:
    """Sample answers to many prompts, in the order of the prompts.

    Args:
        backend: an engine.
        prompts: read as they are needed.
        sampling: of every answer; with a seed, answer ``i`` of a group has ``seed + i``.
        group: answers to each prompt; they share its prefill.
        in_flight: answers that are asked for at once.

    Yields:
        The group of every prompt.

    Raises:
        RequestError: a prompt or the parameters cannot be used; stop strings are text, and cannot.
        K3VLError: whatever ended an answer; the others are cancelled.
    """
    if sampling.stop:
        raise RequestError("rollouts end at stop_ids, not at stop strings", param="stop")
    if sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)
    pending: deque[list[tuple[int, Tokens]]] = deque()
    waiting = iter(prompts)
    try:
        while True:
            while len(pending) * group < max(in_flight, group):
                prompt = next(waiting, None)
                if prompt is None:
                    break
                pending.append([_ask(backend, prompt, sampling, i) for i in range(group)])
            if not pending:
                return
            answers = tuple(_collect(tokens) for _, tokens in pending[0])
            pending.popleft()
            yield answers
    finally:
        for requests in pending:
            for request_id, _ in requests:
                backend.cancel(request_id)


def score(
    backend: Backend,
    prompt: Prompt,
    token_ids: Sequence[int],
    *,
    method: ScoreMethod = "prefill",
) -> tuple[float, ...]:
    """Log-probability of every token of a given answer, under the weights in use.

    Args:
        backend: an embedded engine.
        prompt: what the answer follows.
        token_ids: the answer.
        method: see :meth:`k3vl.lm.local.LocalBackend.score`.

    Raises:
        RequestError: the answer is empty, not of the vocabulary, or longer than the context.
        CapacityError: it can never fit into the cache.
        BackendError: the engine is dead, or cannot score.
    """
    if not isinstance(backend, Scores):
        raise BackendError("only an embedded engine scores answers")
    tokens: Tokens = queue.SimpleQueue()
    backend.score(prompt, token_ids, tokens.put, method=method)
    return _collect(tokens).logprobs


def _ask(
    backend: Backend, prompt: Prompt, sampling: SamplingParams, index: int
) -> tuple[int, Tokens]:
    tokens: Tokens = queue.SimpleQueue()
    if sampling.seed is not None:
        sampling = replace(sampling, seed=sampling.seed + index)
    return backend.submit(prompt, sampling, tokens.put), tokens


def _collect(tokens: Tokens) -> Rollout:
    """Wait for an answer's end."""
    ids: list[int] = []
    logprobs: list[float] = []
    while True:
        token = tokens.get()
        if isinstance(token, K3VLError):
            raise token
        if token.id is not None:
            assert token.logprobs is not None
            ids.append(token.id)
            logprobs.append(token.logprobs.logprob)
        if token.finish is not None:
            return Rollout(
                token_ids=tuple(ids),
                logprobs=tuple(logprobs),
                finish=token.finish,
                cached_tokens=token.cached_tokens,
            )
