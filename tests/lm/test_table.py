"""The expected table against published totals and against real headers."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from k3vl.checkpoint import CheckpointReader, TensorSpec, logical_tensors
from k3vl.config import load_config, parse_config
from k3vl.errors import ConfigError
from k3vl.lm.table import TEXT_PREFIX, expected_tensors
from k3vl.vision.weights import expected_tensors as expected_vision_tensors

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture(scope="module")
def k3():
    return parse_config(json.loads((GOLDEN / "k3_config.json").read_text()))


@pytest.fixture(scope="module")
def k3_table(k3):
    return expected_tensors(k3.text, quantized_experts=True)


def test_the_real_configuration_gives_the_published_totals(k3, k3_table):
    assert k3.quantized_format == "mxfp4-pack-quantized"
    vision = expected_vision_tensors(k3.vision)
    assert not k3_table.keys() & vision.keys()
    assert len(k3_table) + len(vision) == 497_220
    union = [*k3_table.values(), *vision.values()]
    assert sum(spec.nbytes for spec in union) == 1_560_860_324_864


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("model.embed_tokens.weight", (163840, 7168), torch.bfloat16),
        ("lm_head.weight", (163840, 7168), torch.bfloat16),
        ("model.output_attn_res_proj.weight", (1, 7168), torch.bfloat16),
        ("model.layers.0.self_attention_res_norm.weight", (7168,), torch.bfloat16),
        ("model.layers.0.mlp.down_proj.weight", (7168, 33792), torch.bfloat16),
        ("model.layers.0.self_attn.A_log", (128,), torch.float32),
        ("model.layers.90.self_attn.k_conv1d.weight", (12288, 1, 4), torch.float32),
        ("model.layers.91.self_attn.q_b_proj.weight", (18432, 1536), torch.bfloat16),
        ("model.layers.92.self_attn.kv_b_proj.weight", (24576, 512), torch.bfloat16),
        (
            "model.layers.92.block_sparse_moe.gate.e_score_correction_bias",
            (896,),
            torch.float32,
        ),
        (
            "model.layers.1.block_sparse_moe.experts.895.w2.weight_packed",
            (3584, 1536),
            torch.uint8,
        ),
        ("model.layers.1.block_sparse_moe.experts.0.w1.weight_scale", (3072, 112), torch.uint8),
    ],
)
def test_published_tensors_are_in_the_table(k3_table, name, shape, dtype):
    assert k3_table[TEXT_PREFIX + name] == TensorSpec(shape, dtype)


def test_kinds_of_layers_follow_the_lists_not_a_rule(k3_table):
    kda = {n for n in range(93) if f"{TEXT_PREFIX}model.layers.{n}.self_attn.A_log" in k3_table}
    assert len(kda) == 69
    assert {89, 90} <= kda
    assert not {3, 91, 92} & kda


def test_the_table_is_the_header_of_a_real_checkpoint():
    directory = GOLDEN / "sglang_tiny"
    config = load_config(directory)
    expected = expected_tensors(config.text, quantized_experts=False)
    expected |= expected_vision_tensors(config.vision)
    stored = CheckpointReader(directory).specs()
    assert stored.keys() == expected.keys()
    assert {n: s.shape for n, s in stored.items()} == {n: s.shape for n, s in expected.items()}
    # That checkpoint stores the output norm of KDA in bfloat16; K3 itself in float32.
    other = {n for n, spec in stored.items() if spec.dtype != expected[n].dtype}
    assert all(name.endswith("o_norm.weight") for name in other)


def test_quantized_and_plain_experts_are_the_same_tensors(k3):
    text = dataclasses.replace(k3.text, num_experts=20)
    packed = logical_tensors(expected_tensors(text, quantized_experts=True))
    plain = logical_tensors(expected_tensors(text, quantized_experts=False))
    assert {n: t.shape for n, t in packed.items()} == {n: t.shape for n, t in plain.items()}
    encodings = {n: t.encoding for n, t in packed.items()}
    assert {n for n, e in encodings.items() if e == "mxfp4"} == {
        n for n in plain if ".experts." in n
    }


def test_members_of_the_family_without_k3s_additions(k3):
    linear = dataclasses.replace(
        k3.text.linear_attn_config, gate_lower_bound=None, use_full_rank_gate=False
    )
    text = dataclasses.replace(
        k3.text,
        linear_attn_config=linear,
        q_lora_rank=None,
        mla_use_output_gate=False,
        attn_res_block_size=None,
        routed_expert_hidden_size=None,
        latent_moe_use_norm=False,
        num_experts=2,
    )
    table = expected_tensors(text, quantized_experts=False)
    layer = f"{TEXT_PREFIX}model.layers."
    assert table[f"{layer}0.self_attn.g_a_proj.weight"].shape == (128, 7168)
    assert table[f"{layer}0.self_attn.g_b_proj.weight"].shape == (12288, 128)
    assert table[f"{layer}0.self_attn.A_log"].shape == (1, 1, 96, 1)
    assert table[f"{layer}3.self_attn.q_proj.weight"].shape == (18432, 7168)
    assert table[f"{layer}1.block_sparse_moe.experts.1.w1.weight"].shape == (3072, 7168)
    for absent in ("_res_", "routed_expert", "q_a_", "self_attn.g_proj"):
        assert not [name for name in table if absent in name], absent


def test_mxfp4_needs_widths_of_whole_groups(k3):
    text = dataclasses.replace(k3.text, moe_intermediate_size=40)
    with pytest.raises(ConfigError, match="steps of 32, not 40"):
        expected_tensors(text, quantized_experts=True)
