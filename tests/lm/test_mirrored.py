"""One engine over two processes, by gloo: the same answers, and nobody left behind or waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.distributed as dist

from k3vl.errors import Cancelled, RequestError
from k3vl.lm.engine import Engine
from k3vl.lm.local import LocalBackend
from k3vl.lm.mirrored import lead
from k3vl.types import Prompt, SamplingParams
from tests import rank_parts
from tests.rank_parts import SOON, VOCAB, Sink, ask, ids_of, prompt
from tests.tiny import tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.xdist_group("mirrored")  # one pair of processes


def alone() -> Engine:
    parts = rank_parts.build(None)
    return Engine(parts.model, parts.encoder, parts.config, stop_ids=())


@pytest.fixture(scope="module")
def single() -> Iterator[LocalBackend]:
    backend = LocalBackend(alone())
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalBackend]:
    backend = LocalBackend(lead(2, rank_parts.build, "cpu"))
    yield backend
    engine: Any = backend._engine
    processes = list(engine.followers._processes.values())
    backend.close()
    assert [process.returncode for process in processes] == [0], "it ended by itself"
    assert not dist.is_initialized()


# ---------------------------------------------------------------------- the same


def test_requests_together_get_what_one_process_gives(
    single: LocalBackend, pair: LocalBackend
) -> None:
    """Prompts in chunks, decoding beside them, a prefix that is reused; sums are float32."""
    found = []
    for backend in (single, pair):
        sinks = [ask(backend, n, seed, max_tokens=12) for seed, n in enumerate((5, 40, 90))]
        answers = [sink.rest() for sink in sinks]
        answers.append(ask(backend, 90, 2, max_tokens=3, logprobs=2).rest())
        found.append(answers)
    assert list(map(ids_of, found[1])) == list(map(ids_of, found[0]))
    assert found[1][3][0].cached_tokens == found[0][3][0].cached_tokens > 0
    logprobs = [[t.logprobs.logprob for t in answers[3] if t.logprobs] for answers in found]
    assert np.allclose(*logprobs, atol=1e-4)


def test_seeds_that_nobody_gave_are_the_same_on_all_ranks(pair: LocalBackend) -> None:
    """Else ranks would go on with other tokens, which the next step would end."""
    sinks = [ask(pair, 20, temperature=1.0, max_tokens=8) for _ in range(3)]
    answers = [ids_of(sink.rest()) for sink in sinks]
    assert len({tuple(answer) for answer in answers}) == 3
    assert len(ask(pair, 20, max_tokens=2).rest()) == 2


class Even:
    """Allows even tokens only."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def allowed(self) -> np.ndarray:
        return np.full(-(-VOCAB // 32), 0x55555555, np.int32)

    def accept(self, token_id: int) -> None:
        self.seen.append(token_id)


def test_masks_are_asked_on_the_first_rank_only(single: LocalBackend, pair: LocalBackend) -> None:
    answers = []
    for backend in (single, pair):
        mask = Even()
        free = ask(backend, 30, 3, max_tokens=6)
        found = ids_of(ask(backend, 30, 3, max_tokens=6, logit_mask=mask).rest())
        assert mask.seen == found
        assert not any(token % 2 for token in found if token is not None)
        answers.append((found, ids_of(free.rest())))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("method", ["prefill", "decode"])
def test_answers_are_scored(single: LocalBackend, pair: LocalBackend, method: Any) -> None:
    scores = []
    for backend in (single, pair):
        sink = Sink()
        backend.score(prompt(30, 4), tokens(5, 5, VOCAB), sink, method=method)
        scores.append([t.logprobs.logprob for t in sink.rest() if t.logprobs])
    assert np.allclose(*scores, atol=1e-4)
    assert len(scores[1]) == 5


def test_one_that_leaves_or_is_refused_harms_nobody(pair: LocalBackend) -> None:
    staying = ask(pair, 40, max_tokens=30)
    leaving = Sink()
    number = pair.submit(prompt(50, 6), SamplingParams(max_tokens=500), leaving)
    leaving.events.get(timeout=SOON)
    pair.cancel(number)
    with pytest.raises(Cancelled):
        leaving.rest()
    with pytest.raises(RequestError, match="vocabulary"):
        pair.submit(Prompt(token_ids=(VOCAB,)), SamplingParams(), Sink())
    assert len(staying.rest()) == 30
    assert len(ask(pair, 40, max_tokens=2).rest()) == 2
