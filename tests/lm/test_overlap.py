"""Decode steps launched ahead: to callers, caches and counters as if every token had been awaited.

The device is a stand-in (``late.py``) that does nothing before somebody waits for it.
"""

from __future__ import annotations

import random
from dataclasses import asdict, replace

import pytest

from k3vl.errors import Cancelled
from k3vl.lm.decode import StaticDecode
from k3vl.lm.engine import Engine, EngineConfig
from k3vl.types import Prompt, SamplingParams
from tests.lm.late import LateDecode, on_a_stream
from tests.lm.test_decode import CountingRunner
from tests.lm.test_engine import PROMPTS, STOP, FakeEncoder, Inbox
from tests.lm.test_sampler import FakeMask
from tests.tiny import COMPILED, REFERENCE, tiny_model, tokens

MODELS = {kernels.name: tiny_model(kernels=kernels) for kernels in (REFERENCE, COMPILED)}


def engine(name: str = REFERENCE.name, **limits) -> Engine:
    settings = {"max_requests": 6, "cache_bytes": 2**20, "page_size": 16, **limits}
    return Engine(MODELS[name], FakeEncoder(), EngineConfig(**settings), stop_ids=(STOP,))


def counted(runner: Engine) -> list[tuple[int, bool]]:
    """Rows of every decode step, and whether it was launched ahead; kept up to date."""
    launches: list[tuple[int, bool]] = []
    launch = runner.decoder.launch

    def noted(rows, choosers, *, sources=None):
        launches.append((len(rows), sources is not None))
        return launch(rows, choosers, **({} if sources is None else {"sources": sources}))

    runner.decoder.launch = noted
    return launches


def params(rng: random.Random, *, masks: bool) -> SamplingParams:
    kind = rng.choice(
        [
            {},
            {"temperature": 1.0, "seed": rng.randrange(99)},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 1, "logprobs": 2},
            {"logprobs": 0},
            *([{"logit_mask": FakeMask(rng.randrange(99), 4)}] if masks else []),
        ]
    )
    stops = tuple(rng.sample(range(97), rng.choice([0, 6])))
    return SamplingParams(max_tokens=rng.randrange(1, 60), stop_ids=stops, **kind)


def told(inbox: Inbox) -> list[tuple]:
    """Every token: id, finish, cached tokens and log-probability; or the error."""
    return [
        (type(item),)
        if isinstance(item, Exception)
        else (item.id, item.finish, item.cached_tokens, item.logprobs and item.logprobs.logprob)
        for item in inbox.items
    ]


def same(got: list[list[tuple]], want: list[list[tuple]], name: str) -> bool:
    """Whether the same was told: to the bit, but that reference kernels round by their company.

    Of cancelled requests only as much as both have: when a cancellation comes is nobody's promise.
    """
    close = 0.0 if name == COMPILED.name else 1e-3
    for mine, theirs in zip(got, want, strict=True):
        cancelled = (Cancelled,) in (*mine[-1:], *theirs[-1:])
        if len(mine) != len(theirs) and not cancelled:
            return False
        for one, other in zip(mine, theirs, strict=False):
            if (Cancelled,) in (one, other):
                break
            values = one[3] or 0.0, other[3] or 0.0
            if one[:3] != other[:3] or abs(values[0] - values[1]) > close:
                return False
    return True


def counters(runner: Engine) -> dict:
    stats = asdict(runner.stats())
    clocks = {"stage_seconds", "queue_seconds", "first_token_seconds", "idle_seconds"}
    return {name: value for name, value in stats.items() if name not in clocks}


def tree(runner: Engine) -> set:
    """What is kept of prefixes: keys on the way to every page, and where states are."""

    def names(node, above):
        own = (*above, node.key)
        yield own, node.checkpoint is not None
        for child in node.children.values():
            yield from names(child, own)

    return set(names(runner.scheduler.tree.root, ()))


def text(rng: random.Random) -> Prompt:
    """One of a few prompts, some the beginnings of others."""
    return Prompt(tuple(tokens(rng.choice([20, 33, 48]), seed=rng.randrange(3))))


def work(runner: Engine, seed: int, *, steps: int = 150, masks: bool = True) -> list:
    """Requests of every kind come and are cancelled at random; what each was told."""
    rng, inboxes = random.Random(seed), []
    arrivals = rng.choice([0.02, 0.1, 0.4])
    for _ in range(steps):
        if rng.random() < arrivals:
            asked = rng.choice([text(rng), rng.choice(PROMPTS)])
            wishes = params(rng, masks=masks)
            inboxes.append(Inbox())
            runner.add(len(inboxes), asked, wishes, inboxes[-1])
        if inboxes and rng.random() < 0.02:
            runner.cancel(rng.randint(1, len(inboxes)))
        runner.step()
        runner.scheduler.check_integrity()
    finish(runner)
    assert all(inbox.ended for inbox in inboxes)
    return [told(inbox) for inbox in inboxes]


def finish(runner: Engine) -> None:
    for _ in range(3000):
        if not runner.jobs:
            break
        assert runner.step()
        runner.scheduler.check_integrity()
    assert not runner.jobs
    arena = runner.scheduler.arena
    assert arena.num_available == arena.size, "nobody holds anything"


def late(name: str = REFERENCE.name, **limits) -> Engine:
    runner = engine(name, **limits)
    runner.decoder = LateDecode(runner.model, runner.cache)
    return runner


NAMES = pytest.mark.parametrize("name", list(MODELS))


@NAMES
@pytest.mark.parametrize("seed", range(6))
def test_everybody_is_told_the_same(name: str, seed: int) -> None:
    limits = {"max_requests": 99, "cache_bytes": 2**22}
    plain, ahead = engine(name, **limits), late(name, **limits)
    want = work(plain, seed)
    assert same(work(ahead, seed), want, name)
    assert ahead.decoder.ahead
    assert tree(ahead) == tree(plain)


@NAMES
@pytest.mark.parametrize("seed", range(4))
def test_where_nobody_comes_every_step_is_the_same(name: str, seed: int) -> None:
    """Tokens, ends and cancellations by the step, what is held and kept by then, and counters."""
    plain, ahead = engine(name, cache_bytes=2**22), late(name, cache_bytes=2**22)
    rng, inboxes = random.Random(seed), ([], [])
    for number in range(6):
        asked, wishes = PROMPTS[number % 5], params(rng, masks=False)
        for runner, own in zip((plain, ahead), inboxes, strict=True):
            own.append(Inbox())
            runner.add(number, asked, wishes, own[-1])
    while plain.jobs:
        victim = rng.randrange(6) if rng.random() < 0.05 else None
        for runner in (plain, ahead):
            if victim is not None:
                runner.cancel(victim)
            runner.step()
            runner.scheduler.check_integrity()
        want, got = ([told(inbox) for inbox in own] for own in inboxes)
        assert same(got, want, name)
        assert list(map(len, got)) == list(map(len, want))
        assert tree(ahead) == tree(plain)
    assert not ahead.jobs
    assert ahead.decoder.ahead > 10
    want = counters(plain)
    assert not plain.step()
    assert not ahead.step(), "what was launched in vain is forgotten"
    assert counters(ahead) == want


@pytest.mark.parametrize("seed", range(4))
def test_copies_and_results_may_come_as_late_as_a_stream_allows(monkeypatch, seed: int) -> None:
    """Padded steps of several sizes; the host writes memory that a step reads not too early."""
    runner = engine()
    stream = on_a_stream(monkeypatch, runner)
    launches = counted(runner)
    got = work(runner, seed)
    assert sum(ahead for _, ahead in launches) > 10
    assert stream.given > 3 * len(launches)
    monkeypatch.undo()
    assert same(got, work(engine(), seed), REFERENCE.name)


@NAMES
@pytest.mark.parametrize("units", [16, 18, 20])
def test_those_who_give_way_and_what_is_lost_change_nothing(name: str, units: int) -> None:
    """A cache for a few requests; some wait, some give way, prefixes go."""
    size = engine().scheduler.sizes.unit_bytes
    ahead = late(name, cache_bytes=units * size, max_requests=3)
    roomy = engine(name, cache_bytes=2**22)
    found = []
    for runner in (ahead, roomy):
        rng, inboxes = random.Random(units), [Inbox() for _ in range(12)]
        for number, inbox in enumerate(inboxes):
            wishes = replace(params(rng, masks=number % 4 == 0), max_tokens=rng.randrange(30, 90))
            runner.add(number, text(rng), wishes, inbox)
        finish(runner)
        found.append([[(one[0], one[1], 0, one[3]) for one in told(inbox)] for inbox in inboxes])
    assert same(*found, name)
    assert ahead.decoder.ahead
    stats = ahead.stats()
    assert stats.preemptions
    assert stats.evictions


# ------------------------------------------------------------------ when a step is launched ahead


def launched(*wishes: SamplingParams, **limits) -> tuple[list[tuple[int, bool]], list[list[int]]]:
    """Steps that requests with these wishes take, which come at once; and their tokens."""
    runner = engine(max_requests=8, reuse=False, **limits)
    runner.decoder = StaticDecode(runner.model, runner.cache, CountingRunner())
    launches, inboxes = counted(runner), [Inbox() for _ in wishes]
    for number, (wish, inbox) in enumerate(zip(wishes, inboxes, strict=True)):
        runner.add(number, PROMPTS[number], wish, inbox)
    finish(runner)
    return launches, [inbox.ids for inbox in inboxes]


def test_every_step_behind_the_first_is_launched_ahead() -> None:
    launches, _ = launched(SamplingParams(max_tokens=8))
    assert launches == [(1, False), *[(1, True)] * 6], "the prompt's pass gives the first token"


def test_an_end_by_length_is_known_before() -> None:
    """Its place may be taken by then, so the step behind it is not launched ahead."""
    wishes = [SamplingParams(max_tokens=count) for count in (4, 8, 6)]
    launches, answers = launched(*wishes)
    assert [len(ids) for ids in answers] == [4, 8, 6]
    assert launches == [
        *[(3, False), (3, True), (3, True)],
        *[(2, False), (2, True)],
        *[(1, False), (1, True)],
    ]


def test_an_end_that_was_not_known_costs_one_row() -> None:
    _, (ids, _) = launched(SamplingParams(max_tokens=12), SamplingParams(max_tokens=12))
    stop = SamplingParams(max_tokens=12, stop_ids=(ids[4],))
    assert ids.index(ids[4]) == 4
    launches, answers = launched(stop, SamplingParams(max_tokens=12))
    assert answers[0] == ids[:5]
    assert launches == [(2, False), *[(2, True)] * 4, *[(1, True)] * 6]
    launches, _ = launched(stop)
    assert launches == [(1, False), *[(1, True)] * 4], "the last was for nobody"


def test_masks_are_waited_for() -> None:
    masked = SamplingParams(max_tokens=9, logit_mask=FakeMask(0, 4))
    launches, _ = launched(masked, SamplingParams(max_tokens=12))
    assert launches == [*[(2, False)] * 8, (1, False), *[(1, True)] * 2]


def test_whoever_comes_is_let_in_behind_one_step() -> None:
    runner = engine()
    runner.decoder = StaticDecode(runner.model, runner.cache, CountingRunner())
    launches, inboxes = counted(runner), [Inbox(), Inbox()]
    runner.add(0, PROMPTS[0], SamplingParams(max_tokens=30), inboxes[0])
    for _ in range(4):
        runner.step()
    runner.add(1, PROMPTS[1], SamplingParams(max_tokens=30), inboxes[1])
    assert launches[-1] == (1, True)
    runner.step()
    assert not inboxes[1].items
    runner.step()
    assert len(inboxes[1].items) == 1
    assert launches[-1] == (1, False), "beside the prompt"
    runner.step()
    assert launches[-2:] == [(2, False), (2, True)]


def test_tokens_are_handed_out_while_the_next_step_runs() -> None:
    runner = engine()
    runner.decoder = StaticDecode(runner.model, runner.cache, CountingRunner())
    launches, seen = counted(runner), []
    runner.add(0, PROMPTS[0], SamplingParams(max_tokens=6), lambda _: seen.append(len(launches)))
    finish(runner)
    assert seen == [0, 2, 3, 4, 5, 5], "steps launched by the time of every token"


def test_tokens_are_handed_out_while_a_prompt_runs() -> None:
    """Its first pass is launched before, its first token is told behind them."""
    runner, seen = engine(prefill_chunk=16), []
    runner.decoder = StaticDecode(runner.model, runner.cache, CountingRunner())
    forward = runner._forward
    runner._forward = lambda *args, **how: (seen.append("pass"), forward(*args, **how))[1]
    runner.add(0, PROMPTS[0], SamplingParams(max_tokens=30), lambda token: seen.append("old"))
    while "old" not in seen:
        runner.step()
    runner.step()
    runner.add(1, PROMPTS[1], SamplingParams(max_tokens=30), lambda token: seen.append("new"))
    runner.step()
    seen.clear()
    for _ in range(4):
        runner.step()
    assert seen == ["pass", "old", "pass", "old", "new", "old", "new", "old", "new"]


def test_a_known_answer_is_scored_ahead() -> None:
    answer = tokens(9, seed=4)
    found = []
    for runner in (engine(), late()):
        inbox = Inbox()
        runner.add_forced(0, PROMPTS[2], answer, inbox)
        finish(runner)
        assert inbox.ids == answer
        found.append([told(inbox)])
    assert same(*found, REFERENCE.name)
    assert runner.decoder.ahead == 7


def test_new_weights_come_behind_a_step_that_was_launched_in_vain() -> None:
    runner, other = late(), tiny_model(seed=5)
    inbox = Inbox()
    runner.add(0, PROMPTS[0], SamplingParams(max_tokens=30), inbox)
    for _ in range(4):
        runner.step()
    runner.cancel(0)
    assert isinstance(inbox.items[-1], Cancelled)
    runner.update(other, FakeEncoder())
    runner.decoder.model = other
    assert not runner.step()
    inbox = Inbox()
    runner.add(1, PROMPTS[0], SamplingParams(max_tokens=30), inbox)
    finish(runner)
    plain = Engine(other, FakeEncoder(), runner.config, stop_ids=(STOP,))
    again = Inbox()
    plain.add(1, PROMPTS[0], SamplingParams(max_tokens=30), again)
    finish(plain)
    assert inbox.ids == again.ids
