"""Integers from the host to where the model is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def ship(*values: ArrayLike, device: torch.device) -> list[torch.Tensor]:
    """Arrays as int64 tensors on the device: one copy, which the host does not wait for."""
    arrays = [np.asarray(value, np.int64) for value in values]
    flat = torch.from_numpy(np.concatenate(arrays, axis=None))
    if device.type == "cuda":
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split_with_sizes([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
