"""Softmax attention over packed sequences as one Triton kernel, for prefill and for the tower.

Keys may come in two parts, the second shared by all heads (a stride of 0), and values may be a part
of the keys: so the latents of MLA need neither expansion nor copies. Triton reads a kernel's
annotations, so its arguments have none but ``constexpr``.
"""
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _scores(
    q, q_rest, k, k_rest, s_k, s_rest, row, o_n, o_k, o_p, left, MASKED: tl.constexpr,
    P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of the queries with BN keys from packed row ``row`` (int64) on: [BM, BN] float32."""
    at = k + row * s_k + o_k[:, None] + o_n[None, :] * s_k
    if MASKED:
        b_k = tl.load(at, mask=(o_n < left)[None, :], other=0.0)
    else:
        b_k = tl.load(at)
    s = tl.dot(q, b_k, input_precision=PRECISION)
    if P > 0:
        at = k_rest + row * s_rest + o_p[:, None] + o_n[None, :] * s_rest
        if MASKED:
            b_rest = tl.load(at, mask=(o_n < left)[None, :], other=0.0)
        else:
            b_rest = tl.load(at)
        s = tl.dot(q_rest, b_rest, s, input_precision=PRECISION)
    return s


@triton.jit
def flash_kernel(
    q,
    k,
    k_rest,
    v,
    out,
    cu_q,
    cu_k,
    s_q,
    s_qh,
    s_k,
    s_kh,
    s_rest,
    s_rest_h,
    s_v,
    s_vh,
    scale,
    H,
    K: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BM queries of one head of one sequence; ``scale`` includes the logarithm's base.

    The last query of a sequence sees all of its keys, so queries may be fewer (a cached prefix).
    """
    # Late queries see the most keys: they go first.
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h = tl.program_id(1)
    i_s = tl.program_id(2)
    first_q = tl.load(cu_q + i_s).to(tl.int64)
    queries = (tl.load(cu_q + i_s + 1) - first_q).to(tl.int32)
    first_k = tl.load(cu_k + i_s).to(tl.int64)
    keys = (tl.load(cu_k + i_s + 1) - first_k).to(tl.int32)
    if i_m * BM >= queries:
        return
    o_m = i_m * BM + tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_k = tl.arange(0, K)
    o_v = tl.arange(0, V)
    live = (o_m < queries)[:, None]
    p_q = q + first_q * s_q + i_h * s_qh + o_m[:, None] * s_q
    b_q = tl.load(p_q + o_k[None, :], mask=live, other=0.0)
    if P > 0:
        o_p = tl.arange(0, P)
        b_rest = tl.load(p_q + K + o_p[None, :], mask=live, other=0.0)
        k_rest += i_h * s_rest_h
    else:
        o_p = o_k
        b_rest = b_q
    k += i_h * s_kh
    v += i_h * s_vh

    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    mixed = tl.zeros([BM, V], tl.float32)
    ahead = keys - queries  # keys before the first query
    if CAUSAL:
        seen = tl.minimum(keys, ahead + (i_m + 1) * BM)
        full = (ahead + i_m * BM + 1) // BN * BN  # below, every query sees every key
        full = tl.minimum(full, keys // BN * BN)
    else:
        seen = keys
        full = keys // BN * BN
    for n in tl.range(0, full, BN, num_stages=STAGES):
        s = _scores(b_q, b_rest, k, k_rest, s_k, s_rest, first_k + n, o_n, o_k, o_p, BN, False, P,
                    PRECISION)  # fmt: skip
        higher = tl.maximum(highest, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - higher[:, None])
        kept = tl.exp2(highest - higher)
        total = total * kept + tl.sum(p, 1)
        mixed *= kept[:, None]
        highest = higher
        b_v = tl.load(v + (first_k + n) * s_v + o_n[:, None] * s_v + o_v[None, :])
        mixed = tl.dot(p.to(b_v.dtype), b_v, mixed, input_precision=PRECISION)
    for n in tl.range(full, seen, BN, num_stages=1):
        s = _scores(b_q, b_rest, k, k_rest, s_k, s_rest, first_k + n, o_n, o_k, o_p, keys - n, True,
                    P, PRECISION)  # fmt: skip
        visible = (n + o_n < keys)[None, :]
        if CAUSAL:
            visible &= n + o_n[None, :] <= ahead + o_m[:, None]
        s = tl.where(visible, s * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        kept = tl.exp2(highest - higher)
        total = total * kept + tl.sum(p, 1)
        mixed *= kept[:, None]
        highest = higher
        p_v = v + (first_k + n) * s_v + o_n[:, None] * s_v + o_v[None, :]
        b_v = tl.load(p_v, mask=(n + o_n < keys)[:, None], other=0.0)
        mixed = tl.dot(p.to(b_v.dtype), b_v, mixed, input_precision=PRECISION)
    p_out = out + (first_q + o_m[:, None]) * (H * V) + i_h * V + o_v[None, :]
    tl.store(p_out, (mixed / total[:, None]).to(out.dtype.element_ty), mask=live)
