"""Numbers on their way from the host to a device, for which the host does not wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def upload(*values: ArrayLike, device: torch.device) -> list[torch.Tensor]:
    """Arrays as int64 tensors on the device, by one copy in the order of the current stream.

    A copy from pageable memory (``torch.tensor(values, device=device)``) would have the host wait
    until the stream has come to it, behind all that was launched before.
    """
    arrays = [np.asarray(value, np.int64) for value in values]
    flat = torch.from_numpy(np.concatenate(arrays, axis=None))
    if device.type == "cuda":
        flat = flat.pin_memory()  # its memory is used again when the copy is over
    flat = flat.to(device, non_blocking=True)
    if len(arrays) == 1:  # every operator gives Python's lock away, which others may take
        return [flat if arrays[0].ndim == 1 else flat.view(arrays[0].shape)]
    parts = flat.split_with_sizes([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
