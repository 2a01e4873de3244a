"""The embedded engine on a CUDA device answers as it does on a CPU (``-m gpu``)."""

from __future__ import annotations

import pytest
import torch

import k3vl.load
from k3vl.lm.decode import StaticDecode
from k3vl.lm.engine import EngineConfig
from k3vl.pipeline import Pipeline
from tests.e2e.heldout_answers import (
    ask,
    ask_in_waves,
    differences,
    questions,
    recorded,
    without_masks,
)

pytestmark = pytest.mark.gpu

MANY = 64


def wrong(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, *, in_flight: int, every: int = 1
) -> tuple[list[tuple[str, str]], int]:
    """Answers that are not the CPU's, and how many there are in all."""
    where = torch.device("cuda"), dtype
    monkeypatch.setattr(k3vl.load, "choose_device", lambda device: where)
    with Pipeline.load(device="cuda", engine=EngineConfig(max_requests=MANY)) as pipeline:
        got = ask(pipeline, questions()[::every], in_flight=in_flight)
        return differences(pipeline, got, recorded()), len(got)


def test_float32_gives_all_answers_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 held-out questions, many at once: the same tokens to the last one."""
    found, count = wrong(monkeypatch, torch.float32, in_flight=MANY)
    assert count == 200
    assert not found, f"{len(found)} of {count} differ: {found[:5]}"


def test_float32_ahead_of_its_tokens_gives_the_answers_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In waves, without masks, twice: the second time everything is recorded."""
    launched = []
    launch = StaticDecode.launch

    def counted(self, rows, choosers, *, sources=None):
        launched.append(sources is not None)
        return launch(self, rows, choosers, sources=sources)

    monkeypatch.setattr(StaticDecode, "launch", counted)
    where = torch.device("cuda"), torch.float32
    monkeypatch.setattr(k3vl.load, "choose_device", lambda device: where)
    asked = without_masks(questions())
    with Pipeline.load(device="cuda", engine=EngineConfig(max_requests=MANY)) as pipeline:
        for _ in range(2):
            launched.clear()
            found = differences(pipeline, ask_in_waves(pipeline, asked, at_once=MANY), recorded())
            assert not found, f"{len(found)} of {len(asked)} differ: {found[:5]}"
            assert sum(launched) > len(launched) // 4, f"{sum(launched)} of {len(launched)} ahead"


def test_float32_alone_gives_the_answers_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone every step is bound by its launches, so some of them will do."""
    found, count = wrong(monkeypatch, torch.float32, in_flight=1, every=20)
    assert count == 10
    assert not found, f"{len(found)} of {count} differ: {found[:5]}"


def test_bfloat16_answers_nearly_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found, count = wrong(monkeypatch, torch.bfloat16, in_flight=MANY)
    assert count == 200
    assert len(found) <= 0.02 * count, f"{len(found)} of {count} differ: {found[:5]}"
