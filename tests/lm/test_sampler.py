"""Sampling: exact greedy, cut-offs, seeds; rows of a step in any company, on any device."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from k3vl.errors import RequestError
from k3vl.lm.sampler import (
    NUM_PARAMS,
    Ask,
    Forced,
    Sampler,
    SamplingPlan,
    check_sampling,
    choose,
    num_words,
    sample,
)
from k3vl.types import SamplingParams
from tests.device_only import META, device_only

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1]))


def choose_one(sampler: Sampler, logits: torch.Tensor) -> int:
    return choose(logits.unsqueeze(0), [sampler])[0]


def draws(count: int = 4000, **params) -> Counter[int]:
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 5, **params}))
    return Counter(choose_one(sampler, LOGITS) for _ in range(count))


def test_greedy_takes_the_likeliest_and_the_first_of_equals() -> None:
    sampler = Sampler(SamplingParams())
    assert choose_one(sampler, LOGITS) == 1
    assert choose_one(sampler, torch.tensor([0.0, 2.0, 2.0])) == 1


def test_frequencies_follow_the_distribution() -> None:
    counts = draws()
    for token, probability in enumerate(LOGITS.exp().tolist()):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)


def test_temperature_sharpens() -> None:
    cold, hot = draws(temperature=0.3)[1], draws(temperature=3.0)[1]
    assert cold > draws()[1] > hot


def test_cut_offs() -> None:
    assert set(draws(top_k=2)) == {1, 3}
    assert set(draws(top_p=0.65)) == {1, 3}
    assert set(draws(top_p=0.71)) == {1, 3, 2}
    assert set(draws(top_p=1e-9)) == {1}, "one token always stays"
    assert set(draws(top_k=3, top_p=0.65)) == {1, 3}
    assert len(draws(top_k=99)) == 5


def test_a_seed_repeats_and_none_does_not() -> None:
    def run(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        return [choose_one(sampler, LOGITS) for _ in range(60)]

    assert run(11) == run(11)
    assert run(11) != run(12)
    assert run(None) != run(None)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, must be 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0, must be above 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"max_tokens": 0}, "max_tokens is 0, must be at least 1"),
        ({"stop": ("a", "")}, "must be non-empty strings"),
    ],
)
def test_nonsense_is_refused_by_name(params, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        check_sampling(SamplingParams(**params))
    assert error.value.param == next(iter(params))


# ------------------------------------------------------------------ many rows at once


class FakeMask:
    """Random words that always leave something; now and then no mask at all."""

    def __init__(self, seed: int, words: int) -> None:
        self.rng, self.words, self.accepted = random.Random(seed), words, []

    def allowed(self) -> np.ndarray | None:
        if self.rng.random() < 0.3:
            return None
        bits = [self.rng.randrange(-(2**31), 2**31) for _ in range(self.words)]
        return np.array([bits[0] | 1, *bits[1:]], np.int32)

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


def step_by_hand(logits: torch.Tensor, ask: Ask) -> int:
    """One row, as the rules read."""
    if ask.forced >= 0:
        return ask.forced
    values = logits.tolist()
    if ask.bits is not None:
        words = [int(word) & 0xFFFFFFFF for word in ask.bits]
        held = [
            bool(words[i // 32] >> i % 32 & 1) for i in range(min(len(values), 32 * len(words)))
        ]
        held += [False] * (len(values) - len(held))
        values = [x if fine else -float("inf") for x, fine in zip(values, held, strict=True)]
    if ask.temperature == 0:
        return values.index(max(values))
    probabilities = torch.softmax(torch.tensor(values) / ask.temperature, -1)
    order = sorted(range(len(values)), key=lambda i: (-probabilities[i].item(), i))
    order = order[: ask.top_k or None]
    before, kept = torch.tensor(0.0), []
    for i in order:
        if before < ask.top_p:
            kept.append((i, probabilities[i].item()))
        before = before + probabilities[i]
    left = ask.uniform * sum(p for _, p in kept)
    for i, p in kept:
        left -= p
        if left < 0:
            return i
    return kept[-1][0]


class Seen(Sampler):
    """Keeps what it asked for."""

    def ask(self) -> Ask:
        self.asked = super().ask()
        return self.asked


@pytest.mark.parametrize("seed", range(12))
def test_a_mixed_step_is_every_row_by_itself(seed: int) -> None:
    rng = random.Random(seed)
    vocab = rng.choice([5, 64, 97, 500])
    choices = [
        {
            "temperature": rng.choice([0.0, 0.3, 1.0, 1.7]),
            "top_k": rng.choice([0, 1, 3, 50, 10**6]),
            "top_p": rng.choice([1.0, 0.9, 0.3, 1e-9]),
            "logprobs": rng.choice([None, 0, 3, 700]),
            "seed": i,
        }
        for i in range(9)
    ]
    masked = [rng.random() < 0.4 for _ in choices]

    def samplers(kind: type[Sampler] = Sampler) -> list[Sampler]:
        def mask(i: int) -> FakeMask | None:
            return FakeMask(i, max(1, num_words(vocab) - i % 2)) if masked[i] else None

        return [kind(SamplingParams(**p, logit_mask=mask(i))) for i, p in enumerate(choices)]

    together, alone, by_hand = samplers(), samplers(), samplers(Seen)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):
        logits = 4 * torch.randn(len(choices), vocab, generator=generator)
        got = choose(logits, together)
        assert got == [choose_one(s, row) for s, row in zip(alone, logits, strict=True)]
        assert [s.logprobs for s in together] == [s.logprobs for s in alone]
        choose(logits, by_hand)
        assert got == [step_by_hand(x, s.asked) for x, s in zip(logits, by_hand, strict=True)]
    for sampler, row, token in zip(together, logits, got, strict=True):
        count = sampler.params.logprobs
        if count is None:
            assert sampler.logprobs is None
            continue
        wanted = torch.log_softmax(row, -1)
        assert sampler.logprobs.token_id == token
        assert sampler.logprobs.logprob == wanted[token].item()
        best = sorted(range(vocab), key=lambda i: -wanted[i].item())[:count]
        assert [i for i, _ in sampler.logprobs.top] == best
        assert [x for _, x in sampler.logprobs.top] == [wanted[i].item() for i in best]


def test_forced_tokens_in_company() -> None:
    forced, free = Forced([4, 2], num_top=1), Sampler(SamplingParams())
    logits = torch.stack([LOGITS, LOGITS])
    assert [choose(logits, [free, forced]), choose(logits, [free, forced])] == [[1, 4], [1, 2]]
    assert forced.logprobs.logprob == pytest.approx(LOGITS[2].item())
    assert free.logprobs is None
    assert choose(logits[:0], []) == []


def test_a_draw_at_the_very_end_is_a_token_that_stays() -> None:
    plan = SamplingPlan(drawn=True, forced=False, masked=False, num_top=None)
    asks = [Ask(temperature=1.0, top_p=p, uniform=1.0) for p in (1.0, 0.65, 1e-9)]
    params = torch.tensor([ask.numbers for ask in asks], dtype=torch.float64)
    got = sample(LOGITS.expand(3, -1), params, None, plan)
    assert got.tolist() == [0, 3, 1]


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("num_top", [None, 0, 5])
def test_sampling_keeps_to_the_device(drawn: bool, num_top: int | None) -> None:
    logits = torch.empty(3, 97, device=META)
    params = torch.empty(3, NUM_PARAMS, dtype=torch.float64, device=META)
    bits = torch.empty(3, 4, dtype=torch.int32, device=META)
    plan = SamplingPlan(drawn=drawn, forced=drawn, masked=True, num_top=num_top)
    with device_only():
        out = sample(logits, params, bits, plan)
    assert out.shape == ((3,) if num_top is None else (3, 2 + 2 * num_top))


def test_a_seed_draws_what_it_draws_one_by_one() -> None:
    """Numbers are made in blocks; which ones is the seed's promise."""
    sampler = Sampler(SamplingParams(temperature=1.0, seed=11))
    generator = torch.Generator().manual_seed(11)
    for _ in range(100):
        alone = torch.rand((), generator=generator, dtype=torch.float64).item()
        assert sampler.ask().uniform == alone
