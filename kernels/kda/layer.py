"""A whole KDA layer: its contract, and its composition from smaller ops.

Projections, the op of :mod:`k3vl.kernels.kda` over decoding and other sequences, output projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from k3vl.errors import ShapeError

if TYPE_CHECKING:
    from k3vl.kernels.kda import KDAWeights
    from k3vl.kernels.linear import LinearOp
    from k3vl.kernels.sequences import Sequences
    from k3vl.kernels.weight import Weight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class KDALayerWeights:
    """One layer's weights, projections in the model's dtype.

    Attributes:
        splits: rows of ``in_proj``: q, k and v (3 H K), output gate, decay rank, write logits (H).
        in_proj: [sum of splits, D].
        gate_b: [H K, rank of the output gate]; None where the gate has full rank.
        decay_b: [H K, decay rank].
        o_proj: [D, H K].
        core: of the op between the projections.
    """

    splits: tuple[int, int, int, int]
    in_proj: Weight
    gate_b: Weight | None
    decay_b: Weight
    o_proj: Weight
    core: KDAWeights


class KDALayerOp(Protocol):
    """A whole KDA layer: [N, D] -> [N, D] in the dtype of ``x``.

    Args:
        x: [N, D].
        weights: of the layer.
        windows, states: pools, advanced in place; see :func:`k3vl.kernels.kda.kda_decode`.
        cells: [B, H] int64, where each head of each sequence lies; all different.
        sequences: which rows belong to which sequence.
        onto: [N, D], which the result is added to in place, and which is returned.

    Raises:
        ShapeError: the shapes disagree.
    """

    def __call__(
        self,
        x: torch.Tensor,
        weights: KDALayerWeights,
        windows: torch.Tensor,
        states: torch.Tensor,
        cells: torch.Tensor,
        sequences: Sequences,
        onto: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[N, D] -> [N, D]."""


class KDADecode(Protocol):
    """See :func:`k3vl.kernels.kda.kda_decode`."""

    def __call__(
        self,
        qkv: torch.Tensor,
        gate: torch.Tensor,
        decay: torch.Tensor,
        write: torch.Tensor,
        weights: KDAWeights,
        windows: torch.Tensor,
        states: torch.Tensor,
        cells: torch.Tensor,
    ) -> torch.Tensor:
        """[B, H K]."""


class KDAPrefill(Protocol):
    """See :func:`k3vl.kernels.kda.kda_prefill`."""

    def __call__(
        self,
        qkv: torch.Tensor,
        gate: torch.Tensor,
        decay: torch.Tensor,
        write: torch.Tensor,
        weights: KDAWeights,
        windows: torch.Tensor,
        states: torch.Tensor,
        cells: torch.Tensor,
        cu_seqlens: torch.Tensor,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        """[N, H K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedKDA:
    """The layer as a sequence of ops."""

    linear: LinearOp
    kda_decode: KDADecode
    kda_prefill: KDAPrefill

    def __call__(
        self,
        x: torch.Tensor,
        weights: KDALayerWeights,
        windows: torch.Tensor,
        states: torch.Tensor,
        cells: torch.Tensor,
        sequences: Sequences,
        onto: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :class:`KDALayerOp`."""
        w = weights
        qkv, gate, decay, write = self.linear(x, w.in_proj).split(w.splits, dim=-1)
        if w.gate_b is not None:
            gate = self.linear(gate, w.gate_b)
        decay = self.linear(decay, w.decay_b)
        inputs = (qkv, gate, decay, write)
        pool = (w.core, windows, states)
        n = sequences.num_decodes
        outputs = []
        if n:
            qkv, gate, decay, write = (part[:n] for part in inputs)
            outputs.append(self.kda_decode(qkv, gate, decay, write, *pool, cells[:n]))
        if sequences.prefill_lens:
            qkv, gate, decay, write = (part[n:] for part in inputs)
            borders = (sequences.cu_seqlens, sequences.ends)
            outputs.append(self.kda_prefill(qkv, gate, decay, write, *pool, cells[n:], *borders))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.linear(out, w.o_proj, onto=onto)


def check_weights(weights: KDALayerWeights, heads: int, head: int, width: int) -> None:
    """Refuse what does not belong together.

    Raises:
        ShapeError: with the shapes.
    """
    w, inner = weights, heads * head
    _, gate, rank, _ = w.splits
    agree = (
        w.splits[0] == 3 * inner
        and w.splits[3] == heads
        and tuple(w.in_proj.shape) == (sum(w.splits), width)
        and (gate == inner if w.gate_b is None else tuple(w.gate_b.shape) == (inner, gate))
        and tuple(w.decay_b.shape) == (inner, rank)
        and tuple(w.o_proj.shape) == (width, inner)
        and w.core.conv.shape[0] == 3 * inner
        and w.core.a_log.shape == (heads,)
        and w.core.dt_bias.shape == (inner,)
        and w.core.o_norm.shape == (head,)
    )
    if not agree:
        raise ShapeError(
            f"kda: H {heads}, K {head}, D {width}, splits {w.splits}, "
            f"in_proj {tuple(w.in_proj.shape)}, decay_b {tuple(w.decay_b.shape)}, "
            f"o_proj {tuple(w.o_proj.shape)}, conv {tuple(w.core.conv.shape)}"
        )
