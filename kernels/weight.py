"""A matrix as an op takes it: floating, or in pieces, some of them as a checkpoint stores them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from k3vl.errors import ShapeError
from k3vl.kernels.int8 import Int8Weight, dequantize_int8

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Rows:
    """[O, D] as pieces of rows, from the first row to the last.

    Attributes:
        pieces: [O_i, D] each, floating or stored.
        shape: of the whole matrix.
    """

    pieces: tuple[torch.Tensor | Int8Weight, ...]
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        widths = {piece.shape[1] for piece in self.pieces}
        if len(widths) != 1:
            raise ShapeError(f"rows of {len(self.pieces)} pieces, {sorted(widths)} columns wide")
        rows = sum(piece.shape[0] for piece in self.pieces)
        object.__setattr__(self, "shape", (rows, widths.pop()))

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """All rows as one floating tensor."""
        parts = [
            dequantize_int8(piece.codes, piece.scales, dtype=dtype)
            if isinstance(piece, Int8Weight)
            else piece.to(dtype)
            for piece in self.pieces
        ]
        return torch.cat(parts)


Weight: TypeAlias = torch.Tensor | Rows


class Storage(Protocol):
    """How the matrices of a model lie in memory, asked once by every layer."""

    def matrix(self, parameter: torch.Tensor) -> Weight:
        """[O, D]."""

    def matrices(self, parameter: torch.Tensor) -> torch.Tensor | tuple[Weight, ...]:
        """[E, O, D], or as many single ones."""


class AsAllocated:
    """Every matrix is its parameter."""

    def matrix(self, parameter: torch.Tensor) -> Weight:
        """The parameter."""
        return parameter

    def matrices(self, parameter: torch.Tensor) -> torch.Tensor | tuple[Weight, ...]:
        """The parameter."""
        return parameter


class KeptCodes:
    """Matrices that are kept in 8 bits, as their checkpoint stores them.

    A parameter may stand for rows of several of them and for others that are floating; only the
    latter stay in it when it has been asked for.
    """

    def __init__(self) -> None:
        """Nothing is kept yet."""
        self._kept: dict[int, Int8Weight] = {}

    def taker(self, target: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """What takes codes and scales of a matrix whose decoded rows would fill ``target``."""

        def take(codes: torch.Tensor, scales: torch.Tensor) -> None:
            # A copy: what lies in the file begins anywhere, and goes with it.
            own = torch.empty(codes.shape, dtype=codes.dtype).copy_(codes)
            self._kept[target.data_ptr()] = Int8Weight(own, scales.float())

        return take

    def matrix(self, parameter: torch.Tensor) -> Weight:
        """Rows where codes are kept, else the parameter."""
        found = self.matrices(parameter.unsqueeze(0), of=parameter)
        return parameter if isinstance(found, torch.Tensor) else found[0]

    def matrices(
        self, parameter: torch.Tensor, *, of: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[Weight, ...]:
        """Likewise, for each; ``of`` is the parameter itself where the first is a view."""
        runs = [self._runs(matrix.detach()) for matrix in parameter]
        if not any(isinstance(run, Int8Weight) for matrix in runs for run in matrix):
            return parameter
        floating = [r for matrix in runs for r in matrix if not isinstance(r, Int8Weight)]
        left = torch.cat([*floating, parameter.new_empty(0, parameter.shape[-1])])
        (parameter if of is None else of).data = left
        rest = iter(left.split([len(run) for run in floating]))
        return tuple(
            Rows(tuple(r if isinstance(r, Int8Weight) else next(rest) for r in matrix))
            for matrix in runs
        )

    def _runs(self, matrix: torch.Tensor) -> list[torch.Tensor | Int8Weight]:
        """Rows as they follow each other: what is kept, and the floating ones between."""
        begin, stride = matrix.data_ptr(), matrix.stride(0) * matrix.element_size()
        found: list[torch.Tensor | Int8Weight] = []
        row = first = 0
        while row < matrix.shape[0]:
            kept = self._kept.get(begin + row * stride)
            if kept is None:
                row += 1
                continue
            if first < row:
                found.append(matrix[first:row])
            found.append(kept)
            row = first = row + kept.shape[0]
        if first < row:
            found.append(matrix[first:row])
        return found


def pieces(weight: Weight) -> tuple[torch.Tensor | Int8Weight, ...]:
    """The pieces of a weight; a tensor is one."""
    return (weight,) if isinstance(weight, torch.Tensor) else weight.pieces


def as_rows(weight: Weight) -> Rows:
    """A weight as pieces."""
    return weight if isinstance(weight, Rows) else Rows((weight,))


def plain(weight: Weight) -> torch.Tensor:
    """The tensor of a weight, for ops that take nothing else; who makes a model sees to that."""
    assert isinstance(weight, torch.Tensor)
    return weight
