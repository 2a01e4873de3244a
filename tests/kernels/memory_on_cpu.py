"""What Gluon kernels on a CPU (``gluon_on_cpu.py``) have between their warps: memory and barriers.

Here is what happens late: copies into shared memory when their barrier is waited for, and products
when they are ended.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from tests.kernels.ordering import Cell, Clock, group

_meeting = threading.Condition()
"""Whoever changes what groups of warps share holds it."""


class Shared:
    """Shared memory, or a part of it; order is kept for every index of the whole."""

    def __init__(self, tensor: torch.Tensor, cells: list[Cell]) -> None:
        self.tensor, self.cells = tensor, cells

    def index(self, i: Any) -> Shared:
        return Shared(self.tensor[int(i)], self.cells[int(i) :][:1])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.tensor.narrow(dim, start, length), self.cells)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.tensor.permute(order), self.cells)

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.tensor.view(shape), self.cells)

    def load(self, _layout: Any) -> torch.Tensor:
        with _meeting:
            if one := group():
                for cell in self.cells:
                    cell.load(one)
            return self.tensor.clone()

    def store(self, value: torch.Tensor) -> None:
        assert value.dtype == self.tensor.dtype
        assert value.shape == self.tensor.shape
        with _meeting:
            if one := group():
                for cell in self.cells:
                    cell.store(one)
            self.tensor.copy_(value)


class Product:
    """A matrix product under way; its group remembers it until it is waited for."""

    def __init__(self, a: Any, b: Shared, c: Any, *, add: bool) -> None:
        self.a, self.b, self.c, self.add = a, b, c, add
        self.done: torch.Tensor | None = None
        self.cells = [cell for x in (a, b) if isinstance(x, Shared) for cell in x.cells]
        with _meeting:
            if one := group():
                for cell in self.cells:
                    cell.begin_product(one)

    def end(self) -> torch.Tensor:
        """Of the group that began it, which has waited for it."""
        value = self.value()
        with _meeting:
            if one := group():
                now = one.tick()
                for cell in self.cells:
                    cell.end_product(now)
        return value

    def value(self) -> torch.Tensor:
        if self.done is None:
            a = self.a.tensor if isinstance(self.a, Shared) else self.a
            self.done = a.float() @ self.b.tensor.float()
            if self.add:
                self.done += self.c.value() if isinstance(self.c, Product) else self.c
        return self.done


class Descriptor:
    """Of blocks of a tensor; outside of it they have zeros."""

    def __init__(self, tensor: torch.Tensor, block: tuple[int, ...]) -> None:
        self.tensor, self.block = tensor, block

    def read(self, *begins: int) -> torch.Tensor:
        whole = torch.zeros(self.block, dtype=self.tensor.dtype)
        part = self.tensor
        for axis, (begin, size) in enumerate(zip(begins, self.block, strict=True)):
            end = part.shape[axis]
            part = part.narrow(axis, min(begin, end), min(size, max(end - begin, 0)))
        whole[tuple(slice(size) for size in part.shape)] = part
        return whole

    def write(self, block: torch.Tensor, *begins: int) -> None:
        """A block that lies inside."""
        part = self.tensor
        for axis, (begin, size) in enumerate(zip(begins, self.block, strict=True)):
            part = part.narrow(axis, begin, size)
        part.copy_(block)


class Barrier:
    """Completes a phase when all have arrived and all announced bytes are there."""

    def __init__(self) -> None:
        self.count = self.missing = self.phase = self.bytes = 0
        self.copies: list[tuple[Shared, torch.Tensor, Clock]] = []
        # What those knew who have arrived in this phase, and in the last.
        self.coming: Clock = Clock()
        self.told: Clock = Clock()

    def change(self, *, arrived: int = 0, expected: int = 0) -> None:
        self.missing -= arrived
        self.bytes += expected
        assert self.missing >= 0, "more arrivals than were announced"
        if not self.missing and not self.bytes:
            self.phase ^= 1
            self.missing = self.count
            self.told, self.coming = self.coming, Clock()
            _meeting.notify_all()

    def passed(self, phase: int) -> bool:
        """Whether the phase is over, now that all copies of this moment have been made."""
        for target, block, told in self.copies:
            target.tensor.copy_(block)
            self.coming |= told
        size = sum(block.nbytes for _, block, _ in self.copies)
        self.copies = []
        if size:
            self.change(expected=-size)
        return self.phase != phase


class Barriers:
    def __init__(self, number: int) -> None:
        self.all = [Barrier() for _ in range(number)]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]
