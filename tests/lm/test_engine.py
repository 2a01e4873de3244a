"""The embedded engine: same text whatever the batch and chunks; nothing leaks, nothing hangs."""

from __future__ import annotations

import hashlib
import queue
import random

import numpy as np
import pytest
import torch

from k3vl.errors import BackendError, Cancelled, CapacityError, ConfigError, RequestError
from k3vl.lm.engine import Engine, EngineConfig
from k3vl.lm.local import LocalBackend
from k3vl.types import EncoderItem, MediaSpan, Prompt, SamplingParams
from tests.lm.late import LateDecode
from tests.tiny import TINY, tiny_model, tokens

STOP = 3


@pytest.fixture(autouse=True, params=["awaited", "ahead"])
def order(request, monkeypatch) -> str:
    """Every test runs with decode steps that await the last one's tokens, and that do not."""
    if request.param == "ahead":
        monkeypatch.setattr("k3vl.lm.engine.decoder", LateDecode)
    return request.param


class FakeEncoder:
    """Features that depend on the item alone; counts its calls."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, items):
        self.encoded += [item.digest for item in items]
        for item in items:
            if item.digest == "bad":
                raise ValueError("no such picture")
        return [
            torch.randn(
                item.num_tokens,
                TINY.hidden_size,
                generator=torch.Generator().manual_seed(int(item.digest[:8], 16)),
            )
            for item in items
        ]


def picture(number: int, num_tokens: int = 6) -> EncoderItem:
    digest = hashlib.sha256(bytes([number, num_tokens])).hexdigest()
    patches = np.zeros((4 * num_tokens, 3, 14, 14), np.uint8)
    return EncoderItem(digest, patches, (1, 2, 2 * num_tokens), num_tokens)


def prompt(number: int, *, length: int = 30) -> Prompt:
    spans = (MediaSpan(4, picture(number)), MediaSpan(13, picture(number + 1, 9)))
    return Prompt(tuple(tokens(length, seed=number)), spans)


def engine(**limits) -> Engine:
    config = EngineConfig(**{"max_requests": 3, "cache_bytes": 2**20, "page_size": 16, **limits})
    return Engine(tiny_model(), FakeEncoder(), config, stop_ids=(STOP,))


class Inbox:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.items = []

    def __call__(self, item) -> None:
        assert not self.ended, "nothing follows the end"
        self.items.append(item)

    @property
    def ended(self) -> bool:
        last = self.items[-1] if self.items else None
        return isinstance(last, Exception) or (last is not None and last.finish is not None)

    @property
    def ids(self) -> list[int]:
        return [item.id for item in self.items if not isinstance(item, Exception)]


def generate(runner: Engine, prompts: list[Prompt], **sampling) -> list[list[int]]:
    inboxes = [Inbox() for _ in prompts]
    for i, (item, inbox) in enumerate(zip(prompts, inboxes, strict=True)):
        runner.add(i, item, SamplingParams(max_tokens=12, **sampling), inbox)
    while runner.jobs:
        runner.step()
        runner.scheduler.check_integrity()
    assert all(inbox.ended for inbox in inboxes)
    return [inbox.ids for inbox in inboxes]


PROMPTS = [prompt(i, length=24 + 7 * i) for i in range(5)]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Every prompt's greedy text by itself, in one chunk."""
    return [generate(engine(), [item])[0] for item in PROMPTS]


def test_a_batch_gives_the_same_text_as_one_at_a_time(alone) -> None:
    assert len({tuple(ids) for ids in alone}) == 5, "the prompts differ, so do the answers"
    assert generate(engine(max_requests=5), PROMPTS) == alone
    assert generate(engine(max_requests=2), PROMPTS) == alone


@pytest.mark.parametrize("chunk", [1, 2, 5, 7, 13, 16, 31])
def test_any_prefill_chunk_gives_the_same_text(alone, chunk: int) -> None:
    """Chunks end before, inside and behind pictures."""
    assert generate(engine(prefill_chunk=chunk, max_step_tokens=chunk + 3), PROMPTS) == alone


def test_sampling_is_repeatable_in_any_company() -> None:
    params = {"temperature": 1.0, "seed": 7}
    alone = [generate(engine(), [item], **params)[0] for item in PROMPTS]
    assert generate(engine(max_requests=5, prefill_chunk=5), PROMPTS, **params) == alone


def test_pictures_are_encoded_once_per_request_and_released() -> None:
    runner = engine(prefill_chunk=3)
    inbox = Inbox()
    runner.add(0, PROMPTS[0], SamplingParams(max_tokens=12), inbox)
    while 0 in runner.jobs:
        job = runner.jobs[0]
        runner.step()
        spans = job.prompt.spans
        done = [
            i
            for i, s in enumerate(spans)
            if s.offset + s.item.num_tokens <= job.sequence.num_cached
        ]
        assert not set(done) & set(job.sequence.pinned)
    assert runner.encoding.encoder.encoded == [span.item.digest for span in PROMPTS[0].spans]


def test_stop_ids_end_generation() -> None:
    runner = engine()
    ids = generate(runner, [PROMPTS[0]])[0]
    first = ids[2]
    inbox = Inbox()
    runner.add(9, PROMPTS[0], SamplingParams(max_tokens=12, stop_ids=(first,)), inbox)
    while runner.jobs:
        runner.step()
    assert inbox.ids == ids[: ids.index(first) + 1]
    assert inbox.items[-1].finish == "stop"


def test_length_ends_generation() -> None:
    runner = engine()
    inbox = Inbox()
    runner.add(0, PROMPTS[1], SamplingParams(max_tokens=1), inbox)
    runner.step()
    assert [item.finish for item in inbox.items] == ["length"]
    assert not runner.jobs


def test_cancel_at_any_moment_frees_everything(alone) -> None:
    rng = random.Random(0)
    for _ in range(30):
        runner = engine(prefill_chunk=5)
        inboxes = [Inbox() for _ in PROMPTS]
        for i, item in enumerate(PROMPTS):
            runner.add(i, item, SamplingParams(max_tokens=12), inboxes[i])
        victim = rng.randrange(5)
        for _ in range(rng.randrange(40)):
            runner.step()
        runner.cancel(victim)
        runner.cancel(victim)
        runner.cancel(99)
        while runner.jobs:
            runner.step()
            runner.scheduler.check_integrity()
        assert runner.scheduler.arena.num_available == runner.scheduler.arena.size
        for i, inbox in enumerate(inboxes):
            if i != victim:
                assert inbox.ids == alone[i]
            elif isinstance(inbox.items[-1], Cancelled):
                assert inbox.ids == alone[i][: len(inbox.ids)]


def test_bad_media_fail_their_own_request_only(alone) -> None:
    bad = Prompt(PROMPTS[0].token_ids, (MediaSpan(2, EncoderItem("bad", None, (1, 2, 2), 1)),))
    runner = engine(max_requests=5)
    inboxes = [Inbox() for _ in range(3)]
    for i, item in enumerate([PROMPTS[3], bad, PROMPTS[4]]):
        runner.add(i, item, SamplingParams(max_tokens=12), inboxes[i])
    while runner.jobs:
        runner.step()
    assert isinstance(inboxes[1].items[-1], BackendError)
    assert "ValueError" in str(inboxes[1].items[-1])
    assert [inboxes[0].ids, inboxes[2].ids] == [alone[3], alone[4]]


def test_what_cannot_be_served_is_refused_at_once() -> None:
    runner = engine()
    with pytest.raises(RequestError, match="no tokens"):
        runner.admissible(Prompt(()), SamplingParams())
    with pytest.raises(RequestError, match="temperature"):
        runner.admissible(PROMPTS[0], SamplingParams(temperature=-1))
    with pytest.raises(RequestError, match="5000 tokens, the model's context is 4096") as error:
        runner.admissible(Prompt((1,) * 5000), SamplingParams())
    assert error.value.code == "context_length_exceeded"
    assert runner.admissible(Prompt((1,) * 30), SamplingParams(max_tokens=10)) == 10
    with pytest.raises(CapacityError, match="pages"):
        engine(cache_bytes=120_000).admissible(Prompt((1,) * 3000), SamplingParams())
    with pytest.raises(ConfigError, match="cache budget of 1,000 bytes is too small"):
        engine(cache_bytes=1000)


# ------------------------------------------------------------------ the thread around it


def drain(inbox: queue.SimpleQueue) -> list:
    items = []
    while not items or (not isinstance(items[-1], Exception) and items[-1].finish is None):
        items.append(inbox.get(timeout=20))
    return items


def test_the_thread_serves_requests_from_many_callers(alone) -> None:
    backend = LocalBackend(engine())
    inboxes = [queue.SimpleQueue() for _ in PROMPTS]
    for item, inbox in zip(PROMPTS, inboxes, strict=True):
        backend.submit(item, SamplingParams(max_tokens=12), inbox.put)
    assert [[token.id for token in drain(inbox)] for inbox in inboxes] == alone
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.submit(PROMPTS[0], SamplingParams(), print)


def test_closing_ends_what_runs() -> None:
    backend = LocalBackend(engine())
    inbox = queue.SimpleQueue()
    backend.submit(PROMPTS[0], SamplingParams(max_tokens=200), inbox.put)
    backend.close()
    assert isinstance(drain(inbox)[-1], Cancelled)


def test_a_dead_engine_fails_everybody_at_once() -> None:
    runner = engine()
    calls = []

    def broken(batch, cache):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return torch.zeros(len(batch.logit_rows), TINY.vocab_size)

    runner.model.forward = broken
    backend = LocalBackend(runner)
    inboxes = [queue.SimpleQueue() for _ in range(2)]
    for inbox in inboxes:
        backend.submit(PROMPTS[0], SamplingParams(max_tokens=50), inbox.put)
    for inbox in inboxes:
        error = drain(inbox)[-1]
        assert isinstance(error, BackendError)
        assert "out of memory" in str(error)
    with pytest.raises(BackendError, match="stopped after an error"):
        backend.submit(PROMPTS[0], SamplingParams(), print)
    backend.cancel(0)
    backend.close()
