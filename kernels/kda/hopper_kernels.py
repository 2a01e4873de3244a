"""The sequential half of KDA prefill for compute capability 9.0, in Gluon.

One warp fetches what a chunk needs, some chunks ahead; every 64 value channels have four warps that
keep their part of the state in registers and do nothing but the chain of products; some warps more
turn what those leave in shared memory into rows of the output, gate and norm included where all
value channels of a head meet here. So no load, store, norm or gate is part of the chain.

Everything is transposed, values first: the state is the left operand of every product and goes from
its accumulator into the tensor core through registers.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from k3vl.kernels.gluon_parts import begin_copy, let_next_begin, meet, wait_for_inputs


@gluon.jit
def rows_of(i_s, rows):
    """Of a part of a sequence: where its rows begin, its tokens, and those with the padding.

    rows: cu_seqlens, ends, and the part of each sequence: tokens from where to where.
    """
    cu_seqlens, ends, first, last = rows
    begin = gl.load(cu_seqlens + i_s)
    room = (gl.load(cu_seqlens + i_s + 1) - begin).to(gl.int32)
    length = (gl.load(ends + i_s) - begin).to(gl.int32)
    length = gl.maximum(gl.minimum(length, last) - first, 0)
    return begin + first, length, gl.maximum(gl.minimum(room, last) - first, 0)


@gluon.jit
def walk_fetch(
    wq, kl, u, scores, gamma, rows, m_wq, m_kl, m_u, m_scores, m_gamma, landed, used,
    i_s, i_h, i_v, H, C: gl.constexpr, K: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: everything about a chunk, as soon as there is room for it."""
    SIZE: gl.constexpr = 2 * (3 * C * K + BV * C + C * C) + 4 * K
    begin, length, _ = rows_of(i_s, rows)
    slot = (begin // C + i_s).to(gl.int32)
    for c in range(gl.cdiv(length, C)):
        s = c % STAGES
        at = (slot + c) * H + i_h
        mbarrier.wait(used.index(s), (c // STAGES & 1) ^ 1)  # a new one's last phase is over
        mbarrier.expect(landed.index(s), SIZE)
        begin_copy(wq, [at * (2 * C), 0], landed.index(s), m_wq.index(s))
        begin_copy(u, [at * K + i_v * BV, 0], landed.index(s), m_u.index(s))
        begin_copy(gamma, [at, 0], landed.index(s), m_gamma.index(s))
        begin_copy(scores, [at * C, 0], landed.index(s), m_scores.index(s))
        begin_copy(kl, [at * C, 0], landed.index(s), m_kl.index(s))


@gluon.jit
def hand_over(
    o, m_o, told, taken, used, c, SIDE: gl.constexpr, STAGES: gl.constexpr, OUTS: gl.constexpr
):  # fmt: skip
    """A side's outputs [64, C] of chunk ``c`` to those that make rows of them.

    And the chunk before has been used: its products ended before these outputs were there.
    """
    b = c % OUTS
    mbarrier.wait(taken.index(b), (c // OUTS & 1) ^ 1)
    m_o.index(b).slice(SIDE * 64, 64, dim=1).permute((1, 0)).store(o.to(gl.bfloat16))
    meet()
    mbarrier.arrive(told.index(b), count=1)
    if c > 0:  # one meeting serves both
        mbarrier.arrive(used.index((c - 1) % STAGES), count=1)


@gluon.jit
def state_at(p, K: gl.constexpr, STATE: gl.constexpr):
    """Of a side's state [64, K], whose first element ``p`` points to.

    Added one after the other: the sum of both has an address for each of a thread's elements.
    """
    p = p + gl.arange(0, 64, gl.SliceLayout(1, STATE))[:, None]
    return p + gl.arange(0, K, gl.SliceLayout(0, STATE))[None, :] * K


@gluon.jit
def copy_out(
    b_s, states, depths, snapshots, s_state, depth, i_s, i_h, H, DEPTHS: gl.constexpr,
    K: gl.constexpr, STATE: gl.constexpr,
):  # fmt: skip
    """The state at ``depth`` tokens of a sequence to where it is asked for."""
    for d in gl.static_range(DEPTHS):
        if gl.load(depths + i_s * DEPTHS + d) == depth:
            copy = gl.load(snapshots + (i_s * DEPTHS + d) * H + i_h)
            gl.store(state_at(states + copy * s_state, K, STATE), b_s)


@gluon.jit
def walk_state(
    states, cells, depths, snapshots, rows, s_state, s_cells, m_wq, m_kl, m_u, m_scores,
    m_gamma, m_o, landed, used, told, taken, i_s, i_h, i_v, H, SIDE: gl.constexpr, C: gl.constexpr,
    K: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, OUTS: gl.constexpr,
    DEPTHS: gl.constexpr,
):  # fmt: skip
    """Four warps: 64 value channels of the state, chunk after chunk.

    The outputs are put away while the product that moves the state runs. The state decays while the
    second product runs: any earlier, and the assembler waits for both before it uses the first.
    """
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    OF_ROWS: gl.constexpr = gl.DotOperandLayout(0, ROWS, 2)
    states += i_v * BV + SIDE * 64
    zero = gl.zeros([64, C], gl.float32, ROWS)
    _, length, _ = rows_of(i_s, rows)
    p_state = states + gl.load(cells + i_s * s_cells + i_h) * s_state
    p_state = state_at(p_state, K, STATE)
    b_s = gl.load(p_state)
    for c in range(gl.cdiv(length, C)):
        s = c % STAGES
        a = gl.convert_layout(b_s.to(gl.bfloat16), OF_ROWS)
        mbarrier.wait(landed.index(s), c // STAGES & 1)
        x = m_u.index(s).slice(SIDE * 64, 64, dim=0).load(ROWS).to(gl.float32)
        b_w = m_wq.index(s).slice(0, C, dim=0)
        b_q = m_wq.index(s).slice(C, C, dim=0)
        x = warpgroup_mma(a, b_w.permute((1, 0)), x, is_async=True)  # of -w
        o = warpgroup_mma(a, b_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(1, [x])
        b_x = x.to(gl.bfloat16)
        b_scores = m_scores.index(s).permute((1, 0))
        o = warpgroup_mma(gl.convert_layout(b_x, OF_ROWS), b_scores, o, is_async=True)
        b_s = b_s * m_gamma.index(s).load(STATE)
        moved = warpgroup_mma(gl.convert_layout(b_x, OF_STATE), m_kl.index(s), b_s, is_async=True)
        o = warpgroup_mma_wait(1, [o])
        hand_over(o, m_o, told, taken, used, c, SIDE, STAGES, OUTS)
        b_s = warpgroup_mma_wait(0, [moved])
        depth = rows[2] + (c + 1) * C
        copy_out(b_s, states, depths, snapshots, s_state, depth, i_s, i_h, H, DEPTHS, K, STATE)
    gl.store(p_state, b_s)


@gluon.jit
def walk_state_joined(
    states, cells, depths, snapshots, rows, s_state, s_cells, m_wq, m_kl, m_u, m_scores,
    m_gamma, m_o, landed, used, told, taken, i_s, i_h, i_v, H, SIDE: gl.constexpr, C: gl.constexpr,
    K: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, OUTS: gl.constexpr,
    DEPTHS: gl.constexpr,
):  # fmt: skip
    """As :func:`walk_state`, with both products of the state as one of twice the columns.

    Two groups of four warps on a multiprocessor want its tensor cores at the same time, and those
    take as long for 32 columns as for 64. The state decays while they run. Of 392 us this gained 4
    where four warps made rows of the output, and 37 with the eight that do (T8192 H96).
    """
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * C, 16])
    ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    OF_BOTH: gl.constexpr = gl.DotOperandLayout(0, BOTH, 2)
    OF_ROWS: gl.constexpr = gl.DotOperandLayout(0, ROWS, 2)
    states += i_v * BV + SIDE * 64
    zero = gl.zeros([64, 2 * C], gl.float32, BOTH)
    nothing = gl.zeros([64, C], gl.float32, ROWS)
    _, length, _ = rows_of(i_s, rows)
    p_state = states + gl.load(cells + i_s * s_cells + i_h) * s_state
    p_state = state_at(p_state, K, STATE)
    b_s = gl.load(p_state)
    for c in range(gl.cdiv(length, C)):
        s = c % STAGES
        a = gl.convert_layout(b_s.to(gl.bfloat16), OF_BOTH)
        mbarrier.wait(landed.index(s), c // STAGES & 1)
        b_wq = m_wq.index(s).permute((1, 0))
        both = warpgroup_mma(a, b_wq, zero, use_acc=False, is_async=True)
        b_s = b_s * m_gamma.index(s).load(STATE)
        u = m_u.index(s).slice(SIDE * 64, 64, dim=0).load(ROWS).to(gl.float32)
        both = warpgroup_mma_wait(0, [both])
        moved, o = gl.split(both.reshape([64, 2, C]).permute((0, 2, 1)))  # by -w, by q
        b_x = (u + gl.convert_layout(moved, ROWS)).to(gl.bfloat16)
        b_scores = m_scores.index(s).permute((1, 0))
        inner = warpgroup_mma(
            gl.convert_layout(b_x, OF_ROWS), b_scores, nothing, use_acc=False, is_async=True
        )
        moved = warpgroup_mma(gl.convert_layout(b_x, OF_STATE), m_kl.index(s), b_s, is_async=True)
        inner = warpgroup_mma_wait(1, [inner])
        o = gl.convert_layout(o, ROWS) + inner
        hand_over(o, m_o, told, taken, used, c, SIDE, STAGES, OUTS)
        b_s = warpgroup_mma_wait(0, [moved])
        depth = rows[2] + (c + 1) * C
        copy_out(b_s, states, depths, snapshots, s_state, depth, i_s, i_h, H, DEPTHS, K, STATE)
    gl.store(p_state, b_s)


@gluon.jit
def widen(x):
    """bfloat16 to float32, one instruction each; the compiler takes two for every upper half."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=gl.float32,
        is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def reciprocal(x):
    """One instruction, right but for the last bit; 0 of infinity."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def gate_rows(p_gate, s_gate, o_t, o_k, left, ALIGNED: gl.constexpr):
    """Logits [C, K] of the output gate; 0 behind the last token."""
    at = (o_t * s_gate)[:, None] * ALIGNED + o_k[None, :]
    return gl.load(p_gate + at, mask=(o_t < left)[:, None], other=0.0)


@gluon.jit
def walk_rows(
    gate, o_norm, out, m_o, told, taken, begin, length, room, s_gate, eps, i_h, i_v, H,
    C: gl.constexpr, K: gl.constexpr, BV: gl.constexpr, OUTS: gl.constexpr, WARPS: gl.constexpr,
    ALIGNED: gl.constexpr,
):  # fmt: skip
    """Some warps: the output's rows, [C, BV], of one sequence; zeros in padding.

    Norm and gate too if that is all of a head. Gates are loaded a chunk ahead.
    """
    LANES: gl.constexpr = BV // 8
    R: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    o_t = gl.arange(0, C, gl.SliceLayout(1, R))
    o_k = gl.arange(0, BV, gl.SliceLayout(0, R))
    chunks = gl.cdiv(length, C)
    column = i_h * K + i_v * BV
    p_out = out + begin * (H * K) + column
    at = o_t[:, None] * (H * K) + o_k[None, :]
    p_gate = gate + begin * (s_gate * ALIGNED) + column
    if BV == K:
        norm = gl.load(o_norm + o_k)[None, :]
        logits = gate_rows(p_gate, s_gate, o_t, o_k, length, ALIGNED)
    for c in range(chunks):
        b = c % OUTS
        if BV == K:
            p_gate += C * (s_gate * ALIGNED)
            coming = gate_rows(p_gate, s_gate, o_t, o_k, length - (c + 1) * C, ALIGNED)
            opened = norm * reciprocal(1.0 + gl.exp2(widen(logits) * -1.4426950408889634))
        mbarrier.wait(told.index(b), c // OUTS & 1)
        y = m_o.index(b).load(R)
        meet()
        mbarrier.arrive(taken.index(b), count=1)
        if BV == K:
            o = widen(y)
            o *= gl.rsqrt(gl.sum(o * o, 1) / K + eps)[:, None]
            y = (o * opened).to(gl.bfloat16)
            logits = coming
        if length - c * C < C:
            y = gl.where((o_t < length - c * C)[:, None], y, 0.0)
        gl.store(p_out + at, y, mask=(o_t < room - c * C)[:, None])
        p_out += C * H * K
    nothing = gl.zeros([C, BV], gl.bfloat16, R)
    for c in range(chunks, gl.cdiv(room, C)):  # chunks of padding alone
        gl.store(p_out + at, nothing, mask=(o_t < room - c * C)[:, None])
        p_out += C * H * K


@gluon.jit
def advance_window(
    qkv, s_qkv, p_old, p_new, s_tap, begin, end, o_w, o_k, W: gl.constexpr
):  # fmt: skip
    """Make the last W - 1 inputs before ``end`` the window; from the old one where it is short."""
    kept = o_w < W - 1
    at = end - (W - 1) + o_w
    new = gl.load(qkv + at * s_qkv + o_k, mask=kept & (at >= begin), other=0.0)
    old = gl.load(p_old + (at - begin + (W - 1)) * s_tap + o_k, mask=kept & (at < begin), other=0.0)
    meet()  # the old window may be the new one
    gl.store(p_new + o_w * s_tap + o_k, gl.where(at >= begin, new, old), mask=kept)


@gluon.jit
def walk_windows(
    qkv, windows, cells, depths, snapshots, s_qkv, s_cells, s_window, s_tap, s_stream, begin, end,
    i_s, i_h, H, K: gl.constexpr, W: gl.constexpr, DEPTHS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """What the convolution will begin with next time, and at every snapshot."""
    L: gl.constexpr = gl.BlockedLayout([1, K // 32], [1, 32], [WARPS, 1], [1, 0])
    o_w = gl.arange(0, W, gl.SliceLayout(1, L))[:, None]
    o_k = gl.arange(0, K, gl.SliceLayout(0, L))[None, :]
    p_window = windows + gl.load(cells + i_s * s_cells + i_h) * s_window
    for stream in gl.static_range(3):
        p_qkv = qkv + (stream * H + i_h) * K
        p_old = p_window + stream * s_stream
        for d in gl.static_range(DEPTHS):
            wanted = gl.load(depths + i_s * DEPTHS + d)
            if wanted > 0:
                copy = gl.load(snapshots + (i_s * DEPTHS + d) * H + i_h)
                p_new = windows + copy * s_window + stream * s_stream
                until = begin + wanted
                advance_window(p_qkv, s_qkv, p_old, p_new, s_tap, begin, until, o_w, o_k, W)
        advance_window(p_qkv, s_qkv, p_old, p_old, s_tap, begin, end, o_w, o_k, W)


@gluon.jit
def walk_rest(
    qkv, gate, o_norm, windows, cells, depths, snapshots, rows, out, m_o, told, taken,
    s_qkv, s_gate, s_cells, s_window, s_tap, s_stream, eps, i_s, i_h, i_v, H, C: gl.constexpr,
    K: gl.constexpr, BV: gl.constexpr, W: gl.constexpr, OUTS: gl.constexpr, DEPTHS: gl.constexpr,
    WARPS: gl.constexpr, ALIGNED: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """Some warps: rows of the output, then the windows."""
    begin, length, room = rows_of(i_s, rows)
    walk_rows(gate, o_norm, out, m_o, told, taken, begin, length, room, s_gate, eps, i_h, i_v, H, C,
              K, BV, OUTS, WARPS, ALIGNED)  # fmt: skip
    if LAST and i_v == 0:
        walk_windows(qkv, windows, cells, depths, snapshots, s_qkv, s_cells, s_window, s_tap,
                     s_stream, gl.load(rows[0] + i_s), gl.load(rows[1] + i_s), i_s, i_h, H, K, W,
                     DEPTHS, WARPS)  # fmt: skip


@gluon.jit
def kda_walk_sides_kernel(
    wq, kl, u, scores, gamma, qkv, gate, o_norm, windows, states, cells, cu_seqlens, ends,
    depths, snapshots, out, s_qkv, s_gate, s_cells, s_window, s_tap, s_stream, s_state, eps, first,
    last, H,
    C: gl.constexpr, K: gl.constexpr, BV: gl.constexpr, W: gl.constexpr, DEPTHS: gl.constexpr,
    STAGES: gl.constexpr, OUTS: gl.constexpr, WARPS: gl.constexpr, ALIGNED: gl.constexpr,
    LAST: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Carry the state of one head (BV of its value channels, 64 or all 128) through one sequence.

    The first five describe blocks of what the parallel kernel wrote, with -w and q in ``wq``.
    ``s_gate`` is in units of ALIGNED elements, so that the compiler may load so many at once. Of
    tokens ``first`` to ``last``, multiples of C; LAST: nothing comes behind, so windows advance.
    """
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SHORT: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    SIDES: gl.constexpr = BV // 64
    i_v = gl.program_id(0) % (K // BV)  # the parts of a head start together and read the same
    i_h = gl.program_id(0) // (K // BV) % H
    i_s = gl.program_id(0) // (K // BV) // H
    if PDL:
        let_next_begin()
    m_wq = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * C, K], ROWS)
    m_kl = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], ROWS)
    m_u = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BV, C], SHORT)
    m_scores = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], SHORT)
    m_gamma = gl.allocate_shared_memory(gl.float32, [STAGES, 1, K], FLAT)
    m_o = gl.allocate_shared_memory(gl.bfloat16, [OUTS, C, BV], ROWS)
    landed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [OUTS, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [OUTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(landed.index(i), count=1)
        mbarrier.init(used.index(i), count=SIDES)
    for i in gl.static_range(OUTS):
        mbarrier.init(told.index(i), count=SIDES)
        mbarrier.init(taken.index(i), count=1)
    fence_async_shared()
    meet()
    if PDL:
        wait_for_inputs()
    rows = cu_seqlens, ends, first, last
    if SIDES == 1:
        gl.warp_specialize(
            [
                (
                    walk_state,
                    (
                        states, cells, depths, snapshots, rows, s_state, s_cells, m_wq,
                        m_kl, m_u, m_scores, m_gamma, m_o, landed, used, told, taken, i_s, i_h, i_v,
                        H, 0, C, K, BV, STAGES, OUTS, DEPTHS,
                    ),
                ),
                (
                    walk_rest,
                    (
                        qkv, gate, o_norm, windows, cells, depths, snapshots, rows, out,
                        m_o, told, taken, s_qkv, s_gate, s_cells, s_window, s_tap, s_stream, eps,
                        i_s, i_h, i_v, H, C, K, BV, W, OUTS, DEPTHS, WARPS, ALIGNED, LAST,
                    ),
                ),
                (
                    walk_fetch,
                    (
                        wq, kl, u, scores, gamma, rows, m_wq, m_kl, m_u, m_scores,
                        m_gamma, landed, used, i_s, i_h, i_v, H, C, K, BV, STAGES,
                    ),
                ),
            ],
            [WARPS, 1],
            [72, 72],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    walk_state_joined,
                    (
                        states, cells, depths, snapshots, rows, s_state, s_cells, m_wq,
                        m_kl, m_u, m_scores, m_gamma, m_o, landed, used, told, taken, i_s, i_h, i_v,
                        H, 0, C, K, BV, STAGES, OUTS, DEPTHS,
                    ),
                ),
                (
                    walk_state_joined,
                    (
                        states, cells, depths, snapshots, rows, s_state, s_cells, m_wq,
                        m_kl, m_u, m_scores, m_gamma, m_o, landed, used, told, taken, i_s, i_h, i_v,
                        H, 1, C, K, BV, STAGES, OUTS, DEPTHS,
                    ),
                ),
                (
                    walk_rest,
                    (
                        qkv, gate, o_norm, windows, cells, depths, snapshots, rows, out,
                        m_o, told, taken, s_qkv, s_gate, s_cells, s_window, s_tap, s_stream, eps,
                        i_s, i_h, i_v, H, C, K, BV, W, OUTS, DEPTHS, WARPS, ALIGNED, LAST,
                    ),
                ),
                (
                    walk_fetch,
                    (
                        wq, kl, u, scores, gamma, rows, m_wq, m_kl, m_u, m_scores,
                        m_gamma, landed, used, i_s, i_h, i_v, H, C, K, BV, STAGES,
                    ),
                ),
            ],
            [4, WARPS, 1],
            [160, 64, 24],  # what these leave is the first group's, and enough
        )  # fmt: skip
