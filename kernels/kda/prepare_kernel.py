"""The parallel half of KDA prefill: all chunks of all sequences at once; maths in the README.

A chunk of C rows is C / R groups of R rows. Row s of every group is a tensor of its own, [C/R, K],
so that rows are a Python tuple: the convolution takes a neighbour's registers instead of loading
and widening every row W times, and running sums along the rows are plain additions.
"""
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

import triton
import triton.language as tl

from k3vl.kernels.kda.step_kernel import sigmoid


@triton.jit
def chunk_of(slot, cu_seqlens, ends, S, BS: tl.constexpr, C: tl.constexpr):
    """Of a slot: its sequence, where that and the chunk begin, and rows left, maybe none."""
    o_s = tl.arange(0, BS)
    firsts = tl.load(cu_seqlens + o_s, mask=o_s < S, other=0) // C + o_s
    i_s = tl.sum(((firsts <= slot) & (o_s < S)).to(tl.int32), 0) - 1
    begin = tl.load(cu_seqlens + i_s)
    start = begin + (slot - (begin // C + i_s)) * C
    return i_s, begin, start, (tl.load(ends + i_s) - start).to(tl.int32)


@triton.jit
def _whole(rows, C: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr):
    """R tensors [C/R, 1, K], row s of every group, as one [C, K] in DTYPE.

    A thread has all rows of its columns, so every choice is made by the compiler. ``tl.join``
    would say the same, but makes it order the tensor core's operands for 8-bit data.
    """
    R: tl.constexpr = len(rows)
    o_r = tl.arange(0, R)[None, :, None]
    whole = tl.zeros([C // R, R, K], tl.float32)
    for s in tl.static_range(R):
        whole = tl.where(o_r == s, rows[s], whole)
    return tl.reshape(whole.to(DTYPE), (C, K))


@triton.jit
def _silu(y, FAST: tl.constexpr):
    """``y sigmoid(y)``; fast: of y/2, as y/2 (1 + tanh(y/2)), one special instruction, not two.

    That tanh is off by 2^-11 of itself, an eighth of the last bit of a bfloat16.
    """
    if FAST:
        tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )
        return y + y * tanh
    return y * sigmoid(y)


@triton.jit
def _convolve_rows(
    x, s_x, p_window, s_tap, p_conv, s_conv, o_g, o_k, first, count, R: tl.constexpr,
    W: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Causal convolution and SiLU: R tensors [C/R, K] float32.

    Rows behind the last token hold something finite: nothing they touch is read (their write
    strength is 0). Only the first chunk of a sequence reads the window.
    """
    taps = ()
    lowest = tl.where(first > 0, 0, 1 - W)
    for s in tl.static_range(R + W - 1):
        row = o_g * R + (s - W + 1)
        inside = row < count
        if s < W - 1:
            inside = inside & (row >= lowest)
        tap = tl.load(x + row * s_x + o_k, mask=inside, other=0.0)
        tap = tap.to(tl.float32)
        if s < W - 1:
            before = row < lowest
            old = tl.load(
                p_window + s * s_tap + tl.zeros_like(o_g) + o_k,
                mask=before,
                other=0.0,
            )
            tap += old.to(tl.float32)  # one of the two is zero
        taps = taps + (tap,)  # noqa: RUF005
    # Every group loads them for itself: as vectors they would have to change their layout.
    everywhere = tl.zeros_like(o_g) + o_k
    factors = ()
    for j in tl.static_range(W):
        factor = tl.load(p_conv + j * s_conv + everywhere)
        factors = factors + (factor * 0.5 if FAST else factor,)  # noqa: RUF005
    out = ()
    for s in tl.static_range(R):
        y = taps[s] * factors[0]
        for j in tl.static_range(1, W):
            y += taps[s + j] * factors[j]
        out = out + (_silu(y, FAST),)  # noqa: RUF005
    return out


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
    wq,
    u,
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
    R: tl.constexpr,
    LEVELS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    DTYPE: tl.constexpr,
    INVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
    MINUS_W: tl.constexpr,
):
    """Everything about one chunk of one head that does not need the state.

    Writes, per slot and head: w and -qg behind each other in ``wq`` [2C, K] (or -w and qg), kl
    [C, K], u [V, C] and scores [C, C] in DTYPE, gamma [K] float32. Slot ``cu_seqlens[s] // C + s
    + c`` is chunk c of sequence s: no two chunks share one. ``conv`` is [W, 3 H K], the taps first.
    """
    i_h = tl.program_id(0)
    slot = tl.program_id(1)
    i_s, begin, start, count = chunk_of(slot, cu_seqlens, ends, S, BS, C)
    if count <= 0:
        return
    # Of rows [C/R, 1, K]; the axis between makes room for the R rows of a group.
    o_g = tl.arange(0, C // R)[:, None, None]
    o_k = tl.arange(0, K)[None, None, :]
    o_t = tl.arange(0, C)
    o_c = tl.arange(0, K)
    first = (start == begin).to(tl.int32)
    cell = tl.load(cells + i_s * s_cells + i_h)
    column = i_h * K
    x = qkv + start * s_qkv + column
    p_window = windows + cell * s_window
    p_conv = conv + column
    block = slot.to(tl.int64) * H + i_h
    o_gk = o_g * (R * K) + o_k

    # Natural logarithms become powers of two on the way: factors of vectors and scalars.
    rate = tl.exp(tl.load(a_log + i_h)) * -1.4426950408889634
    bias = tl.load(dt_bias + column + tl.zeros_like(o_g) + o_k) * rate
    bound = lower_bound * 1.4426950408889634
    p_decay = decay + start * s_decay + column
    running = tl.zeros([C // R, 1, K], tl.float32)
    totals = ()
    for s in tl.static_range(R):
        row = o_g * R + s
        live = row < count
        logits = tl.load(p_decay + row * s_decay + o_k, mask=live, other=0.0)
        root = tl.rsqrt(1.0 + tl.exp2(logits.to(tl.float32) * rate + bias))
        running += tl.where(live, root * (root * bound), 0.0)
        totals = totals + (running,)  # noqa: RUF005
    whole = tl.sum(running, 0)[None, :, :]
    # exp(G_i - G_j) is a product of two factors around half of the chunk's sum: the bounded gate
    # stays above -5, so neither factor leaves exp(+-80) in 32 tokens. What else is needed (from
    # the start, to the end) is such a factor times a vector.
    from_middle = tl.cumsum(running, 0) - running - whole * 0.5
    to_middle = tl.exp2(whole * 0.5)
    tl.store(gamma + block * K + o_k, tl.exp2(whole))
    middle = tl.reshape(to_middle, (1, K))

    keys = _convolve_rows(x + H * K, s_qkv, p_window + s_stream, s_tap, p_conv + H * K, 3 * H * K,
                          o_g, o_k, first, count, R, W, FAST)  # fmt: skip
    k_ups = ()
    k_downs = ()
    for s in tl.static_range(R):
        k = keys[s]
        k *= tl.rsqrt(tl.sum(k * k, 2) + 1e-6)[:, :, None]
        k_ups = k_ups + (k * tl.exp2(totals[s] + from_middle),)  # noqa: RUF005
        k_down = k * tl.exp2(-from_middle - totals[s])
        k_downs = k_downs + (k_down,)  # noqa: RUF005
        tl.store(kl + block * C * K + s * K + o_gk, (k_down * to_middle).to(DTYPE))
    queries = _convolve_rows(x, s_qkv, p_window, s_tap, p_conv, 3 * H * K,
                             o_g, o_k, first, count, R, W, FAST)  # fmt: skip
    q_ups = ()
    for s in tl.static_range(R):
        q = queries[s]
        q *= (tl.rsqrt(tl.sum(q * q, 2) + 1e-6) * (K**-0.5))[:, :, None]
        q *= tl.exp2(totals[s] + from_middle)
        q_ups = q_ups + (q,)  # noqa: RUF005
        q *= to_middle if MINUS_W else -to_middle
        tl.store(wq + block * (2 * C * K) + (C + s) * K + o_gk, q.to(DTYPE))

    o_i = o_t[:, None]
    o_j = o_t[None, :]
    beta = tl.load(write + start * s_write + i_h + o_t * s_write, mask=o_t < count, other=0.0)
    beta = tl.where(o_t < count, sigmoid(beta.to(tl.float32)), 0.0)
    k_up = _whole(k_ups, C, K, DTYPE)
    down = tl.trans(_whole(k_downs, C, K, DTYPE))
    read = tl.dot(_whole(q_ups, C, K, DTYPE), down, input_precision=PRECISION)
    tl.store(scores + block * C * C + o_i * C + o_j, tl.where(o_i >= o_j, read, 0.0).to(DTYPE))
    mix = tl.dot(k_up, down, input_precision=PRECISION)
    mix = tl.where(o_i > o_j, mix * beta[:, None], 0.0)
    # Write strengths and the way to the middle are factors of columns: of the small matrices.
    solve = _invert(mix, o_i, o_j, LEVELS, INVERSE, PRECISION)
    solve = (solve * beta[None, :]).to(DTYPE)
    b_w = tl.dot(solve, k_up, input_precision=PRECISION) * (-middle if MINUS_W else middle)
    tl.store(wq + block * (2 * C * K) + o_i * K + o_c[None, :], b_w.to(DTYPE))
    values = _convolve_rows(x + 2 * H * K, s_qkv, p_window + 2 * s_stream, s_tap,
                            p_conv + 2 * H * K, 3 * H * K, o_g, o_k, first, count, R, W,
                            FAST)  # fmt: skip
    b_u = tl.dot(solve, _whole(values, C, K, DTYPE), input_precision=PRECISION)
    tl.store(u + block * C * K + o_c[None, :] * C + o_i, b_u.to(DTYPE))
