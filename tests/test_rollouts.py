"""Rollouts of the demo model: ids and log-probabilities out, other weights in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3vl.config import DEMO_CHECKPOINT
from k3vl.errors import BackendError, ConfigError, RequestError, WeightError
from k3vl.lm.engine import EngineConfig
from k3vl.pipeline import Pipeline
from k3vl.rollouts import rollouts, score
from k3vl.types import MediaPart, Message, Prompt, SamplingParams, TextPart
from tests.fakes import FakeBackend

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SAMPLING = SamplingParams(max_tokens=24, temperature=1.0, seed=3)


@pytest.fixture
def pipeline():
    with Pipeline.load(engine=EngineConfig(exact_decode=True, num_threads=1)) as pipe:
        yield pipe


def prompts(pipe: Pipeline) -> list[Prompt]:
    asked = [
        (TextPart("Tell me about the sea."),),
        (MediaPart("image", EXAMPLES / "shapes.png"), TextPart("What is in the picture?")),
        (MediaPart("video", EXAMPLES / "sailboat.mp4"), TextPart("What moves?")),
    ]
    requests = [pipe.request([Message(role="user", parts=parts)]) for parts in asked]
    return [pipe.prepare(request).prompt for request in requests]


def test_groups_come_in_order_and_can_be_scored(pipeline) -> None:
    asked = prompts(pipeline)
    groups = list(rollouts(pipeline.backend, asked, SAMPLING, group=3))
    assert [len(group) for group in groups] == [3, 3, 3]
    worst = 0.0
    for prompt, group in zip(asked, groups, strict=True):
        for made in group:
            assert len(made.token_ids) == len(made.logprobs)
            assert made.finish == "length" or made.token_ids[-1] in pipeline.tokenizer.stop_ids
            decoded = score(pipeline.backend, prompt, made.token_ids, method="decode")
            assert decoded == made.logprobs
            prefilled = score(pipeline.backend, prompt, made.token_ids)
            off = torch.tensor(prefilled) - torch.tensor(made.logprobs)
            worst = max(worst, float(off.abs().max()))
    assert worst == 0, "the compiled kernels' rows are independent: prefill gives decode's bits"
    assert len({made.token_ids for made in groups[0]}) == 3
    again = list(rollouts(pipeline.backend, reversed(asked), SAMPLING, group=3, in_flight=1))
    assert [[m.token_ids for m in g] for g in reversed(again)] == [
        [m.token_ids for m in g] for g in groups
    ]
    assert [made.cached_tokens for made in groups[1]] == [0, 64, 64]  # one page of 87 tokens
    assert [made.cached_tokens for made in again[1]] == [64, 64, 64]


def test_prompts_are_read_as_they_are_needed(pipeline) -> None:
    read: list[int] = []

    def endless():
        while True:
            read.append(1)
            yield Prompt((3, 5, 7, len(read)))

    stream = rollouts(pipeline.backend, endless(), SAMPLING, group=2, in_flight=4)
    next(stream)
    next(stream)
    stream.close()
    assert len(read) <= 4


def test_stop_strings_are_refused(pipeline) -> None:
    with pytest.raises(RequestError, match="stop_ids"):
        next(rollouts(pipeline.backend, [Prompt((3,))], SamplingParams(stop=("a",))))


def test_a_bad_prompt_ends_the_stream(pipeline) -> None:
    with pytest.raises(RequestError, match="token 1 is 4096"):
        list(rollouts(pipeline.backend, [Prompt((3,)), Prompt((3, 4096))], SAMPLING))


# ---------------------------------------------------------------------- other weights


def trained(directory: Path) -> Path:
    """The demo's weights with a head that prefers other tokens, and nothing beside them."""
    directory.mkdir()
    tensors = load_file(DEMO_CHECKPOINT / "model.safetensors")
    for name in ("language_model.lm_head.weight", "language_model.lm_head.weight_scale"):
        tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def greedy(pipe: Pipeline, prompt: Prompt) -> tuple[int, ...]:
    ((made,),) = rollouts(pipe.backend, [prompt], SamplingParams(max_tokens=8))
    return made.token_ids


def test_weights_change_without_a_restart(pipeline, tmp_path) -> None:
    prompt = prompts(pipeline)[1]
    before = greedy(pipeline, prompt)
    directory = trained(tmp_path / "step1")
    pipeline.update_weights(directory)
    after = greedy(pipeline, prompt)
    assert after != before
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        shutil.copyfile(DEMO_CHECKPOINT / name, directory / name)
    with Pipeline.load(directory) as restarted:
        assert greedy(restarted, prompt) == after
    pipeline.update_weights(DEMO_CHECKPOINT)
    assert greedy(pipeline, prompt) == before


def damage(kind: str, directory: Path) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    vision = "vision_tower.encoder.final_layernorm.weight"
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
        return
    if kind == "other model":
        config = json.loads((DEMO_CHECKPOINT / "config.json").read_text())
        config["text_config"]["routed_scaling_factor"] = 2.0
        (directory / "config.json").write_text(json.dumps(config))
        return
    if kind == "missing":
        del tensors[vision]
    elif kind == "not finite":
        tensors[vision] = torch.full_like(tensors[vision], float("nan"))
    elif kind == "shape":
        tensors[vision] = tensors[vision][:-1].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("truncated", WeightError, "damaged"),
        ("missing", WeightError, "1 tensor .*final_layernorm.* missing"),
        ("shape", WeightError, "the model needs"),
        ("not finite", WeightError, "final_norm holds values that are not finite"),
        ("other model", ConfigError, "text_config is not the running model's: routed_scaling"),
    ],
)
def test_bad_weights_change_nothing(pipeline, tmp_path, kind, error, message) -> None:
    prompt = prompts(pipeline)[0]
    before = greedy(pipeline, prompt)
    directory = trained(tmp_path / "bad")
    damage(kind, directory)
    with pytest.raises(error, match=message):
        pipeline.update_weights(directory)
    assert greedy(pipeline, prompt) == before


def test_only_an_embedded_engine_can() -> None:
    backend = FakeBackend([2])
    with pytest.raises(BackendError, match="scores"):
        score(backend, Prompt((1,)), (2,))
