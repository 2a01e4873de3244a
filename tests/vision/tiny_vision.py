"""A tiny tower with seeded weights, shared by the tests of this directory."""

import torch

from k3vl.config import K3_MEDIA, VisionConfig
from k3vl.kernels.vision import REFERENCE, VisionKernels
from k3vl.vision.projector import PatchMerger
from k3vl.vision.tower import VisionTower

TINY = VisionConfig(
    patch_size=14,
    init_pos_emb_height=6,
    init_pos_emb_width=5,
    init_pos_emb_time=4,
    vt_hidden_size=24,
    vt_intermediate_size=40,
    vt_num_hidden_layers=2,
    vt_num_attention_heads=3,
    qkv_hidden_size=48,  # heads wider than 24 / 3, as in K3
    merge_kernel_size=(2, 2),
    text_hidden_size=20,
    mm_hidden_size=24,
)


def tiny_models(
    config: VisionConfig = TINY,
    dtype: torch.dtype = torch.float32,
    kernels: VisionKernels = REFERENCE,
) -> tuple[VisionTower, PatchMerger]:
    generator = torch.Generator().manual_seed(11)
    tower = VisionTower(config, K3_MEDIA, dtype=dtype, kernels=kernels)
    projector = PatchMerger(config, dtype=dtype, kernels=kernels)
    for parameter in [*tower.parameters(), *projector.parameters()]:
        values = torch.randn(parameter.shape, generator=generator)
        spread = parameter[0].numel() ** -0.5 if parameter.ndim in (2, 4) else 0.3
        centre = 1.0 if parameter.ndim == 1 else 0.0
        parameter.data.copy_(values * spread + centre)
        parameter.requires_grad_(False)
    return tower, projector


def pixels(*grids: tuple[int, int, int], seed: int = 0) -> torch.Tensor:
    count = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 14, 14), dtype=torch.uint8, generator=generator)
