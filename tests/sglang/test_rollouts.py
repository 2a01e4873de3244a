"""SGLang's side of docs/rollouts.md: ids with log-probabilities, weights from a directory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from k3vl.pipeline import Pipeline
from k3vl.rollouts import rollouts, score
from k3vl.types import ChatOptions, SamplingParams
from tests.sglang import kit
from tests.sglang.test_server import TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from k3vl.types import Prompt
    from tests.sglang.kit import Server

NUM_TOKENS = 4


@dataclass(frozen=True)
class Made:
    """An answer of SGLang's with its log-probabilities, and those of its prompt."""

    token_ids: tuple[int, ...]
    logprobs: list[float]
    scored: list[float]


def generate(server: Server, input_ids: Sequence[int], num_tokens: int = NUM_TOKENS) -> Made:
    status, answer = server.post(
        "/generate",
        {
            "input_ids": list(input_ids),
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0},
        },
    )
    assert status == 200, answer
    meta = answer["meta_info"]
    return Made(
        tuple(answer["output_ids"]),
        [entry[0] for entry in meta["output_token_logprobs"]],
        [entry[0] for entry in meta["input_token_logprobs"]],
    )


def prompt_of(pipeline: Pipeline) -> Prompt:
    request = pipeline.request(
        [{"role": "user", "content": "hi"}], options=ChatOptions(thinking_effort=None)
    )
    return pipeline.prepare(request).prompt


def embedded(pipeline: Pipeline) -> Any:
    (rollout,) = next(
        rollouts(pipeline.backend, [prompt_of(pipeline)], SamplingParams(max_tokens=NUM_TOKENS))
    )
    return rollout


def test_rollouts_and_scores_are_the_embedded_engine_s(server: Server, pipeline: Pipeline) -> None:
    """Decoded one by one and scored in one prefill: the same log-probabilities."""
    prompt = prompt_of(pipeline)
    made, ours = generate(server, prompt.token_ids), embedded(pipeline)
    assert made.token_ids == ours.token_ids
    assert made.logprobs == pytest.approx(ours.logprobs, abs=TOLERANCE)
    scored = generate(server, [*prompt.token_ids, *made.token_ids], 1).scored[-NUM_TOKENS:]
    assert scored == pytest.approx(made.logprobs, abs=TOLERANCE)
    ours_scored = score(pipeline.backend, prompt, ours.token_ids)
    assert scored == pytest.approx(ours_scored, abs=TOLERANCE)


@pytest.fixture
def own_server(checkpoint: Path, tmp_path: Path) -> Iterator[Server]:
    """SGLang goes by the directory of its latest weights, whatever it was named at the start."""
    server = kit.Server(checkpoint, tmp_path / "sglang.log")
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def test_weights_are_exchanged(
    own_server: Server, pipeline: Pipeline, checkpoint: Path, tmp_path: Path
) -> None:
    """For those of another directory, and back; nothing is started anew."""

    def update(directory: Path) -> None:
        body = {"model_path": str(directory), "abort_all_requests": True}
        end = time.monotonic() + 60
        # An answer that has just come may still count as running; then the cache is not flushed.
        while (answer := own_server.post("/update_weights_from_disk", body))[0] != 200:
            assert "cache was not flushed" in answer[1]["message"], answer
            assert time.monotonic() < end, answer
            time.sleep(0.5)

    other = kit.make_checkpoint(tmp_path / "other")  # the head before it was taught
    prompt = prompt_of(pipeline).token_ids
    before = generate(own_server, prompt)
    try:
        update(other)
        changed = generate(own_server, prompt)
    finally:
        update(checkpoint)
    assert generate(own_server, prompt) == before
    with Pipeline.load(other, device="cpu") as untaught:
        ours = embedded(untaught)
    assert changed.token_ids == ours.token_ids
    assert changed.logprobs == pytest.approx(ours.logprobs, abs=TOLERANCE)
    assert changed.logprobs != pytest.approx(before.logprobs, abs=TOLERANCE)
