"""Passes over prompts at fixed sizes: the same tokens as without; nothing else is touched or waited
for. Graphs need a device; what surrounds them runs here, with steps that are done again instead.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch

from k3vl.config import checkpoint_path, load_config
from k3vl.kernels.bench.case import ratio_of_norms
from k3vl.kernels.choice import cpu_kernels
from k3vl.kernels.recording import EagerRunner
from k3vl.lm.batch import Row
from k3vl.lm.cache import HybridCache, plan_cache
from k3vl.lm.decode import StaticDecode
from k3vl.lm.engine import Engine, EngineConfig
from k3vl.lm.model import K3Model
from k3vl.lm.passes import Passes
from k3vl.lm.prompts import DirectPrompts, Size, StaticPrompts, pays, prompts
from k3vl.types import SamplingParams
from tests.device_only import META, device_only, recorded
from tests.lm.test_decode import small_cache
from tests.lm.test_engine import PROMPTS, STOP, FakeEncoder, Inbox, generate, prompt
from tests.tiny import KIMI_LINEAR, REFERENCE, TINY, TRITON, tiny_model, tokens


class CountingRunner(EagerRunner):
    """Counts what is made."""

    def __init__(self) -> None:
        self.made = 0

    def make(self, step):
        self.made += 1
        return super().make(step)


def engine(*, static: bool, seed: int = 0, config=TINY, **limits) -> Engine:
    settings = {"max_requests": 11, "cache_bytes": 2**21, "page_size": 16, **limits}
    model = tiny_model(config, seed)
    made = Engine(model, FakeEncoder(), EngineConfig(**settings), stop_ids=(STOP,))
    if static:
        fix(made)
    return made


def fix(made: Engine) -> None:
    """Give an engine the passes that a device has."""
    made.prompts = StaticPrompts(made.model, made.cache, CountingRunner())
    most = made.prompts.most_rows
    made.passes = Passes.of(made.config, row_independent=False, most_rows=most)


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("chunk", [16, 48, 1024])
def test_passes_of_fixed_size_choose_the_same_tokens(chunk: int, reuse: bool) -> None:
    direct, static = (
        engine(static=kind, prefill_chunk=chunk, reuse=reuse) for kind in (False, True)
    )
    for _ in range(3):
        assert generate(static, PROMPTS) == generate(direct, PROMPTS)
    assert static.prompts.runner.made, "sizes that came twice were recorded"
    before = static.prompts.runner.made
    generate(static, PROMPTS)
    assert static.prompts.runner.made == before, "and kept"


def test_without_latents_and_with_few_experts() -> None:
    config = replace(KIMI_LINEAR, linear_attn_config=TINY.linear_attn_config)
    direct, static = (engine(static=kind, config=config, reuse=False) for kind in (False, True))
    assert generate(static, PROMPTS) == generate(direct, PROMPTS)


def logprobs(runner: Engine, prompt) -> list[object]:
    """Of an answer, to the bit."""
    inbox = Inbox()
    runner.add(0, prompt, SamplingParams(max_tokens=3, logprobs=5), inbox)
    while runner.jobs:
        runner.step()
    return [token.logprobs for token in inbox.items]


def test_warm_bits_are_cold_ones_whether_a_size_is_recorded_or_not() -> None:
    fresh = [engine(static=True) for _ in PROMPTS]
    cold = [logprobs(runner, item) for runner, item in zip(fresh, PROMPTS, strict=True)]
    assert not fresh[0].prompts.runner.made
    static = engine(static=True)
    for _ in range(2):
        assert [logprobs(static, item) for item in PROMPTS] == cold
    assert static.prompts.runner.made
    assert static.stats().hit_tokens
    static.scheduler.forget()
    assert [logprobs(static, item) for item in PROMPTS] == cold


def test_scored_tokens_are_those_of_other_passes() -> None:
    found = []
    for static in (False, True):
        runner = engine(static=static)
        inbox = Inbox()
        runner.add_scored(0, PROMPTS[4], tokens(20), inbox)
        while runner.jobs:
            runner.step()
        found.append([round(token.logprobs.logprob, 4) for token in inbox.items])
    assert found[0] == found[1]
    assert len(found[0]) == 20


def test_new_weights_make_new_passes() -> None:
    runner, other = engine(static=True), engine(static=False, seed=5)
    old = generate(runner, PROMPTS)
    assert generate(runner, PROMPTS) == old
    runner.update(other.model, FakeEncoder())
    assert not runner.prompts._passes
    assert generate(runner, PROMPTS) == generate(other, PROMPTS) != old


def test_old_weights_go_at_once() -> None:
    """Not when Python next looks for circles: there may be no memory for both until then."""
    runner = engine(static=True)
    runner.decoder = StaticDecode(runner.model, runner.cache, EagerRunner())
    for _ in range(2):
        generate(runner, PROMPTS)
    assert runner.prompts.runner.made
    assert runner.decoder._sizes
    old = weakref.ref(runner.model)
    gc.collect()
    gc.disable()
    try:
        runner.update(tiny_model(), FakeEncoder())
        assert old() is None
    finally:
        gc.enable()


def rows_of(cache: HybridCache, parts: list[tuple[int, int]]) -> list[Row]:
    """Sequences of so many tokens behind so many, whose units lie apart."""
    each, size = cache.sizes.units_per_slot, cache.sizes.page_size
    free = iter(torch.randperm(cache.sizes.num_units, generator=torch.Generator().manual_seed(1)))
    return [
        Row(
            token_ids=tokens(count),
            context_len=context,
            slot=[int(next(free)) for _ in range(each)],
            pages=[int(next(free)) for _ in range(-(-(context + count) // size))],
        )
        for count, context in parts
    ]


def unit_of(cache: HybridCache, number: int) -> torch.Tensor:
    """Bytes of any unit, also of those behind all that can be owned."""
    return cache.buffer.view(-1, cache.sizes.unit_bytes)[number]


class FiniteRunner(CountingRunner):
    """Steps of which every row is a number, those that nobody asked for among them."""

    def make(self, step):
        again = super().make(step)

        def checked() -> torch.Tensor:
            out = again()
            assert out.isfinite().all()
            return out

        checked()
        return checked


@pytest.mark.parametrize("parts", [[(7, 0)], [(5, 16), (20, 0), (1, 3)], [(3, 0)] * 5])
def test_padding_reads_nobodys_memory(parts: list[tuple[int, int]]) -> None:
    """Recorded in the middle of traffic, and run beside it: what others hold may be any bits."""
    model = tiny_model()
    cache = small_cache(model)
    rows = rows_of(cache, parts)
    owned = [unit for row in rows for unit in (*row.slot, *row.pages)]
    mine = cache.units[owned].clone()
    cache.units.fill_(-1)  # as numbers NaN
    cache.units[owned] = mine
    static = StaticPrompts(model, cache, FiniteRunner())
    for _ in range(3):  # launched, recorded, repeated
        static.run(rows)
    assert static.runner.made == 1
    assert not unit_of(cache, cache.spare).any(), "nor writes any but zeros"
    assert not unit_of(cache, cache.spare + 1).any()


class SpoiltEncoder(FakeEncoder):
    """Of some items there are no numbers."""

    def __init__(self, *spoilt: str) -> None:
        super().__init__()
        self.spoilt = spoilt

    def encode(self, items):
        made = super().encode(items)
        return [
            torch.full_like(features, float("nan")) if item.digest in self.spoilt else features
            for item, features in zip(items, made, strict=True)
        ]


@pytest.mark.parametrize("reuse", [True, False])
def test_a_request_without_numbers_is_its_own_affair(reuse: bool) -> None:
    """NaN in one request's states and latents, in passes and steps that it shares with others."""
    spoilt = prompt(90, length=40)
    alone = [generate(engine(static=True), [item])[0] for item in PROMPTS]
    runner = engine(static=True, reuse=reuse)
    runner.decoder = StaticDecode(runner.model, runner.cache, EagerRunner())
    for _ in range(3):
        runner.encoding.encoder = SpoiltEncoder(*(span.item.digest for span in spoilt.spans))
        got = generate(runner, [PROMPTS[0], spoilt, *PROMPTS[1:]])
        assert got.pop(1), "it is answered, with anything"
        assert got == alone
    assert runner.cache.cell_views[0].isnan().any(), "there was NaN"


@pytest.mark.parametrize("parts", [[(7, 0)], [(5, 16), (20, 0), (1, 3)], [(3, 0)] * 5])
def test_padding_touches_nothing(parts: list[tuple[int, int]]) -> None:
    """Every unit that no sequence owns stays as it is, to the byte, NaN included."""
    model = tiny_model()
    cache = small_cache(model)
    rows = rows_of(cache, parts)
    owned = {unit for row in rows for unit in (*row.slot, *row.pages)}
    free = [unit for unit in range(cache.sizes.num_units) if unit not in owned]
    cache.units[free] = -1  # as numbers NaN
    unit_of(cache, cache.spare)[:] = 255
    before = cache.units.clone()
    static = StaticPrompts(model, cache, CountingRunner())
    for _ in range(3):  # launched, recorded, repeated
        cache.units.copy_(before)
        got = static.run(rows)
        assert torch.equal(cache.units[free], before[free])
    assert static.runner.made == 1
    fresh = small_cache(model)
    fresh.units.copy_(before)
    assert torch.allclose(got, DirectPrompts(model, fresh).run(rows), atol=1e-4)
    mine, want = (c.units.view(torch.float32).nan_to_num() for c in (cache, fresh))
    assert ratio_of_norms(mine, want) < 1e-5, "of a pass without padding"


def test_sizes() -> None:
    assert Size.of([3], [0]) == (16, 16, 1)
    assert Size.of([101], [0]) == (128, 128, 1)
    assert Size.of([37], [64]) == (64, 128, 1)
    assert Size.of([101] * 5, [0] * 5) == (512, 512, 8)
    assert Size.of([16] * 4, [0] * 4) == (64, 64, 4)
    assert Size.of([21, 22, 21], [0, 0, 0]) == (128, 128, 4), "a sequence that pads has a row"


def test_what_has_no_size_goes_by_itself() -> None:
    model = tiny_model()
    cache = small_cache(model)
    static = StaticPrompts(model, cache, CountingRunner())
    assert static.most_rows == 2048
    static.most_rows = 16
    rows = rows_of(cache, [(17, 0)])
    fresh = small_cache(model)
    assert torch.equal(static.run(rows), DirectPrompts(model, fresh).run(rows))
    assert not static._passes
    compiled = tiny_model(kernels=cpu_kernels("a test"))
    assert isinstance(prompts(compiled, small_cache(compiled)), DirectPrompts)


def test_for_which_models_it_pays() -> None:
    large = replace(TINY, num_experts=2000, moe_intermediate_size=9000)
    assert pays(tiny_model())
    assert not pays(tiny_model(KIMI_LINEAR)), "without the bound KDA reads lengths on the host"
    model = K3Model(large, REFERENCE, dtype=torch.float32, device=META)
    assert not pays(model)


# ------------------------------------------------------------------ with the Triton kernels


class GuardedRunner:
    """Makes steps on "meta" under guard."""

    def make(self, step):
        with device_only() as launches:
            out = step()
        self.launches = launches
        return lambda: out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_recorded_pass_never_waits_and_is_the_same_for_any_prompts(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from k3vl.kernels.choice import triton_kernels

    model = K3Model(TRITON, triton_kernels("a test"), dtype=dtype, device=META)
    cache, runner = small_cache(model), GuardedRunner()
    static = StaticPrompts(model, cache, runner)
    picture = torch.empty(5, TRITON.hidden_size, dtype=dtype, device=META)
    counts = []
    for parts in ([(40, 0)] * 3, [(30, 0), (60, 0), (11, 0), (1, 0)]):
        rows = [replace(row, features=[(0, picture)]) for row in rows_of(cache, parts[:3])]
        rows += rows_of(cache, parts[3:])
        with recorded() as launches:
            assert static.run(rows).shape == (len(rows), TRITON.vocab_size)
        counts.append(len(launches))
    assert static._passes.keys() == {(128, 128, 4)}
    assert counts[0] > counts[1] == 0, "what is recorded is not launched"
    by_name = Counter(launch.kernel for launch in runner.launches)
    linear = TRITON.linear_attn_config
    assert by_name["kda_walk_kernel"] == len(linear.kda_layers)
    assert by_name["flash_kernel"] == len(linear.full_attn_layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_take_the_demo_model(dtype: torch.dtype) -> None:
    """Steps and passes, in every form; some of its widths are no powers of two."""
    pytest.importorskip("triton")
    from k3vl.kernels.choice import triton_kernels

    config = load_config(checkpoint_path("demo")).text
    model = K3Model(config, triton_kernels("a test"), dtype=dtype, device=META)
    assert pays(model)
    sizes = plan_cache(config, dtype, budget_bytes=2**26, page_size=64)
    cache = HybridCache(config, sizes, dtype=dtype, device=META)
    direct, static = DirectPrompts(model, cache), StaticPrompts(model, cache, GuardedRunner())
    with recorded():
        for parts in ([(1, 5)] * 3, [(64, 0)], [(101, 0)], [(37, 64)], [(101, 0), (30, 0)]):
            rows = rows_of(cache, parts)
            assert direct.run(rows).shape == (len(rows), config.vocab_size)
            assert static.run(rows).shape == static.run(rows).shape == (len(rows), 4096)


def test_no_size_has_kernels_compiled_for_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles a kernel for addresses of 16 bytes, and again for others: seconds each."""
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    from k3vl.kernels.choice import triton_kernels

    begins: dict[object, set[tuple[int, ...]]] = {}

    def run(kernel, *args, grid, **options):
        constants = tuple(sorted((name, str(value)) for name, value in options.items()))
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        places = tuple(arg.storage_offset() * arg.element_size() % 16 for arg in tensors)
        kinds = tuple(type(arg).__name__ for arg in args)
        begins.setdefault((kernel.__name__, kinds, constants), set()).add(places)

    monkeypatch.setattr(JITFunction, "run", run)
    config = load_config(checkpoint_path("demo")).text
    model = K3Model(config, triton_kernels("a test"), dtype=torch.bfloat16, device=META)
    sizes = plan_cache(config, torch.bfloat16, budget_bytes=2**28, page_size=64)
    cache = HybridCache(config, sizes, dtype=torch.bfloat16, device=META)
    static = StaticPrompts(model, cache, GuardedRunner())
    for count in (1, 2, 3, 5, 9, 11, 17):
        static.run(rows_of(cache, [(101, 0)] * count))
    assert len(static._passes) == 7
    several = {name for (name, *_), places in begins.items() if len(places) > 1}
    assert begins
    assert not several
