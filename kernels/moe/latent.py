"""The latent mixture of experts: its contract, and its composition from smaller ops.

Route on the full width, project down, run the chosen experts in the latent, sum, norm, project up,
add the shared experts. Source: Kimi K3 report, Stable LatentMoE; ``modeling_kimi_linear.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from k3vl.errors import ShapeError
from k3vl.kernels.gated_mlp import GatedMLPWeights
from k3vl.kernels.linear import added
from k3vl.kernels.moe.experts import Experts

if TYPE_CHECKING:
    import torch

    from k3vl.kernels.gated_mlp import GatedMLPOp
    from k3vl.kernels.linear import LinearOp
    from k3vl.kernels.situ import GatedActivation
    from k3vl.kernels.weight import Weight

E = TypeVar("E", bound=Experts)
E_co = TypeVar("E_co", bound=Experts, covariant=True)
E_contra = TypeVar("E_contra", bound=Experts, contravariant=True)


# No slots: of a generic class, Python 3.12.3 forgets the one for weak references (gh-118033).
@dataclass(frozen=True, kw_only=True, eq=False)
class MoEWeights(Generic[E_co]):
    """One layer's weights and how it routes.

    In the model's dtype, but for the router and the routed experts.

    Attributes:
        router: [E, D], float32, or the model's dtype where a checkpoint stores no more.
        router_bias: [E] float32.
        down: [L, D] and up: [D, L], to and from the latent; None where L is D.
        experts: the routed ones, in the form that the op takes.
        norm: [L], of the experts' sum; None for no norm.
        shared_gate_up: [2 S, D] and shared_down: [D, S], the shared experts as one gated MLP.
        activation: of all experts.
        top_k: experts a token.
        renormalise: make the weights of a token sum to one.
        scale: multiplies the weights.
        eps: of the norm.
    """

    router: torch.Tensor
    router_bias: torch.Tensor
    down: Weight | None
    experts: E_co
    norm: torch.Tensor | None
    up: Weight | None
    shared_gate_up: Weight
    shared_down: Weight
    activation: GatedActivation
    top_k: int
    renormalise: bool
    scale: float
    eps: float

    @property
    def shared(self) -> GatedMLPWeights:
        """The shared experts as one gated MLP."""
        return GatedMLPWeights(
            gate_up=self.shared_gate_up, down=self.shared_down, activation=self.activation
        )


class LatentMoEOp(Protocol[E_contra]):
    """A whole MoE layer over experts of one form: [N, D] -> [N, D] in the dtype of ``x``.

    Args:
        x: [N, D].
        weights: of the layer.
        onto: [N, D], which the result is added to in place, and which is returned.

    Raises:
        ShapeError: the shapes disagree.
    """

    def __call__(
        self, x: torch.Tensor, weights: MoEWeights[E_contra], onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[N, D] -> [N, D]."""


class FrontOp(Protocol):
    """See :func:`k3vl.kernels.moe.moe_front`."""

    def __call__(
        self, x: torch.Tensor, router: torch.Tensor, down: Weight | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, E] float32 and [N, L]."""


class RouteOp(Protocol):
    """See :func:`k3vl.kernels.moe.route`."""

    def __call__(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor,
        top_k: int,
        *,
        renormalise: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and experts, [N, top_k] each."""


class ExpertsOp(Protocol[E_contra]):
    """See :func:`k3vl.kernels.moe.moe_experts`."""

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        stored: E_contra,
        activation: GatedActivation,
        norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """[N, L]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedLatentMoE(Generic[E]):
    """The layer as a sequence of ops."""

    front: FrontOp
    route: RouteOp
    moe_experts: ExpertsOp[E]
    gated_mlp: GatedMLPOp
    linear: LinearOp

    def __call__(
        self, x: torch.Tensor, weights: MoEWeights[E], onto: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`LatentMoEOp`."""
        w = weights
        check_shapes(x, w)
        total = self.routed(*self.front(x, w.router, w.down), w)
        return self.back(total, w, self.gated_mlp(x, w.shared, onto))

    def routed(
        self, logits: torch.Tensor, latent: torch.Tensor, weights: MoEWeights[E]
    ) -> torch.Tensor:
        """The chosen experts' sum and its norm, [N, E] and [N, L] -> [N, L]."""
        w = weights
        chosen, experts = self.route(
            logits, w.router_bias, w.top_k, renormalise=w.renormalise, scale=w.scale
        )
        return self.moe_experts(latent, chosen, experts, w.experts, w.activation, w.norm, w.eps)

    def back(self, total: torch.Tensor, weights: MoEWeights[E], onto: torch.Tensor) -> torch.Tensor:
        """From the latent, onto what the shared experts gave."""
        w = weights
        return added(total, onto) if w.up is None else self.linear(total, w.up, onto=onto)


def check_shapes(x: torch.Tensor, weights: MoEWeights[E]) -> None:
    """Refuse what does not belong together; for every implementation of the layer.

    Raises:
        ShapeError: with the shapes.
    """
    w = weights
    experts, latent, width = w.experts.count, w.experts.latent, x.shape[1]
    shared = w.shared_down.shape[1]
    agree = (
        w.router.shape == (experts, width)
        and w.router_bias.shape == (experts,)
        and 0 < w.top_k <= experts
        and (latent == width if w.down is None else tuple(w.down.shape) == (latent, width))
        and (latent == width if w.up is None else tuple(w.up.shape) == (width, latent))
        and (w.norm is None or w.norm.shape == (latent,))
        and tuple(w.shared_gate_up.shape) == (2 * shared, width)
        and tuple(w.shared_down.shape) == (width, shared)
    )
    if not agree:
        raise ShapeError(
            f"latent_moe: x {tuple(x.shape)}, router {tuple(w.router.shape)}, "
            f"top_k {w.top_k}, E {experts}, L {latent}, "
            f"shared {tuple(w.shared_gate_up.shape)} and {tuple(w.shared_down.shape)}"
        )
