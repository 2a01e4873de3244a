"""Latent attention, attention residuals and the vision tower at K3's widths, beside PyTorch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.nn.functional import scaled_dot_product_attention

from k3vl.kernels.attn_residual.gpu import FEW, attn_residual
from k3vl.kernels.attn_residual.reference import attn_residual_reference
from k3vl.kernels.bench import sglang_attention
from k3vl.kernels.bench.case import Case, Peer, normal
from k3vl.kernels.bench.sglang_tower import attention_peers
from k3vl.kernels.flash import FlashShape
from k3vl.kernels.flash_hopper import hopper_flash
from k3vl.kernels.mla.gpu import (
    DecodeShape,
    mla_decode,
    mla_prefill_packed,
    mla_store,
    mla_values,
)
from k3vl.kernels.mla.hopper import HopperShape
from k3vl.kernels.mla.reference import (
    mla_decode_reference,
    mla_prefill_reference,
    mla_store_reference,
    mla_values_reference,
)
from k3vl.kernels.mla.turned import TurnedShape, turned_shape
from k3vl.kernels.packed import Packed
from k3vl.kernels.pixels import normalise_pixels as normalise_reference
from k3vl.kernels.pixels.gpu import normalise_pixels
from k3vl.kernels.rms_norm.gpu import NormShape, rms_norm
from k3vl.kernels.rms_norm.reference import rms_norm_reference
from k3vl.kernels.vision_attention.gpu import vision_attention
from k3vl.kernels.vision_attention.grouped import vision_attention_grouped
from k3vl.kernels.vision_attention.reference import vision_attention_reference
from k3vl.kernels.vision_pos import rotary_table
from k3vl.kernels.vision_pos import rotate as rotate_reference
from k3vl.kernels.vision_pos.gpu import RotateShape, rotate, rotate_in_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SCALE = 192**-0.5
TRITON_SHAPE = FlashShape(128, 64, 8, 3)
"""The fastest of the Triton kernel, which runs where the one in Gluon does not."""


def attn_residual_cases() -> Iterator[Case]:
    """Nine rows of 7168, the most that K3 mixes."""
    depth, width = 9, 7168
    mixed = torch.compile(attn_residual_reference, dynamic=False)
    for tokens in (1, 8, 32, 64, 128, 2048, 8192):
        rows = normal(depth, tokens, width)
        query, norm = (normal(width, dtype=torch.float32) / 32, normal(width).abs())
        run = partial(attn_residual, rows, query, norm, 1e-5)
        yield Case(
            op="attn_residual",
            shape=f"T{tokens} R{depth} D{width}",
            ours=run,
            want=partial(attn_residual_reference, rows.float(), query, norm.float(), 1e-5),
            limit=8e-3,
            bytes=tokens * width * 2 * (depth + 1),
            flops=tokens * width * depth * 8,
            variants={name: partial(run, **how) for name, how in _residual_ways(tokens).items()},
            compared=True,
            peers={
                "torch.compile of the reference": partial(mixed, rows, query, norm, 1e-5),
                "PyTorch reference": partial(attn_residual_reference, rows, query, norm, 1e-5),
                **sglang_attention.residual_peers(rows, query, norm, 1e-5),
            },
        )


def _residual_ways(tokens: int) -> dict[str, dict[str, Any]]:
    """Other launches where few tokens leave the device empty."""
    if tokens > 128:
        return {}
    triton: dict[str, dict[str, Any]] = {f"in Triton, {n} warps": {"warps": n} for n in (8, 4)}
    return triton if tokens <= FEW else {"a cluster a token": {"cluster": True}, **triton}


def _decode_shapes(batch: int, length: int) -> dict[str, DecodeShape | HopperShape | TurnedShape]:
    """For 96 heads: half as many parts as fill the device; the other kernels."""
    most = max(1, 132 // (2 * batch))
    usual = min(most, length // 256)
    shapes: list[DecodeShape | HopperShape | TurnedShape] = [
        DecodeShape(heads=64, latents=64, warps=8, stages=2, splits=most)
    ]
    if usual > 1:
        shapes.append(HopperShape(usual // 2))
    if turned_shape(batch, length):
        shapes.append(HopperShape(most))
    return {str(shape): shape for shape in shapes}


def mla_decode_cases() -> Iterator[Case]:
    """Absorbed form, 512 + 64, bf16; latents of every sequence lie in random pages of 64."""
    heads = 96
    for batch, length in ((1, 8192), (1, 32768), (32, 8192), (128, 8192)):
        latents = normal(batch * length, 576)
        pages = torch.randperm(batch * length // 64, device="cuda").view(batch, -1, 1)
        rows = (pages * 64 + torch.arange(64, device="cuda")).flatten(1)
        table = (pages.squeeze(-1) * 64).T.contiguous().T  # as the engine lays it out
        lengths = torch.full((batch,), length, device="cuda")
        q = normal(batch, heads, 576)
        run = partial(mla_decode, q, latents, table, lengths, 512, _SCALE, 64)
        small = batch * length <= 2**18
        peers: dict[str, Callable[[], object] | Peer] = {}
        if small:
            context = latents[rows].unsqueeze(1)  # PyTorch cannot read pages
            # To it the heads of one sequence are queries of one head.
            peers["PyTorch scaled_dot_product_attention, latents gathered before"] = partial(
                scaled_dot_product_attention,
                q.unsqueeze(1),
                context,
                context[..., :512],
                scale=_SCALE,
            )
        peers |= sglang_attention.decode_peers(q, latents, pages.squeeze(-1), length, 512, _SCALE)
        yield Case(
            op="mla_decode",
            shape=f"B{batch} L{length} H{heads}",
            ours=run,
            want=partial(
                mla_decode_reference, q.float(), latents.float(), rows, lengths, 512, _SCALE
            )
            if small
            else None,
            limit=8e-3,
            bytes=batch * length * 576 * 2 + batch * heads * (576 + 512) * 2,
            flops=2 * batch * length * heads * (576 + 512),
            variants={
                name: partial(run, shape=shape)
                for name, shape in _decode_shapes(batch, length).items()
            },
            compared=True,
            peers=peers,
        )


def mla_around_cases() -> Iterator[Case]:
    """What surrounds the decode kernel of a layer: cache write with its norm, values with gate."""
    heads = 96
    for batch in (1, 32, 128):
        kv_b, mixed = normal(heads, 256, 512), normal(batch, heads, 512)
        projected = normal(batch, 2112 + heads * 128)
        c, shared = projected[:, 1536:2048], projected[:, 2048:2112]
        values, gate, norm = kv_b[:, 128:], projected[:, 2112:], normal(512).abs()
        yield Case(
            op="mla_values",
            shape=f"B{batch} H{heads} R512 V128, gated",
            ours=partial(mla_values, mixed, values, gate),
            want=partial(mla_values_reference, mixed.float(), values.float(), gate.float()),
            limit=8e-3,
            bytes=2 * heads * (128 * 512 + batch * (512 + 2 * 128)),
            flops=2 * batch * heads * 512 * 128,
            peers={
                "PyTorch product, then gate": partial(mla_values_reference, mixed, values, gate)
            },
        )
        pool = normal(batch * 64, 576)
        rows = torch.arange(batch, device="cuda") * 64

        def ours(
            c: torch.Tensor = c, shared: torch.Tensor = shared, norm: torch.Tensor = norm,
            pool: torch.Tensor = pool, rows: torch.Tensor = rows,
        ) -> torch.Tensor:  # fmt: skip
            mla_store(c, shared, norm, 1e-6, pool, rows)
            return pool[rows]

        def want(
            c: torch.Tensor = c, shared: torch.Tensor = shared, norm: torch.Tensor = norm,
        ) -> torch.Tensor:  # fmt: skip
            return torch.cat([rms_norm_reference(c.float(), norm.float(), 1e-6), shared], -1)

        args = (c, shared, norm, 1e-6, pool, rows)
        yield Case(
            op="mla_store",
            shape=f"B{batch} R512 P64, with norm",
            ours=ours,
            timed=partial(mla_store, *args),
            want=want,
            limit=8e-3,
            bytes=2 * batch * 576 * 2,
            flops=batch * 512 * 4,
            peers={"PyTorch": partial(mla_store_reference, *args)},
        )


def _join_and_attend(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    shared: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """``attend`` over [1, H, T, D] with [T, H, K] keys and the part that the heads share."""
    joined = torch.cat([k, shared.unsqueeze(1).expand(-1, k.shape[1], -1)], -1)
    return attend(q, joined.transpose(0, 1).unsqueeze(0), v)


def mla_prefill_cases() -> Iterator[Case]:
    """Expanded form, 192 and 128 wide, causal; with and without a cached prefix."""
    heads = 96
    for queries, keys in ((2048, 2048), (8192, 8192), (8192, 32768), (32768, 32768)):
        q, shared = normal(queries, heads, 192), normal(keys, 64)
        latents, kv_b = normal(keys, 512), normal(heads, 256, 512) / 512**0.5
        k, v = (
            torch.mm(latents, part.flatten(0, 1).T).unflatten(1, (heads, 128))
            for part in kv_b.split(128, 1)
        )
        run = partial(
            mla_prefill_packed, q, k, v, _SCALE, lengths=(queries,), contexts=(keys,), shared=shared
        )
        pairs = queries * keys - queries * (queries - 1) / 2
        peers: dict[str, Callable[[], object] | Peer] = {}
        if queries == keys:  # PyTorch's causal mask starts at the upper left
            joined = torch.cat([k, shared.unsqueeze(1).expand(-1, heads, -1)], -1)
            query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, joined, v))
            attend = partial(scaled_dot_product_attention, is_causal=True, scale=_SCALE)
            peers["PyTorch scaled_dot_product_attention, keys joined before"] = partial(
                attend, query, key, value
            )
            peers["PyTorch scaled_dot_product_attention, with joining the keys"] = partial(
                _join_and_attend, attend, query, k, shared, value
            )
        peers |= sglang_attention.prefill_peers(q, k, v, shared, latents, kv_b, _SCALE)

        def want(
            q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v,
            shared: torch.Tensor = shared,
        ) -> torch.Tensor:  # fmt: skip
            joined = torch.cat([k, shared.unsqueeze(1).expand(-1, heads, -1)], -1)
            return mla_prefill_reference(q.float(), joined.float(), v.float(), _SCALE)

        yield Case(
            op="mla_prefill",
            shape=f"T{queries} L{keys} H{heads}",
            ours=run,
            want=want if queries == 2048 else None,
            limit=8e-3,
            bytes=2 * heads * (queries * 320 + keys * 256) + keys * 128,
            flops=2 * heads * pairs * 320,
            variants={"in Triton": partial(run, shape=TRITON_SHAPE)},
            compared=True,
            peers=peers,
        )


def vision_cases() -> Iterator[Case]:
    """12 heads of 128: one picture of 1024 x 1024, many of 448 x 448, four frames, a mixture."""
    heads = 12
    mixture = [5476, 1024, 4096, 256, 2304, 1024, 576, 3136]
    for name, lengths in (
        ("1 x 5476", [5476]),
        ("16 x 1024", [1024] * 16),
        ("4 x 4096 (4 frames of 1024)", [4096] * 4),
        ("8 of 256 to 5476", mixture),
    ):
        total = sum(lengths)
        qkv = normal(total, 3 * heads, 128)
        q, k, v = qkv.split(heads, 1)
        items = Packed.of(lengths, q.device)
        run = partial(vision_attention, q, k, v, items)
        so = partial(
            hopper_flash, q, k, v, 128**-0.5, queries=items, keys=items, causal=False, rest=None
        )
        yield Case(
            op="vision_attention",
            shape=f"{name} patches H12 K128",
            ours=run,
            want=partial(vision_attention_reference, q, k, v, lengths),
            limit=8e-3,
            bytes=4 * total * heads * 256,
            flops=4 * heads * 128 * sum(n * n for n in lengths),
            variants={
                "in Triton": partial(run, shape=FlashShape(64, 64, 4, 3)),
                "not in turns": partial(so, ordered=False),
                "a maximum for every tile": partial(so, fixed=False),
            },
            compared=True,
            peers={
                "PyTorch scaled_dot_product_attention, equal items together": partial(
                    vision_attention_grouped, q, k, v, lengths
                ),
                **attention_peers(q, k, v, lengths),
            },
        )


_ROTATIONS = (
    RotateShape(4, 4, 2),
    RotateShape(8, 8, 4),
    RotateShape(16, 4, 8),
    RotateShape(8, 4, 2),
)


def small_vision_cases() -> Iterator[Case]:
    """What surrounds the attention: rotary positions, norms, pixels."""
    table = rotary_table(74, 74, 128, device=torch.device("cuda"))
    x = normal(5476, 36, 128)[:, :24]
    yield Case(
        op="rotate",
        shape="5476 patches, 24 heads of 128",
        ours=partial(rotate, x, table),
        want=partial(rotate_reference, x.float(), table),
        limit=8e-3,
        bytes=2 * 5476 * 24 * 256 + table.nbytes,
        flops=5476 * 24 * 128 * 3,
        variants={
            "in place": partial(rotate_in_place, x.clone(), table),
            **{str(s): partial(rotate, x, table, shape=s) for s in _ROTATIONS},
        },
        peers={"PyTorch complex product": partial(rotate_reference, x, table)},
    )
    rows, weight = normal(5476, 1024), normal(1024).abs()
    yield Case(
        op="rms_norm",
        shape="5476 patches of 1024",
        ours=partial(rms_norm, rows, weight, 1e-6),
        want=partial(rms_norm_reference, rows.float(), weight.float(), 1e-6),
        limit=8e-3,
        bytes=4 * rows.numel(),
        flops=4 * rows.numel(),
        variants={
            f"{r} rows, {w} warps": partial(rms_norm, rows, weight, 1e-6, shape=NormShape(r, w))
            for r, w in ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 8), (8, 8))
        },
        peers={
            "PyTorch in the dtype of the rows": partial(
                torch_rms_norm, rows, weight.shape, weight, 1e-6
            ),
            "PyTorch by way of float32": partial(rms_norm_reference, rows, weight, 1e-6),
        },
    )
    pixels = torch.randint(0, 256, (65536, 3, 14, 14), dtype=torch.uint8, device="cuda")
    moments = torch.full((3,), 0.5, device="cuda")
    args = (pixels, moments, moments)
    yield Case(
        op="normalise_pixels",
        shape="65536 patches of 3 x 14 x 14",
        ours=partial(normalise_pixels, *args, torch.bfloat16),
        want=partial(normalise_reference, *args, torch.float32),
        limit=8e-3,
        bytes=3 * pixels.numel(),
        flops=3 * pixels.numel(),
        peers={"PyTorch": partial(normalise_reference, *args, torch.bfloat16)},
    )
