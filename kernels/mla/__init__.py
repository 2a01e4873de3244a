"""Multi-head latent attention: expanded for prefill, absorbed over a paged cache for decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3vl.errors import ShapeError
from k3vl.kernels.mla.reference import (
    mla_decode_reference,
    mla_prefill_latent_reference,
    mla_prefill_reference,
)

if TYPE_CHECKING:
    import torch


def mla_prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend causally from the last T tokens of one sequence to all of its L tokens.

    Args:
        q: [T, H, K].
        k: [L, H, K], L >= T.
        v: [L, H, V].
        scale: of the scores, ``(nope + rope) ** -0.5``.

    Returns:
        [T, H, V] in the dtype of ``q``; softmax in float32.

    Raises:
        ShapeError: the shapes disagree.
    """
    length, heads, width = k.shape
    if q.shape[1:] != (heads, width) or v.shape[:2] != (length, heads) or q.shape[0] > length:
        raise ShapeError(f"mla_prefill: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    return mla_prefill_reference(q, k, v, scale)


def mla_prefill_latent(
    q: torch.Tensor, context: torch.Tensor, latent_width: int, scale: float
) -> torch.Tensor:
    """As :func:`mla_prefill`, over latents that all heads share and nobody expands.

    Args:
        q: [T, H, R + P], the no-position query times ``W_K`` (R), then the shared part (P).
        context: [L, R + P], L >= T, the sequence's latents in order.
        latent_width: R.
        scale: of the scores.

    Returns:
        [T, H, R] mixtures of latents in the dtype of ``q``; scores and softmax in float32.

    Raises:
        ShapeError: the shapes disagree.
    """
    fits = q.shape[-1] == context.shape[-1] >= latent_width and q.shape[0] <= context.shape[0]
    if not fits:
        raise ShapeError(
            f"mla_prefill_latent: q {tuple(q.shape)}, context {tuple(context.shape)}, "
            f"R {latent_width}"
        )
    return mla_prefill_latent_reference(q, context, latent_width, scale)


def mla_decode(
    q: torch.Tensor,
    latents: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    latent_width: int,
    scale: float,
) -> torch.Tensor:
    """Attend from one token of every sequence to its cached latents, without expanding them.

    Args:
        q: [B, H, R + P], the no-position query times ``W_K`` (R), then the shared part (P).
        latents: [S, R + P], every token slot of the paged cache.
        rows: [B, L] int64, the cache rows of every sequence in order; padded with any valid row.
        lengths: [B] int64, how many of them count, the current token among them.
        latent_width: R.
        scale: of the scores.

    Returns:
        [B, H, R] mixtures of latents in the dtype of ``q``; scores and softmax in float32. Rows
        past a sequence's length have no influence, whatever they hold (NaN included).

    Raises:
        ShapeError: the shapes disagree.
    """
    agree = q.shape[-1] == latents.shape[-1] and rows.shape[0] == q.shape[0] == lengths.shape[0]
    if not agree or latent_width > latents.shape[-1]:
        raise ShapeError(
            f"mla_decode: q {tuple(q.shape)}, latents {tuple(latents.shape)}, "
            f"rows {tuple(rows.shape)}, lengths {tuple(lengths.shape)}, R {latent_width}"
        )
    return mla_decode_reference(q, latents, rows, lengths, latent_width, scale)
