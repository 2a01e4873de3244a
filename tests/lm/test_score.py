"""Log-probabilities of given answers: exact where promised, and the same in any company."""

from __future__ import annotations

import queue

import pytest
import torch

from k3vl.errors import Cancelled, RequestError
from k3vl.lm.engine import Engine
from k3vl.lm.local import LocalBackend, _Update
from k3vl.types import Prompt, SamplingParams
from tests.lm.test_engine import STOP, FakeEncoder, Inbox, engine, prompt
from tests.tiny import TINY, tiny_model, tokens

PROMPT = prompt(1, length=41)
ANSWER = tuple(tokens(37, seed=99))


def scores(inbox: Inbox) -> list[float]:
    assert [item.logprobs.token_id for item in inbox.items] == inbox.ids
    return [item.logprobs.logprob for item in inbox.items]


def run(runner: Engine, *inboxes: Inbox) -> None:
    while runner.jobs:
        runner.step()
        runner.scheduler.check_integrity()
    assert all(inbox.ended for inbox in inboxes)


def scored(runner: Engine, asked: Prompt = PROMPT, answer=ANSWER, method="scored") -> list[float]:
    inbox = Inbox()
    getattr(runner, f"add_{method}")(0, asked, answer, inbox)
    run(runner, inbox)
    assert inbox.ids == list(answer)
    return scores(inbox)


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return scored(engine())


def test_both_ways_agree_up_to_rounding(alone) -> None:
    decoded = scored(engine(), method="forced")
    assert len(alone) == len(decoded) == len(ANSWER)
    torch.testing.assert_close(torch.tensor(alone), torch.tensor(decoded), rtol=0, atol=1e-3)
    assert max(alone) - min(alone) > 1  # or the comparison says nothing


def test_decoding_again_gives_the_generated_bits() -> None:
    """In company, with sampling, as a rollout would be."""
    runner = engine(exact_decode=True, cache_bytes=2**21, max_requests=4)
    made = [Inbox() for _ in range(3)]
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, logprobs=0)
    for i, inbox in enumerate(made):
        runner.add(i, prompt(i, length=30 + 9 * i), params, inbox)
    run(runner, *made)
    again = [Inbox() for _ in made]
    for i, inbox in enumerate(again):
        runner.add_forced(10 + i, prompt(i, length=30 + 9 * i), made[i].ids, inbox)
    run(runner, *again)
    assert [scores(inbox) for inbox in again] == [scores(inbox) for inbox in made]
    assert all(len(set(scores(inbox))) > 10 for inbox in made)


def test_prefilled_scores_do_not_depend_on_company(alone) -> None:
    runner = engine(max_requests=4, prefill_chunk=16, max_step_tokens=40, cache_bytes=2**21)
    inbox, others = Inbox(), [Inbox() for _ in range(3)]
    for i, other in enumerate(others):
        runner.add(i, prompt(i, length=50), SamplingParams(max_tokens=9), other)
    runner.step()
    runner.add_scored(7, PROMPT, ANSWER, inbox)
    run(runner, inbox, *others)
    assert scores(inbox) == alone


def test_prefilled_scores_do_not_depend_on_where_the_prompt_ends(alone) -> None:
    for count in (1, 7, 8, 36):
        moved = Prompt((*PROMPT.token_ids, *ANSWER[:count]), PROMPT.spans)
        assert scored(engine(), moved, ANSWER[count:]) == alone[count:]


def test_what_follows_in_a_page_moves_a_score_by_rounding(alone) -> None:
    """Experts see the tokens of a page together: products of another height."""
    for count in (1, 7, 8, 36):
        found = torch.tensor(scored(engine(), answer=ANSWER[:count]))
        torch.testing.assert_close(found, torch.tensor(alone[:count]), rtol=0, atol=1e-4)


def test_a_known_prompt_is_not_computed_again(alone) -> None:
    runner = engine()
    assert scored(runner) == alone
    assert scored(runner) == alone
    assert runner.scheduler.counts.hit_tokens == 32  # of 41: the pages before the first score
    inbox = Inbox()
    runner.add(1, PROMPT, SamplingParams(max_tokens=1), inbox)
    run(runner, inbox)
    assert inbox.items[0].cached_tokens == 32


def test_a_preempted_score_is_reported_once() -> None:
    """Four answers grow beside it until their pages are taken from it."""
    answer = tuple(tokens(1000, seed=98))
    expected = scored(engine(cache_bytes=2**21), answer=answer)
    sizes = engine().cache.sizes
    units = 5 * sizes.units_per_slot + 4 * sizes.pages(20) + sizes.pages(41 + 1000) + 6
    runner = engine(
        cache_bytes=units * sizes.unit_bytes, max_requests=5, prefill_chunk=16, max_step_tokens=20
    )
    others, inbox = [Inbox() for _ in range(4)], Inbox()
    for i, other in enumerate(others):
        asked = Prompt(tuple(tokens(20, seed=40 + i)))
        runner.add(i, asked, SamplingParams(max_tokens=100), other)
    for _ in range(9):
        runner.step()
    runner.add_scored(9, PROMPT, answer, inbox)
    while not runner.scheduler.counts.preemptions:
        runner.step()
    assert 0 < len(inbox.items) < len(answer)
    run(runner, inbox, *others)
    assert inbox.ids == list(answer)
    assert scores(inbox) == expected


def test_a_backend_scores_and_refuses() -> None:
    backend = LocalBackend(engine())
    try:
        got: queue.SimpleQueue = queue.SimpleQueue()
        backend.score(PROMPT, ANSWER, got.put)
        found = [got.get(timeout=20) for _ in ANSWER]
        assert [token.id for token in found] == list(ANSWER)
        assert [token.finish for token in found] == [None] * 36 + ["length"]
        with pytest.raises(RequestError, match="no tokens to score"):
            backend.score(PROMPT, (), got.put)
        with pytest.raises(RequestError, match="token 1 is 97, the vocabulary has 97"):
            backend.score(PROMPT, (3, 97), got.put)
        with pytest.raises(RequestError, match="token 0 is -1"):
            backend.submit(Prompt((-1,)), SamplingParams(), got.put)
        with pytest.raises(RequestError, match="context has room for 4055"):
            backend.score(PROMPT, [5] * 4056, got.put)
    finally:
        backend.close()


# ---------------------------------------------------------------------- other weights


def other_model(seed: int = 1):
    return tiny_model(TINY, seed)


def greedy(backend: LocalBackend, asked: Prompt, count: int = 12) -> list[int]:
    got: queue.SimpleQueue = queue.SimpleQueue()
    backend.submit(asked, SamplingParams(max_tokens=count), got.put)
    return drain(got)


def drain(got: queue.SimpleQueue) -> list[int]:
    ids = []
    while True:
        token = got.get(timeout=30)
        if isinstance(token, Exception):
            raise token
        ids.append(token.id)
        if token.finish is not None:
            return ids


def fresh(asked: Prompt) -> list[int]:
    """The answer of an engine that never had other weights."""
    config = engine().config
    backend = LocalBackend(Engine(other_model(), FakeEncoder(), config, stop_ids=(STOP,)))
    try:
        return greedy(backend, asked)
    finally:
        backend.close()


def test_an_update_forgets_what_the_old_weights_made() -> None:
    runner = engine()
    backend = LocalBackend(runner)
    try:
        old = greedy(backend, PROMPT)
        assert greedy(backend, PROMPT) == old
        hits = runner.scheduler.counts.hit_tokens
        assert hits
        assert len(runner.scheduler.features)
        encoder = FakeEncoder()
        backend.update(other_model(), encoder)
        assert runner.scheduler.arena.num_free == runner.scheduler.arena.size
        assert not len(runner.scheduler.features)
        assert not runner.scheduler.tree.nodes()
        new = greedy(backend, PROMPT)
        assert new != old
        assert new == fresh(PROMPT)
        assert len(encoder.encoded) == 2
        assert runner.scheduler.counts.hit_tokens == hits
        runner.scheduler.check_integrity()
    finally:
        backend.close()


def test_requests_in_flight_finish_with_the_old_weights_and_later_ones_wait() -> None:
    runner = engine()
    backend = LocalBackend(runner)
    asked = Prompt(tuple(tokens(30, seed=2)))
    try:
        expected = greedy(backend, asked, 200)
        before: queue.SimpleQueue = queue.SimpleQueue()
        after: queue.SimpleQueue = queue.SimpleQueue()
        cancelled: queue.SimpleQueue = queue.SimpleQueue()
        backend.submit(asked, SamplingParams(max_tokens=200), before.put)

        # What the engine's thread finds in its queue, in this order, between two steps.
        def late() -> None:
            backend._announce(update, "finish")
            backend._start(900, lambda: runner.add(900, asked, one, after.put), after.put)
            backend._start(901, lambda: runner.add(901, asked, one, after.put), cancelled.put)
            backend._cancel(901)

        update = _Update(model=other_model(), encoder=FakeEncoder())
        one = SamplingParams(max_tokens=12)
        backend._send(late)
        update.done.result(timeout=30)
        assert drain(before) == expected
        with pytest.raises(Cancelled):
            drain(cancelled)
        assert drain(after) == fresh(asked)
    finally:
        backend.close()


def test_requests_in_flight_are_cancelled_if_so_asked() -> None:
    backend = LocalBackend(engine())
    try:
        got: queue.SimpleQueue = queue.SimpleQueue()
        backend.submit(PROMPT, SamplingParams(max_tokens=2000), got.put)
        assert got.get(timeout=30).id is not None
        backend.update(other_model(), FakeEncoder(), in_flight="cancel")
        with pytest.raises(Cancelled, match="weights are being updated"):
            drain(got)
        assert greedy(backend, PROMPT) == fresh(PROMPT)
    finally:
        backend.close()


def test_closing_ends_an_update_that_waits() -> None:
    backend = LocalBackend(engine())
    got: queue.SimpleQueue = queue.SimpleQueue()
    update = _Update(model=other_model(), encoder=FakeEncoder())
    held: queue.SimpleQueue = queue.SimpleQueue()
    backend.submit(PROMPT, SamplingParams(max_tokens=3000), got.put)
    backend._send(lambda: backend._announce(update, "finish"))
    backend.submit(PROMPT, SamplingParams(max_tokens=2), held.put)
    backend.close()
    with pytest.raises(Cancelled):
        update.done.result(timeout=30)
    assert isinstance(held.get(timeout=30), Cancelled)
