"""Several processes that train one model, one on each device.

Every process draws its own data; gradients are averaged in one flat buffer, because the model is
small and its tensors are many. What decides over the course of the run (time, stop) is told by the
first process, so that all of them take the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among ``count``; alone, nothing here does anything."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes log and weights."""
        return self.index == 0

    @property
    def device(self) -> torch.device:
        """The CUDA device of this process, or the CPU where there is none."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.index)

    def join(self, meeting: Path) -> None:
        """Meet the other processes at a file that none of them has made yet."""
        if self.count > 1:
            cuda = self.device.type == "cuda"
            if cuda:
                torch.cuda.set_device(self.device)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                init_method=f"file://{meeting}",
                rank=self.index,
                world_size=self.count,
            )

    def leave(self) -> None:
        """End the meeting."""
        if self.count > 1:
            dist.destroy_process_group()

    def agree(self, value: float) -> float:
        """The first process's value, in all of them."""
        if self.count == 1:
            return value
        told = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(told, 0)
        return float(told)

    def average(self, parameters: Sequence[nn.Parameter], others: Sequence[Tensor]) -> None:
        """Average the gradients of ``parameters``, and ``others``, over all processes, in place."""
        if self.count == 1:
            return
        tensors = [p.grad for p in parameters if p.grad is not None]
        assert len(tensors) == len(parameters), "a parameter took no part in the loss"
        tensors += others
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        flat /= self.count
        parts = flat.split([t.numel() for t in tensors])
        torch._foreach_copy_(
            tensors, [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)]
        )

    def align(self, tensors: Sequence[Tensor]) -> None:
        """Take over the first process's values, should the devices have rounded differently."""
        if self.count == 1:
            return
        flat = torch.cat([t.detach().flatten() for t in tensors])
        dist.broadcast(flat, 0)
        parts = flat.split([t.numel() for t in tensors])
        with torch.no_grad():
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
