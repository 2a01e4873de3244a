"""The embedded engine over two GPUs (``-m gpu``): its answers, and what a rank that dies ends."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from k3vl.errors import BackendError
from k3vl.pipeline import Pipeline
from k3vl.types import MediaPart, Message, SamplingParams, TextPart
from tests.e2e.heldout_answers import ask, differences, questions, recorded
from tests.process import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are wanted"),
]


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with Pipeline.load("demo", device="cuda", tensor_parallel=2) as pipeline:
        yield pipeline


def test_held_out_questions_are_answered_as_on_a_cpu(pipeline: Pipeline) -> None:
    """Weights are bfloat16, so a few differ, as they do on one GPU."""
    got = ask(pipeline, questions(), in_flight=16)
    found = differences(pipeline, got, recorded())
    assert len(found) <= len(got) // 10, found[:5]
    engine: Any = pipeline.backend
    processes = list(engine._engine.followers._processes.values())
    pipeline.close()
    assert [process.returncode for process in processes] == [0], "it ended by itself"


def test_a_rank_that_dies_in_a_sum_is_named_and_waited_for_by_nobody(pipeline: Pipeline) -> None:
    picture = MediaPart("image", ROOT / "examples" / "fox-kite-bus.png")
    messages = [Message(role="user", parts=(TextPart("Describe this."), picture))]
    assert pipeline.reply(messages).content == "A fox, a kite and a bus."
    engine: Any = pipeline.backend
    (process,) = engine._engine.followers._processes.values()
    asked = SamplingParams(max_tokens=2000, temperature=1.0)

    def go_on() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            pipeline.reply(messages, sampling=asked)

    threading.Timer(2, process.kill).start()
    with pytest.raises(BackendError, match=r"rank 1 of 2: its process ended \(-9\)"):
        go_on()
