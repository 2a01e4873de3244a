"""Checkpoints in fewer bytes: how far states move, and that nothing else does."""

from __future__ import annotations

import pytest
import torch

from k3vl.lm.engine import Engine, EngineConfig
from k3vl.lm.packing import Rounded, Scaled
from tests.lm.test_engine import STOP, FakeEncoder
from tests.lm.test_reuse import Answer, finish, watch, with_media
from tests.tiny import COMPILED, tiny_model

MODEL = tiny_model(kernels=COMPILED)


@pytest.fixture(autouse=True)
def _watch(monkeypatch) -> None:
    watch(monkeypatch)


def engine(dtype: str, **options) -> Engine:
    settings = {"cache_bytes": 2**20, "page_size": 16, "checkpoint_dtype": dtype, **options}
    return Engine(MODEL, FakeEncoder(), EngineConfig(**settings), stop_ids=(STOP,))


@pytest.mark.parametrize(("states", "most"), [(Rounded(), 2**-7), (Scaled(), 1 / 127)])
def test_elements_move_by_less_than_the_documented_step(states, most: float) -> None:
    head = 12
    given = torch.randn(5, head, head) * torch.logspace(-6, 3, head)[None, :, None]
    given[0], given[1, 3] = 0, 0
    packed = states.pack(given)
    assert packed.shape == (5, states.nbytes(head))
    assert packed.dtype == torch.uint8
    back = states.unpack(packed, head)
    size = given.abs() if isinstance(states, Rounded) else given.abs().amax(-1, keepdim=True)
    assert (back - given).abs().le(size * most / 2 * 1.001).all()
    assert torch.equal(back[0], given[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_slot_comes_back_and_its_neighbours_stay(dtype: str) -> None:
    runner = engine(dtype)
    sizes, cache = runner.scheduler.sizes, runner.cache
    assert 0 < sizes.packed_units <= sizes.units_per_slot, "tiny windows are most of a tiny slot"
    units = torch.randperm(sizes.num_units).tolist()
    slot, other = units[: sizes.units_per_slot], units[-sizes.units_per_slot :]
    kept = units[sizes.units_per_slot :][: sizes.units_per_checkpoint]
    states, windows = cache.cell_views
    states.copy_(torch.randn(states.shape))
    windows.copy_(torch.randn(windows.shape))
    here, there = (cache.cells([where]).flatten() for where in (slot, other))
    before = cache.units.clone()
    runner.checkpoints.save(slot, kept)
    runner.checkpoints.load(kept, other)
    untouched = [unit for unit in range(sizes.num_units) if unit not in {*kept, *other}]
    assert torch.equal(cache.units[untouched], before[untouched])
    assert torch.equal(windows[there], windows[here])
    error = (states[there] - states[here]).norm() / states[here].norm()
    assert 0 < error < 0.02


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_hit_gives_nearly_the_cold_logits(dtype: str) -> None:
    prompt = with_media(100, tail=0)
    runner = engine(dtype)
    answers = []
    for number in range(2):
        answers.append(Answer(runner, number, prompt, max_tokens=1))
        finish(runner)
    cold, warm = answers
    assert warm.cached == 96
    (want,), (got,) = cold.watched.logits, warm.watched.logits
    assert not torch.equal(got, want)
    assert (got - want).norm() / want.norm() < 0.02


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_small_cache_loses_no_unit(dtype: str) -> None:
    """Preemption cannot leave a slot behind as a checkpoint: it lies otherwise."""
    sizes = engine(dtype).scheduler.sizes
    units = 3 * (sizes.units_per_slot + 2) + 2
    runner = engine(dtype, cache_bytes=units * sizes.unit_bytes)
    inboxes = [
        Answer(runner, i, with_media(60, tail=i), max_tokens=40, temperature=0.8, seed=i)
        for i in range(4)
    ]
    finish(runner)
    assert all(answer.inbox.ended for answer in inboxes)
    assert runner.scheduler.arena.num_available == runner.scheduler.arena.size
