"""The scheduler and its pools, over thousands of random traces."""

from __future__ import annotations

import random

import pytest

from k3vl.errors import CapacityError
from k3vl.lm.cache import CacheSizes
from k3vl.lm.pool import Pool
from k3vl.lm.scheduler import Scheduler, Sequence


def scheduler(*, slots: int = 4, pages: int = 12, budget: int = 32, chunk: int = 16) -> Scheduler:
    sizes = CacheSizes(num_slots=slots, num_pages=pages, page_size=8)
    return Scheduler(sizes=sizes, max_step_tokens=budget, prefill_chunk=chunk)


def sequence(number: int, prompt: int, new: int) -> Sequence:
    return Sequence(id=number, num_prompt=prompt, max_new=new)


def run_step(plan: Scheduler) -> list[int]:
    """Carry out one plan as the engine does; returns the ids of the sequences that finished."""
    step = plan.plan()
    assert sum(count for _, count in step.tokens) <= plan.max_step_tokens
    lengths = [count for _, count in step.tokens]
    assert lengths == sorted(lengths, key=lambda n: n != 1), "decode rows lead"
    finished = []
    for seq, count in step.tokens:
        assert 0 < count <= seq.num_pending
        seq.num_cached += count
        assert seq.num_cached <= len(seq.pages) * plan.sizes.page_size
        if seq.num_pending == 0:
            seq.num_generated += 1
            if seq.num_generated == seq.max_new:
                plan.finish(seq)
                finished.append(seq.id)
    plan.check_integrity()
    return finished


@pytest.mark.parametrize("seed", range(150))
def test_random_traces_finish_in_order_and_leak_nothing(seed: int) -> None:
    rng = random.Random(seed)
    plan = scheduler(
        slots=rng.randint(1, 5),
        pages=rng.randint(4, 14),
        budget=rng.randint(1, 40),
        chunk=rng.randint(1, 20),
    )
    limit = plan.sizes.num_pages * plan.sizes.page_size
    live: dict[int, Sequence] = {}
    started: list[int] = []
    arrivals = [
        sequence(i, rng.randint(1, limit // 2), rng.randint(1, limit // 2)) for i in range(20)
    ]
    steps = 0
    while arrivals or live:
        while arrivals and (not live or rng.random() < 0.4):
            new = arrivals.pop(0)
            plan.check_fits(new)
            plan.add(new)
            live[new.id] = new
        if rng.random() < 0.05:
            victim = live.pop(rng.choice(list(live)))
            plan.finish(victim)
            plan.check_integrity()
        for done in run_step(plan):
            live.pop(done)
        started += [s.id for s in plan.running if s.id not in started]
        steps += 1
        assert steps < 20_000, "no progress"
    assert started == sorted(started), "first come, first served"
    assert plan.slots.num_free == plan.slots.size
    assert plan.pages.num_free == plan.pages.size


def test_every_step_moves_something() -> None:
    plan = scheduler(budget=1, chunk=1)
    for i in range(3):
        plan.add(sequence(i, 5, 4))
    done: list[int] = []
    steps = 0
    while len(done) < 3:
        done += run_step(plan)
        steps += 1
    assert steps == 3 * (5 + 4 - 1), "one token a step, none wasted"


def test_nobody_starves_when_a_step_cannot_hold_all_who_decode() -> None:
    plan = scheduler(slots=4, budget=2)
    members = [sequence(i, 1, 12) for i in range(4)]
    for member in members:
        plan.add(member)
    progress = []
    for _ in range(16):
        run_step(plan)
        progress.append([member.num_generated for member in members])
    assert all(max(row) - min(row) <= 2 for row in progress), progress


def test_a_long_prompt_does_not_hold_up_those_who_decode() -> None:
    plan = scheduler(pages=40, budget=16, chunk=16)
    short = sequence(0, 1, 20)
    plan.add(short)
    run_step(plan)
    plan.add(sequence(1, 200, 1))
    for _ in range(10):
        before = short.num_generated
        run_step(plan)
        assert short.num_generated == before + 1


def test_what_can_never_run_is_refused_with_numbers() -> None:
    with pytest.raises(CapacityError, match="90 prompt tokens and up to 10 new ones need 13 pages"):
        scheduler().check_fits(sequence(0, 90, 10))


def test_a_pool_knows_its_owners() -> None:
    pool = Pool(3)
    mine = pool.take(2, owner=7)
    pool.check_integrity()
    assert pool.num_free == 1
    with pytest.raises(AssertionError, match="not owned by request 8"):
        pool.give_back(mine, owner=8)
    pool.give_back(mine, owner=7)
    with pytest.raises(AssertionError, match="not owned"):
        pool.give_back(mine[:1], owner=7)
    pool.check_integrity()
