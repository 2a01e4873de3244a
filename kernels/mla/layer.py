"""A whole MLA layer and the op between its projections: contracts, compositions from smaller ops.

Decode stays in the latent space (absorbed form), and so does prefill while expanding the latents of
the whole sequence into keys and values would cost more than its few queries save. All read one
cache of [c | k_r] rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from k3vl.errors import ShapeError
from k3vl.kernels.mla.reference import mla_absorb_reference, mla_values_reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from k3vl.kernels.linear import LinearOp
    from k3vl.kernels.sequences import Sequences
    from k3vl.kernels.weight import Weight


class DecodeOp(Protocol):
    """See :func:`k3vl.kernels.mla.mla_decode`."""

    def __call__(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        latent_width: int,
        scale: float,
        page: int,
    ) -> torch.Tensor:
        """[B, H, R]."""


class PrefillOp(Protocol):
    """See :func:`k3vl.kernels.mla.mla_prefill`."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        shared: torch.Tensor | None,
        /,
    ) -> torch.Tensor:
        """[T, H, V]."""


class PrefillLatentOp(Protocol):
    """See :func:`k3vl.kernels.mla.mla_prefill_latent`."""

    def __call__(
        self,
        q: torch.Tensor,
        context: torch.Tensor,
        latent_width: int,
        scale: float,
        borders: Borders | None = None,
    ) -> torch.Tensor:
        """[T, H, R]."""


Borders: TypeAlias = "tuple[Tensor, Tensor]"
"""[S + 1] int64 twice: where queries, and where latents, of S sequences begin and end."""
AbsorbOp: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""See :func:`k3vl.kernels.mla.mla_absorb`."""
StoreOp: TypeAlias = "Callable[[Tensor, Tensor, Tensor, float, Tensor, Tensor], None]"
"""See :func:`k3vl.kernels.mla.mla_store`."""
ValuesOp: TypeAlias = "Callable[[Tensor, Tensor, Tensor | None], Tensor]"
"""See :func:`k3vl.kernels.mla.mla_values`."""


GateOp: TypeAlias = "Callable[[Tensor, Tensor | None], Tensor]"
"""See :func:`k3vl.kernels.mla.mla_gate`."""


class MLAOp(Protocol):
    """The cache of latents, and attention over it from queries to gated mixtures of values.

    ``kv_b`` [H, M + V, R] holds every head's key rows, then its value rows; a query is M values
    for those keys, then P for the part of the keys that all heads share.
    """

    def store(
        self,
        c: torch.Tensor,
        shared: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        latents: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        """Normalise and write new latents; see :func:`k3vl.kernels.mla.mla_store`."""

    def decode(
        self,
        q: torch.Tensor,
        kv_b: torch.Tensor,
        latents: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        scale: float,
        gate: torch.Tensor | None = None,
        page: int = 1,
    ) -> torch.Tensor:
        """One token of every sequence.

        Args:
            q: [B, H, M + P].
            kv_b: [H, M + V, R].
            latents: [S, R + P], every token slot of the paged cache.
            rows: [B, L] int64, the cache rows at which the pages of every sequence begin, in
                order; padded with any valid row.
            lengths: [B] int64, how many tokens count, the current one among them; 0 is padding,
                whose result is zero.
            scale: of the scores, ``(M + P) ** -0.5``.
            gate: [B, H V] logits, whose sigmoid multiplies the result; None for no gate.
            page: tokens of a page.

        Returns:
            [B, H V] in the dtype of ``q``. Rows past a sequence's length have no influence,
            whatever they hold.

        Raises:
            ShapeError: the shapes disagree.
        """

    def prefill(
        self,
        q: torch.Tensor,
        kv_b: torch.Tensor,
        latents: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
        gate: torch.Tensor | None = None,
        borders: Borders | None = None,
    ) -> torch.Tensor:
        """The last T tokens of one sequence, or of several.

        Args:
            q: [T, H, M + P].
            kv_b, latents, scale: as in :meth:`decode`.
            rows: [L] int64, the cache rows of the sequence in order, L >= T.
            gate: [T, H V] or None.
            borders: of several sequences, one behind the other in ``q`` and ``rows``.

        Returns:
            [T, H V] in the dtype of ``q``.

        Raises:
            ShapeError: the shapes disagree.
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class MLALayerWeights:
    """One layer's weights, in the model's dtype.

    Attributes:
        splits: rows of ``in_proj``: the query's rank (or the queries themselves), latent R, shared
            key part P, output gate (H V, or 0 for no gate).
        in_proj: [sum of splits, D].
        q_norm: [rank] and q_b: [H (M + P), rank], norm and expansion of the query's low rank; None
            where ``in_proj`` makes queries.
        kv_norm: [R].
        kv_b: [H, M + V, R]; see :class:`MLAOp`.
        o_proj: [D, H V].
        scale: of the scores.
        eps: of both norms.
    """

    splits: tuple[int, int, int, int]
    in_proj: Weight
    q_norm: torch.Tensor | None
    q_b: Weight | None
    kv_norm: torch.Tensor
    kv_b: torch.Tensor
    o_proj: Weight
    scale: float
    eps: float


class MLALayerOp(Protocol):
    """A whole gated MLA layer: [N, D] -> [N, D] in the dtype of ``x``.

    Args:
        x: [N, D].
        weights: of the layer.
        latents: [S, R + P], every token slot of the paged cache; the new tokens' rows are written.
        sequences: which rows belong to which sequence, and what each sees.
        onto: [N, D], which the result is added to in place, and which is returned.

    Raises:
        ShapeError: the shapes disagree.
    """

    def __call__(
        self,
        x: torch.Tensor,
        weights: MLALayerWeights,
        latents: torch.Tensor,
        sequences: Sequences,
        onto: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[N, D] -> [N, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedMLALayer:
    """The layer as a sequence of ops."""

    linear: LinearOp
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    attend: MLAOp

    def __call__(
        self,
        x: torch.Tensor,
        weights: MLALayerWeights,
        latents: torch.Tensor,
        sequences: Sequences,
        onto: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :class:`MLALayerOp`."""
        w, attend = weights, self.attend
        q, gate = self.enter(x, w, latents, sequences)
        counts = (sequences.num_decodes, *sequences.prefill_lens)
        gates = gate.split(counts) if w.splits[3] else (None,) * len(counts)
        outputs = []
        if n := sequences.num_decodes:
            where = (sequences.decode_rows, sequences.decode_lens, w.scale)
            outputs.append(
                attend.decode(q[:n], w.kv_b, latents, *where, gate=gates[0], page=sequences.page)
            )
        parts = zip(
            q[n:].split(sequences.prefill_lens), sequences.prefill_rows, gates[1:], strict=True
        )
        keys = sequences.prefill_keys
        borders = None if keys is None else (sequences.cu_seqlens, keys)
        for q_i, rows, gate_i in parts:
            outputs.append(
                attend.prefill(q_i, w.kv_b, latents, rows, w.scale, gate=gate_i, borders=borders)
            )
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.linear(out, w.o_proj, onto=onto)

    def enter(
        self,
        x: torch.Tensor,
        weights: MLALayerWeights,
        latents: torch.Tensor,
        sequences: Sequences,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Up to attention: queries [N, H, M + P] and gates [N, H V]; new latents are stored."""
        w = weights
        q, c, k_shared, gate = self.linear(x, w.in_proj).split(w.splits, dim=-1)
        if w.q_norm is not None and w.q_b is not None:
            q = self.linear(self.rms_norm(q, w.q_norm, w.eps), w.q_b)
        self.attend.store(c, k_shared, w.kv_norm, w.eps, latents, sequences.cache_rows)
        return q.unflatten(-1, (w.kv_b.shape[0], -1)), gate


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedMLA:
    """The op as products around the attention ops of :mod:`k3vl.kernels.mla`."""

    mla_absorb: AbsorbOp
    mla_decode: DecodeOp
    mla_prefill: PrefillOp
    mla_prefill_latent: PrefillLatentOp
    mla_store: StoreOp
    mla_values: ValuesOp
    mla_gate: GateOp

    def store(
        self,
        c: torch.Tensor,
        shared: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        latents: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        """See :class:`MLAOp`."""
        self.mla_store(c, shared, norm_weight, eps, latents, rows)

    def decode(
        self,
        q: torch.Tensor,
        kv_b: torch.Tensor,
        latents: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        scale: float,
        gate: torch.Tensor | None = None,
        page: int = 1,
    ) -> torch.Tensor:
        """Absorbed form; see :class:`MLAOp`."""
        latent, nope, _ = check_shapes(q, kv_b, latents)
        absorbed = self.mla_absorb(q, kv_b[:, :nope])
        mixed = self.mla_decode(absorbed, latents, rows, lengths, latent, scale, page)
        return self.mla_values(mixed, kv_b[:, nope:], gate)

    def prefill(
        self,
        q: torch.Tensor,
        kv_b: torch.Tensor,
        latents: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
        gate: torch.Tensor | None = None,
        borders: Borders | None = None,
    ) -> torch.Tensor:
        """The cheaper form for T queries, of several sequences the absorbed; see :class:`MLAOp`."""
        latent, nope, shared = check_shapes(q, kv_b, latents)
        context = latents[rows]
        if borders is not None:
            absorbed = self.mla_absorb(q, kv_b[:, :nope])
            mixed = self.mla_prefill_latent(absorbed, context, latent, scale, borders)
            return self.mla_values(mixed, kv_b[:, nope:], gate)
        heads, expanding = kv_b.shape[:2]
        if q.shape[0] * (2 * latent + shared - q.shape[-1] - expanding + nope) < latent * expanding:
            absorbed = mla_absorb_reference(q, kv_b[:, :nope])
            mixed = self.mla_prefill_latent(absorbed, context, latent, scale)
            return self.mla_gate(mla_values_reference(mixed, kv_b[:, nope:], None), gate)
        c, k_shared = context.split([latent, shared], dim=-1)
        expanded = (c @ kv_b.flatten(0, 1).mT).unflatten(-1, (heads, -1))
        k, v = expanded.split([nope, expanding - nope], dim=-1)
        out = self.mla_prefill(q, k, v, scale, k_shared if shared else None)
        return self.mla_gate(out.flatten(1), gate)


def check_shapes(
    q: torch.Tensor, kv_b: torch.Tensor, latents: torch.Tensor
) -> tuple[int, int, int]:
    """Refuse what does not belong together; for every implementation of the op.

    Returns:
        R, M and P.

    Raises:
        ShapeError: with the shapes.
    """
    heads, expanding, latent = kv_b.shape
    shared = latents.shape[1] - latent
    nope = q.shape[-1] - shared
    if q.dim() != 3 or q.shape[1] != heads or shared < 0 or not 0 < nope < expanding:
        raise ShapeError(
            f"mla: q {tuple(q.shape)}, kv_b {tuple(kv_b.shape)}, latents {tuple(latents.shape)}"
        )
    return latent, nope, shared


def check_weights(weights: MLALayerWeights, width: int) -> None:
    """Refuse what does not belong together.

    Raises:
        ShapeError: with the shapes.
    """
    w = weights
    (heads, expanding, latent), (rank, own, shared, gate) = w.kv_b.shape, w.splits
    queries = rank if w.q_b is None else w.q_b.shape[0]
    nope = queries // heads - shared
    value = expanding - nope
    agree = (
        own == latent
        and tuple(w.in_proj.shape) == (sum(w.splits), width)
        and queries == heads * (nope + shared)
        and 0 < nope < expanding
        and (w.q_b is None or w.q_b.shape[1] == rank)
        and (w.q_norm is None) == (w.q_b is None)
        and (w.q_norm is None or w.q_norm.shape == (rank,))
        and w.kv_norm.shape == (latent,)
        and gate in (0, heads * value)
        and tuple(w.o_proj.shape) == (width, heads * value)
    )
    if not agree:
        raise ShapeError(
            f"mla: D {width}, splits {w.splits}, in_proj {tuple(w.in_proj.shape)}, "
            f"kv_b {tuple(w.kv_b.shape)}, o_proj {tuple(w.o_proj.shape)}"
        )
