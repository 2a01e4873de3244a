"""Kimi Delta Attention: a linear attention whose state forgets per key channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3vl.errors import ShapeError
from k3vl.kernels.kda.reference import (
    kda_chunk_reference,
    kda_decay_reference,
    kda_recurrent_reference,
    kda_step_reference,
)

if TYPE_CHECKING:
    import torch


def kda_decay(
    logits: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """Turn decay logits into the natural logarithm of the decay.

    K3: ``lower_bound * sigmoid(exp(a_log) (logits + dt_bias))``, bounded and smooth, not a clamp.
    Kimi-Linear (``lower_bound`` None): ``-exp(a_log) softplus(logits + dt_bias)``.

    Args:
        logits: [N, H * K], any floating dtype.
        a_log: [H] float32.
        dt_bias: [H * K] float32.
        lower_bound: -5 in K3.

    Returns:
        [N, H, K] float32, below 0.

    Raises:
        ShapeError: the shapes disagree.
    """
    if logits.shape[-1:] != dt_bias.shape or dt_bias.shape[0] % a_log.shape[0]:
        raise ShapeError(
            f"kda_decay: logits {tuple(logits.shape)}, a_log {tuple(a_log.shape)}, "
            f"dt_bias {tuple(dt_bias.shape)}"
        )
    return kda_decay_reference(logits, a_log, dt_bias, lower_bound)


def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the delta rule over whole sequences.

    Sequences are padded to a common length; a padded token has ``k``, ``g`` and ``beta`` zero and
    then leaves the state alone. ``g`` must stay above -5 a token where the chunked form is used.

    Args:
        q, k: [B, T, H, K] float32, L2-normalised over K; q scaled by K^-1/2.
        v: [B, T, H, V] float32.
        g: [B, T, H, K] float32, natural logarithm of the decay.
        beta: [B, T, H] float32 in (0, 1).
        state: [B, H, K, V] float32; not modified.

    Returns:
        Outputs [B, T, H, V] and the state after the last token [B, H, K, V], both float32.

    Raises:
        ShapeError: the shapes disagree.
    """
    _check("kda_prefill", q, k, v, g, beta, state.shape)
    return kda_chunk_reference(q, k, v, g, beta, state)


def kda_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as :func:`kda_prefill` token by token; right for any decay."""
    _check("kda_recurrent", q, k, v, g, beta, state.shape)
    return kda_recurrent_reference(q, k, v, g, beta, state)


def kda_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Advance every sequence by one token; its state lives in a pool.

    Args:
        q, k, g: [B, H, K] float32 as in :func:`kda_prefill`.
        v: [B, H, V] float32.
        beta: [B, H] float32.
        states: [S, H, K, V] float32 pool; rows ``slots`` are updated in place.
        slots: [B] int64, all different.

    Returns:
        [B, H, V] float32.

    Raises:
        ShapeError: the shapes disagree.
    """
    expected = (slots.shape[0], *states.shape[1:])
    one = [x.unsqueeze(1) for x in (q, k, v, g, beta)]
    _check("kda_decode", one[0], one[1], one[2], one[3], one[4], expected)
    state = states.index_select(0, slots)  # a copy, so the step may work in place
    output = kda_step_reference(q, k, v, g, beta, state)
    states.index_copy_(0, slots, state)
    return output


def _check(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_shape: tuple[int, ...],
) -> None:
    batch, length, heads, width = q.shape
    agree = (
        k.shape == q.shape
        and g.shape == q.shape
        and v.shape[:3] == q.shape[:3]
        and beta.shape == (batch, length, heads)
        and tuple(state_shape) == (batch, heads, width, v.shape[-1])
    )
    if not agree:
        named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        shapes = ", ".join(f"{label} {tuple(x.shape)}" for label, x in named.items())
        raise ShapeError(f"{name}: {shapes}, state {tuple(state_shape)}")
