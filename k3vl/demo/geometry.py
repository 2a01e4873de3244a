"""Dimensions of the demo model, and the ``config.json`` that says them in K3's field names.

The wiring is K3's own (KDA and gated MLA 3:1, block attention residuals, latent experts, SiTU,
MoonViT3d); only the widths and counts are small. Field names: Kimi K3's ``config.json``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Widths and counts of one model; the defaults are the demo checkpoint's.

    Attributes:
        mla_layers: 1-based numbers of the MLA layers; all others are KDA.
        table: rows and columns of the learned position table.
    """

    vocab: int = 4096
    width: int = 256
    layers: int = 12
    mla_layers: tuple[int, ...] = (4, 8, 12)
    heads: int = 4
    head_dim: int = 64
    conv: int = 4
    q_rank: int = 128
    kv_rank: int = 128
    nope: int = 48
    rope: int = 16
    block: int = 4
    dense: int = 768
    experts: int = 8
    top: int = 2
    latent: int = 128
    inner: int = 192
    shared: int = 2
    patch: int = 14
    table: int = 32
    vision_width: int = 256
    vision_layers: int = 7
    vision_heads: int = 4
    vision_inner: int = 1024

    @property
    def attention_width(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    def is_mla(self, layer: int) -> bool:
        """Whether 0-based ``layer`` is gated MLA."""
        return layer + 1 in self.mla_layers


DEMO = Geometry()
"""The shipped checkpoint."""

GATE_LOWER_BOUND = -5.0
SITU_BETA, SITU_LINEAR_BETA = 4.0, 25.0
RMS_EPS = 1e-5

SPECIALS = (
    "<|bos|>",
    "<|eos|>",
    "<|end_of_msg|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<|unk|>",
    "<|pad|>",
)
"""Control tokens, ids from 0; ids up to :data:`N_SPECIAL` are reserved."""

N_SPECIAL = 256
SPECIAL_ID = {text: index for index, text in enumerate(SPECIALS)}


def hf_config(g: Geometry = DEMO) -> dict[str, Any]:
    """The content of ``config.json``."""
    ids = {
        "bos_token_id": SPECIAL_ID["<|bos|>"],
        "eos_token_id": SPECIAL_ID["<|end_of_msg|>"],
        "pad_token_id": SPECIAL_ID["<|pad|>"],
    }
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": _text_config(g) | ids,
        "vision_config": _vision_config(g),
        "media_placeholder_token_id": SPECIAL_ID["<|media_pad|>"],
        "image_placeholder": "<|kimi_image_placeholder|>",
        **ids,
        "ignore_index": -100,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def _text_config(g: Geometry) -> dict[str, Any]:
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": g.vocab,
        "hidden_size": g.width,
        "intermediate_size": g.dense,
        "num_hidden_layers": g.layers,
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.heads,
        "q_lora_rank": g.q_rank,
        "kv_lora_rank": g.kv_rank,
        "qk_nope_head_dim": g.nope,
        "qk_rope_head_dim": g.rope,
        "v_head_dim": g.head_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "full_attn_layers": list(g.mla_layers),
            "kda_layers": [n for n in range(1, g.layers + 1) if n not in g.mla_layers],
            "gate_lower_bound": GATE_LOWER_BOUND,
            "head_dim": g.head_dim,
            "num_heads": g.heads,
            "short_conv_kernel_size": g.conv,
            "use_full_rank_gate": True,
        },
        "attn_res_block_size": g.block,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": g.experts,
        "num_experts_per_token": g.top,
        "moe_intermediate_size": g.inner,
        "routed_expert_hidden_size": g.latent,
        "num_shared_experts": g.shared,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "routed_scaling_factor": 1.0,
        "hidden_act": "situ",
        "activation_situ_beta": SITU_BETA,
        "activation_situ_linear_beta": SITU_LINEAR_BETA,
        "rms_norm_eps": RMS_EPS,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "use_cache": True,
        "num_nextn_predict_layers": 0,
    }


def _vision_config(g: Geometry) -> dict[str, Any]:
    return {
        "model_type": "kimi_k3_vision",
        "patch_size": g.patch,
        "init_pos_emb_height": g.table,
        "init_pos_emb_width": g.table,
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": "bilinear",
        "vt_hidden_size": g.vision_width,
        "vt_num_hidden_layers": g.vision_layers,
        "vt_num_attention_heads": g.vision_heads,
        "vt_intermediate_size": g.vision_inner,
        "qkv_hidden_size": g.vision_width,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmergerv2",
        "mm_hidden_size": g.vision_width,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": RMS_EPS,
        "text_hidden_size": g.width,
        "norm_type": "rmsnorm",
        "attn_bias": False,
        "linear_bias": False,
        "patch_embed_proj_bias": False,
        "mlp_type": "mlp2",
        "activation_func": "gelu_pytorch_tanh",
    }
