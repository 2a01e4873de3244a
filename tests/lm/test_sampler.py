"""Sampling: exact greedy, cut-offs, seeds."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from k3vl.errors import RequestError
from k3vl.lm.sampler import Sampler, check_sampling
from k3vl.types import SamplingParams

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1]))


def draws(count: int = 4000, **params) -> Counter[int]:
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 5, **params}))
    return Counter(sampler.choose(LOGITS) for _ in range(count))


def test_greedy_takes_the_likeliest_and_the_first_of_equals() -> None:
    sampler = Sampler(SamplingParams())
    assert sampler.choose(LOGITS) == 1
    assert sampler.choose(torch.tensor([0.0, 2.0, 2.0])) == 1


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
        return [sampler.choose(LOGITS) for _ in range(60)]

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
