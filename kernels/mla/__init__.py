"""Multi-head latent attention: expanded for prefill, absorbed over a paged cache for decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3vl.errors import ShapeError
from k3vl.kernels.mla.reference import (
    gated,
    mla_absorb_reference,
    mla_decode_reference,
    mla_prefill_latent_reference,
    mla_prefill_reference,
    mla_store_reference,
    mla_values_reference,
)

if TYPE_CHECKING:
    import torch


def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally from the last T tokens of one sequence to all of its L tokens.

    Args:
        q: [T, H, K + P].
        k: [L, H, K], L >= T.
        v: [L, H, V].
        scale: of the scores, ``(nope + rope) ** -0.5``.
        shared: [L, P], the last part of all heads' keys; None for P = 0.

    Returns:
        [T, H, V] in the dtype of ``q``; softmax in float32.

    Raises:
        ShapeError: the shapes disagree.
    """
    check_prefill(q, k, v, shared)
    return mla_prefill_reference(q, k, v, scale, shared)


def check_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shared: torch.Tensor | None
) -> None:
    """Refuse what does not belong together; for every implementation of :func:`mla_prefill`.

    Raises:
        ShapeError: with the shapes.
    """
    length, heads, width = k.shape
    part = 0 if shared is None else shared.shape[-1]
    agree = (
        q.shape[1:] == (heads, width + part)
        and v.shape[:2] == (length, heads)
        and q.shape[0] <= length
        and (shared is None or shared.shape[:-1] == (length,))
    )
    if not agree:
        other = "" if shared is None else f", shared {tuple(shared.shape)}"
        raise ShapeError(
            f"mla_prefill: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}{other}"
        )


def mla_prefill_latent(
    q: torch.Tensor,
    context: torch.Tensor,
    latent_width: int,
    scale: float,
    borders: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """As :func:`mla_prefill`, over latents that all heads share and nobody expands.

    Args:
        q: [T, H, R + P], the no-position query times ``W_K`` (R), then the shared part (P).
        context: [L, R + P], L >= T, the sequence's latents in order.
        latent_width: R.
        scale: of the scores.
        borders: of S sequences one behind the other, [S + 1] int64 each: where their queries begin
            and end, and where their latents do, of which none has fewer. Every query is of one of
            them; latents behind the last border are not read. None: there is one sequence.

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
    return mla_prefill_latent_reference(q, context, latent_width, scale, borders)


def mla_absorb(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Queries for expanded keys -> queries for latents.

    Args:
        q: [B, H, M + P], for M key channels of a head, then the part that all heads share.
        keys: [H, M, R], every head's key rows.

    Returns:
        [B, H, R + P] in the dtype of ``q``: products with the key rows, then the shared part.

    Raises:
        ShapeError: the shapes disagree.
    """
    check_absorb(q, keys)
    return mla_absorb_reference(q, keys)


def check_absorb(q: torch.Tensor, keys: torch.Tensor) -> None:
    """Refuse what does not belong together; for every implementation of the op.

    Raises:
        ShapeError: with the shapes.
    """
    if q.dim() != 3 or keys.dim() != 3 or q.shape[1] != keys.shape[0] or q.shape[2] < keys.shape[1]:
        raise ShapeError(f"mla_absorb: q {tuple(q.shape)}, keys {tuple(keys.shape)}")


def mla_gate(x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Multiply mixtures of values by the sigmoid of their gates, as :func:`mla_values` does.

    Args:
        x: [N, H V].
        gate: [N, H V] logits; None for no gate.

    Returns:
        [N, H V] in the dtype of ``x``.

    Raises:
        ShapeError: the shapes disagree.
    """
    check_gate(x, gate)
    return gated(x, gate)


def check_gate(x: torch.Tensor, gate: torch.Tensor | None) -> None:
    """Refuse what does not belong together; for every implementation of the op.

    Raises:
        ShapeError: with the shapes.
    """
    if gate is not None and gate.shape != x.shape:
        raise ShapeError(f"mla_gate: x {tuple(x.shape)}, gate {tuple(gate.shape)}")


def mla_decode(
    q: torch.Tensor,
    latents: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    latent_width: int,
    scale: float,
    page: int = 1,
) -> torch.Tensor:
    """Attend from one token of every sequence to its cached latents, without expanding them.

    Args:
        q: [B, H, R + P], the no-position query times ``W_K`` (R), then the shared part (P).
        latents: [S, R + P], every token slot of the paged cache.
        rows: [B, L] int64, the cache rows at which the pages of every sequence begin, in order;
            padded with any valid row.
        lengths: [B] int64, how many tokens count, the current one among them; 0 is padding.
        latent_width: R.
        scale: of the scores.
        page: tokens of a page, whose rows follow one another; with 1, ``rows`` are the tokens'.

    Returns:
        [B, H, R] mixtures of latents in the dtype of ``q``; scores and softmax in float32. Rows
        past a sequence's length have no influence, whatever they hold (NaN included); without any
        the mixture is zero.

    Raises:
        ShapeError: the shapes disagree.
    """
    agree = q.shape[-1] == latents.shape[-1] and rows.shape[0] == q.shape[0] == lengths.shape[0]
    if not agree or latent_width > latents.shape[-1]:
        raise ShapeError(
            f"mla_decode: q {tuple(q.shape)}, latents {tuple(latents.shape)}, "
            f"rows {tuple(rows.shape)}, lengths {tuple(lengths.shape)}, R {latent_width}"
        )
    return mla_decode_reference(q, latents, rows, lengths, latent_width, scale, page)


def mla_store(
    c: torch.Tensor,
    shared: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    latents: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Normalise new latents and write them into the cache, with the shared part behind each.

    Args:
        c: [N, R] and shared: [N, P], columns of the layer's projection.
        norm_weight: [R] of the RMSNorm of ``c``.
        eps: of that norm.
        latents: [S, R + P], written at ``rows``.
        rows: [N] int64, all different; below 0 is padding and written nowhere.

    Raises:
        ShapeError: the shapes disagree.
    """
    check_store(c, shared, norm_weight, latents, rows)
    mla_store_reference(c, shared, norm_weight, eps, latents, rows)


def check_store(
    c: torch.Tensor,
    shared: torch.Tensor,
    norm_weight: torch.Tensor,
    latents: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Refuse what does not belong together; for every implementation of :func:`mla_store`.

    Raises:
        ShapeError: with the shapes.
    """
    width = c.shape[-1] + shared.shape[-1]
    agree = c.shape[:1] == shared.shape[:1] == rows.shape and latents.shape[1:] == (width,)
    if not agree or norm_weight.shape != c.shape[1:]:
        raise ShapeError(
            f"mla_store: c {tuple(c.shape)}, shared {tuple(shared.shape)}, norm "
            f"{tuple(norm_weight.shape)}, latents {tuple(latents.shape)}, rows {tuple(rows.shape)}"
        )


def mla_values(
    mixed: torch.Tensor, values: torch.Tensor, gate: torch.Tensor | None
) -> torch.Tensor:
    """Expand mixtures of latents to mixtures of values and gate them.

    Args:
        mixed: [B, H, R].
        values: [H, V, R], every head's value rows.
        gate: [B, H V] logits, whose sigmoid multiplies the result; None for no gate.

    Returns:
        [B, H V] in the dtype of ``mixed``.

    Raises:
        ShapeError: the shapes disagree.
    """
    check_values(mixed, values, gate)
    return mla_values_reference(mixed, values, gate)


def check_values(mixed: torch.Tensor, values: torch.Tensor, gate: torch.Tensor | None) -> None:
    """Refuse what does not belong together; for every implementation of :func:`mla_values`.

    Raises:
        ShapeError: with the shapes.
    """
    batch, heads, latent = mixed.shape
    agree = values.shape[::2] == (heads, latent)
    if not agree or (gate is not None and gate.shape != (batch, heads * values.shape[1])):
        raise ShapeError(
            f"mla_values: mixed {tuple(mixed.shape)}, values {tuple(values.shape)}, "
            f"gate {None if gate is None else tuple(gate.shape)}"
        )
