"""The whole model against SGLang 0.5.23: a tiny random K3, text and picture, in float32.

``expected.json`` holds what SGLang computed on a CPU from the same checkpoint. Its prompt
log-probabilities, first tokens and their alternatives are compared to 1e-4.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from k3vl.checkpoint import CheckpointReader
from k3vl.config import load_config, load_media_config
from k3vl.lm.batch import Row
from k3vl.lm.weights import load_model
from k3vl.vision.encoder import VisionEncoder
from k3vl.vision.processor import MediaProcessor
from k3vl.vision.weights import load_vision
from tests.tiny import CPU, Runner

DIRECTORY = Path(__file__).resolve().parents[1] / "golden" / "sglang_tiny"
CASES = {
    case["name"]: case for case in json.loads((DIRECTORY / "expected.json").read_text())["cases"]
}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def config():
    return load_config(DIRECTORY)


@pytest.fixture(scope="module")
def model(config):
    return load_model(CheckpointReader(DIRECTORY), config.text, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def features(config):
    """The picture's features, by our own processor, tower and projector."""
    media = load_media_config(DIRECTORY)
    parts = load_vision(CheckpointReader(DIRECTORY), config.vision, media, dtype=torch.float32)
    processed = MediaProcessor(media).process(DIRECTORY / "img_84x56.png")
    (encoded,) = VisionEncoder(*parts).encode(processed.items)
    return encoded


def prefill(model, features, name: str) -> tuple[Runner, list[int], torch.Tensor]:
    case = CASES[name]
    ids = case["prompt_ids"]
    media = [(17, features)] if case["image"] else []
    runner = Runner(model, pages=20)
    row = Row(token_ids=ids, context_len=0, slot=0, pages=range(20), features=media)
    return runner, ids, runner.run([row], all_logits=True).log_softmax(-1)


@pytest.mark.parametrize("name", CASES)
def test_prompt_log_probabilities(model, features, name: str) -> None:
    _, ids, logprobs = prefill(model, features, name)
    expected = CASES[name]["input_token_logprobs"]
    # The picture's own rows have stand-in ids in SGLang, so their log-probabilities mean nothing.
    skipped = range(17, 23) if CASES[name]["image"] else range(0)
    for position in range(1, len(ids)):
        if position not in skipped:
            got = float(logprobs[position - 1, ids[position]])
            assert got == pytest.approx(expected[position], abs=TOLERANCE), position


@pytest.mark.parametrize("name", CASES)
def test_first_token_and_its_alternatives(model, features, name: str) -> None:
    _, _, logprobs = prefill(model, features, name)
    top = logprobs[-1].topk(5)
    for (value, token), got_value, got_token in zip(
        CASES[name]["output_top5"][0], top.values.tolist(), top.indices.tolist(), strict=True
    ):
        assert got_token == token
        assert got_value == pytest.approx(value, abs=TOLERANCE)
