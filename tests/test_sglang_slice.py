"""The weights that ``benchmarks/sglang_slice.py`` draws in the process with SGLang's model."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from benchmarks.sglang_slice import FOLDER, NOTED, TOKENS, chosen, draw
from k3vl.kernels.mxfp4 import dequantize_mxfp4

WIDTH, EXPERTS, TOP = 64, 96, 4


class Choice(NamedTuple):
    topk_ids: torch.Tensor


class TopK(nn.Module):
    """By name what SGLang's layer is."""

    def forward(self, logits: torch.Tensor, bias: torch.Tensor) -> Choice:
        return Choice((logits.sigmoid() + bias).topk(TOP).indices)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((EXPERTS, WIDTH), torch.nan, dtype=torch.bfloat16))
        self.e_score_correction_bias = nn.Parameter(torch.full((EXPERTS,), torch.nan))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        codes, scales = torch.zeros(2, 256, 512), torch.full((2, 256, 32), 255)
        self.w2_weight = nn.Parameter(codes.to(torch.uint8), requires_grad=False)
        self.w2_weight_scale = nn.Parameter(scales.to(torch.uint8), requires_grad=False)
        self.w2_weight_bias = nn.Parameter(torch.full((2, 256), torch.nan))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.topk, self.experts = Gate(), TopK(), Experts()
        self.input_layernorm = nn.RMSNorm(WIDTH)
        self.register_buffer("counts", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate
        logits = self.input_layernorm(x) @ gate.weight.float().mT
        return self.topk(logits, gate.e_score_correction_bias).topk_ids


@pytest.fixture
def model(monkeypatch, tmp_path) -> Model:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    made = Model()
    draw(made.requires_grad_(False))
    assert int((tmp_path / "drawn").read_text()) == 6
    return made


def test_everything_is_drawn_at_its_scale(model) -> None:
    assert model.counts.tolist() == [0, 1, 2]
    assert model.input_layernorm.weight.mean() == pytest.approx(1, abs=0.1)
    assert model.gate.weight.float().std() == pytest.approx(WIDTH**-0.5, rel=0.05)
    assert model.gate.e_score_correction_bias.abs().max() < 0.1
    experts = model.experts
    assert not experts.w2_weight_bias.any()
    w2 = dequantize_mxfp4(experts.w2_weight, experts.w2_weight_scale, dtype=torch.float32)
    assert w2.std() == pytest.approx(1024**-0.5, rel=0.4)


def test_tokens_go_to_different_experts_and_that_is_noted(model, tmp_path) -> None:
    x = torch.randn(2 * TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    model(x)
    assert chosen(tmp_path) is None, "nobody listens yet"
    (tmp_path / "listen").touch()
    model(x[: TOKENS - 1])
    assert chosen(tmp_path) is None
    for _ in range(NOTED + 3):
        ids = model(x)
    assert len((tmp_path / "chosen").read_text().split()) == NOTED
    expected = EXPERTS * (1 - (1 - TOP / EXPERTS) ** TOKENS)
    assert chosen(tmp_path) == ids[-TOKENS:].unique().numel()
    assert chosen(tmp_path) == pytest.approx(expected, rel=0.15)
