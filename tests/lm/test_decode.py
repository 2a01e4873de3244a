"""Decode steps on fixed memory: padded or not, the same tokens; nothing else is touched or waited
for. Graphs need a device; what surrounds them runs here, with steps that are done again instead.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from k3vl.kernels.bench.case import ratio_of_norms
from k3vl.kernels.choice import cpu_kernels
from k3vl.kernels.recording import EagerRunner
from k3vl.lm.batch import Row, build_batch
from k3vl.lm.cache import HybridCache, plan_cache
from k3vl.lm.decode import DirectDecode, StaticDecode, decoder, padded_size
from k3vl.lm.decode_inputs import StepInputs
from k3vl.lm.engine import Engine, EngineConfig
from k3vl.lm.model import K3Model
from k3vl.lm.sampler import Sampler
from k3vl.types import SamplingParams
from tests.device_only import META, Launch, device_only
from tests.lm.test_engine import PROMPTS, STOP, FakeEncoder, Inbox
from tests.lm.test_sampler import FakeMask
from tests.tiny import KIMI_LINEAR, TINY, TRITON, tiny_model, tokens


class CountingRunner(EagerRunner):
    """Counts what is made."""

    def __init__(self) -> None:
        self.made: list[tuple[int, ...]] = []

    def make(self, step):
        again = super().make(step)
        self.made.append(tuple(again().shape))
        return again


def engine(*, static: bool, seed: int = 0, config=TINY, **limits) -> Engine:
    settings = {"max_requests": 11, "cache_bytes": 2**21, "page_size": 16, **limits}
    model = tiny_model(config, seed)
    made = Engine(model, FakeEncoder(), EngineConfig(**settings), stop_ids=(STOP,))
    if static:
        made.decoder = StaticDecode(made.model, made.cache, CountingRunner())
    return made


def wishes(number: int) -> SamplingParams:
    """Requests of every kind, beside each other."""
    kinds = (
        {},
        {"temperature": 1.0, "seed": number},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": number, "logprobs": 2},
        {"logprobs": 0},
        {"logit_mask": FakeMask(number, 4)},
    )
    return SamplingParams(max_tokens=14 + number, **kinds[number % len(kinds)])


def answers(runner: Engine, *, step: int = 1) -> list[list[tuple[int, float | None]]]:
    """Requests come one after the other, so that steps grow, and end one after the other."""
    inboxes = [Inbox() for _ in range(11)]
    for number, inbox in enumerate(inboxes):
        runner.add(number, PROMPTS[number % len(PROMPTS)], wishes(number), inbox)
        for _ in range(step):
            runner.step()
            runner.scheduler.check_integrity()
    while runner.jobs:
        runner.step()
        runner.scheduler.check_integrity()
    return [
        [(item.id, item.logprobs and round(item.logprobs.logprob, 3)) for item in inbox.items]
        for inbox in inboxes
    ]


@pytest.mark.parametrize("config", [TINY, KIMI_LINEAR], ids=["k3", "kimi-linear"])
def test_padded_steps_choose_the_same_tokens(config) -> None:
    direct, static = engine(static=False, config=config), engine(static=True, config=config)
    assert answers(static) == answers(direct)
    made = static.decoder.runner.made
    forwards = Counter(shape for shape in made if shape[1:] == (config.vocab_size,))
    assert set(forwards) == {(size, config.vocab_size) for size in (1, 2, 4, 8, 16)}
    assert set(forwards.values()) == {1}, "a size is made once"
    before = len(made)
    assert answers(static) == answers(direct)
    assert len(made) == before, "and kept"


def test_preempted_requests_decode_again_what_they_had() -> None:
    """Then some rows of a step want no token."""

    def run(**kind) -> tuple[list[list[int]], int]:
        runner = engine(max_requests=4, reuse=False, **kind)
        inboxes = [Inbox() for _ in range(4)]
        for number, inbox in enumerate(inboxes):
            params = SamplingParams(max_tokens=40, temperature=number % 2, seed=number)
            runner.add(number, PROMPTS[number], params, inbox)
        while runner.jobs:
            runner.step()
        return [inbox.ids for inbox in inboxes], runner.stats().preemptions

    direct, _ = run(static=False)
    got, preemptions = run(static=True, cache_bytes=58_000)
    assert got == direct
    assert preemptions, "the cache was too small for all"


def test_new_weights_make_new_steps() -> None:
    runner, other = engine(static=True), engine(static=False, seed=5)
    old = answers(runner)
    made = len(runner.decoder.runner.made)
    runner.update(other.model, FakeEncoder())
    new = answers(runner)
    assert new == answers(other) != old
    assert len(runner.decoder.runner.made) > made


def test_a_step_that_fails_leaves_nothing_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was sent from is the pinned memory of a step to come."""
    model = tiny_model()
    cache = small_cache(model)
    static = StaticDecode(model, cache, EagerRunner())
    rows = rows_of(cache, [3, 5])
    static.launch(rows, [Sampler(SamplingParams()) for _ in rows]).tokens()
    waited = []

    class Place:
        def synchronize(self) -> None:
            waited.append(self)

    monkeypatch.setattr("k3vl.lm.decode.mark", lambda device: Place())
    with pytest.raises(StopIteration):
        static.launch(rows, [])
    assert len(waited) == 1


def rows_of(cache: HybridCache, contexts: list[int]) -> list[Row]:
    """Sequences of these lengths, whose units lie apart."""
    each, size = cache.sizes.units_per_slot, cache.sizes.page_size
    free = iter(torch.randperm(cache.sizes.num_units, generator=torch.Generator().manual_seed(1)))
    return [
        Row(
            token_ids=[number + 1],
            context_len=length,
            slot=[int(next(free)) for _ in range(each)],
            pages=[int(next(free)) for _ in range(length // size + 1)],
        )
        for number, length in enumerate(contexts)
    ]


def small_cache(model: K3Model) -> HybridCache:
    dtype, device = model.embedding.dtype, model.embedding.device
    sizes = plan_cache(model.config, dtype, budget_bytes=2**20, page_size=16)
    return HybridCache(model.config, sizes, dtype=dtype, device=device)


def test_padding_touches_nothing() -> None:
    """Every unit that no row owns stays as it is, to the byte, NaN included."""
    model = tiny_model()
    cache = small_cache(model)
    rows = rows_of(cache, [0, 15, 16, 40, 3])
    owned = {unit for row in rows for unit in (*row.slot, *row.pages)}
    free = [unit for unit in range(cache.sizes.num_units) if unit not in owned]
    cache.units[free] = 255  # as numbers NaN
    before = cache.units.clone()
    static = StaticDecode(model, cache, EagerRunner())
    choosers = [Sampler(SamplingParams()) for _ in rows]
    got = static.launch(rows, choosers).tokens()
    assert torch.equal(cache.units[free], before[free])
    fresh = small_cache(model)
    fresh.units.copy_(before)
    assert got == DirectDecode(model, fresh).launch(rows, choosers).tokens()
    assert not torch.equal(cache.units, before)
    got, want = (c.buffer.view(torch.float32).nan_to_num() for c in (cache, fresh))
    assert ratio_of_norms(got, want) < 1e-5, "of a step without padding"


def test_a_longer_context_does_not_outlive_its_step() -> None:
    """Entries of the page table that were another's are not read."""
    model = tiny_model()
    cache = small_cache(model)
    static = StaticDecode(model, cache, EagerRunner())
    long, short = rows_of(cache, [200, 5])
    for row in (long, short, long, short):
        start = cache.units.clone()
        got = static.launch([row], [Sampler(SamplingParams())]).tokens()
        cache.units.copy_(start)
        assert got == DirectDecode(model, cache).launch([row], [Sampler(SamplingParams())]).tokens()


def test_what_the_device_has_already_is_right_without_being_sent_again() -> None:
    """Rows that come, go, change places, grow and stay, against a step that is all new."""
    model = tiny_model()
    cache, rng = small_cache(model), random.Random(0)
    kept, sent = StepInputs(model, cache, 8), Counter()

    def fresh_row() -> Row:
        length = rng.randrange(60)
        units = rng.sample(range(cache.sizes.num_units), cache.sizes.units_per_slot + 9)
        slot, pages = units[9:], units[: length // 16 + 1]
        return Row(token_ids=[rng.randrange(97)], context_len=length, slot=slot, pages=pages)

    def advance(row: Row) -> None:
        row.context_len += 1
        if row.context_len == len(row.pages) * 16:
            row.pages.append(rng.randrange(cache.sizes.num_units))

    send = kept._staged.send
    kept._staged.send = lambda turn, begin, end: (
        sent.update([end - begin]),
        send(turn, begin, end),
    )
    rows = [fresh_row() for _ in range(5)]
    for step in range(300):
        for row in rows:
            advance(row)
        change = rng.random()
        if change < 0.1 and len(rows) < 8:
            rows.insert(rng.randrange(len(rows) + 1), fresh_row())
        elif change < 0.2 and len(rows) > 1:
            rows.pop(rng.randrange(len(rows)))
        elif change < 0.25:
            rng.shuffle(rows)
        elif change < 0.3:  # they run elsewhere for a while
            for row in rows * rng.randrange(40):
                advance(row)
        kept.fill(rows, step % 2)
        new = StepInputs(model, cache, 8)
        new.fill(rows, 0)
        mine, theirs = kept.batch(), new.batch()
        for name in ("token_ids", "cells", "cache_rows", "decode_lens"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
        for at, row in enumerate(rows):
            used = row.context_len // 16 + 1
            assert torch.equal(mine.decode_rows[at, :used], theirs.decode_rows[at, :used])
    assert sent[3 * 8] > 100, "often nothing but lengths, places and tokens"


def test_sizes_of_steps() -> None:
    assert [padded_size(n) for n in (1, 2, 3, 4, 5, 8, 9, 17, 32, 33)] == [
        *(1, 2, 4, 4, 8, 8, 16, 24, 32, 40)
    ]
    assert sorted({padded_size(n) for n in range(33, 257)}) == [
        *(40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
    ]
    assert all(n <= padded_size(n) < 1.25 * n for n in range(33, 2000))


def test_a_cpu_decodes_what_there_is() -> None:
    model = tiny_model(kernels=cpu_kernels("a test"))
    assert isinstance(decoder(model, small_cache(model)), DirectDecode)


# ------------------------------------------------------------------ with the Triton kernels


class GuardedRunner:
    """Makes steps on "meta" under guard; their tokens are all 0."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def make(self, step):
        with device_only() as launches:
            out = step()
        self.launches += launches
        return lambda: out if out.shape[-1:] == (TRITON.vocab_size,) else torch.zeros(out.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_a_step_on_a_device_never_waits(dtype: torch.dtype, count: int) -> None:
    pytest.importorskip("triton")
    from k3vl.kernels.choice import triton_kernels

    model = K3Model(TRITON, triton_kernels("a test"), dtype=dtype, device=META)
    assert model.kernels.recordable
    cache, runner = small_cache(model), GuardedRunner()
    rows = rows_of(cache, [7 * number for number in range(count)])
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=3, logit_mask=FakeMask(0, 4))
    choosers = [Sampler(params) for _ in rows]
    assert StaticDecode(model, cache, runner).launch(rows, choosers).tokens() == [0] * count
    by_name = Counter(launch.kernel for launch in runner.launches)
    linear = TRITON.linear_attn_config
    assert by_name["kda_step_kernel"] == len(linear.kda_layers)
    for kernel in ("mla_store_kernel", "mla_decode_kernel", "mla_merge_kernel"):
        assert by_name[kernel] == len(linear.full_attn_layers)
    assert by_name["mla_values_kernel"] == len(linear.full_attn_layers)
    assert by_name["attn_residual_kernel"] == 2 * TRITON.num_hidden_layers + 1
    grids = {launch.grid for launch in runner.launches if launch.kernel == "kda_step_kernel"}
    assert grids == {(padded_size(count) * linear.num_heads,)}


@pytest.mark.parametrize("context", [0, 16])
def test_a_prompt_on_a_device_never_waits(context: int) -> None:
    """Two parts, one of them with a picture, behind the copy of their numbers."""
    pytest.importorskip("triton")
    from k3vl.kernels.choice import triton_kernels

    model = K3Model(TRITON, triton_kernels("a test"), dtype=torch.bfloat16, device=META)
    cache = small_cache(model)
    each = cache.sizes.units_per_slot
    picture = torch.empty(5, TRITON.hidden_size, dtype=torch.bfloat16, device=META)
    rows = [
        Row(
            token_ids=tokens(40),
            context_len=context,
            slot=range(part * each, (part + 1) * each),
            pages=range(30 + 4 * part, 34 + 4 * part),
            features=[(3, picture)] * part,
            pad_to=48,
        )
        for part in range(2)
    ]
    batch = build_batch(rows, cache)
    with device_only() as launches:
        assert model(batch, cache).shape == (2, TRITON.vocab_size)
    names = Counter(launch.kernel for launch in launches)
    assert names["flash_kernel"] == 2 * len(TRITON.linear_attn_config.full_attn_layers)


def test_a_batch_goes_to_the_device_by_one_copy() -> None:
    cache = small_cache(tiny_model())
    rows = [
        Row(token_ids=tokens(1), context_len=20, slot=range(2), pages=[5, 6]),
        Row(token_ids=tokens(20), context_len=16, slot=range(2, 4), pages=[7, 8, 9], pad_to=32),
    ]
    whole = build_batch(rows, cache)
    storages = {
        x.untyped_storage().data_ptr()
        for x in (
            *(whole.token_ids, whole.cu_seqlens, whole.ends, whole.cache_rows, whole.decode_rows),
            *(whole.decode_lens, whole.logit_rows, *whole.prefill_rows),
        )
    }
    assert len(storages) == 1
