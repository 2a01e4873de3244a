"""The scheduler at K3's real size against a static split: what is promised, run and recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.simulate_k3 import MEMORIES, simulate, traces

ROOT = Path(__file__).resolve().parents[2]
RECORD = json.loads((ROOT / "benchmarks" / "simulate_k3.json").read_text())["results"]


def more_at_once(trace: str) -> float:
    """Requests that run at once, over those of the static split."""
    one, split = (RECORD[trace][memory] for memory in ("one arena", "static split"))
    return one["concurrency_mean"] / split["concurrency_mean"]


def test_the_record_holds_what_is_promised() -> None:
    assert set(RECORD) == set(traces())
    assert more_at_once("mixed") >= 1.5
    assert all(more_at_once(trace) >= 1.0 for trace in RECORD)


@pytest.mark.parametrize("sessions", [40, 60, 80])
def test_more_sessions_than_fit_do_not_undo_each_other(sessions: int) -> None:
    """Prefixes that come back after a pause are kept rather than more of them begun."""
    one, *others = RECORD[f"{sessions} agent sessions"].values()
    for other in others:
        assert one["output_tokens_per_second"] > 1.5 * other["output_tokens_per_second"]
        assert one["tokens_recomputed"] < 0.5 * other["tokens_recomputed"]
        assert one["ttft_mean"] < other["ttft_mean"]


@pytest.mark.slow
@pytest.mark.parametrize("trace", list(RECORD))
def test_the_record_is_what_the_simulation_gives(trace: str) -> None:
    for memory, make in MEMORIES.items():
        found = simulate(make(), traces()[trace])
        assert {key: round(value, 4) for key, value in found.items()} == RECORD[trace][memory]
