"""The embedded engine on a CUDA device answers as it does on a CPU (``-m gpu``)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

import k3vl.load
from k3vl.errors import K3VLError
from k3vl.pipeline import Pipeline
from k3vl.types import MediaPart, Message, TextPart

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PICTURES = sorted(p for p in EXAMPLES.iterdir() if p.suffix in {".png", ".jpg"})
QUESTIONS = ("Describe the image.", "What is this?")


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> list[list[Message]]:
    """Every example picture as it is, mirrored, halved and cropped, under every question."""
    folder = tmp_path_factory.mktemp("pictures")
    found = []
    for path in PICTURES:
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
        width, height = picture.size
        forms = {
            "whole": picture,
            "mirrored": picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
            "halved": picture.resize((max(28, width // 2), max(28, height // 2))),
            "cropped": picture.crop((0, 0, max(28, 2 * width // 3), height)),
        }
        for name, form in forms.items():
            file = folder / f"{path.stem}-{name}.png"
            form.save(file)
            found += [
                [Message(role="user", parts=(MediaPart("image", file), TextPart(question)))]
                for question in QUESTIONS
            ]
    return found


def answers(messages: list[list[Message]], where: k3vl.load.Device, in_flight: int) -> list[str]:
    with Pipeline.load(device=where) as pipeline:
        requests = [pipeline.request(message) for message in messages]
        found = []
        for reply in pipeline.replies(requests, in_flight=in_flight):
            if isinstance(reply, K3VLError):
                raise reply
            found.append(reply.content)
        return found


@pytest.fixture(scope="module")
def want(messages: list[list[Message]]) -> list[str]:
    return answers(messages, "cpu", 1)


def test_float32_on_the_gpu_gives_the_captions_of_the_cpu(
    messages: list[list[Message]], want: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    single = (torch.device("cuda"), torch.float32)
    monkeypatch.setattr(k3vl.load, "choose_device", lambda device: single)
    for in_flight in (1, 16):
        got = answers(messages, "cuda", in_flight)
        wrong = [(a, b) for a, b in zip(want, got, strict=True) if a != b]
        assert not wrong, f"{len(wrong)} of {len(want)} differ: {wrong[:5]}"


def test_bfloat16_on_the_gpu_answers_nearly_always_the_same(
    messages: list[list[Message]], want: list[str]
) -> None:
    got = answers(messages, "cuda", 16)
    wrong = [(a, b) for a, b in zip(want, got, strict=True) if a != b]
    assert len(wrong) <= 0.1 * len(want), f"{len(wrong)} of {len(want)} differ: {wrong[:5]}"
