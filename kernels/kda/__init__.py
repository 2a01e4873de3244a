"""Kimi Delta Attention: a linear attention whose state forgets per key channel.

One op from the layer's projections to its output projection: short convolution with a carried
window and SiLU, L2 norm of queries and keys, decay and write strength, the delta rule on a pool of
states, RMSNorm of every head times the sigmoid of its gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3vl.errors import ShapeError
from k3vl.kernels.kda.reference import kda_decode_reference, kda_prefill_reference

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KDAWeights:
    """What the op needs of a layer's weights; all float32.

    Attributes:
        conv: [3 H K, W], for q, k and v; ``conv[:, W-1]`` multiplies the current token.
        a_log: [H], dt_bias: [H K] of the decay gate.
        o_norm: [K], shared by all heads.
        eps: of the output norm.
        lower_bound: of the log-decay: -5 in K3; None is Kimi-Linear's unbounded gate.
    """

    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    o_norm: torch.Tensor
    eps: float
    lower_bound: float | None


def kda_decode(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    decay: torch.Tensor,
    write: torch.Tensor,
    weights: KDAWeights,
    windows: torch.Tensor,
    states: torch.Tensor,
    cells: torch.Tensor,
) -> torch.Tensor:
    """Advance every sequence by one token; its windows and states lie in a pool of cells.

    Values have the width of keys, K. The last axis of every argument is contiguous; rows may lie
    any distance apart (they are columns of one projection).

    Args:
        qkv: [B, 3 H K] projections before the convolution, in the model's dtype as are the next
            three.
        gate: [B, H K] logits of the output gate.
        decay: [B, H K] logits of the decay: log-decay ``lower_bound * sigmoid(exp(a_log) (decay +
            dt_bias))``, or ``-exp(a_log) softplus(decay + dt_bias)`` without a bound.
        write: [B, H] logits of the write strength.
        weights: of the layer.
        windows: [C, W-1, 3, K] in the model's dtype, the last inputs of the convolution, oldest
            first; those of ``cells`` advance in place.
        states: [C, K, K] float32, key channels first; those of ``cells`` advance in place.
        cells: [B, H] int64, where each head of each sequence lies; all different. Those of a
            padding row are below 0 (the compiled kernels for CPUs are given none).

    Returns:
        [B, H K] in the dtype of ``gate``; float32 inside. Padding rows are zero.

    Raises:
        ShapeError: the shapes disagree.

    Source: Kimi Linear report; Kimi K3 ``modeling_kimi_linear.py`` (KimiDeltaAttention).
    """
    check_shapes("kda_decode", qkv, gate, decay, write, weights, windows, states, cells)
    if cells.shape[0] != qkv.shape[0]:
        raise ShapeError(f"kda_decode: qkv {tuple(qkv.shape)}, cells {tuple(cells.shape)}")
    return kda_decode_reference(qkv, gate, decay, write, weights, windows, states, cells)


def kda_prefill(
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
    """As :func:`kda_decode` over S packed sequences of any length.

    Args:
        qkv, gate, decay, write: [N, ...] rows of all sequences, one after the other.
        weights, windows, states: as in :func:`kda_decode`.
        cells: [S, H] int64.
        cu_seqlens: [S + 1] int64; rows ``cu_seqlens[s] .. cu_seqlens[s + 1]`` are sequence s's, and
            the last is N. Every sequence has a row.
        ends: [S] int64, the row behind the last token of every sequence. Rows from there to
            ``cu_seqlens[s + 1]`` are padding: whatever they hold, they leave windows and states
            alone.

    Returns:
        [N, H K] in the dtype of ``gate``; zero in padding.

    Raises:
        ShapeError: the shapes disagree.
    """
    check_shapes("kda_prefill", qkv, gate, decay, write, weights, windows, states, cells)
    check_sequences(cells, cu_seqlens, ends)
    return kda_prefill_reference(
        qkv, gate, decay, write, weights, windows, states, cells, cu_seqlens, ends
    )


def check_shapes(
    name: str,
    qkv: torch.Tensor,
    gate: torch.Tensor,
    decay: torch.Tensor,
    write: torch.Tensor,
    weights: KDAWeights,
    windows: torch.Tensor,
    states: torch.Tensor,
    cells: torch.Tensor,
) -> None:
    """Refuse what does not belong together; for every implementation of the two ops.

    Raises:
        ShapeError: with the shapes.
    """
    rows, (channels, width), heads = qkv.shape[0], weights.conv.shape, cells.shape[1]
    head = states.shape[-1]
    agree = (
        channels == 3 * heads * head
        and qkv.shape == (rows, channels)
        and gate.shape == decay.shape == (rows, heads * head)
        and write.shape == (rows, heads)
        and windows.shape[1:] == (width - 1, 3, head)
        and states.shape == (windows.shape[0], head, head)
        and weights.a_log.shape == (heads,)
        and weights.dt_bias.shape == (heads * head,)
        and weights.o_norm.shape == (head,)
    )
    if not agree:
        named = {
            "qkv": qkv,
            "gate": gate,
            "decay": decay,
            "write": write,
            "conv": weights.conv,
            "a_log": weights.a_log,
            "dt_bias": weights.dt_bias,
            "o_norm": weights.o_norm,
            "windows": windows,
            "states": states,
            "cells": cells,
        }
        shapes = ", ".join(f"{label} {tuple(x.shape)}" for label, x in named.items())
        raise ShapeError(f"{name}: {shapes}")


def check_sequences(cells: torch.Tensor, cu_seqlens: torch.Tensor, ends: torch.Tensor) -> None:
    """Refuse borders of another number of sequences; for every implementation of the prefill.

    Raises:
        ShapeError: with the shapes.
    """
    sequences = cells.shape[0]
    if cu_seqlens.shape != (sequences + 1,) or ends.shape != (sequences,):
        raise ShapeError(
            f"kda_prefill: cells {tuple(cells.shape)}, cu_seqlens {tuple(cu_seqlens.shape)}, "
            f"ends {tuple(ends.shape)}"
        )
