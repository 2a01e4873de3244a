"""Small parts that several layers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from k3vl.kernels.gated_mlp import GatedMLPWeights
from k3vl.kernels.weight import AsAllocated
from k3vl.parameters import linear, parameter

if TYPE_CHECKING:
    import torch

    from k3vl.kernels.choice import Kernels
    from k3vl.kernels.situ import GatedActivation
    from k3vl.kernels.weight import Storage


class RMSNorm(nn.Module):
    """RMSNorm with a plain weight (no ``1 + w``); the op of its layer applies it."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate an uninitialised weight."""
        super().__init__()
        self.eps = eps
        self.weight = parameter(width, dtype=dtype, device=device)


class GatedMLP(nn.Module):
    """``down activation(gate_up x)``: the dense layer and the shared experts."""

    def __init__(
        self,
        width: int,
        inner: int,
        activation: GatedActivation,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate uninitialised weights; ``gate_up`` rows are gates, then ups."""
        super().__init__()
        self.gate_up = linear(width, 2 * inner, dtype, device)
        self.down = linear(inner, width, dtype, device)
        self.activation = activation
        self.kernels = kernels
        self.bind(AsAllocated())

    def bind(self, storage: Storage) -> None:
        """Gather what the op reads; ``storage`` tells how matrices lie in memory."""
        self.weights = GatedMLPWeights(
            gate_up=storage.matrix(self.gate_up.weight),
            down=storage.matrix(self.down.weight),
            activation=self.activation,
        )

    def forward(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        """[N, D] -> [N, D]; added to ``onto``, which is then what is returned."""
        return self.kernels.gated_mlp(x, self.weights, onto=onto)
