"""K3 without its weights: slices of the real geometry filled with random values.

Here: their ``config.json``, their checkpoints on disk, and models that were never on a disk. For
measuring engine and loader at K3's own dimensions; what such a model answers means nothing.
"""

from __future__ import annotations

import math
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from k3vl.checkpoint_writer import write_checkpoint
from k3vl.config import parse_config
from k3vl.kernels.moe.mxfp4 import Mxfp4Experts
from k3vl.kernels.mxfp4 import GROUP_SIZE
from k3vl.lm.model import Layer
from k3vl.lm.moe import LatentMoE
from k3vl.lm.ranks import Cut, allocate
from k3vl.lm.table import expected_tensors as expected_text_tensors
from k3vl.vision.weights import expected_tensors as expected_vision_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from k3vl.checkpoint import TensorSpec
    from k3vl.config import K3Config, TextConfig
    from k3vl.kernels.choice import Kernels
    from k3vl.kernels.moe.experts import ExpertForm
    from k3vl.lm.model import K3Model
    from k3vl.lm.ranks import Ranks

_MEAN_SQUARE = 68.5 / 8
"""Of an E2M1 code drawn uniformly."""

_K3_TEXT: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 33792,
    "num_attention_heads": 96,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "linear_attn_config": {
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True,
    "attn_res_block_size": 12,
    "rms_norm_eps": 1e-5,
    "hidden_act": "situ",
    "max_position_embeddings": 1048576,
    "quantization_config": {"format": "mxfp4-pack-quantized"},
}
_K3_VISION: dict[str, Any] = {
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "vt_hidden_size": 1024,
    "vt_intermediate_size": 4096,
    "vt_num_hidden_layers": 27,
    "vt_num_attention_heads": 12,
    "qkv_hidden_size": 1536,
    "merge_kernel_size": [2, 2],
    "text_hidden_size": 7168,
    "mm_hidden_size": 1024,
}
_TINY_TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "linear_attn_config": {**_K3_TEXT["linear_attn_config"], "num_heads": 4, "head_dim": 32},
    "num_experts": 16,
    "num_experts_per_token": 4,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 64,
    "attn_res_block_size": 2,
    "max_position_embeddings": 65536,
}
_TINY_VISION: dict[str, Any] = {
    "vt_hidden_size": 32,
    "vt_intermediate_size": 64,
    "vt_num_hidden_layers": 1,
    "vt_num_attention_heads": 2,
    "qkv_hidden_size": 32,
    "text_hidden_size": 128,
    "mm_hidden_size": 32,
}


def slice_config(
    layers: int, *, experts: int | None = None, vocab: int | None = None, tiny: bool = False
) -> dict[str, Any]:
    """The ``config.json`` of a K3 cut down to so many layers.

    Layers follow K3's own pattern: the first has a dense MLP, every fourth and the last are MLA.

    Args:
        layers: how many, at least two; 93 is all of K3.
        experts: routed experts of a layer, at least those of a token; None: as many as there are.
        vocab: rows of embedding and head; None: as many as there are.
        tiny: small numbers in place of K3's dimensions; every kind of layer is still there.
    """
    text, vision = deepcopy(_K3_TEXT), deepcopy(_K3_VISION)
    if tiny:
        text.update(deepcopy(_TINY_TEXT))
        vision.update(_TINY_VISION)
    full = sorted({*range(4, layers, 4), layers})
    text["num_hidden_layers"] = layers
    text["linear_attn_config"] |= {
        "full_attn_layers": full,
        "kda_layers": [n for n in range(1, layers + 1) if n not in full],
    }
    text["num_experts"] = experts or text["num_experts"]
    text["vocab_size"] = vocab or text["vocab_size"]
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "media_placeholder_token_id": min(163605, text["vocab_size"] - 1),
        "eos_token_id": min(163586, text["vocab_size"] - 2),
        "text_config": text,
        "vision_config": vision,
    }


# ---------------------------------------------------------------------- on disk


def stored_specs(config: K3Config) -> dict[str, TensorSpec]:
    """Every tensor of such a checkpoint, experts packed: real names, shapes and dtypes."""
    return {
        **expected_text_tensors(config.text, quantized_experts=True),
        **expected_vision_tensors(config.vision),
    }


def write_slice(
    directory: Path, content: Mapping[str, Any], *, seed: int = 0, max_shard_bytes: int = 1 << 30
) -> int:
    """Write a checkpoint with random weights; what it takes in memory is one shard.

    Args:
        directory: made if need be; must not hold weights yet.
        content: of :func:`slice_config`.
        seed: with it, every tensor depends on its name only.
        max_shard_bytes: see :func:`k3vl.checkpoint.write_checkpoint`.

    Returns:
        Bytes of all tensors.

    Raises:
        ConfigError: the configuration contradicts itself.
        WeightError: the directory holds weights, or cannot be written.
    """
    specs = stored_specs(parse_config(dict(content)))
    write_checkpoint(
        directory,
        specs,
        partial(_random_tensor, specs, seed),
        json_files={"config.json": content},
        max_shard_bytes=max_shard_bytes,
    )
    return sum(spec.nbytes for spec in specs.values())


def _random_tensor(specs: Mapping[str, TensorSpec], seed: int, name: str) -> torch.Tensor:
    spec = specs[name]
    generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    if name.endswith("_packed"):
        return tensor.random_(0, 256, generator=generator)
    if name.endswith("_scale"):
        return _random_scales(tensor, spec.shape[-1] * GROUP_SIZE, generator)
    return _random_floats(tensor, name, math.prod(spec.shape[1:]), generator)


def _random_floats(
    tensor: torch.Tensor, name: str, columns: int, generator: torch.Generator
) -> torch.Tensor:
    """Matrices keep the scale of what goes through them; norms are near one."""
    if name.removesuffix(".weight").endswith("norm"):
        return tensor.normal_(1, 0.1, generator=generator)
    if name.endswith("bias"):
        # A choice bias balances the experts of a trained router; a drawn one has no need of it.
        return tensor.normal_(0, 0.01, generator=generator)
    # Scores of the mixture over depth stay near one: a mixture, not a choice.
    is_matrix = tensor.dim() > 1 or name.endswith("_read.query")
    spread = 1 / math.sqrt(columns) if is_matrix else 0.3
    return tensor.normal_(0, spread, generator=generator)


def _random_scales(tensor: torch.Tensor, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Scales with which uniformly drawn codes are a matrix as above; one octave up and down."""
    middle = round(127 - math.log2(_MEAN_SQUARE * columns) / 2)
    return tensor.random_(middle - 1, middle + 2, generator=generator)


# ---------------------------------------------------------------------- in memory


@torch.no_grad()
def random_model(
    config: TextConfig,
    kernels: Kernels,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    ranks: Ranks | None = None,
) -> K3Model:
    """A language model with random weights, drawn on its device; the seed decides them there.

    Routed experts are packed where the kernels can run them so. Of the same weights ``ranks`` have
    a part each; what is drawn and not kept takes the memory of one tensor.

    Raises:
        ConfigError: the ranks cannot divide it.
    """
    form: ExpertForm = "float" if kernels.latent_moe_mxfp4 is None else "mxfp4"
    model = allocate(config, kernels, ranks, form=form, router=dtype, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)

    def fill(name: str, target: torch.Tensor, draw: Callable[[torch.Tensor], object]) -> None:
        if ranks is None:
            draw(target)
            return
        cut = Cut.of(ranks, model, name)
        whole = target.new_empty(cut.whole_shape(target.shape))
        draw(whole)
        target.copy_(cut.share(whole))

    for name, parameter in model.named_parameters():

        def floats(tensor: torch.Tensor, name: str = name) -> object:
            return _random_floats(tensor, name, tensor.shape[-1], generator)

        fill(name, parameter, floats)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        stored = layer.mlp.experts if isinstance(layer.mlp, LatentMoE) else None
        if isinstance(stored, Mxfp4Experts):
            for name in ("w13", "w2"):
                fill(
                    f"layers.{index}.mlp.{name}",
                    getattr(stored, name),
                    lambda t: t.random_(-(1 << 31), 1 << 31, generator=generator),
                )
            for name in ("w13_scale", "w2_scale"):
                fill(
                    f"layers.{index}.mlp.{name}",
                    getattr(stored, name),
                    lambda t: _random_scales(t, t.shape[-1] * GROUP_SIZE, generator),
                )
    return model
