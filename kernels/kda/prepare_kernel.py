"""The parallel half of KDA prefill: all chunks of all sequences at once; maths in the README.

A chunk of C rows is C / R groups of R rows. Row s of every group is a tensor of its own,
[C/R, 1, K], so that rows are a Python tuple: the convolution takes a neighbour's registers instead
of loading and widening every row W times, and running sums along the rows are plain additions.

Keys keep their length: the product that scores keys against keys has the squares of their lengths
on its diagonal, and what divides by them are factors of rows and columns of the small matrices.
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
def _widen(x):
    """To float32; of bfloat16 one instruction each, where the compiler takes two for the upper."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=tl.float32,
            is_pure=True, pack=2,
        )  # fmt: skip
    return x.to(tl.float32)


@triton.jit
def _rows(
    p, p_window, s_tap, o_g, o_k, lowest, count, S_X: tl.constexpr, BEFORE: tl.constexpr,
    R: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """R rows and the BEFORE in front of them as tensors [C/R, 1, K], ``p`` at the first.

    Rows before ``lowest`` (that is -BEFORE in all but the first chunk) are the window's, those
    from ``count`` on zero; in a full chunk there is none of either. They stay as narrow as they
    are stored, so that many can be on their way at once.
    """
    rows = ()
    for s in tl.static_range(R + BEFORE):
        if FULL:
            rows = rows + (tl.load(p + (s - BEFORE) * S_X),)  # noqa: RUF005
        else:
            at = o_g * R + (s - BEFORE)
            x = tl.load(p + (s - BEFORE) * S_X, mask=(at >= lowest) & (at < count), other=0)
            if s < BEFORE:
                p_old = p_window + s * s_tap + tl.zeros_like(o_g) + o_k
                old = tl.load(p_old, mask=at < lowest, other=0)
                x = tl.where(at < lowest, old.to(x.dtype), x)
            rows = rows + (x,)  # noqa: RUF005
    return rows


@triton.jit
def _taps(p_conv, o_g, o_k, S_CONV: tl.constexpr, W: tl.constexpr):
    """Of the convolution, the oldest first: W tensors [C/R, 1, K].

    Every group loads them for itself: as vectors they would have to change their layout.
    """
    p_conv += tl.zeros_like(o_g) + o_k
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (tl.load(p_conv + j * S_CONV),)  # noqa: RUF005
    return taps


@triton.jit
def _convolved(rows, taps, R: tl.constexpr, W: tl.constexpr, FAST: tl.constexpr):
    """Causal convolution of what :func:`_rows` has, and SiLU: R tensors [C/R, 1, K] float32.

    Rows behind the last token hold something finite: nothing they touch is read (their write
    strength is 0). The sums are spelt out, so that full and other chunks round alike.
    """
    wide = ()
    for s in tl.static_range(R + W - 1):
        wide = wide + (_widen(rows[s]),)  # noqa: RUF005
    out = ()
    for s in tl.static_range(R):
        y = wide[s] * taps[0]
        for j in tl.static_range(1, W):
            y = tl.fma(wide[s + j], taps[j], y)
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
        half = inverse.to(DTYPE)
        step = tl.dot(tl.where(below, -mix, 0.0).to(DTYPE), half, input_precision=PRECISION)
        inverse = tl.dot(half, step.to(DTYPE), inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _one_chunk(
    x, decay, write, conv, a_log, dt_bias, p_window, wq, u, kl, scores, gamma, s_write, s_tap,
    s_stream, lower_bound, i_h, block, lowest, count, S_QKV: tl.constexpr, S_DECAY: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, LEVELS: tl.constexpr, K: tl.constexpr,
    W: tl.constexpr, DTYPE: tl.constexpr, INVERSE: tl.constexpr, PRECISION: tl.constexpr,
    FAST: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """``x``, ``decay`` and ``write`` point to the chunk's first row; see the kernel.

    No load moves across a barrier or a store, so rows are asked for a step before they are needed.
    """
    # Of rows [C/R, 1, K]; the axis between makes room for the R rows of a group.
    o_g = tl.arange(0, C // R)[:, None, None]
    o_k = tl.arange(0, K)[None, None, :]
    o_t = tl.arange(0, C)
    o_c = tl.arange(0, K)
    o_gk = o_g * (R * K) + o_k
    x += o_g * (R * S_QKV) + o_k
    decay += o_g * (R * S_DECAY) + o_k

    p_k, w_k = x + H * K, p_window + s_stream
    p_v, w_v = x + 2 * H * K, p_window + 2 * s_stream
    # Natural logarithms become powers of two on the way: factors of vectors and scalars.
    rate = tl.exp(tl.load(a_log + i_h)) * -1.4426950408889634
    bias = tl.load(dt_bias + tl.zeros_like(o_g) + o_k) * rate
    bound = lower_bound * 1.4426950408889634
    running = tl.zeros([C // R, 1, K], tl.float32)
    totals = ()
    logits = ()
    for s in tl.static_range(R):
        if FULL:
            logits = logits + (tl.load(decay + s * S_DECAY),)  # noqa: RUF005
        else:  # the root of a lowest logit is 0: no decay behind the last token
            live = o_g * R + s < count
            lowest_logit = float("-inf")
            logit = tl.load(decay + s * S_DECAY, mask=live, other=lowest_logit)
            logits = logits + (logit,)  # noqa: RUF005
    k_rows = _rows(p_k, w_k, s_tap, o_g, o_k, lowest, count, S_QKV, W - 1, R, FULL)
    for s in tl.static_range(R):
        root = tl.rsqrt(1.0 + tl.exp2(tl.fma(_widen(logits[s]), rate, bias)))
        running = tl.fma(root, root, running)
        totals = totals + (running,)  # noqa: RUF005
    whole = tl.sum(running, 0)[None, :, :] * bound
    # exp(G_i - G_j) is a product of two factors around half of the chunk's sum: the bounded gate
    # stays above -5, so neither factor leaves exp(+-80) in 32 tokens. What else is needed (from
    # the start, to the end) is such a factor times a vector.
    from_middle = (tl.cumsum(running, 0) - running) * bound - whole * 0.5
    to_middle = tl.exp2(whole * 0.5)
    tl.store(gamma + block * K + o_k, tl.exp2(whole))
    middle = tl.reshape(to_middle, (1, K))

    k_taps = _taps(conv + H * K, o_g, o_k, 3 * H * K, W)
    keys = _convolved(k_rows, k_taps, R, W, FAST)
    q_rows = _rows(x, p_window, s_tap, o_g, o_k, lowest, count, S_QKV, W - 1, R, FULL)
    k_ups = ()
    k_downs = ()
    for s in tl.static_range(R):
        k_ups = k_ups + (keys[s] * tl.exp2(tl.fma(totals[s], bound, from_middle)),)  # noqa: RUF005
        k_down = keys[s] * tl.exp2(tl.fma(totals[s], -bound, -from_middle))
        k_downs = k_downs + (k_down,)  # noqa: RUF005
        tl.store(kl + block * C * K + s * K + o_gk, (k_down * to_middle).to(DTYPE))
    k_up = _whole(k_ups, C, K, DTYPE)
    q_taps = _taps(conv, o_g, o_k, 3 * H * K, W)
    down = tl.trans(_whole(k_downs, C, K, DTYPE))
    mix = tl.dot(k_up, down, input_precision=PRECISION)
    queries = _convolved(q_rows, q_taps, R, W, FAST)
    q_ups = ()
    for s in tl.static_range(R):
        q = queries[s]
        q *= (tl.rsqrt(tl.sum(q * q, 2) + 1e-6) * (K**-0.5))[:, :, None]
        q *= tl.exp2(tl.fma(totals[s], bound, from_middle))
        q_ups = q_ups + (q,)  # noqa: RUF005
        q *= -to_middle
        tl.store(wq + block * (2 * C * K) + (C + s) * K + o_gk, q.to(DTYPE))

    o_i = o_t[:, None]
    o_j = o_t[None, :]
    if FULL:
        beta = sigmoid(tl.load(write + o_t * s_write).to(tl.float32))
    else:
        beta = tl.load(write + o_t * s_write, mask=o_t < count, other=0.0)
        beta = tl.where(o_t < count, sigmoid(beta.to(tl.float32)), 0.0)
    v_rows = _rows(p_v, w_v, s_tap, o_g, o_k, lowest, count, S_QKV, W - 1, R, FULL)
    v_taps = _taps(conv + 2 * H * K, o_g, o_k, 3 * H * K, W)
    read = tl.dot(_whole(q_ups, C, K, DTYPE), down, input_precision=PRECISION)
    tl.store(scores + block * C * C + o_i * C + o_j, tl.where(o_i >= o_j, read, 0.0).to(DTYPE))
    squares = tl.where(o_i == o_j, mix, 0.0)
    left = tl.rsqrt(tl.sum(squares, 1) + 1e-6)
    right = tl.rsqrt(tl.sum(squares, 0) + 1e-6)[None, :]
    mix = tl.where(o_i > o_j, mix * (left * beta)[:, None] * right, 0.0)
    # Write strengths, lengths and the way to the middle are factors of the small matrices.
    solve = _invert(mix, o_i, o_j, LEVELS, INVERSE, PRECISION)
    solve = solve * beta[None, :] * left[:, None]
    b_w = tl.dot((solve * right).to(DTYPE), k_up, input_precision=PRECISION)
    b_w *= middle
    tl.store(wq + block * (2 * C * K) + o_i * K + o_c[None, :], b_w.to(DTYPE))
    values = _convolved(v_rows, v_taps, R, W, FAST)
    b_u = tl.dot(solve.to(DTYPE), _whole(values, C, K, DTYPE), input_precision=PRECISION)
    tl.store(u + block * C * K + o_c[None, :] * C + o_i, b_u.to(DTYPE))


@triton.jit
def kda_prepare_kernel(
    qkv, decay, write, conv, a_log, dt_bias, windows, cells, cu_seqlens, ends, wq, u, kl, scores,
    gamma, s_write, s_cells, s_window, s_tap, s_stream, lower_bound, S, S_QKV: tl.constexpr,
    S_DECAY: tl.constexpr, H: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    LEVELS: tl.constexpr, K: tl.constexpr, W: tl.constexpr, DTYPE: tl.constexpr,
    INVERSE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Everything about one chunk of one head that does not need the state.

    Writes, per slot and head: w and -qg behind each other in ``wq`` [2C, K], kl [C, K], u [V, C]
    and scores [C, C] in DTYPE, gamma [K] float32. Slot ``cu_seqlens[s] // C + s + c`` is chunk c of
    sequence s: no two chunks share one. ``conv`` is [W, 3 H K], the taps first, halved for a fast
    SiLU. What a model decides is constant, so that rows are offsets in the code.
    """
    i_h = tl.program_id(0)
    slot = tl.program_id(1)
    i_s, begin, start, count = chunk_of(slot, cu_seqlens, ends, S, BS, C)
    if count > 0:
        column = i_h * K
        block = slot.to(tl.int64) * H + i_h
        x = qkv + start * S_QKV + column
        p_decay = decay + start * S_DECAY + column
        p_write = write + start * s_write + i_h
        p_window = windows + tl.load(cells + i_s * s_cells + i_h) * s_window
        if (count >= C) & (start != begin):
            _one_chunk(x, p_decay, p_write, conv + column, a_log, dt_bias + column, p_window, wq, u,
                       kl, scores, gamma, s_write, s_tap, s_stream, lower_bound, i_h, block, 1 - W,
                       C, S_QKV, S_DECAY, H, C, R, LEVELS, K, W, DTYPE, INVERSE, PRECISION, FAST,
                       True)  # fmt: skip
        else:
            lowest = tl.where(start != begin, 1 - W, 0)
            _one_chunk(x, p_decay, p_write, conv + column, a_log, dt_bias + column, p_window, wq, u,
                       kl, scores, gamma, s_write, s_tap, s_stream, lower_bound, i_h, block, lowest,
                       count, S_QKV, S_DECAY, H, C, R, LEVELS, K, W, DTYPE, INVERSE, PRECISION,
                       FAST, False)  # fmt: skip
