"""Multi-head latent attention on a CUDA device."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from k3vl.errors import ShapeError
from k3vl.kernels.dependent import begins_early
from k3vl.kernels.flash import FlashShape, flash
from k3vl.kernels.hopper import hopper_runs
from k3vl.kernels.mla import check_absorb, check_gate, check_prefill, check_store, check_values
from k3vl.kernels.mla.decode_kernels import (
    mla_absorb_kernel,
    mla_decode_kernel,
    mla_gate_kernel,
    mla_merge_kernel,
    mla_merge_once_kernel,
    mla_store_kernel,
    mla_values_kernel,
)
from k3vl.kernels.mla.hopper import (
    HEADS,
    PROGRAMS,
    TILE,
    HopperShape,
    hopper_parts,
    hopper_takes,
)
from k3vl.kernels.mla.turned import (
    TurnedShape,
    turned_heads,
    turned_parts,
    turned_shape,
    turned_takes,
)
from k3vl.kernels.packed import Packed

_FEW_HEADS = 32
"""Up to here the rows of a tensor core's product are mostly padding, and bytes are what counts."""


_OF_WARP = 2048
"""Numbers of parts that a warp adds: their loads are all under way together."""


class DecodeShape(NamedTuple):
    """Heads and latents of a program, its warps and pipeline stages, parts of a context."""

    heads: int
    latents: int
    warps: int
    stages: int
    splits: int


def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    shared: torch.Tensor | None = None,
    *,
    shape: FlashShape | None = None,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.mla.mla_prefill`."""
    check_prefill(q, k, v, shared)
    span = {"lengths": (q.shape[0],), "contexts": (k.shape[0],)}
    return mla_prefill_packed(q, k, v, scale, **span, shared=shared, shape=shape)


def mla_prefill_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    lengths: tuple[int, ...],
    contexts: tuple[int, ...],
    shared: torch.Tensor | None = None,
    shape: FlashShape | None = None,
) -> torch.Tensor:
    """Attend causally in several packed sequences, each behind a cached prefix or none.

    Args:
        q: [N, H, K + P].
        k: [M, H, K] and shared: [M, P], the part of the keys that all heads have in common; or
            k: [M, H, K + P] alone.
        v: [M, H, V].
        scale: of the scores.
        lengths: new tokens of every sequence, they add up to N.
        contexts: tokens of every sequence, prefix included; they add up to M.
        shape: of the programs, for measurements.

    Returns:
        [N, H, V] in the dtype of ``q``; softmax in float32.

    Raises:
        ShapeError: the shapes disagree, or the kernel cannot take the widths.
    """
    width = k.shape[-1] + (shared.shape[-1] if shared is not None else 0)
    agree = (
        q.shape[1:] == (k.shape[1], width)
        and v.shape[:2] == k.shape[:2]
        and (sum(lengths), sum(contexts)) == (q.shape[0], k.shape[0])
        and all(t <= n for t, n in zip(lengths, contexts, strict=True))
    )
    if not agree:
        raise ShapeError(f"mla_prefill: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    rest: torch.Tensor | None = None
    if shared is not None:
        rest = shared.unsqueeze(1).expand(-1, k.shape[1], -1)
    if rest is None or k.shape[-1] & (k.shape[-1] - 1):
        k, rest = _halve(k if rest is None else torch.cat([k, rest], -1))
    queries, keys = _packed(lengths, q.device), _packed(contexts, q.device)
    return flash(q, k, v, scale, queries=queries, keys=keys, causal=True, rest=rest, shape=shape)


def mla_prefill_latent(
    q: torch.Tensor,
    context: torch.Tensor,
    latent_width: int,
    scale: float,
    borders: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    shape: FlashShape | None = None,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.mla.mla_prefill_latent`."""
    if q.shape[-1] != context.shape[-1] or q.shape[0] > context.shape[0]:
        raise ShapeError(
            f"mla_prefill_latent: q {tuple(q.shape)}, context {tuple(context.shape)}, "
            f"R {latent_width}"
        )
    c, shared = context.split([latent_width, context.shape[-1] - latent_width], dim=-1)
    heads = q.shape[1]
    c = c.unsqueeze(1).expand(-1, heads, -1)
    return flash(
        q,
        c,
        c,
        scale,
        queries=_within(q.shape[0], borders, 0, q.device),
        keys=_within(context.shape[0], borders, 1, q.device),
        causal=True,
        rest=shared.unsqueeze(1).expand(-1, heads, -1),
        shape=shape,
    )


def mla_decode(
    q: torch.Tensor,
    latents: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    latent_width: int,
    scale: float,
    page: int = 1,
    *,
    shape: DecodeShape | HopperShape | TurnedShape | None = None,
) -> torch.Tensor:
    """See :func:`k3vl.kernels.mla.mla_decode`."""
    batch, heads, width = q.shape
    shared = width - latent_width
    agree = width == latents.shape[-1] and rows.shape[0] == batch == lengths.shape[0]
    powers = all(w >= 16 and not w & (w - 1) for w in (latent_width, shared))
    flat = all(x.stride(-1) == 1 for x in (q, latents))
    if not (agree and powers and flat):
        raise ShapeError(
            f"mla_decode: q {tuple(q.shape)}, latents {tuple(latents.shape)}, rows "
            f"{tuple(rows.shape)}, lengths {tuple(lengths.shape)}, R {latent_width}; rows must be "
            "contiguous and R and P powers of two, at least 16"
        )
    out = torch.empty(batch, heads, latent_width, dtype=q.dtype, device=q.device)
    if not batch:
        return out
    layout = shape or _best_shape(q, latents, rows, latent_width, page)
    splits = layout.splits
    whole = splits == 1
    args = (q, latents, rows, lengths, latent_width, scale, page)
    early = begins_early(q)
    sums = out if whole else q.new_empty(batch, heads, splits, dtype=torch.float32)
    if not isinstance(layout, DecodeShape):
        takes = hopper_takes if isinstance(layout, HopperShape) else turned_takes
        if not takes(q, latents, rows, latent_width, page):
            raise ShapeError(f"mla_decode: {layout} takes neither these widths nor pages of {page}")
        parts = out if whole else q.new_empty(batch, splits, heads, latent_width)
        if isinstance(layout, HopperShape):
            hopper_parts(*args, layout, results=(parts, sums), early=early)
        else:
            turned_parts(*args, layout, results=(parts, sums), early=early)
        if not whole:
            _merge_once(parts, sums, out, early=early)
        return out
    parts = out
    if not whole:
        parts = q.new_empty(batch, heads, splits, latent_width, dtype=torch.float32)
    _decode_parts(*args, layout, results=(out, parts, sums))
    if not whole:
        mla_merge_kernel[(heads, batch, max(1, latent_width // 128))](
            parts,
            sums,
            lengths,
            out,
            heads,
            splits,
            R=latent_width,
            BR=min(latent_width, 128),
            BN=layout.latents,
            BS=triton.next_power_of_2(splits),
            BP=min(32, triton.next_power_of_2(splits)),
            PDL=early,
            launch_pdl=early,
        )
    return out


def _merge_once(
    parts: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, *, early: bool
) -> None:
    """Add parts [B, SPLITS, H, R]; each has a weight [B, H, SPLITS], that of zeros -inf.

    Programs are single warps: no barriers, and the device is filled evenly.
    """
    batch, splits, heads, width = parts.shape
    slots = triton.next_power_of_2(splits)
    channels = min(width, max(16, _OF_WARP // slots))
    mla_merge_once_kernel[(heads, batch, width // channels)](
        parts,
        weights,
        out,
        splits,
        R=width,
        BR=channels,
        BS=slots,
        PDL=early,
        num_warps=1,
        launch_pdl=early,
    )


def mla_absorb(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """See :func:`k3vl.kernels.mla.mla_absorb`."""
    check_absorb(q, keys)
    (batch, heads, width), (_, own, latent) = q.shape, keys.shape
    flat = q.stride()[1:] == (width, 1) and keys.stride(2) == 1
    if latent < 16 or latent & (latent - 1) or not flat:
        raise ShapeError(
            f"mla_absorb: q {tuple(q.shape)}, keys {tuple(keys.shape)}: rows must be contiguous "
            "and R a power of two, at least 16"
        )
    out = torch.empty(batch, heads, latent + width - own, dtype=q.dtype, device=q.device)
    if not batch:
        return out
    rows, columns = min(64, max(16, triton.next_power_of_2(batch))), min(128, latent)
    early = begins_early(q)
    mla_absorb_kernel[(heads, triton.cdiv(batch, rows), latent // columns)](
        q,
        keys,
        out,
        q.stride(0),
        *keys.stride()[:2],
        batch,
        heads,
        width - own,
        M=own,
        R=latent,
        BB=rows,
        BM=max(16, triton.next_power_of_2(own)),
        BR=columns,
        BP=triton.next_power_of_2(max(1, width - own)),
        PRECISION="tf32" if q.dtype != torch.float32 else "tf32x3",
        PDL=early,
        num_warps=4,
        launch_pdl=early,
    )
    return out


def mla_store(
    c: torch.Tensor,
    shared: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    latents: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """See :func:`k3vl.kernels.mla.mla_store`."""
    check_store(c, shared, norm_weight, latents, rows)
    if any(x.stride(-1) != 1 for x in (c, shared, latents, rows)):
        raise ShapeError("mla_store: rows must be contiguous")
    (tokens, latent), part = c.shape, shared.shape[1]
    if tokens:
        early = begins_early(c)
        mla_store_kernel[(tokens,)](
            c,
            shared,
            norm_weight,
            latents,
            rows,
            c.stride(0),
            shared.stride(0),
            latents.stride(0),
            eps,
            latent,
            part,
            BR=triton.next_power_of_2(latent),
            BP=triton.next_power_of_2(max(1, part)),
            PDL=early,
            num_warps=1 if latent <= 512 else 4,
            launch_pdl=early,
        )


def mla_gate(x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """See :func:`k3vl.kernels.mla.mla_gate`; plain PyTorch takes six launches in 16 bits."""
    check_gate(x, gate)
    if gate is None:
        return x
    if x.stride(1) != 1 or gate.stride(1) != 1:
        raise ShapeError("mla_gate: rows must be contiguous")
    (rows, width), early = x.shape, begins_early(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        mla_gate_kernel[(rows, triton.cdiv(width, 2048))](
            x, gate, out, x.stride(0), gate.stride(0), width, BLOCK=2048, PDL=early,
            num_warps=8, launch_pdl=early,
        )  # fmt: skip
    return out


def mla_values(
    mixed: torch.Tensor, values: torch.Tensor, gate: torch.Tensor | None
) -> torch.Tensor:
    """See :func:`k3vl.kernels.mla.mla_values`."""
    check_values(mixed, values, gate)
    batch, heads, latent = mixed.shape
    width = values.shape[1]
    flat = values.stride(2) == 1 and (gate is None or gate.stride(1) == 1)
    if latent < 16 or latent & (latent - 1) or not flat:
        raise ShapeError(
            f"mla_values: values {tuple(values.shape)}: rows must be contiguous and R a power of "
            "two, at least 16"
        )
    mixed = mixed.contiguous()
    out = torch.empty(batch, heads * width, dtype=mixed.dtype, device=mixed.device)
    if not batch:
        return out
    # Few sequences: the weights are all there is to read, by more programs than multiprocessors.
    rows = min(64, max(16, triton.next_power_of_2(batch)))
    columns = min(32 if batch <= 32 else 64, max(16, triton.next_power_of_2(width)))
    half = mixed.dtype != torch.float32
    early = begins_early(mixed)
    mla_values_kernel[(heads, triton.cdiv(batch, rows), triton.cdiv(width, columns))](
        mixed,
        values,
        mixed if gate is None else gate,
        out,
        *values.stride()[:2],
        0 if gate is None else gate.stride(0),
        batch,
        heads,
        width,
        R=latent,
        BB=rows,
        BV=columns,
        BR=min(latent, 128 if half else 32),
        GATED=gate is not None,
        PRECISION="tf32" if half else "tf32x3",
        STAGES=3 if half else 1,
        PDL=early,
        num_warps=4,
        launch_pdl=early,
    )
    return out


def _decode_parts(
    q: torch.Tensor,
    latents: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    latent_width: int,
    scale: float,
    page: int,
    shape: DecodeShape,
    *,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Fill results: [B, H, R], or with several parts theirs and their weights."""
    batch, heads, width = q.shape
    mla_decode_kernel[(triton.cdiv(heads, shape.heads), batch, shape.splits)](
        q,
        latents,
        rows,
        lengths,
        *results,
        *q.stride()[:2],
        latents.stride(0),
        *rows.stride(),
        scale / math.log(2),
        heads,
        shape.splits,
        R=latent_width,
        P=width - latent_width,
        PAGE=page,
        BH=shape.heads,
        BN=shape.latents,
        WHOLE=shape.splits == 1,
        PRECISION="tf32" if q.dtype != torch.float32 else "tf32x3",
        STAGES=shape.stages,
        num_warps=shape.warps,
    )


def _best_shape(
    q: torch.Tensor, latents: torch.Tensor, rows: torch.Tensor, latent_width: int, page: int
) -> DecodeShape | HopperShape | TurnedShape:
    batch, heads, _ = q.shape
    longest = rows.shape[1] * page
    if (
        heads > _FEW_HEADS
        and hopper_runs(q.device)
        and hopper_takes(q, latents, rows, latent_width, page)
    ):
        turned = turned_shape(batch, longest)
        if turned and turned_heads(heads):
            return turned
        # As many parts as fill the device, of four tiles at least: with two, adding costs more.
        programs = batch * -(-heads // HEADS)
        splits = max(1, min(PROGRAMS // programs, -(-longest // (4 * TILE))))
        # 64 or 32 and not a few more, which would leave half of the launch that adds them idle.
        return HopperShape(splits // 32 * 32 or splits)
    return _decode_shape(batch, heads, longest, half=q.dtype != torch.float32)


def _decode_shape(batch: int, heads: int, longest: int, *, half: bool) -> DecodeShape:
    """The fastest of those that ``bench`` tried on an H200; as many parts as fill the device."""
    if not half:
        block, latents, warps, stages = 16, 16, 4, 1
    elif heads > _FEW_HEADS:
        block, latents, warps, stages = 64, 64, 8, 2
    else:
        block, latents, warps, stages = 16, 32, 4, 3
    programs = batch * -(-heads // block)
    splits = max(1, min(PROGRAMS // programs, -(-longest // (2 * latents))))
    return DecodeShape(block, latents, warps, stages, splits)


def _within(
    rows: int, borders: tuple[torch.Tensor, torch.Tensor] | None, which: int, device: torch.device
) -> Packed:
    """One sequence, or those whose borders only the device knows: each may have all rows."""
    if borders is None:
        return _packed((rows,), device)
    return Packed((rows,) * (borders[which].shape[0] - 1), borders[which])


def _packed(lengths: tuple[int, ...], device: torch.device) -> Packed:
    """Kept, as every layer of a step asks for the same."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _packed_on(stream, lengths, device)


@lru_cache(maxsize=32)
def _packed_on(stream: int, lengths: tuple[int, ...], device: torch.device) -> Packed:
    """For one stream: another might read the numbers too early, or when they have gone."""
    del stream
    return Packed.of(lengths, device)


def _halve(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Cut keys into the largest power of two and the rest."""
    largest = 1 << (k.shape[-1].bit_length() - 1)
    return k[..., :largest], k[..., largest:] if k.shape[-1] > largest else None
