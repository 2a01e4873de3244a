"""Addresses for Gluon kernels that run on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class Pointer:
    """An address, or a block of them, in the memory of a tensor."""

    def __init__(self, tensor: torch.Tensor, at: Any = 0) -> None:
        self.tensor, self.at = tensor, at
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.at + offset)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.tensor, self.at[index])

    def to(self, _dtype: torch.dtype) -> int:
        """As a number that only hints to a cache are given."""
        return 0

    def cells(self, mask: Any) -> tuple[torch.Tensor, Any, Any]:
        """All memory in a row, indices into it, and which of them count."""
        flat = torch.as_strided(
            self.tensor, (self.tensor.untyped_storage().nbytes() // self.tensor.itemsize,), (1,), 0
        )
        at = torch.as_tensor(self.at) + self.tensor.storage_offset()
        live = torch.as_tensor(True if mask is None else mask).expand(at.shape)
        assert ((at >= 0) & (at < len(flat)) | ~live).all(), "outside of the tensor's memory"
        return flat, torch.where(live, at, 0), live
