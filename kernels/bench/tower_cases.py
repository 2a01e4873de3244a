"""The whole MoonViT3d with its projector at K3's dimensions, weights drawn at random."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from k3vl.config import MediaConfig, VisionConfig, parse_config
from k3vl.kernels.bench import sglang_tower
from k3vl.kernels.bench.case import Case, Peer, Work, normal
from k3vl.kernels.recording import GraphRunner
from k3vl.kernels.vision import REFERENCE, triton_vision
from k3vl.synthetic import slice_config
from k3vl.vision.projector import PatchMerger
from k3vl.vision.tower import Grid, VisionTower
from k3vl.vision.weights import placements

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from k3vl.kernels.vision import VisionKernels

_LIMIT = 5e-2
"""27 layers in bfloat16, each rounding what goes from layer to layer, against float32."""


def tower_cases() -> Iterator[Case]:
    """One picture of 1024 x 1024 (padded to 1036), 16 of 448 x 448; patches are normalised."""
    content = slice_config(2)["vision_config"]
    config = parse_config(slice_config(2)).vision
    encode, tensors = build(config, triton_vision(), torch.bfloat16)
    for tensor in tensors.values():
        _draw(tensor)
    theirs = sglang_tower.built_once(content, tensors)
    for name, grids in (("1024x1024", [(1, 74, 74)]), ("16 of 448x448", [(1, 32, 32)] * 16)):
        lengths = [frames * rows * columns for frames, rows, columns in grids]
        patches = normal(sum(lengths), 3, config.patch_size, config.patch_size)
        yield Case(
            op="vision_tower",
            shape=f"{name}, {sum(lengths)} patches, projector included",
            ours=partial(encode, patches, grids),
            want=partial(_want, config, tensors, patches, grids),
            limit=_LIMIT,
            bytes=sum(t.nbytes for t in tensors.values()) + patches.nbytes
            + sum(lengths) // 4 * config.text_hidden_size * 2,
            flops=_flops(config, lengths),
            variants={"recorded": Peer(partial(_recorded, encode, patches, grids))},
            compared=True,
            peers=sglang_tower.tower_peers(patches, grids, theirs),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Encoder:
    """Tower and projector."""

    tower: VisionTower
    projector: PatchMerger

    def __call__(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """[P, 3, 14, 14] to [M, D]."""
        return self.projector(self.tower(patches, grids))


def _recorded(encode: Encoder, patches: torch.Tensor, grids: Sequence[Grid]) -> Work:
    """As it is served when grids come again: one graph."""
    plan = encode.tower.plan(grids)
    step = GraphRunner().make(lambda: encode.projector(encode.tower.run(patches, plan)))
    return Work(step, step)


def build(
    config: VisionConfig, kernels: VisionKernels, dtype: torch.dtype, device: str = "cuda"
) -> tuple[Encoder, dict[str, torch.Tensor]]:
    """The encoder and its weights by their names; not yet filled."""
    media = MediaConfig(
        patch_size=config.patch_size,
        merge_kernel_size=2,
        in_patch_limit=16384,
        patch_limit_on_one_side=512,
    )
    tower = VisionTower(config, media, dtype=dtype, device=device, kernels=kernels)
    projector = PatchMerger(config, dtype=dtype, device=device, kernels=kernels)
    tower.requires_grad_(requires_grad=False)
    projector.requires_grad_(requires_grad=False)

    places = placements(tower, projector)
    return Encoder(tower, projector), {name: place.target for name, place in places.items()}


def _draw(tensor: torch.Tensor) -> None:
    """Matrices keep the scale of what goes through them; norms are near one."""
    if tensor.dim() == 1:
        tensor.normal_(1, 0.1)
    else:
        tensor.normal_(0, tensor[0].numel() ** -0.5)


def _want(
    config: VisionConfig,
    tensors: Mapping[str, torch.Tensor],
    patches: torch.Tensor,
    grids: Sequence[Grid],
) -> torch.Tensor:
    """The reference in float32; its weights are gone again afterwards."""
    encode, places = build(config, REFERENCE, torch.float32, str(patches.device))
    for name, place in places.items():
        place.copy_(tensors[name])
    return encode(patches.float(), grids)


def _flops(config: VisionConfig, lengths: Sequence[int]) -> int:
    width, qkv, inner = config.vt_hidden_size, config.qkv_hidden_size, config.vt_intermediate_size
    patches, cells, merged = sum(lengths), sum(lengths) // 4, config.merged_size
    layer = 2 * patches * (4 * qkv * width + 2 * inner * width)
    attention = 4 * qkv * sum(n * n for n in lengths)
    embedding = 2 * patches * 3 * config.patch_size**2 * width
    projector = 2 * cells * merged * (merged + config.text_hidden_size)
    return config.vt_num_hidden_layers * (layer + attention) + embedding + projector
