"""Our tower against transformers' K2.5 tower, as far as the two share rules.

Shared, and compared: patch embedding, positions over time (a sinusoid, none for pictures), rotary
positions, joint attention over the frames of a group, the MLP with its tanh GELU, pooling over
time, the 2x2 merge and its order, and how positions are resampled with one and the same filter.

Different in K2.5 and therefore set aside here: LayerNorm (K3: RMSNorm; torch's is put in its
place), biases (K3: none; zero), bicubic resampling of positions (K3: bilinear; the module is told
so), heads as wide as ``hidden / heads``, a square position table, and the projector, which
normalises before its two maps (K3: behind them).
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from transformers import Kimi_K25VisionConfig
from transformers.core_model_loading import PermuteForRope
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

from k3vl.vision.tower import NORM_EPS, VisionTower
from tests.vision.tiny_vision import TINY, pixels, tiny_models

SHARED = dataclasses.replace(TINY, init_pos_emb_height=6, init_pos_emb_width=6, qkv_hidden_size=24)
GRIDS = [(1, 6, 6), (1, 4, 10), (4, 6, 6), (3, 8, 2)]
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def ours() -> VisionTower:
    return tiny_models(SHARED)[0]


@pytest.fixture(scope="module")
def theirs(ours):
    config = Kimi_K25VisionConfig(
        patch_size=14,
        pos_emb_height=6,
        pos_emb_width=6,
        pos_emb_time=4,
        num_attention_heads=SHARED.vt_num_attention_heads,
        num_hidden_layers=SHARED.vt_num_hidden_layers,
        hidden_size=SHARED.vt_hidden_size,
        intermediate_size=SHARED.vt_intermediate_size,
    )
    model = Kimi_K25VisionModel(config).eval()
    width = SHARED.vt_hidden_size
    permute = PermuteForRope()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
        model.patch_embed.proj.weight.copy_(ours.patch_weight)
        model.patch_embed.pos_emb.position_embeddings.copy_(ours.position_table)
        model.final_layernorm = norm(width, ours.final_norm)
        for layer, block in zip(model.layers, ours.blocks, strict=True):
            layer.norm1 = norm(width, block.attention_norm)
            layer.norm2 = norm(width, block.mlp_norm)
            q, k, v = block.qkv.weight.chunk(3)
            layer.attn.q_proj.weight.copy_(permute._permute_for_rope(q, config))
            layer.attn.k_proj.weight.copy_(permute._permute_for_rope(k, config))
            layer.attn.v_proj.weight.copy_(v)
            layer.attn.proj.weight.copy_(block.out.weight)
            layer.mlp.fc1.weight.copy_(block.up.weight)
            layer.mlp.fc2.weight.copy_(block.down.weight)
    return model


def norm(width: int, weight: torch.Tensor) -> nn.RMSNorm:
    module = nn.RMSNorm(width, eps=NORM_EPS)
    module.weight.data.copy_(weight)
    return module


def both(ours, theirs, grids) -> tuple[torch.Tensor, torch.Tensor]:
    patches = pixels(*grids, seed=len(grids))
    normalised = (patches.float() / 255 - 0.5) / 0.5
    with torch.no_grad():
        expected = theirs(normalised, torch.tensor(grids)).pooler_output
        found = ours(patches, grids)
    return found, expected.flatten(1)


@pytest.mark.parametrize("grids", [*([grid] for grid in GRIDS), GRIDS], ids=str)
def test_merged_cells_agree(ours, theirs, grids) -> None:
    theirs.patch_embed.pos_emb.interpolation_mode = "bilinear"
    found, expected = both(ours, theirs, grids)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_the_filter_is_a_difference_of_the_two(ours, theirs) -> None:
    theirs.patch_embed.pos_emb.interpolation_mode = "bicubic"
    same, expected = both(ours, theirs, [(2, 6, 6)])  # as large as the table: nothing to filter
    torch.testing.assert_close(same, expected, rtol=0, atol=TOLERANCE)
    found, expected = both(ours, theirs, [(2, 4, 10)])
    assert (found - expected).abs().max() > 100 * TOLERANCE
