"""Warm answers equal cold ones, token for token and logit for logit, whatever was kept or lost."""

from __future__ import annotations

import random

import pytest
import torch

from k3vl.lm.encoding import EncodeInStep
from k3vl.lm.engine import Engine, EngineConfig
from k3vl.lm.prefix import page_keys
from k3vl.lm.sampler import choose
from k3vl.types import MediaSpan, Prompt, SamplingParams
from tests.lm.late import LateDecode
from tests.lm.test_engine import STOP, FakeEncoder, Inbox, picture
from tests.tiny import COMPILED, REFERENCE, TINY, tiny_model, tokens

PAGE = 16
MODELS = {kernels.name: tiny_model(kernels=kernels) for kernels in (REFERENCE, COMPILED)}


@pytest.fixture(autouse=True, params=[*MODELS, *(f"{name}, ahead" for name in MODELS)])
def model(request, monkeypatch):
    """Every test runs with each implementation of the ops, and with decode steps launched ahead."""
    name, *ahead = request.param.split(", ")
    if ahead:
        monkeypatch.setattr("k3vl.lm.engine.decoder", LateDecode)
    chosen = MODELS[name]
    monkeypatch.setitem(MODELS, "now", chosen)
    watch(monkeypatch)
    return chosen


def engine(*, encoding=EncodeInStep, **limits) -> Engine:
    settings = {"cache_bytes": 2**20, "page_size": PAGE, "exact_decode": True, **limits}
    config = EngineConfig(**settings)
    return Engine(MODELS["now"], FakeEncoder(), config, stop_ids=(STOP,), encoding=encoding)


class Watched:
    """A sampler that keeps the logits it was shown."""

    def __init__(self, sampler) -> None:
        self.sampler, self.logits = sampler, []

    @property
    def logprobs(self):
        return self.sampler.logprobs

    @property
    def asks_ahead(self):
        return self.sampler.asks_ahead

    def ask(self):
        return self.sampler.ask()

    def take(self, token_id, logprobs) -> None:
        self.sampler.take(token_id, logprobs)


def watching(logits: torch.Tensor, choosers) -> list[int]:
    """Choose, and show who watches its row."""
    for row, chooser in zip(logits, choosers, strict=True):
        if isinstance(chooser, Watched):
            chooser.logits.append(row.clone())
    return choose(logits, choosers)


def watch(monkeypatch) -> None:
    """Wherever an engine chooses, it shows its logits to whoever watches."""
    for module in ("engine", "decode"):
        monkeypatch.setattr(f"k3vl.lm.{module}.choose", watching)


class Answer:
    """Tokens, logits and cached tokens of one request."""

    def __init__(self, runner: Engine, number: int, prompt: Prompt, **sampling) -> None:
        self.inbox = Inbox()
        runner.add(number, prompt, SamplingParams(**{"max_tokens": 6, **sampling}), self.inbox)
        job = runner.jobs[number]
        job.sampler = self.watched = Watched(job.sampler)

    @property
    def cached(self) -> int:
        return self.inbox.items[0].cached_tokens

    def same_as(self, other: Answer) -> bool:
        return (
            self.inbox.ids == other.inbox.ids
            and len(self.logits) == len(other.logits)
            and all(map(torch.equal, self.logits, other.logits))
        )

    @property
    def logits(self) -> list[torch.Tensor]:
        """Of its tokens, without those behind its end that a step launched ahead has computed."""
        count = len(self.inbox.ids)
        assert len(self.watched.logits) <= count + 1
        return self.watched.logits[:count]


def finish(runner: Engine) -> None:
    for _ in range(5000):
        if not runner.jobs:
            return
        assert runner.step()
        runner.scheduler.check_integrity()
    raise AssertionError("no progress")


def ask(runner: Engine, prompt: Prompt, **sampling) -> Answer:
    answer = Answer(runner, 0, prompt, **sampling)
    finish(runner)
    return answer


def cold(prompt: Prompt, **sampling) -> Answer:
    """By an engine that has never seen anything and keeps nothing."""
    return ask(engine(reuse=False), prompt, **sampling)


def text(length: int, seed: int = 0, tail: int | None = None) -> Prompt:
    """A prompt; with ``tail`` its last tokens differ from those of the same seed."""
    ids = tokens(length, seed=seed)
    if tail is not None:
        ids[-5:] = tokens(5, seed=1000 + tail)
    return Prompt(tuple(ids))


def with_media(length: int, *, tail: int, first: int = 1) -> Prompt:
    """Two pictures and a group of video frames before the tail; the first picture can be chosen."""
    spans = (
        MediaSpan(5, picture(first, 20)),
        MediaSpan(26, picture(2, 9)),
        MediaSpan(40, picture(3, 13)),
    )
    ids = list(text(length, seed=7, tail=tail).token_ids)
    for span in spans:
        ids[span.offset : span.offset + span.item.num_tokens] = [1] * span.item.num_tokens
    return Prompt(tuple(ids), spans)


@pytest.mark.parametrize("pages", [1, 2, 4])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_prefixes_around_a_page_border(pages: int, off: int) -> None:
    """A prompt of kB-1, kB, kB+1 tokens, asked twice and then extended."""
    length = pages * PAGE + off
    runner, ids = engine(), text(length + 40).token_ids
    hits = []
    for end in (length, length, length + 1, length + 17, length + 40):
        prompt = Prompt(ids[:end])
        warm = ask(runner, prompt)
        assert warm.same_as(cold(prompt))
        hits.append(warm.cached)
    assert hits[0] == 0
    assert hits == sorted(hits), "more is found of a longer prompt"
    assert hits[1] == (length - 1) // PAGE * PAGE
    assert hits[2] == length // PAGE * PAGE


@pytest.mark.parametrize("chunk", [1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 127, 130])
def test_any_chunk_gives_the_same_bits(chunk: int) -> None:
    check_chunks(chunk)


@pytest.mark.slow
def test_every_chunk_gives_the_same_bits() -> None:
    for chunk in range(1, 131):
        check_chunks(chunk)


def check_chunks(chunk: int) -> None:
    """Cold and warm, in chunks of so many tokens (at least a page), and in one."""
    prompt = with_media(150, tail=0)
    runner = engine(prefill_chunk=chunk, max_step_tokens=chunk)
    want = cold(prompt)
    assert ask(runner, prompt).same_as(want)
    warm = ask(runner, prompt)
    assert warm.same_as(want)
    assert warm.cached == 144


def test_going_back_after_an_eviction() -> None:
    """A, B, A, and again, in a cache that cannot hold both."""
    runner = engine(cache_bytes=24_000)
    prompts = [text(70, seed=seed, tail=seed) for seed in (1, 2)]
    want = [cold(prompt) for prompt in prompts]
    for turn in (0, 1, 0, 0, 1, 1, 0):
        assert ask(runner, prompts[turn]).same_as(want[turn])
    assert sum(runner.stats().evictions.values()) > 0


@pytest.mark.parametrize("units", range(14, 60, 5))
def test_any_budget_gives_the_same_bits(units: int) -> None:
    """Conversations that share beginnings, with media, from one request's worth upwards."""
    unit = engine().scheduler.sizes.unit_bytes
    runner = engine(cache_bytes=units * unit, prefill_chunk=32)
    prompts = [with_media(90 + 3 * i, tail=i, first=1 + i % 2) for i in range(4)]
    want = [cold(prompt) for prompt in prompts]
    rng = random.Random(units)
    for _ in range(3):
        order = [rng.randrange(4) for _ in range(5)]
        answers = [Answer(runner, n, prompts[i]) for n, i in enumerate(order)]
        finish(runner)
        assert all(a.same_as(want[i]) for a, i in zip(answers, order, strict=True))


def test_concurrent_cold_starts_of_one_prefix() -> None:
    runner = engine(prefill_chunk=16, max_step_tokens=40)
    prompts = [with_media(120, tail=i) for i in range(6)]
    answers = [Answer(runner, i, prompt) for i, prompt in enumerate(prompts)]
    finish(runner)
    assert all(a.same_as(cold(p)) for a, p in zip(answers, prompts, strict=True))
    assert [a.cached for a in answers] == [0] + [112] * 5
    assert len(runner.encoding.encoder.encoded) == 3, "every picture once"


def test_preemption_changes_no_bit(model, monkeypatch) -> None:
    """Three requests start where only one can end; what is not kept is computed again."""
    sizes = engine().scheduler.sizes
    prompts = [text(20 + i, seed=i) for i in range(3)]
    options = {"max_tokens": 60, "temperature": 0.8, "seed": 5}
    want = [cold(prompt, **options) for prompt in prompts]
    units = 3 * (sizes.units_per_slot + 2) + 2
    runner = engine(cache_bytes=units * sizes.unit_bytes)
    answers = [Answer(runner, i, prompt, **options) for i, prompt in enumerate(prompts)]
    decoded: list[int] = []
    launch = runner.decoder.launch

    def counted(rows, choosers, **how):
        decoded.append(len(rows))
        return launch(rows, choosers, **how)

    monkeypatch.setattr(runner.decoder, "launch", counted)
    finish(runner)
    assert runner.stats().preemptions > 0
    assert all(a.same_as(w) for a, w in zip(answers, want, strict=True))
    once = sum(len(answer.inbox.ids) - 1 for answer in answers)
    once += len(answers) if runner.decoder.overlaps else 0  # behind its end, each
    assert (sum(decoded) <= once) == model.kernels.row_independent, "otherwise some are replayed"


@pytest.mark.parametrize("answered", [1, 5, 14, 15, 16, 17, 30, 33, 47])
def test_the_next_turn_starts_behind_the_answer(model, answered: int) -> None:
    """What decoding computed is what prefill computes, where rows are independent."""
    runner, first = engine(), with_media(70, tail=0)
    said = ask(runner, first, max_tokens=answered, temperature=0.9, seed=answered).inbox.ids
    ids = (*first.token_ids, *said, *tokens(20, seed=5))
    warm = ask(runner, prompt := Prompt(ids, first.spans))
    assert warm.same_as(cold(prompt))
    seen = 70 + len(said) - 1  # the last token was never run
    known = seen if model.kernels.row_independent else 70
    assert warm.cached == known // PAGE * PAGE
    other = Prompt((*ids[:75], 9, *ids[76:]), first.spans)
    assert ask(runner, other).same_as(cold(other)), "the user changed what the model had said"


def test_answers_share_nothing_across_salts() -> None:
    """The salt lies in the key of the first page, which decoding completed here."""
    runner, prompt = engine(), text(PAGE - 6)
    said = ask(runner, prompt, max_tokens=30, cache_salt="a").inbox.ids
    turn = Prompt((*prompt.token_ids, *said))
    assert ask(runner, turn, cache_salt="b").cached == 0
    again = ask(runner, turn, cache_salt="b")
    assert again.cached == (len(turn.token_ids) - 1) // PAGE * PAGE


def test_prompts_share_a_pass_where_rows_are_independent(model, monkeypatch) -> None:
    """Scored ones take one for themselves: they want the logits of every row."""
    passes = []
    forward = Engine._forward

    def watched(self, rows, **options):
        passes.append([len(row.token_ids) for row in rows])
        return forward(self, rows, **options)

    monkeypatch.setattr(Engine, "_forward", watched)
    runner = engine(reuse=False)
    prompts = [text(length, seed=length) for length in (9, 14, 33)]
    answers = [Answer(runner, i, prompt, max_tokens=1) for i, prompt in enumerate(prompts)]
    finish(runner)
    together = [[9, 14, 33]] if model.kernels.row_independent else [[9], [14], [16], [16], [1]]
    assert passes == together
    assert all(a.same_as(cold(p, max_tokens=1)) for a, p in zip(answers, prompts, strict=True))
    passes.clear()
    several = [text(100, seed=seed) for seed in range(4)]
    answers = [Answer(runner, i, prompt, max_tokens=1) for i, prompt in enumerate(several)]
    finish(runner)
    if model.kernels.row_independent:
        assert passes == [[100, 100], [100, 100]], "the first need not wait for the last"
    assert all(a.same_as(cold(p, max_tokens=1)) for a, p in zip(answers, several, strict=True))
    answers = [Answer(runner, i, prompt, max_tokens=1) for i, prompt in enumerate(prompts[:2])]
    inbox = Inbox()
    runner.add_scored(7, prompts[2], tokens(3, seed=1), inbox)
    finish(runner)
    assert inbox.ids == tokens(3, seed=1)
    assert all(a.same_as(cold(p, max_tokens=1)) for a, p in zip(answers, prompts, strict=False))


@pytest.mark.parametrize("loose", [{}, {"reuse": True}, {"exact_decode": True}])
def test_prompts_share_a_pass_where_nothing_is_kept_and_rounding_is_free(
    loose: dict[str, bool], model, monkeypatch
) -> None:
    passes = []
    forward = Engine._forward

    def watched(self, rows, **options):
        passes.append([len(row.token_ids) for row in rows])
        return forward(self, rows, **options)

    monkeypatch.setattr(Engine, "_forward", watched)
    settings = {"reuse": False, "exact_decode": False, "max_step_tokens": 200, **loose}
    runner = engine(max_requests=5, **settings)
    prompts = [text(23, seed=1), with_media(101, tail=1), text(5, seed=2), with_media(90, tail=2)]
    answers = [Answer(runner, i, prompt) for i, prompt in enumerate(prompts)]
    inbox = Inbox()
    runner.add_scored(7, text(20, seed=3), tokens(3, seed=1), inbox)
    finish(runner)
    if not model.kernels.row_independent:
        assert (passes[0] == [23, 101, 5, 64]) == (not loose), "one step's tokens are one pass"
        assert [16] in passes, "scores stay what they are in any company"
    for answer, prompt in zip(answers, prompts, strict=True):
        for got, want in zip(answer.watched.logits, cold(prompt).watched.logits):  # noqa: B905 - tokens may part at a tie
            torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
    again = engine(reuse=False, exact_decode=False)
    other = Inbox()
    again.add_scored(7, text(20, seed=3), tokens(3, seed=1), other)
    finish(again)
    assert [t.logprobs for t in inbox.items] == [t.logprobs for t in other.items]


def test_media_are_told_apart_by_content_not_by_pads() -> None:
    runner = engine()
    one, other = (with_media(100, tail=0, first=first) for first in (1, 4))
    assert one.token_ids == other.token_ids
    ask(runner, one)
    warm = ask(runner, other)
    assert warm.cached == 0, "the picture lies in the first page"
    assert warm.same_as(cold(other))
    assert not warm.same_as(cold(one))


def test_the_same_media_at_another_offset_are_another_prefix() -> None:
    ids = (1,) * 64
    near, far = (Prompt(ids, (MediaSpan(offset, picture(1, 9)),)) for offset in (20, 21))
    keys = [page_keys(p.token_ids, p.spans, PAGE, None) for p in (near, far)]
    assert [a == b for a, b in zip(*keys, strict=True)] == [True, False, True, True]
    runner = engine()
    ask(runner, near)
    assert ask(runner, far).same_as(cold(far))


def test_salts_share_nothing() -> None:
    runner, prompt = engine(), with_media(100, tail=0)
    hits = [ask(runner, prompt, cache_salt=salt).cached for salt in ("a", "a", "b", None, "b")]
    assert hits == [0, 96, 0, 0, 96]
    assert len(runner.encoding.encoder.encoded) == 9


def test_a_chunk_is_one_pass_where_rows_are_independent(model, monkeypatch) -> None:
    """With other kernels every page is a pass of its own; a checkpoint ends one with any."""
    heights = []
    forward = Engine._forward

    def watched(self, rows, **options):
        heights.append(rows[0].num_rows)
        return forward(self, rows, **options)

    monkeypatch.setattr(Engine, "_forward", watched)
    for reuse, in_chunks in ((False, [100]), (True, [96, 4])):
        ask(engine(reuse=reuse), text(100, seed=1), max_tokens=1)
        assert heights == (in_chunks if model.kernels.row_independent else [PAGE] * 7)
        heights.clear()


def test_company_changes_no_bit(model) -> None:
    """With kernels whose rows are independent by themselves, with others by ``exact_decode``."""
    prompts = [with_media(60 + 11 * i, tail=i) for i in range(5)]
    exact = not model.kernels.row_independent
    runner = engine(max_requests=5, prefill_chunk=16, exact_decode=exact)
    answers = [Answer(runner, i, prompt, max_tokens=20) for i, prompt in enumerate(prompts)]
    finish(runner)
    assert all(a.same_as(cold(p, max_tokens=20)) for a, p in zip(answers, prompts, strict=True))


def test_company_changes_rounding_only_without() -> None:
    prompts = [text(40 + i, seed=i) for i in range(5)]
    runner = engine(exact_decode=False)
    answers = [Answer(runner, i, prompt, max_tokens=20) for i, prompt in enumerate(prompts)]
    finish(runner)
    for answer, prompt in zip(answers, prompts, strict=True):
        for got, want in zip(answer.watched.logits, cold(prompt, max_tokens=20).watched.logits):  # noqa: B905 - tokens may part at a tie
            torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


def test_stats_add_up() -> None:
    runner, prompt = engine(), with_media(100, tail=0)
    for _ in range(2):
        ask(runner, prompt)
    stats = runner.stats()
    assert (stats.lookups, stats.hit_tokens, stats.prompt_tokens) == (
        {"unknown": 1, "hit": 1},
        96,
        200,
    )
    assert (stats.feature_misses, stats.feature_hits) == (3, 0), "the second needs no features"
    assert sum(stats.bytes_by_kind.values()) == (stats.units - stats.free_units) * stats.unit_bytes
    assert stats.free_units + stats.idle_units == stats.units
    assert stats.bytes_by_kind["checkpoint"] > 0 == stats.bytes_by_kind["slot"]
    assert stats.first_tokens == 2
    assert stats.stage_seconds["prefill"] > 0
    assert stats.peak_running == 1


# ------------------------------------------------------------------ soak


def soak(steps: int, seed: int, *, seconds: float = float("inf"), host: int = 0) -> Engine:
    """Random arrivals, cancels and families of prompts in a cache just above the minimum.

    Chats go on: some prompts are an earlier prompt with its answer and a few tokens more.
    """
    import time

    sizes = engine().scheduler.sizes
    least = sizes.units_per_slot + sizes.pages(170) + 6
    runner = engine(
        cache_bytes=(least + 2) * sizes.unit_bytes,
        host_cache_bytes=host,
        max_requests=6,
        exact_decode=False,
    )
    rng, number, until = random.Random(seed), 0, time.monotonic() + seconds
    inboxes: dict[int, Inbox] = {}
    prompts: dict[int, Prompt] = {}
    chats: list[Prompt] = []
    for _ in range(steps):
        if time.monotonic() > until:
            break
        if len(runner.jobs) < 8 and rng.random() < 0.4:
            kind, length = rng.choice((0, 0, 0, 1, 2, 3)), rng.randint(60, 140)
            prompt = with_media(length, tail=kind) if kind else text(length // 4, seed=length % 3)
            if chats and rng.random() < 0.4:
                prompt = chats.pop(rng.randrange(len(chats)))
            inboxes[number] = Inbox()
            most = min(60, 170 - len(prompt.token_ids))
            sampling = SamplingParams(max_tokens=rng.randint(1, most), seed=number, temperature=0.7)
            runner.add(number, prompt, sampling, inboxes[number])
            prompts[number] = prompt
            number += 1
        if runner.jobs and rng.random() < 0.03:
            runner.cancel(rng.choice(list(runner.jobs)))
        assert runner.step() == bool(runner.jobs) or not runner.jobs
        runner.scheduler.check_integrity()
        for done in [n for n in inboxes if n not in runner.jobs]:
            inbox = inboxes.pop(done)
            assert inbox.ended
            asked = prompts.pop(done)
            ids = (*asked.token_ids, *inbox.ids, *tokens(3, seed=done))
            if len(ids) < 140 and rng.random() < 0.5:
                chats = [*chats[-4:], Prompt(ids, asked.spans)]
    finish(runner)
    assert all(inbox.ended for inbox in inboxes.values())
    assert runner.scheduler.arena.num_available == runner.scheduler.arena.size
    return runner


@pytest.mark.parametrize("host", [0, 20_000])
def test_a_short_soak(host: int) -> None:
    stats = soak(250, seed=4, host=host).stats()
    assert (stats.host_fetches > 0) == (host > 0)
    assert stats.preemptions > 0
    assert stats.hit_tokens > 0
    assert sum(stats.evictions.values()) > 0


@pytest.mark.slow
def test_a_long_soak() -> None:
    """Ten minutes; memory of the process must not grow."""
    import psutil

    process = psutil.Process()
    soak(2000, seed=2, host=20_000)
    before = process.memory_info().rss
    stats = soak(10**9, seed=3, seconds=600, host=20_000).stats()
    assert process.memory_info().rss - before < 64 * 2**20
    assert stats.preemptions > stats.steps // 500
    assert stats.host_fetches > stats.steps // 100


def test_vocabulary_of_the_fake_prompts_is_the_models() -> None:
    assert max(with_media(150, tail=3).token_ids) < TINY.vocab_size
