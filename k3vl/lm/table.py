"""Which tensors a checkpoint of the language model holds, from its configuration alone.

Here: names, shapes and stored dtypes. Not here: the parameters that they fill (``weights.py``), the
vision part (``k3vl.vision.weights``).

Source: header table of moonshotai/Kimi-K3 (revision 9f62e4e9); for the members of the family
without K3's additions, the names of moonshotai/Kimi-Linear-48B-A3B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from k3vl.checkpoint import TensorSpec
from k3vl.errors import ConfigError
from k3vl.kernels.mxfp4 import GROUP_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k3vl.config import TextConfig

TEXT_PREFIX = "language_model."
"""Every checkpoint name of this part starts with it."""

_Entry = tuple[str, TensorSpec]


def expected_tensors(config: TextConfig, *, quantized_experts: bool) -> dict[str, TensorSpec]:
    """List the stored tensors of the language model: full checkpoint name -> shape and dtype.

    Args:
        config: of the language model.
        quantized_experts: routed experts are MXFP4 (``weight_packed`` and ``weight_scale``).

    Raises:
        ConfigError: MXFP4 experts whose width is not a multiple of 32.
    """
    if quantized_experts:
        for width in (config.expert_hidden_size, config.moe_intermediate_size):
            if width % GROUP_SIZE:
                raise ConfigError(
                    f"MXFP4 experts need widths in steps of {GROUP_SIZE}, not {width}"
                )
    d = config.hidden_size
    table = {
        "model.embed_tokens.weight": _bf16(config.vocab_size, d),
        "model.norm.weight": _bf16(d),
        "lm_head.weight": _bf16(config.vocab_size, d),
    }
    if config.attn_res_block_size is not None:
        table |= _mixture("model.output_attn_res", d)
    for layer in range(config.num_hidden_layers):
        path = f"model.layers.{layer}"
        for name, spec in _layer(config, layer):
            table[f"{path}.{name}"] = spec
        if config.is_moe(layer):
            experts = dict(_expert(config, quantized_experts))
            for expert in range(config.num_experts):
                base = f"{path}.block_sparse_moe.experts.{expert}"
                table |= {f"{base}.{name}": spec for name, spec in experts.items()}
    return {TEXT_PREFIX + name: spec for name, spec in table.items()}


def _layer(config: TextConfig, layer: int) -> Iterator[_Entry]:
    """Everything but the routed experts."""
    d = config.hidden_size
    yield "input_layernorm.weight", _bf16(d)
    yield "post_attention_layernorm.weight", _bf16(d)
    if config.attn_res_block_size is not None:
        # The first layer's attention has nothing to mix; its tensors exist all the same.
        yield from _mixture("self_attention_res", d).items()
        yield from _mixture("mlp_res", d).items()
    for name, spec in _kda(config) if config.is_kda(layer) else _mla(config):
        yield f"self_attn.{name}", spec
    if config.is_moe(layer):
        for name, spec in _router_and_shared(config):
            yield f"block_sparse_moe.{name}", spec
    else:
        yield from _gated_mlp("mlp", d, config.intermediate_size)


def _kda(config: TextConfig) -> Iterator[_Entry]:
    linear = config.linear_attn_config
    d, head = config.hidden_size, linear.head_dim
    width = linear.num_heads * head
    for name in "qkv":
        yield f"{name}_proj.weight", _bf16(width, d)
        yield f"{name}_conv1d.weight", _f32(width, 1, linear.short_conv_kernel_size)
    yield "f_a_proj.weight", _bf16(head, d)
    yield "f_b_proj.weight", _bf16(width, head)
    yield "b_proj.weight", _bf16(linear.num_heads, d)
    if linear.use_full_rank_gate:
        yield "g_proj.weight", _bf16(width, d)
    else:
        yield "g_a_proj.weight", _bf16(head, d)
        yield "g_b_proj.weight", _bf16(width, head)
    if linear.gate_lower_bound is None:
        yield "A_log", _f32(1, 1, linear.num_heads, 1)
    else:
        # One value per head counts; K3 stores as many as a head has channels, 128 for 96 heads.
        yield "A_log", _f32(max(linear.num_heads, head))
    yield "dt_bias", _f32(width)
    yield "o_norm.weight", _f32(head)
    yield "o_proj.weight", _bf16(d, width)


def _mla(config: TextConfig) -> Iterator[_Entry]:
    d, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    value = heads * config.v_head_dim
    if config.q_lora_rank is None:
        yield "q_proj.weight", _bf16(query, d)
    else:
        yield "q_a_proj.weight", _bf16(config.q_lora_rank, d)
        yield "q_a_layernorm.weight", _bf16(config.q_lora_rank)
        yield "q_b_proj.weight", _bf16(query, config.q_lora_rank)
    yield "kv_a_proj_with_mqa.weight", _bf16(latent + config.qk_rope_head_dim, d)
    yield "kv_a_layernorm.weight", _bf16(latent)
    yield "kv_b_proj.weight", _bf16(heads * config.qk_nope_head_dim + value, latent)
    if config.mla_use_output_gate:
        yield "g_proj.weight", _bf16(value, d)
    yield "o_proj.weight", _bf16(d, value)


def _router_and_shared(config: TextConfig) -> Iterator[_Entry]:
    d, latent = config.hidden_size, config.routed_expert_hidden_size
    yield "gate.weight", _bf16(config.num_experts, d)
    yield "gate.e_score_correction_bias", _f32(config.num_experts)
    if latent is not None:
        yield "routed_expert_down_proj.weight", _bf16(latent, d)
        yield "routed_expert_up_proj.weight", _bf16(d, latent)
        if config.latent_moe_use_norm:
            yield "routed_expert_norm.weight", _bf16(latent)
    if config.num_shared_experts:
        yield from _gated_mlp("shared_experts", d, config.shared_intermediate_size)


def _expert(config: TextConfig, quantized: bool) -> Iterator[_Entry]:
    """One routed expert: w1 is the gate, w3 the way up, w2 the way down."""
    width, inner = config.expert_hidden_size, config.moe_intermediate_size
    for name, rows, columns in (("w1", inner, width), ("w2", width, inner), ("w3", inner, width)):
        if quantized:
            yield f"{name}.weight_packed", TensorSpec((rows, columns // 2), torch.uint8)
            yield f"{name}.weight_scale", TensorSpec((rows, columns // GROUP_SIZE), torch.uint8)
        else:
            yield f"{name}.weight", _bf16(rows, columns)


def _gated_mlp(path: str, width: int, inner: int) -> Iterator[_Entry]:
    yield f"{path}.gate_proj.weight", _bf16(inner, width)
    yield f"{path}.up_proj.weight", _bf16(inner, width)
    yield f"{path}.down_proj.weight", _bf16(width, inner)


def _mixture(path: str, width: int) -> dict[str, TensorSpec]:
    return {f"{path}_norm.weight": _bf16(width), f"{path}_proj.weight": _bf16(1, width)}


def _bf16(*shape: int) -> TensorSpec:
    return TensorSpec(shape, torch.bfloat16)


def _f32(*shape: int) -> TensorSpec:
    return TensorSpec(shape, torch.float32)
