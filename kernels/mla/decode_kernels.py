"""Absorbed MLA decode over paged latents as Triton kernels.

Queries for latents; new latents into the cache; parts of the context; their sum; mixtures of
values, gated; gates alone.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from k3vl.kernels.dependent import ask_for, let_next_begin, wait_for_inputs


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
    s_page,
    scale,
    H,
    SPLITS,
    R: tl.constexpr,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BH heads of one sequence over one part of its context.

    A latent row is keys and values at once, so it is loaded once. ``rows`` say where pages of PAGE
    tokens begin. ``scale`` includes the logarithm's base. WHOLE: there is one part, which is the
    result. Else parts [B, H, SPLITS, R] float32, normalised, and weights [B, H, SPLITS], log2 of
    their sums.
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
    p_rows = rows + i_b * s_rows
    line = tl.zeros([BN], tl.int64)
    if STAGES <= 2:
        o_t = start + o_n
        line += tl.load(p_rows + o_t // PAGE * s_page, mask=o_t < end, other=0) + o_t % PAGE
    for n in tl.range(start, end, BN, num_stages=STAGES):
        live = n + o_n < end
        # Where rows lie is asked for a whole block before they are: by hand, or in more than two
        # stages by the compiler, which gives up on all loads where it is done by hand.
        o_t = n + o_n + (BN if STAGES <= 2 else 0)
        found = tl.load(p_rows + o_t // PAGE * s_page, mask=o_t < end, other=0) + o_t % PAGE
        if STAGES > 2:
            line = found
        # Rows past the end are not read: 0 x NaN would be NaN.
        p_line = latents + line[:, None] * s_latents
        b_c = tl.load(p_line + o_r[None, :], mask=live[:, None], other=0.0)
        b_p = tl.load(p_line + o_p[None, :], mask=live[:, None], other=0.0)
        s = tl.dot(b_q, tl.trans(b_c), input_precision=PRECISION)
        s = tl.dot(b_shared, tl.trans(b_p), s, input_precision=PRECISION)
        s = tl.where(live[None, :], s * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        kept = tl.exp2(highest - higher)
        total = total * kept + tl.sum(p, 1)
        mixed = tl.dot(p.to(b_c.dtype), b_c, mixed * kept[:, None], input_precision=PRECISION)
        highest = higher
        if STAGES <= 2:
            line = found
    if WHOLE:
        # The highest score adds 1, so the sum is at least that; padding has none and gets zeros.
        mixed /= tl.maximum(total, 1.0)[:, None]
        p_out = out + (i_b * H + o_h[:, None]) * R + o_r[None, :]
        tl.store(p_out, mixed.to(out.dtype.element_ty), mask=exists)
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
    PDL: tl.constexpr,
):
    """Add the parts of BR channels of one head, each times its share of the softmax's sum.

    BP parts at once, so that their loads are under way together.
    """
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    i_b = tl.program_id(1)
    at = (i_b.to(tl.int64) * H + tl.program_id(0)) * SPLITS
    length = tl.load(lengths + i_b).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, SPLITS), BN) * BN
    filled = tl.cdiv(length, tl.maximum(share, 1))
    o_s = tl.arange(0, BS)
    o_p = tl.arange(0, BP)
    o_r = tl.program_id(2) * BR + tl.arange(0, BR)
    w = tl.load(weights + at + o_s, mask=o_s < filled, other=float("-inf"))
    highest = tl.where(filled > 0, tl.max(w, 0), 0.0)  # of padding there are no parts
    total = tl.maximum(tl.sum(tl.exp2(w - highest), 0), 1.0)
    mixed = tl.zeros([BR], tl.float32)
    for first in range(0, filled, BP):
        live = first + o_p < filled
        sums = tl.load(weights + at + first + o_p, mask=live, other=float("-inf"))
        row = (at + first + o_p) * R
        part = tl.load(parts + row[:, None] + o_r[None, :], mask=live[:, None], other=0.0)
        mixed += tl.sum(part * tl.exp2(sums - highest)[:, None], 0)
    p_out = out + (i_b.to(tl.int64) * H + tl.program_id(0)) * R + o_r
    tl.store(p_out, (mixed / total).to(out.dtype.element_ty))


@triton.jit
def mla_merge_once_kernel(
    parts,
    weights,
    out,
    SPLITS,
    R: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
    PDL: tl.constexpr,
):
    """As ``mla_merge_kernel``, all parts of BR channels in one go, no load behind another.

    Parts are [B, SPLITS, H, R]. That needs a weight of every part, of empty ones too: it is that of
    nothing, and those are zeros.
    """
    let_next_begin(PDL)
    H = tl.num_programs(0)
    i_b = tl.program_id(1).to(tl.int64)
    i_h = tl.program_id(0)
    o_s = tl.arange(0, BS)
    o_r = tl.program_id(2) * BR + tl.arange(0, BR)
    there = o_s < SPLITS
    row = (i_b * SPLITS + o_s) * H + i_h
    p_part = parts + row[:, None] * R + o_r[None, :]
    p_weight = weights + (i_b * H + i_h) * SPLITS + o_s
    wait_for_inputs(PDL)
    part = tl.load(p_part, mask=there[:, None], other=0.0)
    tl.debug_barrier()  # else the assembler puts parts behind the wait for weights
    w = tl.load(p_weight, mask=there, other=float("-inf"))
    share = tl.exp2(w - tl.maximum(tl.max(w, 0), -1e38))
    total = tl.maximum(tl.sum(share, 0), 1.0)  # of padding all parts are empty
    mixed = tl.sum(part.to(tl.float32) * share[:, None], 0) / total
    tl.store(out + (i_b * H + i_h) * R + o_r, mixed.to(out.dtype.element_ty))


@triton.jit
def mla_absorb_kernel(
    q,
    keys,
    out,
    s_q,
    s_head,
    s_key,
    B,
    H,
    P,
    M: tl.constexpr,
    R: tl.constexpr,
    BB: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """BR latent channels of one head's queries for BB sequences; the first also the shared part."""
    i_h = tl.program_id(0)
    o_b = (tl.program_id(1) * BB + tl.arange(0, BB)).to(tl.int64)
    i_r = tl.program_id(2)
    o_m = tl.arange(0, BM)
    o_r = i_r * BR + tl.arange(0, BR)
    p_keys = keys + i_h.to(tl.int64) * s_head + o_m[:, None] * s_key + o_r[None, :]
    if PDL:
        ELEMENT: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth // 8
        row = i_h.to(tl.int64) * s_head + tl.minimum(o_m, M - 1) * s_key
        ask_for(keys + row + i_r * BR, BR * ELEMENT)
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    live = (o_b < B)[:, None]
    p_q = q + o_b[:, None] * s_q + i_h * (M + P)
    b_k = tl.load(p_keys, mask=(o_m < M)[:, None], other=0.0)
    b_q = tl.load(p_q + o_m[None, :], mask=live & (o_m < M)[None, :], other=0.0)
    y = tl.dot(b_q, b_k, input_precision=PRECISION)
    p_out = out + (o_b[:, None] * H + i_h) * (R + P)
    tl.store(p_out + o_r[None, :], y.to(out.dtype.element_ty), mask=live)
    if i_r == 0:
        o_p = tl.arange(0, BP)
        inside = live & (o_p < P)[None, :]
        tail = tl.load(p_q + M + o_p[None, :], mask=inside, other=0.0)
        tl.store(p_out + R + o_p[None, :], tail, mask=inside)


@triton.jit
def mla_store_kernel(
    c,
    shared,
    norm,
    latents,
    rows,
    s_c,
    s_shared,
    s_latents,
    eps,
    R,
    P,
    BR: tl.constexpr,
    BP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program normalises the latent of one token and writes it with the shared part behind."""
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    i_n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i_n)
    if row < 0:
        return
    o_r = tl.arange(0, BR)
    o_p = tl.arange(0, BP)
    x = tl.load(c + i_n * s_c + o_r, mask=o_r < R, other=0.0).to(tl.float32)
    tail = tl.load(shared + i_n * s_shared + o_p, mask=o_p < P, other=0.0)
    weight = tl.load(norm + o_r, mask=o_r < R, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / R + eps) * weight
    p_row = latents + row * s_latents
    tl.store(p_row + o_r, x.to(latents.dtype.element_ty), mask=o_r < R)
    tl.store(p_row + R + o_p, tail.to(latents.dtype.element_ty), mask=o_p < P)


@triton.jit
def mla_gate_kernel(
    x, gate, out, s_x, s_gate, WIDTH, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """BLOCK channels of a row times the sigmoid of their gates."""
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o_d < WIDTH
    wide = tl.load(x + i_n * s_x + o_d, mask=inside, other=0.0).to(tl.float32)
    logits = tl.load(gate + i_n * s_gate + o_d, mask=inside, other=0.0).to(tl.float32)
    y = wide * tl.sigmoid(logits)
    tl.store(out + i_n * WIDTH + o_d, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def mla_values_kernel(
    mixed,
    values,
    gate,
    out,
    s_head,
    s_value,
    s_gate,
    B,
    H,
    V,
    R: tl.constexpr,
    BB: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """BV value channels of one head for BB sequences: product over R, times the gate."""
    i_h = tl.program_id(0)
    o_b = (tl.program_id(1) * BB + tl.arange(0, BB)).to(tl.int64)
    o_v = tl.program_id(2) * BV + tl.arange(0, BV)
    o_r = tl.arange(0, BR)
    p_mixed = mixed + (o_b[:, None] * H + i_h) * R + o_r[None, :]
    p_values = values + i_h.to(tl.int64) * s_head + o_v[:, None] * s_value + o_r[None, :]
    if PDL:
        ELEMENT: tl.constexpr = values.dtype.element_ty.primitive_bitwidth // 8
        row = i_h.to(tl.int64) * s_head + tl.minimum(o_v, V - 1) * s_value
        ask_for(values + row, R * ELEMENT)
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    inside = (o_b < B)[:, None] & (o_v < V)[None, :]
    column = i_h * V + o_v[None, :]
    acc = tl.zeros([BB, BV], tl.float32)
    for r in tl.range(0, R, BR, num_stages=STAGES):
        b_m = tl.load(p_mixed + r, mask=(o_b < B)[:, None], other=0.0)
        b_v = tl.load(p_values + r, mask=(o_v < V)[:, None], other=0.0)
        acc = tl.dot(b_m, tl.trans(b_v), acc, input_precision=PRECISION)
    if GATED:
        logits = tl.load(gate + o_b[:, None] * s_gate + column, mask=inside, other=0.0)
        acc *= tl.sigmoid(logits.to(tl.float32))
    p_out = out + o_b[:, None] * (H * V) + column
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=inside)
