"""What the demo model answers to 200 held-out questions on a CPU, recorded for other devices.

    python -m tests.e2e.heldout_answers        # asks them all again, a minute or two on two cores

Greedy, float32, to every token. ``test_demo.py`` asks some of them, ``test_gpu.py`` all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu_equality import Recorder, questions_about_pictures
from k3vl.app.evaluation.ask import LocalAsked
from k3vl.app.evaluation.run import ask_all
from k3vl.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3vl.app.evaluation.labels import Question

COUNT = 200
RECORD = Path(__file__).with_suffix(".json")


def questions() -> list[Question]:
    """Of every kind in turn, about pictures."""
    return questions_about_pictures(COUNT)


def without_masks(asked: Sequence[Question]) -> list[Question]:
    """Those whose answers may be decoded ahead: no mask is made of the tokens before."""
    masked = {"tool_choice", "response_format"}
    return [
        question for question in asked if not question.tools and not masked & set(question.options)
    ]


def ask_in_waves(
    pipeline: Pipeline, asked: Sequence[Question], *, at_once: int
) -> dict[str, tuple[int, ...]]:
    """As :func:`ask`, the next only when all of the last are answered.

    In a steady stream there is nearly always a prompt to compute, and beside one no step is
    launched ahead: one of a hundred is. In waves three of four are.
    """
    found = {}
    for first in range(0, len(asked), at_once):
        found |= ask(pipeline, asked[first : first + at_once], in_flight=at_once)
    return found


def ask(
    pipeline: Pipeline, asked: Sequence[Question], *, in_flight: int
) -> dict[str, tuple[int, ...]]:
    """Tokens of every answer, by the prompt (:func:`benchmarks.gpu_equality.prompt_key`)."""
    backend = pipeline.backend
    pipeline.backend = recorder = Recorder(backend)
    try:
        results = list(ask_all(asked, LocalAsked(pipeline), blanks=0, in_flight=in_flight))
    finally:
        pipeline.backend = backend
    errors = [result.error for result in results if result.error is not None]
    assert not errors, errors[0]
    return {key: ids for key, (ids, _) in recorder.answers.items()}


def recorded() -> dict[str, tuple[int, ...]]:
    """As :func:`ask` gave them on a CPU."""
    found = json.loads(RECORD.read_text(encoding="utf-8"))
    return {key: tuple(answer["tokens"]) for key, answer in found.items()}


def differences(
    pipeline: Pipeline,
    got: Mapping[str, Sequence[int]],
    want: Mapping[str, Sequence[int]],
) -> list[tuple[str, str]]:
    """Texts of the answers that differ: what was to be said, and what was."""
    assert got.keys() <= want.keys(), "questions without a recorded answer: record again"
    return [
        (text_of(pipeline, want[key]), text_of(pipeline, ids))
        for key, ids in got.items()
        if tuple(ids) != tuple(want[key])
    ]


def text_of(pipeline: Pipeline, ids: Sequence[int]) -> str:
    """Of all tokens."""
    return b"".join(map(pipeline.tokenizer.token_bytes, ids)).decode(errors="replace")


def main() -> None:
    with Pipeline.load(device="cpu") as pipeline:
        got = ask(pipeline, questions(), in_flight=16)
        found = {
            key: {"text": text_of(pipeline, ids), "tokens": list(ids)}
            for key, ids in sorted(got.items())
        }
    lines = (f"{json.dumps(key)}: {json.dumps(answer)}" for key, answer in found.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    sys.stdout.write(f"{len(found)} answers in {RECORD}\n")


if __name__ == "__main__":
    main()
