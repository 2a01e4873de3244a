"""Where checkpoints are placed, that they carry their depth, and that nobody writes into them."""

from __future__ import annotations

import pytest

from k3vl.lm.arena import Arena
from k3vl.lm.prefix import PrefixTree
from k3vl.lm.sequence import checkpoint_depths
from k3vl.types import Prompt
from tests.lm.test_reuse import ask, engine, model, text  # noqa: F401 - model: both kernels
from tests.lm.test_scheduler import PAGE, Machine, finish_all, scheduler, sequence
from tests.tiny import tokens


def test_states_are_wanted_at_ends_at_hints_and_further_and_further_from_the_end() -> None:
    depths = checkpoint_depths(10_000, (100, 4_000, 20_000), 64)
    ends = {9_999 // 64, 10_000 // 64}
    hints = {100 // 64, 4_000 // 64}
    spaced = {(10_000 - distance) // 64 for distance in (512, 1024, 2048, 4096, 8192)}
    assert depths == ends | hints | spaced, "a hint behind the prompt is none"
    assert checkpoint_depths(63, (10,), 64) == set()
    assert checkpoint_depths(129, (), 64) == {2}


def test_a_state_of_another_depth_is_refused() -> None:
    arena = Arena(8)
    tree = PrefixTree(arena, page_size=PAGE, units_per_checkpoint=2)
    node = tree.root
    for key in ("a", "b"):
        (unit,) = arena.take(1, "page")
        node, _ = tree.insert(node, (key,), unit)
    units = tree.reserve(node, passed=False)
    assert units is not None
    for depth in (1, 3):
        with pytest.raises(AssertionError, match=f"state of page {depth} attached to page 2"):
            tree.attach(node, units, depth)
    tree.attach(node, units, 2)
    assert [n.depth for n in tree.match((("a",), ("b",), ("c",)), 3).path] == [1, 2]
    assert not tree.match((("a",), ("b",), ("c",)), 1).path, "deeper than is asked for"


def test_a_match_whose_state_is_not_of_its_depth_is_not_restored() -> None:
    plan = scheduler(units=60)
    machine = Machine(plan)
    plan.add(sequence(0, 4 * PAGE + 1, 1, family=1))
    finish_all(machine)
    (node,) = (node for node in plan.tree.nodes() if node.checkpoint is not None)
    node.depth -= 1
    plan.add(sequence(1, 4 * PAGE + 1, 1, family=1))
    with pytest.raises(AssertionError):
        plan.plan()


def test_a_kept_state_is_not_written_by_those_who_start_from_it() -> None:
    """Its units hold the same bytes after other requests have gone on from there."""
    runner = engine()
    first = ask(runner, text(70))
    node = max(
        (n for n in runner.scheduler.tree.nodes() if n.checkpoint is not None),
        key=lambda n: n.depth,
    )
    assert node.checkpoint is not None
    units = list(node.checkpoint.units)
    buffer = runner.cache.buffer.view(-1, runner.scheduler.sizes.unit_bytes)
    before = buffer[units].clone()
    for tail in range(3):
        longer = Prompt((*text(70).token_ids, *tokens(20, seed=tail)))
        assert ask(runner, longer, max_tokens=20).cached == 64
    assert node.checkpoint.kept
    assert (buffer[units] == before).all()
    assert ask(runner, text(70)).same_as(first)
