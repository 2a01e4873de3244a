"""The parallel half of KDA prefill for compute capability 9.0, in Gluon; maths in the README.

Four warps have a chunk of 32 tokens, each a group of eight rows. Matrices of 64 rows have two kinds
of them in turns of eight, so that every warp has its own rows of both in the tensor core's operand
and accumulator: keys and queries in the product that scores them, w and u in the one that solves.
So nothing is exchanged but what others have to read, by shared memory that tensor cores read too.
"""
# ruff: noqa: ANN001, ANN201, RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from k3vl.kernels.gluon_parts import (
    begin_store,
    let_next_begin,
    meet,
    wait_for_inputs,
    wait_for_stores,
)
from k3vl.kernels.kda.hopper_kernels import reciprocal, widen


@gluon.jit
def tanh(x):
    """One special instruction, off by 2^-11 of itself."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def narrow(x):
    """To bfloat16, two at once."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def chunk_of(slot, cu_seqlens, ends, S, BS: gl.constexpr, C: gl.constexpr, LANES: gl.constexpr):
    """Of a slot: its sequence, where that and the chunk begin, and rows left, maybe none."""
    o_s = gl.arange(0, BS, LANES)
    firsts = gl.load(cu_seqlens + o_s, mask=o_s < S, other=0) // C + o_s
    i_s = gl.sum(((firsts <= slot) & (o_s < S)).to(gl.int32), 0) - 1
    begin = gl.load(cu_seqlens + i_s)
    start = begin + (slot - (begin // C + i_s)) * C
    return i_s, begin, start, (gl.load(ends + i_s) - start).to(gl.int32)


@gluon.jit
def load_rows(
    p, p_window, s_tap, o_g, o_k, lowest, count, S_X: gl.constexpr, BEFORE: gl.constexpr,
    R: gl.constexpr, FULL: gl.constexpr,
):  # fmt: skip
    """R rows of every group and the BEFORE in front of them, [C/R, K] each, ``p`` at the first.

    Rows before ``lowest`` (that is -BEFORE in all but the first chunk) are the window's, those
    from ``count`` on zero; in a full chunk there is none of either.
    """
    rows = ()
    for s in gl.static_range(R + BEFORE):
        if FULL:
            rows = rows + (gl.load(p + (s - BEFORE) * S_X),)
        else:
            at = o_g * R + (s - BEFORE)
            x = gl.load(p + (s - BEFORE) * S_X, mask=(at >= lowest) & (at < count), other=0.0)
            if s < BEFORE:
                p_old = p_window + (s * s_tap + o_g * 0 + o_k)
                x = gl.where(at < lowest, gl.load(p_old, mask=at < lowest, other=0.0), x)
            rows = rows + (x,)
    return rows


@gluon.jit
def load_taps(p_conv, o_g, o_k, S_CONV: gl.constexpr, W: gl.constexpr):
    """Of the convolution, the oldest first, halved: W tensors [C/R, K], every group's own."""
    taps = ()
    for j in gl.static_range(W):
        taps = taps + (gl.load(p_conv + (j * S_CONV + o_g * 0 + o_k)),)
    return taps


@gluon.jit
def convolved(rows, taps, R: gl.constexpr, W: gl.constexpr):
    """Causal convolution of what :func:`load_rows` has, and SiLU: R tensors [C/R, K] float32.

    Rows behind the last token hold something finite: nothing they touch is read (their write
    strength is 0). Taps are halves: with y half of the sum, its SiLU is y (1 + tanh(y)).
    """
    wide = ()
    for s in gl.static_range(R + W - 1):
        wide = wide + (widen(rows[s]),)
    out = ()
    for s in gl.static_range(R):
        y = wide[s] * taps[0]
        for j in gl.static_range(1, W):
            y = gl.fma(wide[s + j], taps[j], y)
        out = out + (gl.fma(y, tanh(y), y),)
    return out


@gluon.jit
def stacked(x, G: gl.constexpr, K: gl.constexpr):
    """Eight tensors [G, K], row s of every group of eight, as one [8 G, K]."""
    a = gl.join(gl.join(x[0], x[4]), gl.join(x[2], x[6]))
    b = gl.join(gl.join(x[1], x[5]), gl.join(x[3], x[7]))
    return gl.join(a, b).reshape([G, K, 8]).permute((0, 2, 1)).reshape([8 * G, K])


@gluon.jit
def in_turns(a, b, C: gl.constexpr, N: gl.constexpr):
    """[2 C, N]: eight rows of ``a`` [C, N], eight of ``b``, and so on."""
    both = gl.join(a.reshape([C // 8, 8, N]), b.reshape([C // 8, 8, N]))
    return both.permute((0, 3, 1, 2)).reshape([2 * C, N])


@gluon.jit
def apart(both, C: gl.constexpr, N: gl.constexpr):
    """What :func:`in_turns` has put together."""
    a, b = gl.split(both.reshape([C // 8, 2, 8, N]).permute((0, 2, 3, 1)))
    return a.reshape([C, N]), b.reshape([C, N])


@gluon.jit
def one_by_other(a, b, C: gl.constexpr):
    """For two products at once: [2 C, 2 C] of ``a`` and ``b`` [C, C].

    ``a`` is where both axes have turns of the first kind, ``b`` where both have the second.
    """
    a = a.reshape([C // 8, 8, C // 8, 8])
    b = b.reshape([C // 8, 8, C // 8, 8])
    zero = gl.zeros_like(a)
    four = gl.join(gl.join(a, zero), gl.join(zero, b))  # [.., of columns, of rows]
    return four.permute((0, 5, 1, 2, 4, 3)).reshape([2 * C, 2 * C])


@gluon.jit
def invert(
    mix, m_below, m_half, o_i, o_j, C: gl.constexpr, LEVELS: gl.constexpr, OWN: gl.constexpr
):
    """(I + mix)^-1 of a strictly lower triangle, by doubling: two inverted blocks make one.

    Of blocks A and B and what is below, N: -B N A. No entry of the inverse, nor of the products on
    the way, exceeds 1: keys have unit length, and beta and decay are below 1. So float16 holds them
    well. The left operand is a warp's own rows, in registers; of the right one all are needed.
    """
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    zero = gl.zeros([2 * C, C], gl.float32, PRODUCT)
    none = gl.zeros([C, C], gl.float16, OWN)
    inverse = gl.where(o_i == o_j, 1.0, 0.0) - gl.where(o_i >> 1 == o_j >> 1, mix, 0.0)
    for level in gl.static_range(1, LEVELS):
        below = (o_i >> (level + 1) == o_j >> (level + 1)) & (o_i >> level > o_j >> level)
        m_below[level - 1].store(gl.where(below, -mix, 0.0).to(gl.float16))
    fence_async_shared()
    meet()
    for level in gl.static_range(1, LEVELS):
        half = inverse.to(gl.float16)
        m_half[level - 1].store(half)
        fence_async_shared()
        left = gl.convert_layout(in_turns(half, none, C, C), LEFT)
        step = warpgroup_mma(left, m_below[level - 1], zero, use_acc=False, is_async=True)
        step, _ = apart(warpgroup_mma_wait(0, [step]), C, C)
        step = gl.convert_layout(step, OWN).to(gl.float16)
        left = gl.convert_layout(in_turns(step, none, C, C), LEFT)
        meet()
        step = warpgroup_mma(left, m_half[level - 1], zero, use_acc=False, is_async=True)
        step, _ = apart(warpgroup_mma_wait(0, [step]), C, C)
        inverse += gl.convert_layout(step, OWN)
    return inverse


@gluon.jit
def one_chunk(
    x, decay, write, conv, a_log, dt_bias, p_window, wq, kl, gamma, t_wq, t_u, t_scores, s_write,
    s_tap, s_stream, lower_bound, i_h, block, at, lowest, count, S_QKV: gl.constexpr,
    S_DECAY: gl.constexpr, H: gl.constexpr, C: gl.constexpr, R: gl.constexpr,
    LEVELS: gl.constexpr, K: gl.constexpr, W: gl.constexpr, FULL: gl.constexpr,
):  # fmt: skip
    """``x``, ``decay`` and ``write`` point to the chunk's first row; see the kernel.

    No load moves across a barrier or a store, so rows are asked for a step before they are needed.
    All else the assembler orders as it likes, and then 128 registers may not do. So taps are asked
    for behind a store, lest rows are convolved before there is room for what that makes of them;
    and rooms of rows and sums are there before the first meeting, as one that has been another's
    costs a barrier.
    """
    G: gl.constexpr = C // R
    ROWS: gl.constexpr = gl.BlockedLayout([1, K // 32], [1, 32], [G, 1], [1, 0])
    OWN: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [],
        [32, 32],
    )  # fmt: skip
    OWN_ROWS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [0, 32], [0, 64]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]], [], [32, 128],
    )  # fmt: skip
    SCORED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    SOLVED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    SOLVES: gl.constexpr = gl.DotOperandLayout(0, SOLVED, 2)
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SHORT: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    o_g = gl.arange(0, G, gl.SliceLayout(1, ROWS))[:, None]
    o_k = gl.arange(0, K, gl.SliceLayout(0, ROWS))[None, :]
    x += o_g * (R * S_QKV) + o_k
    decay += o_g * (R * S_DECAY) + o_k
    p_k, w_k = x + H * K, p_window + s_stream
    p_v, w_v = x + 2 * H * K, p_window + 2 * s_stream
    o_gk = o_g * (R * K) + o_k

    # Natural logarithms become powers of two on the way: factors of vectors and scalars.
    rate = gl.exp(gl.load(a_log + i_h)) * -1.4426950408889634
    bias = gl.load(dt_bias + (o_g * 0 + o_k)) * rate
    bound = lower_bound * 1.4426950408889634
    logits = ()
    for s in gl.static_range(R):
        if FULL:
            logits = logits + (gl.load(decay + s * S_DECAY),)
        else:  # the root of a lowest logit is 0: no decay behind the last token
            live = o_g * R + s < count
            logits = logits + (gl.load(decay + s * S_DECAY, mask=live, other=float("-inf")),)
    k_rows = load_rows(p_k, w_k, s_tap, o_g, o_k, lowest, count, S_QKV, W - 1, R, FULL)
    running = gl.zeros([G, K], gl.float32, ROWS)
    rates, bounds = running + rate, running + bound
    totals = ()
    for s in gl.static_range(R):
        root = gl.fma(widen(logits[s]), rates, bias)
        root = gl.rsqrt(1.0 + gl.exp2(root))
        running = gl.fma(root, root, running)
        totals = totals + (running,)
    # Eight rows of keys, eight of queries, and so on; values follow queries.
    m_rows = gl.allocate_shared_memory(gl.bfloat16, [2 * C, K], WIDE)
    m_turns = m_rows.reshape([G, 2, R, K])
    m_down = gl.allocate_shared_memory(gl.bfloat16, [C, K], WIDE)
    m_beta = gl.allocate_shared_memory(gl.float32, [C], LINE)
    m_sums = gl.allocate_shared_memory(gl.float32, [G, K], FLAT)
    m_sums.store(running)
    meet()
    before = gl.zeros([G, K], gl.float32, ROWS)
    whole = gl.zeros([1, K], gl.float32, ROWS)
    for g in gl.static_range(G):
        one = m_sums.slice(g, 1, dim=0).load(ROWS)
        before += gl.where(o_g > g, one, 0.0)
        whole += one
    whole = whole * bound
    # exp(G_i - G_j) is a product of two factors around half of the chunk's sum: the bounded gate
    # stays above -5, so neither factor leaves exp(+-80) in 32 tokens. What else is needed (from
    # the start, to the end) is such a factor times a vector.
    from_middle = gl.fma(before, bounds, gl.zeros_like(before) - whole * 0.5)
    to_middle = gl.exp2(whole * 0.5)
    gl.store(gamma + (block * K + o_k), gl.exp2(whole))
    m_middle = gl.allocate_shared_memory(gl.float32, [1, K], LINE)
    m_middle.index(0).store((0.0 - to_middle).reshape([K]))

    k_taps = load_taps(conv + H * K, o_g, o_k, 3 * H * K, W)
    q_rows = load_rows(x, p_window, s_tap, o_g, o_k, lowest, count, S_QKV, W - 1, R, FULL)
    ups = ()
    for s in gl.static_range(R):
        ups = ups + (gl.exp2(gl.fma(totals[s], bounds, from_middle)),)
    o_i = gl.arange(0, C, gl.SliceLayout(1, OWN))
    if FULL:
        beta = gl.load(write + o_i * s_write)
    else:
        beta = gl.load(write + o_i * s_write, mask=o_i < count, other=float("-inf"))
    keys = convolved(k_rows, k_taps, R, W)
    k_ups = ()
    k_downs = ()
    for s in gl.static_range(R):
        if s == R - 3:
            q_taps = load_taps(conv, o_g, o_k, 3 * H * K, W)
        k_ups = k_ups + (narrow(keys[s] * ups[s]),)
        k_down = keys[s] * reciprocal(ups[s])
        k_downs = k_downs + (narrow(k_down),)
        gl.store(kl + (block * C * K + s * K + o_gk), narrow(k_down * to_middle))
    beta = reciprocal(1.0 + gl.exp2(beta.to(gl.float32) * -1.4426950408889634))
    m_beta.store(beta)
    m_turns.slice(0, 1, dim=1).store(stacked(k_ups, G, K).reshape([G, 1, R, K]))
    m_down.store(stacked(k_downs, G, K))

    queries = convolved(q_rows, q_taps, R, W)
    v_rows = load_rows(p_v, w_v, s_tap, o_g, o_k, lowest, count, S_QKV, W - 1, R, FULL)
    v_taps = load_taps(conv + 2 * H * K, o_g, o_k, 3 * H * K, W)
    q_ups = ()
    for s in gl.static_range(R):
        q = queries[s]
        q *= (gl.rsqrt(gl.sum(q * q, 1) + 1e-6) * (K**-0.5))[:, None]
        q *= ups[s]
        q_ups = q_ups + (narrow(q),)
        gl.store(wq + (block * (2 * C * K) + (C + s) * K + o_gk), narrow(q * to_middle))
    m_turns.slice(1, 1, dim=1).store(stacked(q_ups, G, K).reshape([G, 1, R, K]))
    fence_async_shared()
    meet()
    both = gl.zeros([2 * C, C], gl.float32, SCORED)
    both = warpgroup_mma(m_rows, m_down.permute((1, 0)), both, use_acc=False, is_async=True)
    values = convolved(v_rows, v_taps, R, W)
    v = ()
    for s in gl.static_range(R):
        v = v + (narrow(values[s]),)
    both = warpgroup_mma_wait(0, [both])
    # Queries have been read.
    meet()
    m_turns.slice(1, 1, dim=1).store(stacked(v, G, K).reshape([G, 1, R, K]))
    mix, read = apart(both, C, C)
    mix, read = gl.convert_layout(mix, OWN), gl.convert_layout(read, OWN)
    o_i, o_j = o_i[:, None], gl.arange(0, C, gl.SliceLayout(0, OWN))[None, :]
    m_scores = gl.allocate_shared_memory(gl.bfloat16, [C, C], SHORT)
    m_scores.store(gl.where(o_i >= o_j, read, 0.0).to(gl.bfloat16))
    left = gl.rsqrt(gl.sum(gl.where(o_i == o_j, mix, 0.0), 1) + 1e-6)
    right = gl.convert_layout(left, gl.SliceLayout(0, OWN))
    mix = gl.where(o_i > o_j, mix * (left * beta)[:, None] * right[None, :], 0.0)
    # Write strengths, lengths and the way to the middle are factors of the small matrices.
    m_below = ()  # memory of their own, as the compiler has barriers for parts of one
    m_half = ()
    for _ in gl.static_range(LEVELS - 1):
        m_below = m_below + (gl.allocate_shared_memory(gl.float16, [C, C], SHORT),)
        m_half = m_half + (gl.allocate_shared_memory(gl.float16, [C, C], SHORT),)
    solve = invert(mix, m_below, m_half, o_i, o_j, C, LEVELS, OWN)
    solve = solve * m_beta.load(gl.SliceLayout(0, OWN))[None, :] * left[:, None]
    solves = one_by_other((solve * right[None, :]).to(gl.bfloat16), solve.to(gl.bfloat16), C)
    wu = gl.zeros([2 * C, K], gl.float32, SOLVED)
    solves = gl.convert_layout(solves, SOLVES)
    wu = warpgroup_mma(solves, m_rows, wu, use_acc=False, is_async=True)
    w, u = apart(warpgroup_mma_wait(0, [wu]), C, K)
    w, u = gl.convert_layout(w, OWN_ROWS), gl.convert_layout(u, OWN_ROWS)
    middle = m_middle.index(0).load(gl.SliceLayout(0, OWN_ROWS))[None, :]
    m_w = gl.allocate_shared_memory(gl.bfloat16, [C, K], WIDE)
    m_w.store((w * middle).to(gl.bfloat16))
    m_u = gl.allocate_shared_memory(gl.bfloat16, [K, C], SHORT)
    m_u.permute((1, 0)).store(u.to(gl.bfloat16))
    fence_async_shared()
    meet()
    begin_store(t_wq, [at * (2 * C), 0], m_w)
    begin_store(t_u, [at * K, 0], m_u)
    begin_store(t_scores, [at * C, 0], m_scores)
    wait_for_stores(0)


@gluon.jit
def kda_prepare_hopper_kernel(
    t_wq, t_u, t_scores, qkv, decay, write, conv, a_log, dt_bias, windows, cells, cu_seqlens, ends,
    wq, kl, gamma, s_write, s_cells, s_window, s_tap, s_stream, lower_bound, S, first,
    S_QKV: gl.constexpr, S_DECAY: gl.constexpr, H: gl.constexpr, BS: gl.constexpr, C: gl.constexpr,
    R: gl.constexpr, LEVELS: gl.constexpr, K: gl.constexpr, W: gl.constexpr, ASIDE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """As ``kda_prepare_kernel``, for chunks of 32 tokens and heads of 128 channels in bfloat16.

    The first three describe blocks of what that writes, [C, K], [K, C] and [C, C]; -w and qg are in
    ``wq``; ``first`` is the slot to begin with.

    ASIDE: beside the launch in front of it, which has begun: what that waited for is there, and
    nothing that it writes is needed. Only the last program waits, for the sake of who comes behind.
    """
    if PDL:
        if not ASIDE:
            wait_for_inputs()
        let_next_begin()
    LANES: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
    i_h = gl.program_id(0)
    slot = first + gl.program_id(1)
    i_s, begin, start, count = chunk_of(slot, cu_seqlens, ends, S, BS, C, LANES)
    if count > 0:
        column = i_h * K
        at = slot * H + i_h
        block = at.to(gl.int64)
        x = qkv + start * S_QKV + column
        p_decay = decay + start * S_DECAY + column
        p_write = write + start * s_write + i_h
        if (count >= C) & (start != begin):
            one_chunk(x, p_decay, p_write, conv + column, a_log, dt_bias + column, windows, wq, kl,
                      gamma, t_wq, t_u, t_scores, s_write, s_tap, s_stream, lower_bound, i_h, block,
                      at, 1 - W, C, S_QKV, S_DECAY, H, C, R, LEVELS, K, W, True)  # fmt: skip
        else:
            p_window = windows + gl.load(cells + i_s * s_cells + i_h) * s_window
            lowest = gl.where(start != begin, 1 - W, 0)
            one_chunk(x, p_decay, p_write, conv + column, a_log, dt_bias + column, p_window, wq, kl,
                      gamma, t_wq, t_u, t_scores, s_write, s_tap, s_stream, lower_bound, i_h, block,
                      at, lowest, count, S_QKV, S_DECAY, H, C, R, LEVELS, K, W, False)  # fmt: skip
    last = (i_h == H - 1) & (gl.program_id(1) == gl.num_programs(1) - 1)
    if ASIDE and last:
        wait_for_inputs()
