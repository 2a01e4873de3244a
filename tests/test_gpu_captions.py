"""What ``benchmarks/gpu_captions.py`` makes of what it measures."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.gpu_captions import (
    Options,
    engine_field,
    in_both,
    keeper,
    make_pictures,
    replace_fields,
)
from benchmarks.gpu_equality import Recorder, compare, parting, questions_about_pictures
from benchmarks.gpu_profile import covered, summary_of
from benchmarks.gpu_rounds import in_short, summary
from benchmarks.gpu_subjects import Failed, Subject, ahead, patches_of, steady
from k3vl.lm.backend import Token
from k3vl.types import Prompt, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from pathlib import Path


def test_pictures_are_files_of_one_size_and_all_differ(tmp_path: Path) -> None:
    paths = make_pictures(tmp_path, 20)
    assert {path.suffix for path in paths} == {".png", ".jpg"}
    pictures = []
    for path in paths:
        with Image.open(path) as opened:
            assert (opened.size, opened.mode) == ((224, 224), "RGB")
            pictures.append(opened.tobytes())
    assert len(set(pictures)) == 20


def test_the_best_of_each_kind_is_compared_by_medians() -> None:
    rates = {
        "k3vl, 64 in flight": (100, 300, 200),
        "k3vl, 256 in flight": (250, 10, 260),
        "k3vl on the CPU, 16 in flight": (5, 4, 6),
        "transformers, batch 1": (1, 1, 1),
        "transformers, batch 64": (20, 25, 30),
    }
    rounds = {name: [{"captions_per_second": r} for r in own] for name, own in rates.items()}
    found = summary(rounds)
    assert found["best"] == {"k3vl": 250, "k3vl_on_cpu": 5, "transformers": 25}
    assert (found["over_the_cpu"], found["over_transformers"]) == (50, 10)
    del rounds["transformers, batch 1"], rounds["transformers, batch 64"]
    assert summary(rounds)["over_transformers"] is None


def test_the_summary_says_rates_stages_and_ratios() -> None:
    ours = {
        "captions": 500,
        "steady_captions_per_second": 300.0,
        "process_seconds": 1.5,
        "stage_seconds": {"decode": 0.5, "wait": 0.0},
        "steps": 40,
        "mean_running": 200.0,
    }
    record = {
        "rounds": {"k3vl, 256 in flight": [ours], "transformers, batch 64": [{}]},
        "captions_per_second": {"k3vl, 256 in flight": 250.0, "transformers, batch 64": 50.0},
        "over_transformers": 5.0,
        "over_the_cpu": None,
    }
    assert in_short(record) == [
        "k3vl, 256 in flight: 250.0 a second, 300.0 in between; ms a caption: 3.00 of processor "
        "time, decode 1.00; 40 steps of 200 requests",
        "transformers, batch 64: 50.0 a second",
        "over_transformers: 5.00 (goal: 5)",
    ]


def test_replies_in_steady_state_are_those_between_the_first_and_the_last() -> None:
    times = [0.0, *(10.0 + n for n in range(8))]
    assert steady(times, 2) == 1.0
    assert steady(times, 3) == 8 / 17.0


def test_fields_of_the_command_line() -> None:
    assert engine_field("max_step_patches=8192") == ("max_step_patches", 8192)
    options = replace_fields(Options(), {"in_flight": [1, 2], "engine": {"page_size": 32}})
    assert (options.in_flight, options.engine, options.items) == ((1, 2), {"page_size": 32}, 200)


def test_fewer_answers_are_compared_with_theirs_among_more() -> None:
    few, many = {"b": 1, "c": 2}, {"a": 3, "b": 4, "c": 2}
    assert in_both(few, many) == (few, {"b": 4, "c": 2})
    assert in_both(many, few) == ({"b": 4, "c": 2}, few)
    with pytest.raises(KeyError):
        in_both({"d": 1}, many)


def test_where_answers_part_and_how_far() -> None:
    first = {
        "same": ((1, 2), (-0.1, -0.2)),
        "rounded": ((1, 2), (-0.1, -0.2)),
        "other": ((1, 2, 3), (-0.5, -0.7, -0.1)),
        "shorter": ((1, 2, 3), (-0.5, -0.7, -0.3)),
    }
    second = {
        "same": ((1, 2), (-0.1, -0.2)),
        "rounded": ((1, 2), (-0.1, -0.25)),
        "other": ((1, 4, 3), (-0.5, -0.9, -0.1)),
        "shorter": ((1, 2), (-0.5, -0.7)),
    }
    found = compare(first, second, str)
    assert (found["items"], found["same_tokens"], found["same_bits"]) == (4, 2, 1)
    assert found["largest_difference"] == pytest.approx(0.05)
    assert found["largest_margin"] == pytest.approx(0.2)
    assert [each["token"] for each in found["differences"]] == [1, 2]
    assert parting((), (1,)) == 0
    with pytest.raises(AssertionError):
        compare(first, {}, str)


def test_questions_are_spread_over_splits_without_clips() -> None:
    questions = questions_about_pictures(60)
    assert len(questions) == 60
    assert len({question.split for question in questions[:30]}) == 30
    assert all(path.suffix != ".mp4" for question in questions for path in question.files)
    assert len(questions_about_pictures(200)) == 200


def test_the_recorder_keeps_whole_answers() -> None:
    class Backend:
        def submit(self, prompt, sampling, sink):
            sink(Token(id=7, logprobs=TokenLogprob(7, -0.5, ())))
            sink(Token(id=8, finish="stop", logprobs=TokenLogprob(8, -0.25, ())))
            return 1

    seen: list[Token] = []
    recorder = Recorder(Backend())
    prompt = Prompt(token_ids=(1, 2), spans=())
    assert recorder.submit(prompt, SamplingParams(), seen.append) == 1
    assert [token.id for token in seen] == [7, 8]
    assert list(recorder.answers.values()) == [((7, 8), (-0.5, -0.25))]


def test_overlapping_work_counts_once() -> None:
    assert covered([]) == 0
    assert covered([(5, 6), (0, 2), (1, 3), (1.5, 2)]) == 4
    events = [
        {"cat": "kernel", "name": "a", "ts": 0, "dur": 400_000},
        {"cat": "kernel", "name": "a", "ts": 200_000, "dur": 400_000},
        {"cat": "gpu_memcpy", "name": "b", "ts": 900_000, "dur": 100_000},
        {"cat": "cpu_op", "name": "c", "ts": 0, "dur": 1_000_000},
        {"name": "no category", "ts": 0},
    ]
    found = summary_of(events, 2.0)
    assert found["busy_share"] == pytest.approx(0.35)
    assert found["operations_per_second"] == 1.5
    assert found["longest"]["a"] == {"seconds": 0.8, "count": 2}


def test_patches_are_cut_row_by_row() -> None:
    pixels = np.zeros((28, 42, 3), np.uint8)
    pixels[14:, 14:28, 1] = 255  # second row of patches, second column
    patches, grids = patches_of([Image.fromarray(pixels)])
    assert grids.tolist() == [[1, 2, 3]]
    assert patches.shape == (6, 3, 14, 14)
    assert patches.amax((1, 2, 3)).tolist() == [-1, -1, -1, -1, 1, -1]
    assert patches[4].amin((1, 2)).tolist() == [-1, 1, -1]


def test_batches_come_in_order() -> None:
    assert list(ahead(lambda x: x * x, range(100), threads=3)) == [x * x for x in range(100)]


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, more: int) -> int:
        self.value += more
        return self.value

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        pass


def test_a_subject_that_takes_too_long_is_ended() -> None:
    with Subject(Counter, 5, seconds=60) as subject:
        assert subject.call("add", 2) == 7
        subject._seconds = 0.1
        with pytest.raises(Failed, match=r"sleep: more than 0\.1 s"):
            subject.call("sleep", 600)
        with pytest.raises(Failed, match="add: the process died"):
            subject.call("add", 2)


def test_what_a_part_knows_is_in_the_file_at_once(tmp_path: Path) -> None:
    record: dict[str, Any] = {"speed": {"old": 1}, "profile": {"old": 2}}
    path = tmp_path / "record.json"
    keep = keeper(record, "speed", path)
    keep({"pictures": 5})
    keep({"errors": {"speed": "why"}})
    kept = json.loads(path.read_text())
    assert kept["profile"] == {"old": 2}
    assert (kept["speed"]["pictures"], kept["speed"]["errors"]) == (5, {"speed": "why"})
    assert "old" not in kept["speed"]


def test_a_subject_lives_in_a_process_and_tells_what_failed() -> None:
    with Subject(Counter, 5) as subject:
        assert subject.call("add", 2) == 7
        with pytest.raises(Failed, match="TypeError"):
            subject.call("add", "x")
        assert subject.call("add", 1) == 8
