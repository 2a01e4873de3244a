"""The gated MLP: two projections with a gated activation between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch.nn import functional as F

from k3vl.errors import ShapeError
from k3vl.kernels.situ import glu as glu_reference
from k3vl.kernels.weight import plain

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from k3vl.kernels.linear import LinearOp
    from k3vl.kernels.situ import GatedActivation
    from k3vl.kernels.weight import Weight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class GatedMLPWeights:
    """What the op needs of a layer.

    Attributes:
        gate_up: [2 I, D], gate rows first.
        down: [D, I].
        activation: [N, 2 I] -> [N, I].
    """

    gate_up: Weight
    down: Weight
    activation: GatedActivation


class GatedMLPOp(Protocol):
    """``down activation(gate_up x)``.

    Args:
        x: [N, D].
        weights: of the layer.
        onto: [N, D], which the result is added to in place.

    Returns:
        [N, D] in the dtype of ``x``; ``onto`` itself where it is given.

    Raises:
        ShapeError: the shapes disagree.
    """

    def __call__(
        self, x: torch.Tensor, weights: GatedMLPWeights, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[N, D] -> [N, D]."""


def glu_linear(
    x: torch.Tensor,
    weight: Weight,
    activation: GatedActivation,
    *,
    glu: Callable[[torch.Tensor, GatedActivation], torch.Tensor] = glu_reference,
) -> torch.Tensor:
    """A projection to gates and ups, and their activation.

    Args:
        x: [N, D].
        weight: [2 I, D], gate rows first.
        activation: [N, 2 I] -> [N, I].
        glu: what applies it.

    Returns:
        [N, I] in the dtype of ``x``.
    """
    return glu(F.linear(x, plain(weight)), activation)


@dataclass(frozen=True, slots=True)
class ComposedGatedMLP:
    """The op as two projections, the first with the activation (:func:`glu_linear`)."""

    glu_linear: Callable[[torch.Tensor, Weight, GatedActivation], torch.Tensor]
    linear: LinearOp

    def __call__(
        self, x: torch.Tensor, weights: GatedMLPWeights, onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`GatedMLPOp`."""
        w = weights
        check_shapes(x, w.gate_up, w.down)
        return self.linear(self.glu_linear(x, w.gate_up, w.activation), w.down, onto=onto)


def check_shapes(x: torch.Tensor, gate_up: Weight, down: Weight) -> None:
    """Refuse what does not belong together; for every implementation of the op.

    Raises:
        ShapeError: with the shapes.
    """
    width, inner = down.shape
    if x.shape[1:] != (width,) or tuple(gate_up.shape) != (2 * inner, width):
        raise ShapeError(
            f"gated_mlp: x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, "
            f"down {tuple(down.shape)}"
        )
