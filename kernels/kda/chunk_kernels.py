"""Whole sequences of Kimi Delta Attention as three Triton kernels; the maths is in the README.

``prepare`` runs over all chunks at once, ``scan`` carries the state through the chunks of every
sequence, ``norm`` is the output norm where ``scan`` cannot hold whole heads. C is the chunk.
"""
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from k3vl.kernels.kda.step_kernel import log_decay, sigmoid


@triton.jit
def _row(x, o_t, index):
    """One row of a [C, K] tile as [K]."""
    return tl.sum(tl.where(o_t[:, None] == index, x, 0.0), 0)


@triton.jit
def _convolve(
    x,
    s_x,
    p_window,
    s_tap,
    p_conv,
    o_t,
    o_k,
    first,
    live,
    W: tl.constexpr,
):
    """Causal convolution and SiLU of one chunk of one stream: [C, K] float32, dead rows zero.

    ``x`` points at the chunk's first row; only the first chunk of a sequence reads the window.
    """
    y = tl.zeros([o_t.shape[0], o_k.shape[0]], tl.float32)
    lowest = tl.where(first > 0, 0, 1 - W)
    for j in tl.static_range(W):
        back = o_t + (j - W + 1)
        inside = live & (back >= lowest)
        rows = tl.load(x + back[:, None] * s_x + o_k[None, :], mask=inside[:, None], other=0.0)
        y += rows.to(tl.float32) * tl.load(p_conv + o_k * W + j)[None, :]
    if first > 0:
        for j in tl.static_range(W - 1):
            back = o_t + (j - W + 1)
            old = tl.load(
                p_window + (back[:, None] + (W - 1)) * s_tap + o_k[None, :],
                mask=(live & (back < 0))[:, None],
                other=0.0,
            )
            y += old.to(tl.float32) * tl.load(p_conv + o_k * W + j)[None, :]
    return y * sigmoid(y)


@triton.jit
def _unit(x):
    """Rows of unit length."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def _gates(
    p_decay, s_decay, p_write, s_write, rate, bias, lower_bound, o_t, o_k, live
):  # fmt: skip
    """Running sums of log2-decays [T, K] and write strengths [T]; dead rows decay and write not."""
    logits = tl.load(p_decay + o_t[:, None] * s_decay + o_k[None, :], mask=live[:, None], other=0.0)
    g = log_decay(logits, rate, bias, lower_bound, True) * 1.4426950408889634
    total = tl.cumsum(tl.where(live[:, None], g, 0.0), 0)
    beta = tl.load(p_write + o_t * s_write, mask=live, other=0.0).to(tl.float32)
    return total, tl.where(live, sigmoid(beta), 0.0)


@triton.jit
def _invert(mix, o_i, o_j, LEVELS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + mix)^-1 of a strictly lower triangle, by doubling: two inverted blocks make one.

    No entry of the inverse, nor of the products on the way, exceeds 1: keys have unit length, and
    beta and decay are below 1. So 16-bit floats with 11 bits of mantissa hold them well.
    """
    inverse = tl.where(o_i == o_j, 1.0, 0.0) - tl.where(o_i >> 1 == o_j >> 1, mix, 0.0)
    for level in tl.static_range(1, LEVELS):
        below = (o_i >> (level + 1) == o_j >> (level + 1)) & (o_i >> level > o_j >> level)
        step = tl.where(below, mix, 0.0).to(DTYPE)
        step = tl.dot(step, inverse.to(DTYPE), input_precision=PRECISION)
        inverse -= tl.dot(inverse.to(DTYPE), step.to(DTYPE), input_precision=PRECISION)
    return inverse


@triton.jit
def kda_prepare_kernel(
    qkv,
    decay,
    write,
    conv,
    a_log,
    dt_bias,
    windows,
    cells,
    cu_seqlens,
    ends,
    w,
    u,
    qg,
    kl,
    scores,
    gamma,
    s_qkv,
    s_decay,
    s_write,
    s_cells,
    s_window,
    s_tap,
    s_stream,
    lower_bound,
    S,
    H,
    BS: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    DTYPE: tl.constexpr,
    INVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Everything about one chunk of one head that does not need the state.

    Writes, per slot and head: w, qg, kl [C, K], u [V, C] and scores [C, C] in DTYPE, gamma [K]
    float32. Slot ``cu_seqlens[s] // C + s + c`` is chunk c of sequence s: no two chunks share one.
    """
    i_h = tl.program_id(0)
    slot = tl.program_id(1)
    o_s = tl.arange(0, BS)
    firsts = tl.load(cu_seqlens + o_s, mask=o_s < S, other=0) // C + o_s
    i_s = tl.sum(((firsts <= slot) & (o_s < S)).to(tl.int32), 0) - 1
    begin = tl.load(cu_seqlens + i_s)
    start = begin + (slot - (begin // C + i_s)) * C
    count = tl.load(ends + i_s) - start
    if count <= 0:
        return
    o_t = tl.arange(0, C)
    o_k = tl.arange(0, K)
    first = (start == begin).to(tl.int32)
    cell = tl.load(cells + i_s * s_cells + i_h)
    column = i_h * K
    x = qkv + start * s_qkv + column
    p_window = windows + cell * s_window
    p_conv = conv + column * W
    block = slot.to(tl.int64) * H + i_h
    o_ck = o_t[:, None] * K + o_k[None, :]
    o_i = o_t[:, None]
    o_j = o_t[None, :]
    o_cc = o_i * C + o_j
    live = o_t < count
    rate = tl.exp(tl.load(a_log + i_h))
    bias = tl.load(dt_bias + column + o_k)[None, :]

    # exp(G_i - G_j) is a product of two factors around half of the chunk's sum: the bounded gate
    # stays above -5, so neither factor leaves exp(+-80) in 32 tokens. What else is needed (from
    # the start, to the end) is such a factor times a vector.
    total, beta = _gates(decay + start * s_decay + column, s_decay, write + start * s_write + i_h,
                         s_write, rate, bias, lower_bound, o_t, o_k, live)  # fmt: skip
    whole = _row(total, o_t, C - 1)
    to_middle = tl.exp2(whole * 0.5)[None, :]
    up = tl.exp2(total - whole[None, :] * 0.5)
    k = _unit(_convolve(x + H * K, s_qkv, p_window + s_stream, s_tap, p_conv + H * K * W,
                        o_t, o_k, first, live, W))  # fmt: skip
    k_up = k * up
    k_down = k * tl.exp2(whole[None, :] * 0.5 - total)
    q = _unit(_convolve(x, s_qkv, p_window, s_tap, p_conv, o_t, o_k, first, live, W))
    q_up = q * up * (K**-0.5)
    down = tl.trans(k_down.to(DTYPE))
    mix = tl.dot(k_up.to(DTYPE), down, input_precision=PRECISION)
    read = tl.dot(q_up.to(DTYPE), down, input_precision=PRECISION)
    tl.store(scores + block * C * C + o_cc, tl.where(o_i >= o_j, read, 0.0).to(DTYPE))
    tl.store(gamma + block * K + o_k, tl.exp2(whole))
    tl.store(qg + block * C * K + o_ck, (q_up * to_middle).to(DTYPE))
    tl.store(kl + block * C * K + o_ck, (k_down * to_middle).to(DTYPE))
    seen = (k_up * to_middle * beta[:, None]).to(DTYPE)
    mix = tl.where(o_i > o_j, mix * beta[:, None], 0.0)
    solve = _invert(mix, o_i, o_j, LEVELS, INVERSE, PRECISION).to(DTYPE)
    b_w = tl.dot(solve, seen, input_precision=PRECISION)
    tl.store(w + block * C * K + o_ck, b_w.to(DTYPE))
    v = _convolve(x + 2 * H * K, s_qkv, p_window + 2 * s_stream, s_tap, p_conv + 2 * H * K * W,
                  o_t, o_k, first, live, W)  # fmt: skip
    b_u = tl.dot(solve, (v * beta[:, None]).to(DTYPE), input_precision=PRECISION)
    tl.store(u + block * C * K + o_k[None, :] * C + o_t[:, None], b_u.to(DTYPE))


@triton.jit
def _advance_windows(
    qkv, s_qkv, p_window, s_tap, s_stream, begin, end, column, stream, K: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """Make the last W - 1 inputs before ``end`` the window; from the old one where it is short."""
    o_w = tl.arange(0, W)[:, None]
    o_k = tl.arange(0, K)[None, :]
    kept = o_w < W - 1
    at = end - (W - 1) + o_w
    new = tl.load(qkv + at * s_qkv + column + o_k, mask=kept & (at >= begin), other=0.0)
    p_tap = p_window + stream * s_stream + o_k
    old = tl.load(p_tap + (at - begin + (W - 1)) * s_tap, mask=kept & (at < begin), other=0.0)
    return tl.where(at >= begin, new.to(old.dtype), old)


@triton.jit
def kda_scan_kernel(
    qkv,
    gate,
    o_norm,
    windows,
    states,
    cells,
    cu_seqlens,
    ends,
    w,
    u,
    qg,
    kl,
    scores,
    gamma,
    depths,
    snapshots,
    out,
    s_qkv,
    s_gate,
    s_cells,
    s_window,
    s_tap,
    s_stream,
    s_state,
    eps,
    H,
    C: tl.constexpr,
    K: tl.constexpr,
    BV: tl.constexpr,
    W: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    FUSED: tl.constexpr,
    DEPTHS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Carry the state of one head (BV of its value channels) through one sequence.

    Everything is transposed, values first: then the state is the left operand of every product and
    goes from its accumulator into the tensor core without a way through shared memory.
    """
    i_s = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    i_v = tl.program_id(1)
    o_t = tl.arange(0, C)
    o_k = tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    column = i_h * K
    begin = tl.load(cu_seqlens + i_s)
    behind = tl.load(cu_seqlens + i_s + 1)
    end = tl.load(ends + i_s)
    cell = tl.load(cells + i_s * s_cells + i_h)
    block = (begin // C + i_s) * H + i_h

    p_state = states + cell * s_state + o_k[:, None] * K + o_v[None, :]
    b_s = tl.trans(tl.load(p_state))  # [V, K] float32
    o_ck = o_t[:, None] * K + o_k[None, :]
    chunks = tl.cdiv(end - begin, C).to(tl.int32)
    for c in tl.range(0, chunks, num_stages=STAGES):
        at = block + c * H
        b_w = tl.load(w + at * C * K + o_ck)
        b_qg = tl.load(qg + at * C * K + o_ck)
        b_scores = tl.load(scores + at * C * C + o_t[:, None] * C + o_t[None, :])
        b_kl = tl.load(kl + at * C * K + o_ck)
        b_u = tl.load(u + at * C * K + o_v[:, None] * C + o_t[None, :])
        b_gamma = tl.load(gamma + at * K + o_k)
        held = b_s.to(DTYPE)
        x = b_u.to(tl.float32) - tl.dot(held, tl.trans(b_w), input_precision=PRECISION)
        o = tl.dot(held, tl.trans(b_qg), input_precision=PRECISION)  # [V, C]
        x = x.to(DTYPE)
        b_s = tl.dot(x, b_kl, b_s * b_gamma[None, :], input_precision=PRECISION)
        o = tl.dot(x, tl.trans(b_scores), o, input_precision=PRECISION)

        row = begin + c * C + o_t
        live = row < end
        if FUSED:
            o *= tl.rsqrt(tl.sum(o * o, 0) / K + eps)[None, :] * tl.load(o_norm + o_v)[:, None]
        y = tl.trans(o.to(out.dtype.element_ty))
        if FUSED:
            logits = tl.load(
                gate + row[:, None] * s_gate + column + o_v[None, :], mask=live[:, None], other=0.0
            )
            y = (y.to(tl.float32) * sigmoid(logits.to(tl.float32))).to(out.dtype.element_ty)
        y = tl.where(live[:, None], y, 0.0)
        p_out = out + row[:, None] * (H * K) + column + o_v[None, :]
        tl.store(p_out, y, mask=(row < behind)[:, None])
        for d in tl.static_range(DEPTHS):
            wanted = tl.load(depths + i_s * DEPTHS + d)
            if wanted == (c + 1) * C:
                copy = tl.load(snapshots + (i_s * DEPTHS + d) * H + i_h)
                p_copy = states + copy * s_state + o_k[:, None] * K + o_v[None, :]
                tl.store(p_copy, tl.trans(b_s))
    tl.store(p_state, tl.trans(b_s))
    for c in range(chunks, tl.cdiv(behind - begin, C).to(tl.int32)):  # chunks of padding alone
        row = begin + c * C + o_t
        p_out = out + row[:, None] * (H * K) + column + o_v[None, :]
        nothing = tl.zeros([C, BV], out.dtype.element_ty)
        tl.store(p_out, nothing, mask=(row < behind)[:, None])

    if i_v == 0:
        o_w = tl.arange(0, W)[:, None]
        for stream in tl.static_range(3):
            at = column + stream * H * K
            for d in tl.static_range(DEPTHS):
                wanted = tl.load(depths + i_s * DEPTHS + d)
                if wanted > 0:
                    taps = _advance_windows(qkv, s_qkv, windows, s_tap, s_stream, begin,
                                            begin + wanted, at, stream, K, W)  # fmt: skip
                    copy = tl.load(snapshots + (i_s * DEPTHS + d) * H + i_h)
                    p_tap = windows + copy * s_window + stream * s_stream + o_k[None, :]
                    tl.store(p_tap + o_w * s_tap, taps, mask=o_w < W - 1)
            taps = _advance_windows(qkv, s_qkv, windows + cell * s_window, s_tap, s_stream, begin,
                                    end, at, stream, K, W)  # fmt: skip
            tl.debug_barrier()  # several threads may hold one tap
            p_tap = windows + cell * s_window + stream * s_stream + o_k[None, :]
            tl.store(p_tap + o_w * s_tap, taps, mask=o_w < W - 1)


@triton.jit
def kda_norm_kernel(x, gate, o_norm, s_gate, eps, N, H, BH: tl.constexpr, K: tl.constexpr):
    """Gated RMSNorm of heads in place; one program takes BH heads of the flat [N H] axis."""
    o_n = tl.program_id(0).to(tl.int64) * BH + tl.arange(0, BH)
    o_k = tl.arange(0, K)
    live = o_n[:, None] < N * H
    p_x = x + o_n[:, None] * K + o_k[None, :]
    o = tl.load(p_x, mask=live, other=0.0).to(tl.float32)
    o *= tl.rsqrt(tl.sum(o * o, 1) / K + eps)[:, None] * tl.load(o_norm + o_k)[None, :]
    p_gate = gate + (o_n // H)[:, None] * s_gate + (o_n % H)[:, None] * K + o_k[None, :]
    # Padding is zero, whatever its gate holds.
    o = tl.where(o == 0.0, 0.0, o * sigmoid(tl.load(p_gate, mask=live).to(tl.float32)))
    tl.store(p_x, o.to(x.dtype.element_ty), mask=live)
