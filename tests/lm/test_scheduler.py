"""Arena, prefix tree and scheduler over thousands of random traces; integers only."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from k3vl.errors import CapacityError
from k3vl.lm.arena import Arena, Entry
from k3vl.lm.cache import CacheSizes
from k3vl.lm.features import MediaItem
from k3vl.lm.scheduler import Scheduler
from k3vl.lm.sequence import Sequence, checkpoint_depths, media_units

if TYPE_CHECKING:
    from k3vl.lm.plan import Step

PAGE = 8


def scheduler(
    *, units: int = 40, slot: int = 3, budget: int = 32, chunk: int = 16, **options
) -> Scheduler:
    sizes = CacheSizes(
        num_units=units, unit_bytes=64, page_size=PAGE, units_per_slot=slot, feature_rows=4
    )
    return Scheduler(sizes=sizes, max_step_tokens=budget, prefill_chunk=chunk, **options)


def sequence(
    number: int, prompt: int, new: int, *, family: int | None = None, media: tuple = ()
) -> Sequence:
    """Prompts of one family share their pages; a family's pages contain its media."""
    keys = [(family if family is not None else f"own {number}", i) for i in range(prompt // PAGE)]
    return Sequence(
        id=number,
        num_prompt=prompt,
        max_new=new,
        keys=tuple(keys),
        wanted=checkpoint_depths(prompt, (), PAGE),
        media=media,
    )


def item(offset: int, tokens: int, digest: str, patches: int = 4) -> MediaItem:
    return MediaItem(offset=offset, num_tokens=tokens, patches=patches, key=(None, digest))


class Machine:
    """Carries out plans as the engine does, and checks what may be checked at every step."""

    def __init__(self, plan: Scheduler, *, check_every: int = 1) -> None:
        self.plan, self.check_every, self.steps = plan, check_every, 0
        self.state: dict[int, tuple] = {}  # unit -> what was written there, as (family key, depth)
        self.encoded: list[str] = []
        self.decoded = 0
        if isinstance(plan.tier, FakeTier):
            plan.tier.state = self.state
        self.waited = 0

    def step(self) -> list[Sequence]:
        """One step; the sequences that finished."""
        plan, step = self.plan, self.plan.plan()
        self.steps += 1
        if self.steps % self.check_every == 0:
            plan.check_integrity()
        assert self._moves(step) == bool(plan.running), "every step advances something"
        assert sum(n for _, n in step.tokens) <= plan.max_step_tokens
        for new in step.admitted:
            depth = 0
            if new.restore is not None:
                depth = self.state[new.restore.units[0]][1]
                assert self.state[new.restore.units[0]][0] == new.keys[depth - 1], "another's state"
                self.state[new.slot[0]] = self.state[new.restore.units[0]]
            assert depth * PAGE == new.num_cached
            plan.restored(new)
        for feature in step.encode:
            assert feature.entry.kept
            assert feature.entry.refs
            self.encoded.append(feature.item.key[1])
        finished = self._encode(step)
        finished += [s for s, n in step.tokens if s.slot is not None and self._run(s, n)]
        if self.steps % self.check_every == 0:
            plan.check_integrity()
        return finished

    def _moves(self, step: Step) -> bool:
        return bool(step.tokens or step.encode)

    def _encode(self, step: Step) -> list[Sequence]:
        """Make what the step wants made; the sequences that this has ended."""
        patches = [feature.item.patches for feature in step.encode]
        assert len(patches) <= 1 or sum(patches) <= self.plan.max_step_patches
        for feature in step.encode:
            feature.ready = True
        return []

    def _run(self, seq: Sequence, tokens: int) -> bool:
        for index in seq.overlapping(seq.num_cached, seq.num_cached + tokens):
            assert seq.pinned[index].ready, "media are encoded before their tokens run"
        assert tokens == 1 or not seq.is_decoding
        self.decoded += seq.is_decoding
        end = seq.num_cached + tokens
        while seq.num_cached < end:
            part = min(PAGE, end - seq.num_cached)
            assert len(seq.pages) * PAGE >= seq.num_cached + part
            if self.plan.keep_decoded and (seq.num_cached + part) // PAGE > len(seq.keys):
                seq.keys = (*seq.keys, (seq.keys[0][0] if seq.keys else seq.id, len(seq.keys)))
            units = self.plan.advance(seq, part)
            if units is not None:
                depth = seq.num_cached // PAGE
                assert seq.num_cached % PAGE == 0
                self.state[units[0]] = (seq.keys[depth - 1], depth)
        if seq.slot is not None and seq.num_cached % PAGE == 0 and seq.num_cached > 0:
            depth = seq.num_cached // PAGE  # what a preemption in the next plan may leave behind
            if depth <= len(seq.keys):
                self.state[seq.slot[0]] = (seq.keys[depth - 1], depth)
        if seq.num_pending:
            return False
        seq.num_generated += 1
        if seq.num_generated < seq.max_new:
            return False
        self.plan.finish(seq)
        return True


class FakeTier:
    """Keeps what a machine wrote into the units, a few of them at a time."""

    def __init__(self, size: int) -> None:
        self.size, self.state, self.held = size, {}, {}

    def __contains__(self, name) -> bool:
        return name in self.held

    def store(self, name, units) -> None:
        self.held.pop(name, None)
        self.held[name] = [self.state.get(unit) for unit in units]
        while sum(map(len, self.held.values())) > self.size:
            del self.held[next(iter(self.held))]

    def fetch(self, name, units) -> bool:
        content = self.held.get(name, ())
        self.state.update(zip(units, content, strict=bool(content)))
        return bool(content)

    def clear(self) -> None:
        self.held.clear()


class LateMachine(Machine):
    """Outputs come steps later, in any order, and some never: their users end."""

    def __init__(self, plan: Scheduler, rng: random.Random, *, check_every: int = 1) -> None:
        super().__init__(plan, check_every=check_every)
        assert plan.encodes_beside
        self.rng, self.under_way = rng, []

    def _moves(self, step: Step) -> bool:
        self.under_way = [feature for feature in self.under_way if feature.entry.kept]
        return bool(step.tokens or step.encode or self.under_way)

    def _encode(self, step: Step) -> list[Sequence]:
        self.under_way += step.encode
        patches = [feature.item.patches for feature in self.under_way]
        assert len(patches) <= 1 or sum(patches) <= self.plan.max_step_patches
        done = [f for f in self.under_way if self.rng.random() < 0.3]
        if not step.tokens and not done and self.under_way:
            done = [self.rng.choice(self.under_way)]  # the engine waits for one
            self.waited += 1
        self.under_way = [f for f in self.under_way if f not in done]
        ended = []
        for feature in done:
            if self.rng.random() < 0.9:
                feature.ready = True
                continue
            users = [s for s in self.plan.running if feature in s.pinned.values()]
            for user in users:
                self.plan.finish(user)
            ended += users
            assert not feature.entry.kept
        return ended


def random_sequence(rng: random.Random, number: int, units: int, slot: int) -> Sequence:
    room = (units - slot - 4) * PAGE
    prompt = rng.randint(1, max(1, room * 2 // 3))
    media, at = [], 0
    while rng.random() < 0.6:
        at += rng.choice((0, 0, 1, 3, 20))
        size = rng.randint(1, 12)
        if at + size > prompt:
            break
        media.append(item(at, size, f"{rng.randrange(6)}-{size}", patches=4 * size))
        at += size
    return sequence(
        number,
        prompt,
        rng.randint(1, max(1, room - prompt)),
        family=rng.choice((None, 0, 1, 2)) if not media else None,
        media=tuple(media),
    )


@pytest.mark.parametrize("beside", [False, True], ids=["in step", "beside"])
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_random_traces_finish_reuse_and_leak_nothing(first: int, *, beside: bool) -> None:
    """Books are checked at every step of one trace in five, at every ninth of the others."""
    random_traces(range(first, first + 100), beside=beside)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True], ids=["in step", "beside"])
def test_many_more_random_traces(*, beside: bool) -> None:
    random_traces(range(1000, 20_000), beside=beside)


def random_traces(seeds: range, *, beside: bool) -> None:
    waited = 0
    for seed in seeds:
        rng = random.Random(seed)
        slot, units = rng.randint(1, 4), rng.randint(12, 40)
        plan = scheduler(
            units=units,
            slot=slot,
            budget=rng.randint(PAGE, 40),
            chunk=rng.randint(PAGE, 30),
            max_requests=rng.randint(1, 6),
            max_step_patches=rng.randint(1, 80),
            reuse=rng.random() < 0.8,
            keep_decoded=rng.random() < 0.5,
            tier=rng.choice((None, FakeTier(rng.randint(1, 60)))),
            encodes_beside=beside,
        )
        check = 9 if seed % 5 else 1
        late = LateMachine(plan, rng, check_every=check) if beside else None
        machine = late or Machine(plan, check_every=check)
        live, arrivals, steps = {}, [], 0
        for number in range(12):
            new = random_sequence(rng, number, units, slot)
            try:
                plan.check_fits(new)
            except CapacityError:
                continue
            arrivals.append(new)
        while arrivals or live:
            while arrivals and (not live or rng.random() < 0.4):
                new = arrivals.pop(0)
                plan.add(new)
                live[new.id] = new
            if live and rng.random() < 0.05:
                plan.finish(live.pop(rng.choice(list(live))))
                plan.check_integrity()
            for done in machine.step():
                live.pop(done.id)
            steps += 1
            assert steps < 5000, f"no progress, seed {seed}"
        assert plan.arena.num_available == plan.arena.size, "nothing is held when nobody runs"
        if not plan.reuse:
            assert plan.arena.num_free == plan.arena.size
        waited += machine.waited
    assert bool(waited) == beside


def finish_all(machine: Machine, limit: int = 2000) -> int:
    steps = 0
    while machine.plan.running or machine.plan.waiting:
        machine.step()
        steps += 1
        assert steps < limit
    return steps


def test_every_step_moves_something() -> None:
    plan = scheduler(budget=PAGE, chunk=PAGE)
    for i in range(3):
        plan.add(sequence(i, 5, 4))
    assert finish_all(Machine(plan)) <= 3 * (1 + 4 - 1)


def test_nobody_starves_when_a_step_cannot_hold_all_who_decode() -> None:
    plan = scheduler(units=200, budget=PAGE)
    members = [sequence(i, 1, 40) for i in range(2 * PAGE)]
    for member in members:
        plan.add(member)
    machine = Machine(plan)
    for _ in range(8):
        machine.step()
    for _ in range(40):
        machine.step()
        made = [member.num_generated for member in members]
        assert max(made) - min(made) <= 3, made


def test_a_long_prompt_does_not_hold_up_those_who_decode() -> None:
    plan = scheduler(units=60, budget=16, chunk=16)
    short = sequence(0, 1, 20)
    plan.add(short)
    machine = Machine(plan)
    machine.step()
    plan.add(sequence(1, 200, 1))
    for _ in range(10):
        before = short.num_generated
        machine.step()
        assert short.num_generated == before + 1


def test_what_can_never_run_is_refused_with_numbers() -> None:
    with pytest.raises(CapacityError, match="90 prompt tokens and up to 300 new ones need 49"):
        scheduler().check_fits(sequence(0, 90, 300))
    large = item(3, 200, "large")
    with pytest.raises(CapacityError, match="50 of media features"):
        scheduler().check_fits(sequence(0, 204, 1, media=(large,)))


def test_two_items_that_do_not_fit_together_take_turns() -> None:
    """Each item nearly fills what is left; the text between them is shorter than a page."""
    media = (item(0, 41, "a"), item(44, 40, "b"))
    one = sequence(0, 88, 4, media=media)
    need = 3 + 12 + media_units(one, scheduler().sizes)
    assert media_units(one, scheduler().sizes) == 21, "both lie in one page"
    plan = scheduler(units=need)
    other = sequence(1, 88, 4, media=(item(0, 41, "c"), item(44, 40, "d")))
    for new in (one, other):
        plan.check_fits(new)
        plan.add(new)
    machine = Machine(plan)
    finish_all(machine, 200)
    with pytest.raises(CapacityError):
        scheduler(units=need - 1).check_fits(sequence(0, 88, 4, media=media))


def test_items_of_several_requests_are_encoded_in_one_step_under_the_budget() -> None:
    plan = scheduler(units=200, budget=64, max_step_patches=40)
    for i in range(4):
        plan.add(sequence(i, 12, 2, media=(item(2, 5, f"{i}", patches=20),)))
    step = plan.plan()
    assert [feature.item.key[1] for feature in step.encode] == ["0", "1"]
    assert [s.id for s, _ in step.tokens] == [0, 1], "the others have no page without media"


def test_others_run_while_pictures_are_encoded() -> None:
    plan = scheduler(units=200, budget=64, chunk=64, encodes_beside=True)
    plan.add(sequence(0, 30, 2, media=(item(PAGE + 3, 5, "a"),)))
    plan.add(sequence(1, 12, 2, media=(item(2, 5, "b"),)))
    plan.add(sequence(2, 6, 2))
    step = plan.plan()
    assert [feature.item.key[1] for feature in step.encode] == ["a", "b"]
    assert [(s.id, n) for s, n in step.tokens] == [(2, 6)]
    plan.advance(plan.running[2], 6)
    plan.finish(plan.running[2])
    step.encode[1].ready = True
    step = plan.plan()
    assert not step.encode
    assert [(s.id, n) for s, n in step.tokens] == [(1, 12)]
    plan.advance(plan.running[1], PAGE)
    plan.finish(plan.running[1])
    step = plan.plan()
    assert [(s.id, n) for s, n in step.tokens] == [(0, PAGE)], "there is nothing else to do"


def test_a_beginning_that_others_wait_for_is_not_held_up_by_a_picture() -> None:
    plan = scheduler(units=200, budget=64, chunk=64, encodes_beside=True)
    first, second = (
        sequence(i, 5 * PAGE, 2, family=1, media=(item(2 * PAGE + 1, 5, f"{i}"),)) for i in range(2)
    )
    second.keys = (*first.keys[:2], *((1, i) for i in range(3)))
    for new in (sequence(9, 1, 9), first, second):
        plan.add(new)
    machine = Machine(plan)
    step = plan.plan()
    assert [(s.id, n) for s, n in step.tokens] == [(9, 1), (0, 2 * PAGE)]
    for seq, tokens in step.tokens:
        machine._run(seq, tokens)
    step = plan.plan()
    assert [s.id for s in step.admitted] == [1]
    assert [feature.item.key[1] for feature in step.encode] == ["1"], "both are under way"
    assert [s.id for s, _ in step.tokens] == [9]


def test_media_further_on_are_encoded_in_time() -> None:
    """As many at once as the budget allows; what somebody stands before goes first."""
    plan = scheduler(units=200, chunk=PAGE, encodes_beside=True, max_step_patches=10)
    sizes = (4, 4, 12, 1)
    media = tuple(item(20 * i, 5, f"{i}", patches=n) for i, n in enumerate(sizes))
    plan.add(sequence(0, 90, 1, media=media))
    plan.add(sequence(1, 20, 1, media=(item(10, 5, "small", patches=1),)))
    started = []
    while plan.running or plan.waiting:
        step = plan.plan()
        plan.check_integrity()
        started.append([feature.item.key[1] for feature in step.encode])
        for feature in step.encode:
            feature.ready = True
        for seq, tokens in step.tokens:
            plan.advance(seq, tokens)
            if not seq.num_pending:
                plan.finish(seq)
    assert [names for names in started if names] == [["0", "1"], ["small"], ["2"], ["3"]]


def test_small_pictures_do_not_pass_by_a_large_one_for_ever() -> None:
    plan = scheduler(units=200, encodes_beside=True, max_step_patches=10, reuse=False)
    for number, patches in enumerate((4, 4, 12, *[4] * 9)):
        plan.add(sequence(number, 9, 1, media=(item(0, 5, f"{number}", patches=patches),)))
    started, under_way = [], []
    while "2" not in started:
        step = plan.plan()
        started += [feature.item.key[1] for feature in step.encode]
        under_way += step.encode
        under_way.pop(0).ready = True  # one a step, so the encoder never runs out
        for seq, tokens in step.tokens:
            plan.advance(seq, min(tokens, PAGE))
            plan.finish(seq)
    assert started == ["0", "1", "2"]


def test_nobody_gives_way_to_media_further_on() -> None:
    plan = scheduler(units=3 + 11 + 5 + 3 + 2 + 1, chunk=PAGE, encodes_beside=True)
    first = sequence(0, 11 * PAGE, 1, media=(item(0, 20, "near"), item(40, 40, "far")))
    plan.add(first)
    plan.add(sequence(1, 2 * PAGE, PAGE))
    machine = Machine(plan)
    machine.step()
    assert machine.encoded == ["near"], "what is left is less than the far one needs"
    assert len(plan.running) == 2
    finish_all(machine)
    assert machine.encoded == ["near", "far"]
    assert plan.counts.preemptions == 1, "it came there"


def test_a_picture_that_two_requests_need_is_encoded_once() -> None:
    plan = scheduler(units=200, budget=64)
    shared = item(2, 5, "shared")
    for i in range(2):
        plan.add(sequence(i, 12, 2, media=(shared,)))
    machine = Machine(plan)
    finish_all(machine)
    plan.add(sequence(2, 12, 2, media=(shared,)))
    finish_all(machine)
    assert machine.encoded == ["shared"]
    assert (plan.features.hits, plan.features.misses) == (2, 1)


def test_a_second_request_starts_from_the_deepest_state() -> None:
    plan = scheduler(units=200, budget=64, chunk=64)
    machine = Machine(plan)
    for number, length in enumerate((3 * PAGE, 3 * PAGE, 3 * PAGE + 1, 4 * PAGE, 2 * PAGE - 1)):
        new = sequence(number, length, 2, family=1)
        plan.add(new)
        finish_all(machine)
        assert new.num_hit == (0, 2 * PAGE, 3 * PAGE, 3 * PAGE, 0)[number]
    assert plan.counts.lookups == {"unknown": 1, "hit": 3, "no_checkpoint": 1}


def test_concurrent_cold_starts_compute_a_prefix_once() -> None:
    plan = scheduler(units=400, budget=64, chunk=16)
    machine = Machine(plan)
    members = [sequence(i, 10 * PAGE + 1 + i, 2, family=1) for i in range(8)]
    for member in members:
        plan.add(member)
    finish_all(machine)
    assert [member.num_hit for member in members] == [0] + [10 * PAGE] * 7


def test_a_fork_seen_twice_leaves_a_state() -> None:
    plan = scheduler(units=400, budget=256, chunk=256)
    machine = Machine(plan)
    hits = []
    for number in range(3):
        new = sequence(number, 12 * PAGE, 1, family=1)
        new.keys = (*new.keys[:5], *((number, i) for i in range(7)))
        plan.add(new)
        finish_all(machine)
        hits.append(new.num_hit)
    assert hits == [0, 0, 5 * PAGE]


@pytest.mark.parametrize("keep_decoded", [False, True])
def test_a_turn_goes_on_behind_the_answer_where_decoding_is_kept(*, keep_decoded: bool) -> None:
    """One state per answer is left, at its last page border; its last token was never run."""
    plan = scheduler(units=200, budget=64, chunk=64, keep_decoded=keep_decoded)
    machine = Machine(plan)
    plan.add(sequence(0, 2 * PAGE + 3, 4 * PAGE, family=1))
    finish_all(machine)
    kept = plan.arena.units_by_kind()
    assert kept["page"] == (6 if keep_decoded else 2)
    assert kept["checkpoint"] == 3 * (2 if keep_decoded else 1)
    turn = sequence(1, 8 * PAGE, 1, family=1)
    plan.add(turn)
    finish_all(machine)
    assert turn.num_hit == (6 if keep_decoded else 2) * PAGE


@pytest.mark.parametrize("keep_decoded", [False, True])
def test_after_a_preemption_only_what_is_not_kept_is_replayed(*, keep_decoded: bool) -> None:
    plan = scheduler(units=2 * 3 + 8, budget=64, keep_decoded=keep_decoded)
    machine = Machine(plan)
    for i in range(2):
        plan.add(sequence(i, 2 * PAGE, 5 * PAGE))
    finish_all(machine)
    assert plan.counts.preemptions > 0
    assert (machine.decoded <= 2 * (5 * PAGE - 1)) == keep_decoded
    assert plan.counts.recomputed_tokens > 0


def test_what_went_to_another_tier_comes_back() -> None:
    """Pages and the deepest state; a prompt that does not fit beside them does without."""
    tier = FakeTier(100)
    plan = scheduler(units=20, budget=64, chunk=64, tier=tier)
    machine = Machine(plan)
    hits = []
    for family in (1, 2, 1, 3, 1):
        new = sequence(len(hits), 8 * PAGE + 1, 2, family=family)
        plan.add(new)
        finish_all(machine)
        hits.append(new.num_hit)
    assert hits == [0, 0, 8 * PAGE, 0, 8 * PAGE]
    assert plan.arena.evictions["checkpoint"] > 0
    plan.forget()
    assert not tier.held


def test_without_room_a_checkpoint_is_left_out() -> None:
    plan = scheduler(units=3 + 4, budget=64)
    new = sequence(0, 3 * PAGE, 2, family=1)
    plan.add(new)
    finish_all(Machine(plan))
    assert plan.counts.checkpoints == 0
    assert plan.counts.checkpoints_skipped > 0


def test_the_latest_gives_way_and_comes_back() -> None:
    plan = scheduler(units=2 * 3 + 8, budget=64)
    old, new = sequence(0, 2 * PAGE, 5 * PAGE), sequence(1, 2 * PAGE, 5 * PAGE)
    for member in (old, new):
        plan.add(member)
    machine = Machine(plan)
    finish_all(machine)
    assert plan.counts.preemptions > 0
    assert old.num_generated == new.num_generated == 5 * PAGE


def test_the_least_valuable_goes_first_and_unused_value_fades() -> None:
    arena, gone = Arena(4), []

    def keep(name: str, value: float) -> Entry:
        entry = Entry(
            kind="features",
            units=arena.take(1, "features"),
            value=lambda: value,
            on_evict=lambda: gone.append(name),
        )
        arena.keep(entry)
        return entry

    entries = {name: keep(name, value) for name, value in (("a", 5.0), ("b", 1.0), ("c", 3.0))}
    arena.hold(entries["b"])
    arena.take(2, "page")
    assert gone == ["c"], "the cheapest that nobody uses"
    assert not arena.fits(2)
    arena.release(entries["b"])
    arena.check_integrity()
    arena.take(1, "page")
    assert gone == ["c", "b"]
    assert arena.try_take(1, "page", rank=4.0) is None, "a is worth more"
    assert arena.try_take(1, "page", rank=6.0)
    assert gone == ["c", "b", "a"]
    arena.check_integrity()


def test_the_arena_knows_its_owners() -> None:
    arena = Arena(3)
    mine = arena.take(2, "slot")
    with pytest.raises(AssertionError, match="no private page"):
        arena.give_back(mine, "page")
    arena.give_back(mine, "slot")
    with pytest.raises(AssertionError, match="no private slot"):
        arena.give_back(mine[:1], "slot")
    arena.check_integrity()
