"""What was evicted comes back from the host tier with every bit, or is computed again."""

from __future__ import annotations

import random

import pytest
import torch

from k3vl.lm.engine import Engine, EngineConfig
from k3vl.lm.tier import pieces
from k3vl.types import Prompt
from tests.lm.test_engine import STOP, FakeEncoder
from tests.lm.test_reuse import Answer, ask, finish, text, watch, with_media
from tests.tiny import COMPILED, REFERENCE, tiny_model, tokens

MODELS = [tiny_model(kernels=kernels) for kernels in (REFERENCE, COMPILED)]


@pytest.fixture(params=MODELS, ids=["reference", "compiled"])
def model(request):
    return request.param


@pytest.fixture(autouse=True)
def _watch(monkeypatch) -> None:
    watch(monkeypatch)


def engine(model, *, host: int = 2**20, cache: int = 24_000, **options) -> Engine:
    settings = {"page_size": 16, "exact_decode": True, "prefill_chunk": 32, **options}
    config = EngineConfig(cache_bytes=cache, host_cache_bytes=host, **settings)
    return Engine(model, FakeEncoder(), config, stop_ids=(STOP,))


def cold(model, prompt: Prompt, **sampling) -> Answer:
    return ask(engine(model, host=0, cache=2**20, reuse=False), prompt, **sampling)


def test_what_was_evicted_is_a_hit_again(model) -> None:
    """A, B, A in a cache that cannot hold both; every answer as a cold one."""
    runner, without = engine(model), engine(model, host=0)
    prompts = [text(70, seed=seed, tail=seed) for seed in (1, 2)]
    want = [cold(model, prompt) for prompt in prompts]
    hits: dict[Engine, list[int]] = {runner: [], without: []}
    for turn in (0, 1, 0, 1, 0):
        for each, found in hits.items():
            answer = ask(each, prompts[turn])
            assert answer.same_as(want[turn])
            found.append(answer.cached)
    assert hits[runner] == [0, 0, 64, 64, 64]
    assert sum(hits[without]) < sum(hits[runner])
    stats = runner.stats()
    assert stats.host_fetches > 0
    assert stats.host_bytes > 0


def test_features_come_back_without_the_encoder(model) -> None:
    runner = engine(model, cache=30_000)
    prompt = with_media(90, tail=0)
    ask(runner, prompt, max_tokens=1)
    for seed in (5, 6):
        ask(runner, text(120, seed=seed), max_tokens=1)
    assert (None, prompt.spans[0].item.digest) not in runner.scheduler.features, "it was evicted"
    encoded = len(runner.encoding.encoder.encoded)
    # The first token differs, so no prefix is reused and the media are needed.
    other = Prompt((9, *prompt.token_ids[1:]), prompt.spans)
    assert ask(runner, other).same_as(cold(model, other))
    assert len(runner.encoding.encoder.encoded) == encoded


@pytest.mark.parametrize("host", [3_000, 20_000, 2**20])
def test_any_tier_gives_the_same_bits(model, host: int) -> None:
    """Smaller than a checkpoint and its pages, about as large, and large; answers go on."""
    runner = engine(model, host=host, cache=40_000)
    rng = random.Random(host)
    prompts = [with_media(90 + 3 * i, tail=i, first=1 + i % 2) for i in range(4)]
    want = [cold(model, prompt) for prompt in prompts]
    for _ in range(6):
        order = [rng.randrange(4) for _ in range(3)]
        answers = [Answer(runner, n, prompts[i]) for n, i in enumerate(order)]
        finish(runner)
        assert all(a.same_as(want[i]) for a, i in zip(answers, order, strict=True))
        assert runner.stats().host_bytes <= host


def test_salts_share_nothing_there_either(model) -> None:
    runner = engine(model)
    prompt = text(70, seed=1)
    hits = []
    for salt in ("a", "b", "a"):
        hits.append(ask(runner, prompt, cache_salt=salt, max_tokens=1).cached)
        ask(runner, text(120, seed=8), max_tokens=1)
    assert hits == [0, 0, 64]


def test_new_weights_find_nothing_of_the_old(model) -> None:
    runner = engine(model)
    for seed in (1, 2):
        ask(runner, text(70, seed=seed), max_tokens=1)
    assert runner.stats().host_bytes > 0
    runner.update(model, FakeEncoder())
    assert runner.stats().host_bytes == 0
    assert ask(runner, text(70, seed=1), max_tokens=1).cached == 0


def test_an_answer_comes_back_where_it_is_kept(model) -> None:
    runner = engine(model, cache=40_000)
    first = text(40, seed=1)
    said = ask(runner, first, max_tokens=40, temperature=0.9, seed=2).inbox.ids
    for seed in (5, 6, 7):
        ask(runner, text(120, seed=seed), max_tokens=1)
    turn = Prompt((*first.token_ids, *said, *tokens(9, seed=3)))
    again = ask(runner, turn)
    assert again.same_as(cold(model, turn))
    seen = 40 + len(said) - 1 if model.kernels.row_independent else 40
    assert again.cached == seen // 16 * 16


def test_units_hold_what_was_stored() -> None:
    runner = engine(MODELS[1], host=10_000)
    tier, cache = runner.tier, runner.cache
    assert tier is not None
    cache.units.copy_(torch.randint(0, 1000, cache.units.shape))
    rows = 10_000 // cache.sizes.unit_bytes
    assert rows == 4
    before = cache.units.clone()
    for i in range(3):
        tier.store(("page", i), [i])
    tier.store(("page", 0), [9])
    tier.store(("checkpoint", 0), [4, 3])
    assert ("page", 1) not in tier, "used longest ago"
    tier.store(("features", 0), list(range(rows + 1)))
    assert ("features", 0) not in tier, "larger than the tier"
    cache.units.zero_()
    assert not tier.fetch(("page", 1), [0])
    assert tier.fetch(("checkpoint", 0), [7, 8])
    assert torch.equal(cache.units[[7, 8]], before[[4, 3]])
    assert tier.fetch(("page", 0), [6])
    assert torch.equal(cache.units[6], before[0]), "the name was there already"
    assert (tier.stored, tier.fetched) == (5, 3)
    tier.clear()
    assert tier.held_bytes == 0


@pytest.mark.parametrize("row", [4_000, 114_048, 1_800_000, 2**21, 300 * 2**20])
@pytest.mark.parametrize("most", [0, 10_000, 50 * 2**20, 300 * 2**20, 5 * 2**30 + 7])
def test_memory_is_locked_in_pieces_that_are_hardly_rounded_up(row: int, most: int) -> None:
    counts = list(pieces(most // row, row))
    assert sum(counts) == most // row
    assert min(counts, default=1) > 0
    locked = sum(1 << (count * row - 1).bit_length() for count in counts)
    if row < 2**22:
        assert locked <= 1.01 * most + 2**24
