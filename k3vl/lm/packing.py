"""How a KDA state lies in a checkpoint: as it is, or in fewer bytes.

A slot is float32 states [K, V], one per cell, each with its convolution window. ``exact`` copies
its units. ``bfloat16`` rounds the states; ``int8`` keeps a byte for every element and a float32
scale for every row of K: a key channel decays as a whole, so rows differ in size by orders of
magnitude. Windows (3 % of K3's bytes) stay exact. With anything but ``exact`` what
is computed behind a restored checkpoint is no longer what a cold run computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3vl.config import TextConfig
    from k3vl.lm.cache import HybridCache

CheckpointDtype: TypeAlias = Literal["exact", "bfloat16", "int8"]


class States(Protocol):
    """States on their way to bytes and back."""

    def nbytes(self, head: int) -> int:
        """Bytes of one [K, V] state with K = V = ``head``."""

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """[N, K, V] float32 to [N, nbytes] uint8."""

    def unpack(self, packed: torch.Tensor, head: int) -> torch.Tensor:
        """[N, nbytes] uint8 to [N, K, V] float32."""


class Rounded:
    """bfloat16: relative error of an element at most 2^-8."""

    def nbytes(self, head: int) -> int:
        """Two bytes an element."""
        return 2 * head * head

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """See :class:`States`."""
        return states.to(torch.bfloat16).flatten(1).view(torch.uint8)

    def unpack(self, packed: torch.Tensor, head: int) -> torch.Tensor:
        """See :class:`States`."""
        return packed.contiguous().view(torch.bfloat16).view(-1, head, head).float()


class Scaled:
    """int8 with a scale per row of K: error of an element at most 1/254 of its row's largest."""

    def nbytes(self, head: int) -> int:
        """A byte an element and four a row."""
        return head * head + 4 * head

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """See :class:`States`."""
        scales = states.abs().amax(-1, keepdim=True) / 127
        steps = (states / scales.clamp_min(torch.finfo(torch.float32).tiny)).round()
        steps = steps.clamp_(-127, 127).to(torch.int8)
        return torch.cat(
            [steps.flatten(1).view(torch.uint8), scales.flatten(1).view(torch.uint8)], 1
        )

    def unpack(self, packed: torch.Tensor, head: int) -> torch.Tensor:
        """See :class:`States`."""
        steps = packed[:, : head * head].contiguous().view(torch.int8).view(-1, head, head)
        scales = packed[:, head * head :].contiguous().view(torch.float32)
        return steps.float() * scales.unsqueeze(-1)


class Checkpoints(Protocol):
    """Moves states between slots and checkpoints."""

    def save(self, slot: Sequence[int], units: Sequence[int]) -> None:
        """Write a slot's state into a checkpoint's units."""

    def load(self, units: Sequence[int], slot: Sequence[int]) -> None:
        """Fill a slot from a checkpoint."""


class ExactCheckpoints:
    """A checkpoint is a copy of the slot."""

    def __init__(self, cache: HybridCache) -> None:
        """Of this cache."""
        self.save = self.load = cache.copy


class PackedCheckpoints:
    """A checkpoint is the packed states of all cells, then their windows."""

    def __init__(self, cache: HybridCache, states: States, head: int) -> None:
        """Of this cache, whose states are [head, head]."""
        self.cache, self.states, self.head = cache, states, head

    def save(self, slot: Sequence[int], units: Sequence[int]) -> None:
        """See :class:`Checkpoints`."""
        cells = self.cache.cells([slot]).flatten()
        states, windows = self.cache.cell_views
        parts = [self.states.pack(states[cells]), windows[cells].flatten(1).view(torch.uint8)]
        content = torch.cat([part.flatten() for part in parts])
        self.cache.write_units(units, content)

    def load(self, units: Sequence[int], slot: Sequence[int]) -> None:
        """See :class:`Checkpoints`."""
        cells = self.cache.cells([slot]).flatten()
        states, windows = self.cache.cell_views
        content = self.cache.read_units(units)
        split = len(cells) * self.states.nbytes(self.head)
        packed = content[:split].view(len(cells), -1)
        states[cells] = self.states.unpack(packed, self.head)
        shape = (len(cells), *windows.shape[1:])
        size = len(cells) * windows[0].numel() * windows.element_size()
        windows[cells] = content[split : split + size].clone().view(windows.dtype).view(shape)


def checkpoints_of(cache: HybridCache, states: States | None, head: int) -> Checkpoints:
    """Of a cache whose states are [head, head], packed if ``states`` says how."""
    return ExactCheckpoints(cache) if states is None else PackedCheckpoints(cache, states, head)


def states_as(dtype: CheckpointDtype) -> States | None:
    """The packing of an ``EngineConfig.checkpoint_dtype``; None keeps states as they are."""
    packings: dict[CheckpointDtype, States | None] = {
        "exact": None,
        "bfloat16": Rounded(),
        "int8": Scaled(),
    }
    return packings[dtype]


def packed_bytes(config: TextConfig, dtype: torch.dtype, states: States) -> int:
    """Bytes of a packed checkpoint of a model whose windows are ``dtype``."""
    linear = config.linear_attn_config
    cells = len(linear.kda_layers) * linear.num_heads
    window = (linear.short_conv_kernel_size - 1) * 3 * linear.head_dim * dtype.itemsize
    return cells * (states.nbytes(linear.head_dim) + window)
