"""Absorbed MLA decode over paged latents as two Triton kernels: parts of the context, their sum."""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def mla_decode_kernel(
    q,
    latents,
    rows,
    lengths,
    out,
    parts,
    weights,
    s_q,
    s_qh,
    s_latents,
    s_rows,
    scale,
    H,
    SPLITS,
    R: tl.constexpr,
    P: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BH heads of one sequence over one part of its context.

    A latent row is keys and values at once, so it is loaded once. ``scale`` includes the
    logarithm's base. WHOLE: there is one part, which is the result. Else parts [B, H, SPLITS, R]
    float32, normalised, and weights [B, H, SPLITS], log2 of their sums.
    """
    i_h = tl.program_id(0)
    i_b = tl.program_id(1).to(tl.int64)
    i_s = tl.program_id(2)
    o_h = i_h * BH + tl.arange(0, BH)
    o_n = tl.arange(0, BN)
    o_r = tl.arange(0, R)
    o_p = R + tl.arange(0, P)
    exists = (o_h < H)[:, None]
    length = tl.load(lengths + i_b).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, SPLITS), BN) * BN
    start = share * i_s
    end = tl.minimum(start + share, length)

    p_q = q + i_b * s_q + o_h[:, None] * s_qh
    b_q = tl.load(p_q + o_r[None, :], mask=exists, other=0.0)
    b_shared = tl.load(p_q + o_p[None, :], mask=exists, other=0.0)
    highest = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    mixed = tl.zeros([BH, R], tl.float32)
    p_rows = rows + i_b * s_rows + o_n
    line = tl.load(p_rows + start, mask=start + o_n < end, other=0) * s_latents
    for n in tl.range(start, end, BN, num_stages=STAGES):
        live = n + o_n < end
        # Where the next rows lie is asked for a whole block before they are.
        following = tl.load(p_rows + n + BN, mask=n + BN + o_n < end, other=0) * s_latents
        # Rows past the end are not read: 0 x NaN would be NaN.
        b_c = tl.load(latents + line[:, None] + o_r[None, :], mask=live[:, None], other=0.0)
        b_p = tl.load(latents + line[:, None] + o_p[None, :], mask=live[:, None], other=0.0)
        s = tl.dot(b_q, tl.trans(b_c), input_precision=PRECISION)
        s = tl.dot(b_shared, tl.trans(b_p), s, input_precision=PRECISION)
        s = tl.where(live[None, :], s * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        kept = tl.exp2(highest - higher)
        total = total * kept + tl.sum(p, 1)
        mixed = tl.dot(p.to(b_c.dtype), b_c, mixed * kept[:, None], input_precision=PRECISION)
        highest = higher
        line = following
    if WHOLE:
        p_out = out + (i_b * H + o_h[:, None]) * R + o_r[None, :]
        tl.store(p_out, (mixed / total[:, None]).to(out.dtype.element_ty), mask=exists)
    elif start < length:
        at = (i_b * H + o_h) * SPLITS + i_s
        tl.store(parts + at[:, None] * R + o_r[None, :], mixed / total[:, None], mask=exists)
        tl.store(weights + at, highest + tl.log2(total), mask=o_h < H)


@triton.jit
def mla_merge_kernel(
    parts,
    weights,
    lengths,
    out,
    H,
    SPLITS,
    R: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BS: tl.constexpr,
    BP: tl.constexpr,
):
    """Add the parts of BR channels of one head, each times its share of the softmax's sum.

    BP parts at once, so that their loads are under way together.
    """
    i_b = tl.program_id(1)
    at = (i_b.to(tl.int64) * H + tl.program_id(0)) * SPLITS
    length = tl.load(lengths + i_b).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, SPLITS), BN) * BN
    filled = tl.cdiv(length, share)
    o_s = tl.arange(0, BS)
    o_p = tl.arange(0, BP)
    o_r = tl.program_id(2) * BR + tl.arange(0, BR)
    w = tl.load(weights + at + o_s, mask=o_s < filled, other=float("-inf"))
    highest = tl.max(w, 0)
    total = tl.sum(tl.exp2(w - highest), 0)
    mixed = tl.zeros([BR], tl.float32)
    for first in range(0, filled, BP):
        live = first + o_p < filled
        sums = tl.load(weights + at + first + o_p, mask=live, other=float("-inf"))
        row = (at + first + o_p) * R
        part = tl.load(parts + row[:, None] + o_r[None, :], mask=live[:, None], other=0.0)
        mixed += tl.sum(part * tl.exp2(sums - highest)[:, None], 0)
    p_out = out + (i_b.to(tl.int64) * H + tl.program_id(0)) * R + o_r
    tl.store(p_out, (mixed / total).to(out.dtype.element_ty))
