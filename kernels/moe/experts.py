"""The routed experts of one layer as a value: the forms in which their weights are kept.

Here: what every form can say about itself, and the plain one. Not here: 4 bits (``mxfp4.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from k3vl.errors import ShapeError

if TYPE_CHECKING:
    import torch

    from k3vl.kernels.weight import Rows

ExpertForm: TypeAlias = Literal["float", "mxfp4"]
"""In the model's dtype, or in the 4 bits of the checkpoint."""


class Experts(Protocol):
    """E experts between a latent of width L and an inner width I."""

    @property
    def count(self) -> int:
        """E."""

    @property
    def inner(self) -> int:
        """I."""

    @property
    def latent(self) -> int:
        """L."""

    def gate_up(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """One expert's way in, [2 I, L], gate rows first."""

    def down(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """One expert's way back, [L, I]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FloatExperts:
    """Weights as they are multiplied.

    Attributes:
        w13: [E, 2 I, L], gate rows first.
        w2: [E, L, I].

    Raises:
        ShapeError: the shapes disagree.
    """

    w13: torch.Tensor
    w2: torch.Tensor

    def __post_init__(self) -> None:
        count, double, latent = self.w13.shape
        if self.w2.shape != (count, latent, double // 2):
            raise ShapeError(f"experts: w13 {tuple(self.w13.shape)}, w2 {tuple(self.w2.shape)}")

    @property
    def count(self) -> int:
        """E."""
        return self.w13.shape[0]

    @property
    def inner(self) -> int:
        """I."""
        return self.w2.shape[2]

    @property
    def latent(self) -> int:
        """L."""
        return self.w2.shape[1]

    def gate_up(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Experts`; a view where the dtype is the weights' own."""
        return self.w13[expert].to(dtype)

    def down(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Experts`; a view where the dtype is the weights' own."""
        return self.w2[expert].to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodedExperts:
    """Weights as they are stored, as far as they are kept so.

    Attributes:
        w13: [2 I, L] of every expert, gate rows first.
        w2: [L, I] of every expert.

    Raises:
        ShapeError: the shapes disagree.
    """

    w13: tuple[Rows, ...]
    w2: tuple[Rows, ...]

    def __post_init__(self) -> None:
        into, back = {rows.shape for rows in self.w13}, {rows.shape for rows in self.w2}
        double, latent = self.w13[0].shape
        same = len(self.w13) == len(self.w2) and len(into) == len(back) == 1
        if not same or back != {(latent, double // 2)}:
            raise ShapeError(f"experts: w13 {sorted(into)}, w2 {sorted(back)}")

    @property
    def count(self) -> int:
        """E."""
        return len(self.w13)

    @property
    def inner(self) -> int:
        """I."""
        return self.w2[0].shape[1]

    @property
    def latent(self) -> int:
        """L."""
        return self.w2[0].shape[0]

    def gate_up(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Experts`; decoded."""
        return self.w13[expert].decoded(dtype)

    def down(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Experts`; decoded."""
        return self.w2[expert].decoded(dtype)
