"""Muon: momentum whose matrices are made orthogonal, for every matrix of a model at once.

Source: K. Jordan's Muon (quintic Newton-Schulz iteration) with the update size of Moonlight
(0.2 sqrt(longer side)), so that a learning rate means the same as AdamW's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon:
    """Updates parameters whose last two axes are matrices; equal shapes are stacked.

    Args:
        parameters: what to update.
        decay: weight decay, in units of the learning rate.
        momentum: of the gradient.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, decay: float = 0.02, momentum: float = 0.95
    ) -> None:
        self._decay, self._momentum = decay, momentum
        self._groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for p in parameters:
            self._groups.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
        self._moments: dict[tuple[int, int], Tensor] = {}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update; every parameter must have a gradient."""
        for (rows, columns), parameters in self._groups.items():
            grads = [p.grad.reshape(-1, rows, columns) for p in parameters if p.grad is not None]
            assert len(grads) == len(parameters), "a matrix took no part in the loss"
            gradient = torch.cat(grads).float()
            moment = self._moments.setdefault((rows, columns), torch.zeros_like(gradient))
            moment.lerp_(gradient, 1 - self._momentum)
            ahead = gradient.lerp(moment, self._momentum)
            update = orthogonal(ahead) * (0.2 * max(rows, columns) ** 0.5)
            sizes = [grad.shape[0] for grad in grads]
            parts = [
                part.reshape(p.shape)
                for part, p in zip(update.split(sizes), parameters, strict=True)
            ]
            values: list[Tensor] = list(parameters)
            torch._foreach_mul_(values, 1 - rate * self._decay)
            torch._foreach_add_(values, parts, alpha=-rate)


def orthogonal(matrices: Tensor) -> Tensor:
    """[n, r, c] -> nearly orthogonal ones with the same singular vectors, float32."""
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(1, 2) if tall else x).float()
