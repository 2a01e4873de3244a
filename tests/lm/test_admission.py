"""Who waits, for how long, and what that saves; integers only."""

from __future__ import annotations

import random

import pytest

from k3vl.lm import admission, scheduler
from k3vl.lm.admission import Admission
from k3vl.lm.cache import CacheSizes
from k3vl.lm.scheduler import Scheduler
from k3vl.lm.sequence import Sequence, checkpoint_depths
from tests.lm.test_scheduler import PAGE, Machine, finish_all, sequence


def make(units: int, slot: int = 3, **options) -> Scheduler:
    sizes = CacheSizes(num_units=units, unit_bytes=64, page_size=PAGE, units_per_slot=slot)
    return Scheduler(sizes=sizes, max_step_tokens=64, prefill_chunk=64, **options)


class Session:
    """One that comes back: every turn is the last one's prompt, its answer, and a page more."""

    def __init__(self, name: int, rng: random.Random, *, turns: int, pause: int) -> None:
        self.name, self.rng, self.turns, self.pause = name, rng, turns, pause
        self.pages, self.due = rng.randint(4, 12), rng.randint(0, 9)

    def turn(self, number: int) -> Sequence:
        self.turns -= 1
        self.pages += 1
        length = self.pages * PAGE + self.rng.randint(0, PAGE - 1)
        return Sequence(
            id=number,
            num_prompt=length,
            max_new=self.rng.randint(1, 2 * PAGE),
            keys=tuple((self.name, i) for i in range(self.pages)),
            wanted=checkpoint_depths(length, (), PAGE),
        )


def replay(plan: Scheduler, sessions: list[Session], *, check_every: int = 1) -> list[int]:
    """Run all turns; ids in the order in which they entered first.

    At every step somebody runs, and no arrival was passed by more often than it may be.
    """
    machine, step, number = Machine(plan, check_every=check_every), 0, 0
    owner: dict[int, Session] = {}
    entered: list[int] = []
    while any(s.turns for s in sessions) or owner:
        for session in sessions:
            if session.turns and session.due <= step and session not in owner.values():
                new = session.turn(number)
                plan.check_fits(new)
                plan.add(new)
                owner[number] = session
                number += 1
        if not owner:
            step += 1
            continue
        finished = machine.step()
        known = set(entered)
        entered += sorted({s.id for s in (*plan.running, *finished)} - known)
        for done in finished:
            session = owner.pop(done.id)
            session.due = step + session.rng.randint(1, session.pause)
        step += 1
        assert plan.running or not plan.waiting or finished, "somebody runs"
        assert all(s.overtaken <= admission.OVERTAKEN for s in plan.waiting)
        assert step < 50_000, "no progress"
    plan.check_integrity()
    assert plan.arena.num_available == plan.arena.size
    return entered


def sessions(seed: int, count: int, turns: int, pause: int = 30) -> list[Session]:
    rng = random.Random(seed)
    return [Session(i, rng, turns=turns, pause=pause) for i in range(count)]


class Never(Admission):
    """Admits in order of arrival whoever fits."""

    def in_turn(self, waiting):
        return list(waiting)

    def holds_back(self, sequence, hit, running):
        return False


def never(units: int, slot: int) -> Scheduler:
    plan = make(units, slot)
    plan.admission = Never(sizes=plan.sizes, arena=plan.arena, tree=plan.tree)
    return plan


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_whoever_waits_gets_in(first: int, monkeypatch) -> None:
    """Sessions that come back, more than fit; books are checked, and nobody is passed too often."""
    held = 0
    for seed in range(first, first + 50):
        rng = random.Random(seed)
        bound = rng.choice((0, 1, 3, 64))
        for module in (admission, scheduler):
            monkeypatch.setattr(module, "OVERTAKEN", bound)
        plan = make(rng.randint(40, 120), rng.randint(1, 6), keep_decoded=rng.random() < 0.5)
        entered = replay(plan, sessions(seed, rng.randint(4, 16), 4), check_every=5)
        assert sorted(entered) == list(range(len(entered)))
        if bound == 0:
            assert entered == sorted(entered), "in order of arrival"
        held += plan.admission.held_back
    assert held > 0


@pytest.mark.slow
def test_many_more_sessions_get_in(monkeypatch) -> None:
    for first in range(300, 3000, 50):
        test_whoever_waits_gets_in(first, monkeypatch)


def test_waiting_spares_what_comes_back(monkeypatch) -> None:
    """Far more sessions than fit: less is computed again, by much."""
    monkeypatch.setattr(admission, "DECODED", 1)  # prompts are short here
    plans = make(150, 6), never(150, 6)
    for plan in plans:
        replay(plan, sessions(1, 16, 10, 4))
    spared, lost = (plan.counts.prompt_tokens - plan.counts.hit_tokens for plan in plans)
    assert plans[0].admission.held_back > 0
    assert plans[0].admission.lost_tokens > 0, "that is how it knows"
    assert spared < 0.7 * lost


def test_nobody_waits_for_what_never_comes_back() -> None:
    plan = make(150)
    machine = Machine(plan)
    for number in range(60):
        plan.add(sequence(number, 6 * PAGE + 3, 8))
    finish_all(machine)
    assert plan.arena.evictions["checkpoint"] > 0
    assert plan.admission.lost_tokens == plan.admission.held_back == 0


def fill(plan: Scheduler, *families: int) -> Machine:
    machine = Machine(plan)
    for number, family in enumerate(families):
        plan.add(sequence(number, 6 * PAGE + 1, 1, family=family))
        finish_all(machine)
    return machine


def test_a_lost_prefix_that_is_asked_for_is_charged_and_work_pays_for_it() -> None:
    plan = make(20)
    fill(plan, 1)
    plan.arena.give_back(plan.arena.take(20, "page"), "page")
    assert plan.admission.lost_tokens == 0, "nobody has asked yet"
    machine = fill(plan, 1)
    assert plan.admission.lost_tokens == 6 * PAGE
    plan.admission.balance = -30
    plan.add(sequence(9, 2 * PAGE, 2))
    machine.step()
    assert plan.admission.balance == -30 + 2 * PAGE // admission.TOLERATED
    machine.step()
    paid = 2 * PAGE // admission.TOLERATED + admission.DECODED // admission.TOLERATED
    assert plan.admission.balance == -30 + paid


def test_a_newcomer_waits_while_it_would_take_an_end_and_half_is_in_use() -> None:
    plan = make(60)
    machine = fill(plan, 1, 2)
    kept = 2 * (6 + 3)
    assert plan.arena.num_available - plan.arena.num_spare == kept, "ends and what leads to them"
    busy = sequence(10, 26 * PAGE + 1, 30, family=7)
    plan.add(busy)
    machine.step()
    plan.admission.balance = 0
    new = sequence(11, 10 * PAGE, 1)
    plan.add(new)
    while busy in plan.running:
        plan.admission.balance = 0
        assert new in plan.waiting
        machine.step()
    machine.step()
    assert new not in plan.waiting, "what is idle may keep half of the arena, no more"
    assert plan.admission.held_back > 0


def test_who_is_mostly_here_goes_first_but_not_for_ever(monkeypatch) -> None:
    for module in (admission, scheduler):
        monkeypatch.setattr(module, "OVERTAKEN", 2)
    plan = make(60, max_requests=1)
    machine = fill(plan, 1)
    strange = sequence(20, 6 * PAGE, 1)
    plan.add(strange)
    back = [sequence(21 + i, 6 * PAGE + 1, 1, family=1) for i in range(4)]
    for new in back:
        plan.add(new)
    order = []
    while plan.waiting or plan.running:
        order += [done.id for done in machine.step()]
    assert order == [21, 22, 20, 23, 24]


def test_a_state_that_has_been_passed_goes_before_an_end() -> None:
    """The middle states of a long prompt go first, whatever their worth; a fork is no middle."""
    plan = make(60, slot=2)
    machine = Machine(plan)
    plan.add(sequence(0, 20 * PAGE + 1, 1, family=1))
    plan.tree.on_lost = lambda node: pytest.fail("an end has gone")
    machine.plan.waiting[0].wanted = {5, 12, 20}
    finish_all(machine)
    assert [n.depth for n in plan.tree.nodes() if n.checkpoint] == [5, 12, 20]
    assert [n.depth for n in plan.tree.nodes() if n.checkpoint and n.checkpoint.spare] == [5, 12]
    fork = sequence(1, 9 * PAGE + 1, 1, family=1)
    fork.keys = (*fork.keys[:5], *((2, i) for i in range(4)))
    plan.add(fork)
    finish_all(machine)
    assert {n.depth for n in plan.tree.nodes() if n.checkpoint and n.checkpoint.spare} == {12}
    plan.check_integrity()
    free = plan.arena.num_free
    plan.arena.give_back(plan.arena.take(free + 1, "page"), "page")
    assert 12 not in {n.depth for n in plan.tree.nodes() if n.checkpoint}
    plan.check_integrity()
