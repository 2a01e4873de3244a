"""K3's tensor names of the vision tower and the projector.

Here: the expected table and the way from checkpoint names to parameters. Not here: reading files
(``k3vl.checkpoint``), the language model's names (``k3vl.lm``).

Source: header table of moonshotai/Kimi-K3 (revision 9f62e4e9). No tensor of it has a bias.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from k3vl.checkpoint import CheckpointReader, Placement, TensorSpec
from k3vl.kernels.vision import REFERENCE
from k3vl.vision.projector import PatchMerger
from k3vl.vision.tower import VisionBlock, VisionTower

if TYPE_CHECKING:
    from k3vl.config import MediaConfig, VisionConfig
    from k3vl.kernels.vision import VisionKernels

VISION_PREFIXES = ("vision_tower.", "mm_projector.")
"""Every checkpoint name of this part starts with one of these."""


def expected_tensors(config: VisionConfig) -> dict[str, TensorSpec]:
    """List the stored tensors of an unquantised checkpoint: name -> shape and dtype."""
    width, inner, qkv = config.vt_hidden_size, config.vt_intermediate_size, config.qkv_hidden_size
    patch = config.patch_size
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (width, 3, patch, patch),
        "vision_tower.patch_embed.pos_emb.weight": (
            config.init_pos_emb_height,
            config.init_pos_emb_width,
            width,
        ),
    }
    for layer in range(config.vt_num_hidden_layers):
        block = f"vision_tower.encoder.blocks.{layer}."
        shapes |= {
            f"{block}norm0.weight": (width,),
            f"{block}norm1.weight": (width,),
            f"{block}wqkv.weight": (3 * qkv, width),
            f"{block}wo.weight": (width, qkv),
            f"{block}mlp.fc0.weight": (inner, width),
            f"{block}mlp.fc1.weight": (width, inner),
        }
    merged = config.merged_size
    shapes |= {
        "vision_tower.encoder.final_layernorm.weight": (width,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.2.weight": (config.text_hidden_size, merged),
        "mm_projector.post_norm.weight": (config.text_hidden_size,),
    }
    return {name: TensorSpec(shape, torch.bfloat16) for name, shape in shapes.items()}


def placements(tower: VisionTower, projector: PatchMerger) -> dict[str, Placement]:
    """Map every checkpoint name of this part to the parameter that it fills."""
    places: dict[str, torch.Tensor] = {
        "vision_tower.patch_embed.proj.weight": tower.patch_weight,
        "vision_tower.patch_embed.pos_emb.weight": tower.position_table,
        "vision_tower.encoder.final_layernorm.weight": tower.final_norm,
        "mm_projector.proj.0.weight": projector.inner.weight,
        "mm_projector.proj.2.weight": projector.outer.weight,
        "mm_projector.post_norm.weight": projector.norm,
    }
    for layer, block in enumerate(tower.blocks):
        assert isinstance(block, VisionBlock)
        prefix = f"vision_tower.encoder.blocks.{layer}."
        places |= {
            f"{prefix}norm0.weight": block.attention_norm,
            f"{prefix}norm1.weight": block.mlp_norm,
            f"{prefix}wqkv.weight": block.qkv.weight,
            f"{prefix}wo.weight": block.out.weight,
            f"{prefix}mlp.fc0.weight": block.up.weight,
            f"{prefix}mlp.fc1.weight": block.down.weight,
        }
    return {name: Placement(parameter) for name, parameter in places.items()}


def load_vision(
    reader: CheckpointReader,
    config: VisionConfig,
    media: MediaConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    kernels: VisionKernels = REFERENCE,
) -> tuple[VisionTower, PatchMerger]:
    """Build tower and projector and fill them from a checkpoint, ready for inference.

    Raises:
        WeightError: a tensor of this part is missing, left over, damaged or of another shape.
    """
    tower = VisionTower(config, media, dtype=dtype, device=device, kernels=kernels)
    projector = PatchMerger(config, dtype=dtype, device=device, kernels=kernels)
    reader.load_into(placements(tower, projector), prefixes=VISION_PREFIXES)
    return tower.eval().requires_grad_(False), projector.eval().requires_grad_(False)
