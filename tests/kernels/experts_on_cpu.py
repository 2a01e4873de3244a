"""What the tests of experts on an imitation of Gluon have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from k3vl.kernels.moe.mxfp4 import prepare_experts
from tests.kernels.gluon_on_cpu import launch

if TYPE_CHECKING:
    from k3vl.kernels.moe.mxfp4 import Mxfp4Experts


def on_cpu(kernel: Any, grid: tuple[int, int], *args: Any, **constants: Any) -> None:
    """Launch without what only a device takes."""
    for option in ("num_warps", "maxnreg", "launch_pdl"):
        constants.pop(option, None)
    launch(kernel, (*grid, 1), *args, **constants)


def random_experts(count: int, latent: int, inner: int) -> Mxfp4Experts:
    """All codes, and scales about 1."""

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(116, 124, shape, dtype=torch.uint8)

    return prepare_experts(
        codes(count, 2 * inner, latent // 2),
        scales(count, 2 * inner, latent // 32),
        codes(count, latent, inner // 2),
        scales(count, latent, inner // 32),
    )
