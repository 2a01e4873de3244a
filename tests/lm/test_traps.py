"""Mistakes that other implementations of K3 have made, each with a test that would have caught it.

Traps with a natural home are tested there: A_log and weight names (test_checkpoint, test_table),
the bounded gate and the delta rule's order (kernels/test_kda), window carry, NaN in unused latents,
router bias (kernels/test_attention_parts), frozen bank rows, low-rank epsilon, 1-based layer lists
(test_model), patch budgets and head width (vision, test_config).
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from k3vl.checkpoint import CheckpointReader, TensorSpec
from k3vl.config import checkpoint_path, load_config
from k3vl.kernels.situ import SiluGLU, SituGLU
from k3vl.lm.batch import Row
from k3vl.lm.kda import KimiDeltaAttention
from k3vl.lm.model import K3Model
from k3vl.lm.moe import LatentMoE
from k3vl.lm.weights import load_model, router_dtype
from k3vl.xtml.tokenizer import load_tokenizer
from tests.test_config import GOLDEN, K3
from tests.tiny import CPU, REFERENCE, TINY, Runner, fill, tiny_model, tokens


@pytest.fixture(scope="module")
def bfloat16_model() -> K3Model:
    model = K3Model(TINY, REFERENCE, dtype=torch.bfloat16, device=CPU).eval().requires_grad_(False)
    fill(model)
    return model


def test_what_must_stay_float32_does_in_a_bfloat16_model(bfloat16_model) -> None:
    """Router and its bias (a bfloat16 router chooses other experts for one token in twenty), decay
    parameters, convolutions, the output norm of KDA, and the recurrent state."""
    float32 = {
        name.rsplit(".", 1)[-1]
        for name, parameter in bfloat16_model.named_parameters()
        if parameter.dtype == torch.float32
    }
    assert float32 == {"router", "router_bias", "a_log", "dt_bias", "conv", "o_norm", "query"}
    cache = Runner(bfloat16_model).cache
    assert cache.layers[0].states.dtype == torch.float32
    assert cache.layers[0].windows.dtype == torch.bfloat16


def test_the_demo_model_says_the_same_in_bfloat16() -> None:
    """A trained model is stable where a random one amplifies every rounding."""
    directory = checkpoint_path("demo")
    config, reader = load_config(directory).text, CheckpointReader(directory)
    tokenizer = load_tokenizer(directory)
    text = "How many foxes are there? Where is the kite relative to the bus? A fox, a kite and"
    row = Row(token_ids=tokenizer.encode_segment(text, False), context_len=0, slot=0, pages=[0, 1])
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(reader, config, REFERENCE, dtype=dtype, device=CPU)
        logits.append(Runner(model, page_size=32).run([row], all_logits=True))
    want, got = logits
    error = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.median() < 0.03
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.9


def test_router_logits_are_not_rounded() -> None:
    """Two experts whose scores differ in the 12th bit: rounding the logits would tie them."""
    chosen = []

    def capture(x, weights, experts, *rest):
        chosen.append(experts)
        return torch.zeros_like(x)

    composed = dataclasses.replace(REFERENCE.latent_moe, moe_experts=capture)
    kernels = dataclasses.replace(REFERENCE, latent_moe=composed)
    layer = LatentMoE(TINY, SiluGLU(), kernels, dtype=torch.bfloat16, device=CPU)
    fill(layer)
    with torch.no_grad():
        layer.router.zero_()
        layer.router_bias.zero_()
        layer.router[:, 0] = torch.tensor([1.0, 1.0002, 1.0004, 0.9, 0.8, 0.7])
        x = torch.zeros(1, TINY.hidden_size, dtype=torch.bfloat16)
        x[0, 0] = 1
        layer(x)
    assert sorted(chosen[0][0].tolist()) == [1, 2]


@pytest.mark.parametrize(
    ("stored", "dtype", "kept"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
    ],
)
def test_a_router_loses_no_bit(stored: torch.dtype, dtype: torch.dtype, kept: torch.dtype) -> None:
    name = "language_model.layers.1.block_sparse_moe.gate.weight"
    reader = SimpleNamespace(specs=lambda: {name: TensorSpec((6, 64), stored)})
    assert router_dtype(reader, dtype) == kept


def test_situ_takes_its_caps_from_the_configuration() -> None:
    gate_up = torch.tensor([[3.0, 50.0]])
    for beta, linear_beta in ((4.0, 25.0), (2.0, 10.0)):
        want = beta * math.tanh(3 / beta) / (1 + math.exp(-3)) * linear_beta
        want *= math.tanh(50 / linear_beta)
        assert float(SituGLU(beta=beta, linear_beta=linear_beta)(gate_up)) == pytest.approx(
            want, rel=1e-6
        )
    changed = dataclasses.replace(TINY, activation_situ_beta=1.0)
    row = Row(token_ids=tokens(5), context_len=0, slot=0, pages=[0])
    logits = [Runner(tiny_model(config)).run([row]) for config in (TINY, changed)]
    assert not torch.allclose(*logits, atol=1e-3)


def test_a_turn_ends_at_end_of_msg_not_at_the_document_end_only() -> None:
    assert K3["eos_token_id"] == 163586
    for directory in (checkpoint_path("demo"), GOLDEN / "sglang_tiny"):
        tokenizer = load_tokenizer(directory)
        eos = load_config(directory).eos_token_id
        assert eos == tokenizer.special_ids["<|end_of_msg|>"]
        assert tokenizer.stop_ids[0] == eos


def test_values_are_not_normalised_and_queries_are_scaled_once() -> None:
    """Doubling the value projection doubles what KDA reads; doubling q's changes nothing."""
    layer = KimiDeltaAttention(TINY, REFERENCE, dtype=torch.float32, device=CPU)
    fill(layer)
    row = Row(token_ids=[0] * 6, context_len=0, slot=0, pages=[0])
    x = torch.randn(6, TINY.hidden_size, generator=torch.Generator().manual_seed(0))

    def final_state(scale_rows: slice | None) -> torch.Tensor:
        runner = Runner(tiny_model())
        batch, state = runner.batch([row]), runner.cache.layers[0]
        saved = layer.in_proj.weight.detach().clone(), layer.conv.detach().clone()
        with torch.no_grad():
            if scale_rows is not None:
                # SiLU follows the convolution, so the scale goes where it stays linear: large
                # positive inputs. Scaling both by a power of two keeps q's direction.
                layer.conv[scale_rows] = layer.conv[scale_rows].abs()
                layer.in_proj.weight[scale_rows] = layer.in_proj.weight[scale_rows].abs() * 64
            layer(x.abs(), batch, state)
            layer.in_proj.weight.copy_(saved[0])
            layer.conv.copy_(saved[1])
        return state.states[batch.cells[0]].clone()

    width = layer.heads * layer.head
    plain = final_state(None)
    assert torch.equal(final_state(slice(0, width)), plain), "queries never enter the state"
    assert final_state(slice(2 * width, 3 * width)).norm() > 10 * plain.norm()
