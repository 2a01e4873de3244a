"""Tiny K3 models that hold every kind of layer, with seeded weights."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from k3vl.config import LinearAttentionConfig, TextConfig
from k3vl.kernels.choice import Kernels, cpu_kernels, reference_kernels
from k3vl.lm.batch import Batch, Row, build_batch
from k3vl.lm.cache import HybridCache, plan_cache
from k3vl.lm.model import K3Model

CPU = torch.device("cpu")
REFERENCE = reference_kernels("what tests compare with")
COMPILED = cpu_kernels("what the demo runs")
KERNELS = [pytest.param(kernels, id=kernels.name) for kernels in (REFERENCE, COMPILED)]

LINEAR = LinearAttentionConfig(
    full_attn_layers=(2, 5),
    kda_layers=(1, 3, 4),
    num_heads=2,
    head_dim=8,
    short_conv_kernel_size=4,
    gate_lower_bound=-5.0,
    use_full_rank_gate=True,
)

TINY = TextConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=5,
    num_attention_heads=3,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    linear_attn_config=LINEAR,
    num_experts=6,
    moe_intermediate_size=16,
    num_shared_experts=2,
    rms_norm_eps=1e-5,
    q_lora_rank=10,
    mla_use_nope=True,
    mla_use_output_gate=True,
    num_experts_per_token=2,
    hidden_act="situ",
    routed_expert_hidden_size=20,
    latent_moe_use_norm=True,
    attn_res_block_size=2,  # five layers: the last block is partial
    max_position_embeddings=4096,
)
"""Every layer kind of K3: dense and MoE, KDA and MLA, three blocks of attention residuals."""

TRITON = dataclasses.replace(
    TINY,
    linear_attn_config=dataclasses.replace(LINEAR, head_dim=32),
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=32,
)
"""The smallest widths that the Triton kernels take."""

KIMI_LINEAR = dataclasses.replace(
    TINY,
    linear_attn_config=dataclasses.replace(LINEAR, gate_lower_bound=None, use_full_rank_gate=False),
    q_lora_rank=None,
    mla_use_output_gate=False,
    hidden_act="silu",
    routed_expert_hidden_size=None,
    latent_moe_use_norm=False,
    attn_res_block_size=None,
)
"""The same geometry as Kimi-Linear: plain residuals, no latent, SiLU, low-rank gates."""


def fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights with unit-scale activations; norms near one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("norm", "norm.weight")):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.dim() < 2:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))


def tiny_model(config: TextConfig = TINY, seed: int = 0, kernels: Kernels = REFERENCE) -> K3Model:
    model = K3Model(config, kernels, dtype=torch.float32, device=CPU).eval().requires_grad_(False)
    fill(model, seed)
    return model


class Runner:
    """Feeds a model by hand: slots, pages and context lengths are the test's business."""

    def __init__(self, model: K3Model, *, slots: int = 4, pages: int = 64, page_size: int = 16):
        self.model = model
        dtype = model.embedding.dtype
        sizes = plan_cache(model.config, dtype, budget_bytes=2**24, page_size=page_size)
        self.slots = slots
        sizes = dataclasses.replace(sizes, num_units=slots * sizes.units_per_slot + pages)
        self.cache = HybridCache(model.config, sizes, dtype=dtype, device=CPU)

    def units(self, slot: int) -> list[int]:
        """Units of a numbered slot; pages lie behind all slots."""
        each = self.cache.sizes.units_per_slot
        return list(range(slot * each, (slot + 1) * each))

    def run(self, rows: list[Row], *, all_logits: bool = False) -> torch.Tensor:
        batch = self.batch(rows)
        if all_logits:
            every = torch.arange(batch.token_ids.shape[0])
            batch = dataclasses.replace(batch, logit_rows=every)
        return self.model(batch, self.cache)

    def batch(self, rows: list[Row]) -> Batch:
        """``slot`` and ``pages`` of the rows are small numbers, mapped to units here."""
        behind = self.slots * self.cache.sizes.units_per_slot
        placed = [
            dataclasses.replace(
                row, slot=self.units(row.slot), pages=[behind + page for page in row.pages]
            )
            for row in rows
        ]
        return build_batch(placed, self.cache)


def tokens(count: int, seed: int = 0, vocab: int = TINY.vocab_size) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (count,), generator=generator).tolist()
