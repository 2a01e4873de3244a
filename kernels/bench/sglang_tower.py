"""SGLang's MoonViT3d and projector for Kimi K3, and the attention kernels that it may have."""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from k3vl.kernels.bench.case import Work
from k3vl.kernels.bench.peers import named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from k3vl.kernels.bench.case import Peer

_PREFIXES = {"tower": "vision_tower.", "projector": "mm_projector."}


def built_once(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Callable[[], tuple[Any, Any]]:
    """A function that builds tower and projector at its first call, and keeps them.

    Args:
        config: ``vision_config`` of ``config.json``.
        tensors: weights under a checkpoint's names, on the device.
    """
    return cache(partial(_built, config, tensors))


def _built(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    from sglang.srt.configs.kimi_k3 import KimiK3VisionConfig
    from sglang.srt.models.kimi_k3_vl import KimiK3MultiModalProjector, KimiK3VisionTower

    # Without a server's arguments its tower chooses the attention by itself: PyTorch's on Hopper.
    settings = KimiK3VisionConfig(**config)
    example = next(iter(tensors.values()))
    built = []
    for kind, prefix in ((KimiK3VisionTower, "tower"), (KimiK3MultiModalProjector, "projector")):
        with example.device:
            module = kind(settings)
        module = module.to(example.device, example.dtype).eval().requires_grad_(False)
        begin = _PREFIXES[prefix]
        module.load_state_dict(
            {n.removeprefix(begin): t for n, t in tensors.items() if n.startswith(begin)}
        )
        built.append(module)
    tower, projector = built
    return tower, projector


def tower_peers(
    patches: torch.Tensor,
    grids: Sequence[tuple[int, int, int]],
    build: Callable[[], tuple[Any, Any]],
) -> dict[str, Peer]:
    """Normalised patches to rows of the language model; the result is ours, [M, D].

    Args:
        patches: [P, 3, 14, 14], the weights' dtype.
        grids: of the items.
        build: of :func:`built_once`.
    """
    return named(
        {
            "KimiK3VisionTower + projector": lambda: _tower(patches, grids, build(), before=False),
            "KimiK3VisionTower + projector, positions and lengths made before": lambda: _tower(
                patches, grids, build(), before=True
            ),
        }
    )


def _tower(
    patches: torch.Tensor,
    grids: Sequence[tuple[int, int, int]],
    built: tuple[Any, Any],
    *,
    before: bool,
) -> Work:
    tower, projector = built
    sizes = torch.tensor(grids, device=patches.device)
    made = (
        tower.prepare_forward_metadata(sizes, grid_thw_list=grids, total_tokens=len(patches))
        if before
        else None
    )

    def encode() -> torch.Tensor:
        return projector(tower(patches, sizes, forward_metadata=made))

    return Work(encode, encode)


def attention_peers(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]
) -> dict[str, Peer]:
    """Attention within every item; the result is ours, [P, H, K].

    Args:
        q, k, v: [P, H, K].
        lengths: of the items, they add up to P.
    """
    args = (q, k, v, lengths)
    return named(
        {
            "FlashAttention 3 (sgl-kernel), packed": lambda: _flash3(*args),
            "sdpa_varlen_attention, as its tower on Hopper": lambda: _sdpa(*args),
            "Triton context_attention_fwd, packed": lambda: _triton(*args),
        }
    )


def _borders(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _flash3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]) -> Work:
    library: Any = import_module("sgl_kernel.flash_attn")
    borders, longest = _borders(lengths, q.device), max(lengths)

    def attend() -> torch.Tensor:
        return library.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=borders,
            cu_seqlens_k=borders,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=q.shape[-1] ** -0.5,
        )

    return Work(attend, attend)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]) -> Work:
    from sglang.srt.models.kimi_k3_vl import sdpa_varlen_attention

    borders = _borders(lengths, q.device)
    ends = list(accumulate(lengths))
    bounds = tuple(zip([0, *ends], ends, strict=False))

    def attend() -> torch.Tensor:
        return sdpa_varlen_attention(q, k, v, borders, segment_bounds=bounds).view(q.shape)

    return Work(attend, attend)


def _triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]) -> Work:
    from sglang.kernels.ops.attention.prefill_attention import context_attention_fwd

    borders = _borders(lengths, q.device)
    each = torch.tensor(lengths, dtype=torch.int32, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)

    def attend() -> torch.Tensor:
        context_attention_fwd(q, k, v, out, borders, each, max(lengths), is_causal=False)
        return out

    return Work(attend, attend)
