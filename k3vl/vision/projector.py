"""From merged patches to rows of the language model (``patchmergerv2``).

Source: Kimi K3 ``modeling_kimi_k3.py``; GELU is the exact one here, unlike in the tower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import gelu

from k3vl.errors import ShapeError
from k3vl.kernels.vision import REFERENCE
from k3vl.parameters import linear

if TYPE_CHECKING:
    from k3vl.config import VisionConfig
    from k3vl.kernels.vision import VisionKernels


class PatchMerger(nn.Module):
    """Two linear maps around a GELU, then an RMS norm; no biases.

    Parameters are left uninitialised: a checkpoint, or whoever trains, fills them.
    """

    def __init__(
        self,
        config: VisionConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kernels: VisionKernels = REFERENCE,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        merged, width = config.merged_size, config.text_hidden_size
        self.eps = config.projector_ln_eps
        self.inner = linear(merged, merged, dtype, device)
        self.outer = linear(merged, width, dtype, device)
        self.norm = nn.Parameter(torch.empty(width, dtype=dtype, device=device))

    def forward(self, merged: torch.Tensor) -> torch.Tensor:
        """Project [M, 4 * tower width] cells to [M, text width], same dtype.

        Raises:
            ShapeError: the width is another one.
        """
        if merged.ndim != 2 or merged.shape[1] != self.inner.in_features:
            raise ShapeError(
                f"projector: input {tuple(merged.shape)}, weight {tuple(self.inner.weight.shape)}"
            )
        ops = self.kernels
        hidden = gelu(ops.linear(merged, self.inner.weight))
        return ops.rms_norm(ops.linear(hidden, self.outer.weight), self.norm, self.eps)
