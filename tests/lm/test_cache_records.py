"""What was measured of the caches holds what is promised of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3vl.load import KEPT_PICTURES

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MIB = 2**20


@pytest.mark.parametrize(
    ("what", "most"),
    [("second_turn_448x336", 0.20), ("shared_head_2000", 0.15), ("fifty_questions_apart", 1 / 5)],
)
def test_warm_requests_take_a_part_of_the_time(what: str, most: float) -> None:
    """With caches over without, in turns in one run; medians of every round that was made."""
    seconds = json.loads((BENCHMARKS / "prefix_cache.json").read_text())["results"][what]["seconds"]
    on, off = (sorted(seconds["all"][side]) for side in ("on", "off"))
    assert len(on) == len(off) >= 3
    assert on[len(on) // 2] <= most * off[len(off) // 2]


def test_memory_under_load_stays_within_the_budget() -> None:
    for run in json.loads((BENCHMARKS / "memory_under_load.json").read_text())["results"]:
        assert run["budget_bytes"] - run["unit_bytes"] < run["buffer_bytes"] <= run["budget_bytes"]
        assert run["most_held_bytes"] == run["buffer_bytes"], "the load fills it"
        beside = KEPT_PICTURES + 24 * MIB  # processed pictures for the next turn, and work space
        assert run["rss_peak_over_bytes"] < run["budget_bytes"] + beside
