"""Repeated grids: recorded when they come again, within bounds, and with every bit the same.

Graphs need a device; what surrounds them runs here, with passes that are done again instead.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import weakref
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from k3vl.config import K3_MEDIA
from k3vl.errors import BackendError
from k3vl.kernels.recording import EagerRunner
from k3vl.kernels.vision import cpu_vision, triton_vision
from k3vl.lm.encoding import EncodeInStep, EncodeOnThread
from k3vl.vision.encoder import VisionEncoder
from k3vl.vision.projector import PatchMerger
from k3vl.vision.repeats import Repeats, filled_up
from k3vl.vision.tower import VisionTower
from tests.device_only import META, Launch, device_only, recorded
from tests.lm.test_encoding import take_all, wanted
from tests.vision.test_encoder import item
from tests.vision.tiny_vision import TINY, pixels, tiny_models

KERNELS = cpu_vision()
"""Their rows are independent of each other: a batch gives the bits of its items alone."""
GRIDS = [(1, 2, 2), (1, 4, 6), (2, 4, 2), (4, 2, 4)]


class CountingRunner(EagerRunner):
    """Counts what is made and what is done again."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.runs = 0

    def make(self, step):
        again = super().make(step)
        self.made.append(len(again()))

        def counted() -> torch.Tensor:
            self.runs += 1
            return again()

        return counted


def encoder(runner=None, seed: int = 0, limit: int | None = 10_000) -> VisionEncoder:
    tower, projector = tiny_models(kernels=KERNELS)
    if seed:
        projector.outer.weight.data.mul_(seed)
    return VisionEncoder(tower, projector, max_patches_per_batch=limit, runner=runner)


def alone(one) -> torch.Tensor:
    return encoder().encode([one])[0]


@pytest.mark.parametrize("limit", [None, 60, 10_000])
def test_mixed_batches_give_the_bits_of_lone_items(limit: int | None) -> None:
    """Any grids in any number, again and again; what was handed out earlier stays as it was."""
    runner, rng = CountingRunner(), random.Random(1)
    ours, made = encoder(runner, limit=limit), []
    for turn in range(60):
        grids = rng.sample(GRIDS, rng.choice([1, 1, 2]))
        asked = [item(*rng.choice(grids), seed=100 * turn + n) for n in range(rng.randrange(1, 8))]
        made += zip(asked, ours.encode(asked), strict=True)
    assert runner.runs > 20
    assert len(runner.made) < 30
    for one, rows in made:
        assert torch.equal(rows, alone(one))


def test_a_batch_is_recorded_when_it_comes_again() -> None:
    runner = CountingRunner()
    ours = encoder(runner)
    history = []
    for turn in range(4):
        for grid in GRIDS[:2]:
            one = item(*grid, seed=turn)
            assert torch.equal(ours.encode([one])[0], alone(one))
            history.append((len(runner.made), runner.runs))
    assert history == [(0, 0), (0, 0), (1, 1), (2, 2), (2, 3), (2, 4), (2, 5), (2, 6)]


def test_counts_of_equal_grids_share_records() -> None:
    runner = CountingRunner()
    ours = encoder(runner)
    for count in (5, 6, 5, 6, 5, 3, 4, 4, 3, 3):
        asked = [item(1, 2, 4, seed=10 * count + n) for n in range(count)]
        for one, rows in zip(asked, ours.encode(asked), strict=True):
            assert torch.equal(rows, alone(one))
    assert runner.made == [6 * 2, 4 * 2, 3 * 2]


def test_the_order_of_the_items_does_not_matter() -> None:
    runner = CountingRunner()
    ours = encoder(runner)
    for turn in range(6):
        asked = [item(*grid, seed=turn) for grid in (*GRIDS, GRIDS[0])]
        random.Random(turn).shuffle(asked)
        for one, rows in zip(asked, ours.encode(asked), strict=True):
            assert torch.equal(rows, alone(one))
    assert len(runner.made) == 1


def test_what_fills_a_batch_up_changes_nothing() -> None:
    tower, projector = tiny_models(kernels=KERNELS)
    repeats = Repeats(tower, projector, EagerRunner())
    grid, many, few = (1, 2, 4), pixels(*[(1, 2, 4)] * 6), pixels(*[(1, 2, 4)] * 5, seed=3)
    want = repeats.run(few, [grid] * 5)[:10].clone()
    for before in (many, torch.full_like(many, 255), torch.zeros_like(many)):
        repeats.run(before, [grid] * 6)
        assert torch.equal(repeats.run(few, [grid] * 5)[:10], want)


def test_counts_that_are_made_alike() -> None:
    small, large = (1, 16, 16), (4, 24, 32)
    counts = [1, 2, 3, 4, 5, 7, 9, 12, 13, 16, 17]
    assert [len(filled_up([small] * n)) for n in counts] == [1, 2, 3, 4, 6, 8, 12, 12, 16, 16, 17]
    assert [len(filled_up([large] * n)) for n in (1, 2, 3)] == [1, 2, 3]
    assert filled_up([small, large]) == (small, large)
    assert len(filled_up([(1, 2, 2)] * 40)) == 40


def test_large_batches_are_left_alone(monkeypatch) -> None:
    monkeypatch.setattr("k3vl.vision.repeats._MOST_PATCHES", 24)
    runner = CountingRunner()
    ours = encoder(runner)
    for turn in range(4):
        asked = [item(1, 4, 6, seed=turn), item(1, 2, 2, seed=turn)]
        for one, rows in zip(asked, ours.encode(asked), strict=True):
            assert torch.equal(rows, alone(one))
    assert runner.made == []
    for turn in range(2):
        ours.encode([item(1, 4, 6, seed=10 + turn)])
    assert runner.made == [6], "as large as may be"


@pytest.mark.parametrize("bound", ["count", "bytes"])
def test_the_record_used_longest_ago_goes(bound: str, monkeypatch) -> None:
    tower, projector = tiny_models(kernels=KERNELS)
    each = 8 * (3 * 14 * 14 + 4 * TINY.vt_hidden_size + 8 * 16 // 4) + 2 * 4 * TINY.text_hidden_size
    if bound == "count":
        monkeypatch.setattr("k3vl.vision.repeats._MOST_RECORDS", 2)
    else:
        monkeypatch.setattr("k3vl.vision.repeats._MOST_BYTES", int(2.5 * each))
    runner = CountingRunner()
    ours = VisionEncoder(tower, projector, runner=runner)
    a, b, c = (1, 2, 4), (1, 4, 2), (2, 2, 2)
    for grid in (a, a, b, b, a, c, c):  # b has to go
        assert ours.encode([item(*grid)])
    assert {key[0] for key in ours.repeats._records} == {(a,), (c,)}
    held = sum(batch.nbytes for batch in ours.repeats._records.values())
    made = len(runner.made)
    for grid in (a, c, a, c):
        ours.encode([item(*grid)])
    assert len(runner.made) == made == 3
    for turn in range(2):
        one = item(*b, seed=turn)
        assert torch.equal(ours.encode([one])[0], alone(one))
    assert len(runner.made) == 4
    assert sum(batch.nbytes for batch in ours.repeats._records.values()) <= held


def test_batches_that_came_once_are_forgotten_in_time(monkeypatch) -> None:
    monkeypatch.setattr("k3vl.vision.repeats._MOST_SEEN", 3)
    runner = CountingRunner()
    ours = encoder(runner)
    for columns in range(2, 20, 2):
        ours.encode([item(1, 2, columns)])
    assert len(ours.repeats._seen) == 3
    ours.encode([item(1, 2, 2, seed=1)])
    assert runner.made == [], "too long ago"
    ours.encode([item(1, 2, 18, seed=1)])
    assert runner.made == [9]


def test_floats_and_bytes_are_batches_of_their_own() -> None:
    runner = CountingRunner()
    ours, grid = encoder(runner), (1, 2, 4)
    for turn in range(4):
        given = item(*grid, seed=turn)
        as_float = dataclasses.replace(
            given, digest=f"{turn}", patches=((given.patches / 255 - 0.5) / 0.5).astype("float32")
        )
        for one in (given, as_float):
            assert torch.equal(ours.encode([one])[0], alone(one))
    assert runner.made == [2, 2]


def test_records_follow_the_table_they_were_made_from() -> None:
    runner = CountingRunner()
    ours, fresh, one = encoder(runner), encoder(), item(1, 2, 4)
    before = [ours.encode([one])[0] for _ in range(3)][-1]
    for each in (ours, fresh):
        each.tower.position_table.mul_(2)
        each.tower.blocks[0].qkv.weight.mul_(2)
    for _ in range(3):
        after = ours.encode([one])[0]
        assert torch.equal(after, fresh.encode([one])[0])
    assert not torch.equal(after, before)
    assert len(runner.made) == 2


@pytest.mark.parametrize("make", [EncodeInStep, EncodeOnThread])
def test_new_weights_replay_nothing_of_the_old(make) -> None:
    old, new = CountingRunner(), CountingRunner()
    encoding = make(encoder(old))
    for runner, seed in ((old, 0), (new, 3)):
        plain = encoder(seed=seed)
        for turn in range(3):
            one = item(1, 2, 4, seed=turn)
            encoding.start([wanted(one)])
            (rows,) = take_all(encoding, 1).values()
            assert torch.equal(rows, plain.encode([one])[0])
        assert runner.made == [2]
        if runner is old:
            encoding.renew(encoder(new, seed=3))
    assert old.runs == 2
    encoding.close()


def test_a_record_that_fails_costs_no_other_item() -> None:
    class Failing(CountingRunner):
        fails = 1

        def make(self, step):
            self.fails -= 1
            if self.fails >= 0:
                raise RuntimeError("out of memory")
            return super().make(step)

    runner = Failing()
    encoding = EncodeInStep(encoder(runner))
    for turn in range(5):
        asked = [item(1, 2, 4, seed=10 * turn + n) for n in range(2)]
        encoding.start([wanted(one) for one in asked])
        made = take_all(encoding, 2)
        for one in asked:
            rows = made[one.digest]
            assert not isinstance(rows, BackendError)
            assert torch.equal(rows, alone(one))
    assert runner.made, "later it worked"


class Addresses(TorchDispatchMode):
    """Notes every tensor that operators read and that none of them has made."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[weakref.ref[torch.Tensor]] = []
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self.read += [weakref.ref(x) for x in given if all(x is not own for own in self.made)]
        out = func(*args, **(kwargs or {}))
        self.made += [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        return out


def test_what_a_record_reads_stays_as_long_as_it() -> None:
    """As a graph, this runner holds no tensor but the result."""
    seen = Addresses()

    class Forgetful:
        def make(self, step):
            with seen:
                out = step()
            seen.made.clear()
            return lambda: out

    tower, projector = tiny_models()
    ours = VisionEncoder(tower, projector, runner=Forgetful())
    for turn in range(2):
        ours.encode([item(2, 4, 2, seed=turn)])
    tower._plans.clear()
    gc.collect()
    assert len(seen.read) > 15, "weights, patches, positions, rotations"
    assert all(ref() is not None for ref in seen.read)
    ours.repeats._records.clear()
    gc.collect()
    assert sum(ref() is None for ref in seen.read) >= 3, "and no longer"


# ------------------------------------------------------------------ with the Triton kernels


class GuardedRunner(EagerRunner):
    """Makes passes on "meta" under guard."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def make(self, step):
        with device_only() as launches:
            out = step()
        self.launches += launches
        return lambda: out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("grids", [[(1, 4, 6)], [(1, 4, 6)] * 5, [(1, 4, 6), (2, 2, 2)]])
@pytest.mark.parametrize("given", [torch.uint8, torch.float32])
def test_a_recorded_pass_needs_nothing_of_the_host(grids, dtype, given) -> None:
    pytest.importorskip("triton")
    config = dataclasses.replace(
        TINY, vt_hidden_size=32, qkv_hidden_size=64, vt_num_attention_heads=2, mm_hidden_size=32
    )
    options = {"dtype": dtype, "device": META, "kernels": triton_vision()}
    tower = VisionTower(config, K3_MEDIA, **options).requires_grad_(False)
    projector = PatchMerger(config, **options).requires_grad_(False)
    runner = GuardedRunner()
    repeats = Repeats(tower, projector, runner)
    count = sum(t * h * w for t, h, w in grids)
    patches = torch.empty(count, 3, 14, 14, dtype=given)
    with recorded():
        repeats.run(patches, grids)
    rows = repeats.run(patches, grids)
    assert len(rows) == sum(h * w // 4 for _, h, w in filled_up(grids))
    names = Counter(launch.kernel for launch in runner.launches)
    blocks = config.vt_num_hidden_layers
    assert names == {
        **({"pixel_kernel": 1} if given == torch.uint8 else {}),
        "rms_norm_kernel": 2 * blocks + 2,
        "rotate_kernel": blocks,
        "flash_kernel": blocks,
    }
