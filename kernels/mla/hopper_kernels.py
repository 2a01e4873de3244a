"""Absorbed MLA decode for compute capability 9.0, in Gluon: layouts and the order of waits by hand.

A tile is BN latents; it lies in shared memory once and is keys and values at once. Pages hold whole
tiles, so a tile is one run of rows, which the copy engine fetches by itself. Two tiles fit beside
the queries of 64 heads; what counts is that the next copy begins as soon as a tile is used up.
"""
# ruff: noqa: ANN001, ANN201, SIM102
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

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
def tile_row(p_rows, s_page, at, end, rows_end, PAGE: gl.constexpr):
    """Row of the latent at ``at``; past the end one outside of the pool: the copy writes zeros."""
    row = rows_end
    if at < end:
        row = (gl.load(p_rows + at // PAGE * s_page) + at % PAGE).to(gl.int32)
    return row


@gluon.jit
def fetch(desc, target, landed, row, column, SIZE: gl.constexpr, MORE: gl.constexpr):
    """Begin to copy a block of SIZE bytes; the barrier is to wait for MORE bytes besides."""
    mbarrier.expect(landed, SIZE + MORE)
    begin_copy(desc, [row, column], landed, target)


@gluon.jit
def first_tiles(
    values, shared, p_rows, s_page, start, end, rows_end, m_mine, m_p, landed,
    SIDE: gl.constexpr, R: gl.constexpr, P: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Begin to copy a side's halves of the first two tiles."""
    HALF: gl.constexpr = BN * (R // 2) * 2
    COLUMN: gl.constexpr = SIDE * (R // 2)
    row = tile_row(p_rows, s_page, start + SIDE * BN, end, rows_end, PAGE)
    fetch(values, m_mine.index(SIDE), landed.index(3 * SIDE), row, COLUMN, HALF, 0)
    row = tile_row(p_rows, s_page, start + (1 - SIDE) * BN, end, rows_end, PAGE)
    last = landed.index(1 + SIDE)
    fetch(values, m_mine.index(1 - SIDE), last, row, COLUMN, HALF, BN * P * 2)
    begin_copy(shared, [row, R], last, m_p.index(1 - SIDE))


@gluon.jit
def zero_rows(tile, left, BN: gl.constexpr, WIDTH: gl.constexpr):
    """Clear rows from ``left`` on: they may hold NaN, and 0 x NaN is NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_n = gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    for k in gl.static_range(WIDTH // 64):
        piece = tile.slice(k * 64, 64, dim=1)
        kept = gl.where((o_n < left)[:, None], piece.load(LAYOUT), 0.0)
        meet()
        piece.store(kept)
    fence_async_shared()
    meet()


@gluon.jit
def write_half(
    m_half, mixed, target, i_b, i_h, i_s, H, SPLITS, there, COLUMN: gl.constexpr, R: gl.constexpr,
    BH: gl.constexpr,
):  # fmt: skip
    """A side's channels to [B, H, SPLITS, R], whole sectors at a time, by way of its last tile."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m_half.store(mixed.to(gl.bfloat16))
    o_h = i_h * BH + gl.arange(0, BH, gl.SliceLayout(1, ROWS))
    part = (i_b * H + o_h) * SPLITS + i_s
    o_r = COLUMN + gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    for k in gl.static_range(R // 128):
        b_x = m_half.slice(k * 64, 64, dim=1).load(ROWS)
        p_target = target + part[:, None] * R + (k * 64 + o_r)[None, :]
        gl.store(p_target, b_x, mask=(o_h < H)[:, None] & there)


@gluon.jit
def one_side(
    values,
    shared,
    p_rows,
    s_page,
    rows_end,
    start,
    end,
    length,
    scale,
    m_q,
    m_qp,
    m_mine,
    m_others,
    m_p,
    m_max,
    m_sum,
    landed,
    told,
    out,
    parts,
    weights,
    i_b,
    i_h,
    i_s,
    H,
    SPLITS,
    SIDE: gl.constexpr,
    R: gl.constexpr,
    P: gl.constexpr,
    PAGE: gl.constexpr,
    BH: gl.constexpr,
    BN: gl.constexpr,
    WHOLE: gl.constexpr,
    LEAN: gl.constexpr,
):
    """What four warps do: the scores of every second tile, and half of the channels of all values.

    The two sides exchange maxima and probabilities, so that one's softmax runs beside the other's
    products. Nobody but this side uses its halves of the tiles last, so it fetches them itself.
    Probabilities lie where the shared part of the keys lay, which is used up by then.

    Barriers ``landed``: this half of tile 0 and 1 of side 0, then of side 1. ``told``: side 0 has a
    maximum; side 1 has one, and probabilities; side 0 has probabilities; sums of 0; of 1.

    Order: 0, 1 and 2 of ``told`` take turns. All four warps wait before they load, and meet between
    their last access and the arrival or copy that lets the other side, or the copy engine, write
    again: side 1 has read maximum 0 when it tells of its own, side 0 maximum 1 when it tells of its
    probabilities. What threads store and products read is fenced by whoever stored it. The tests
    take every one of these waits, meetings and fences away, and expect a race.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R // 2, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    HALF: gl.constexpr = BN * (R // 2) * 2
    REST: gl.constexpr = BN * P * 2
    COLUMN: gl.constexpr = SIDE * (R // 2)
    # This side uses the other side's tile last; the shared part of its keys comes with that.
    MINE: gl.constexpr = 3 * SIDE
    LAST: gl.constexpr = 1 + SIDE
    pairs = gl.cdiv(gl.maximum(end - start, 0), 2 * BN)
    if not LEAN:
        if pairs > 0:
            first_tiles(
                values, shared, p_rows, s_page, start, end, rows_end, m_mine, m_p, landed, SIDE, R,
                P, PAGE, BN,
            )  # fmt: skip
    highest = gl.full([BH], float("-inf"), gl.float32, ROW)
    total = gl.zeros([BH], gl.float32, ROW)
    zero = gl.zeros([BH, BN], gl.float32, S)
    mixed = gl.zeros([BH, R // 2], gl.float32, O)
    o_n = gl.arange(0, BN, gl.SliceLayout(0, S))
    for j in range(pairs):
        phase = j & 1
        # Zero, but the compiler cannot know: else it would compute the operands' addresses before
        # the loop and spill them (112 registers).
        none = j >> 30
        at = start + j * 2 * BN
        own, other = SIDE + none, 1 - SIDE + none
        b_own, b_other = m_mine.index(own), m_mine.index(other)
        next_own = tile_row(p_rows, s_page, at + (2 + SIDE) * BN, end, rows_end, PAGE)
        next_other = tile_row(p_rows, s_page, at + (3 - SIDE) * BN, end, rows_end, PAGE)
        # Scores of this side's tile, its halves in the order in which they land.
        mbarrier.wait(landed.index(MINE), phase)
        s = warpgroup_mma(m_q.index(own), b_own.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.wait(landed.index(2 - SIDE), phase)
        s = warpgroup_mma(m_q.index(other), m_others.index(own).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(m_qp.index(none), m_p.index(own).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        left = end - at - SIDE * BN
        if left < BN:
            s = gl.where((o_n < left)[None, :], s, float("-inf"))
            zero_rows(b_own, left, BN, R // 2)
        peak = gl.max(s, 1) * scale
        if SIDE == 0:
            higher = gl.maximum(highest, peak)
            m_max.index(0).store(higher)
            meet()
            mbarrier.arrive(told.index(0), count=1)
            p = gl.exp2(s * scale - higher[:, None])
            b_p = p.to(gl.bfloat16)
        else:
            mbarrier.wait(told.index(0), phase)
            higher = gl.maximum(m_max.index(0).load(ROW), peak)
            p = gl.exp2(s * scale - higher[:, None])
            b_p = p.to(gl.bfloat16)
            # By now all four warps have read the keys that the probabilities replace.
            meet()
            m_max.index(1).store(higher)
            m_p.index(own).store(b_p)
            fence_async_shared()
            meet()
            mbarrier.arrive(told.index(1), count=1)
        kept = gl.exp2(highest - higher)
        total = total * kept + gl.sum(p, 1)
        mixed = mixed * gl.convert_layout(kept, ROW_O)[:, None]
        product = warpgroup_mma(gl.convert_layout(b_p, LEFT), b_own, mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, [product])
        meet()
        if j + 1 < pairs:
            fetch(values, b_own, landed.index(MINE), next_own, COLUMN, HALF, 0)
        if SIDE == 0:
            mbarrier.wait(told.index(1), phase)
            highest = m_max.index(1).load(ROW)
            kept = gl.exp2(higher - highest)
            total = total * kept
            m_p.index(own).store((p * kept[:, None]).to(gl.bfloat16))
            fence_async_shared()
            meet()
            mbarrier.arrive(told.index(2), count=1)
            mixed = mixed * gl.convert_layout(kept, ROW_O)[:, None]
        else:
            mbarrier.wait(told.index(2), phase)
            highest = higher
        # The other side has waited for this tile; who reads what a copy wrote waits himself.
        mbarrier.wait(landed.index(LAST), phase)
        left = end - at - (1 - SIDE) * BN
        if left < BN:
            zero_rows(b_other, left, BN, R // 2)
        product = warpgroup_mma(m_p.index(other), b_other, mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, [product])
        meet()
        if j + 1 < pairs:
            fetch(values, b_other, landed.index(LAST), next_other, COLUMN, HALF, REST)
            begin_copy(shared, [next_other, R], landed.index(LAST), m_p.index(other))
    m_sum.index(SIDE).store(total)
    meet()
    mbarrier.arrive(told.index(3 + SIDE), count=1)
    mbarrier.wait(told.index(4 - SIDE), 0)
    total = total + m_sum.index(1 - SIDE).load(ROW)
    mixed = mixed / gl.convert_layout(gl.maximum(total, 1.0), ROW_O)[:, None]
    o_h = i_h * BH + gl.arange(0, BH, ROW_O)
    o_r = COLUMN + gl.arange(0, R // 2, gl.SliceLayout(0, O))
    exists = (o_h < H)[:, None]
    if LEAN:
        write_half(
            m_mine.index(SIDE), mixed, parts, i_b, i_h, i_s, H, SPLITS, start < length, COLUMN, R,
            BH,
        )  # fmt: skip
        if SIDE == 0:
            # Of a part that is empty there is only the weight, and that is nothing.
            o_w = i_h * BH + gl.arange(0, BH, ROW)
            p_weights = weights + (i_b * H + o_w) * SPLITS + i_s
            gl.store(p_weights, highest + gl.log2(total), mask=o_w < H)
    elif WHOLE:
        p_out = out + (i_b * H + o_h[:, None]) * R + o_r[None, :]
        gl.store(p_out, mixed.to(out.dtype.element_ty), mask=exists)
    elif start < length:
        part = (i_b * H + o_h) * SPLITS + i_s
        gl.store(parts + part[:, None] * R + o_r[None, :], mixed, mask=exists)
        if SIDE == 0:
            o_w = i_h * BH + gl.arange(0, BH, ROW)
            p_weights = weights + (i_b * H + o_w) * SPLITS + i_s
            gl.store(p_weights, highest + gl.log2(total), mask=o_w < H)


@gluon.jit
def mla_decode_sides_kernel(
    values,
    shared,
    q,
    rows,
    lengths,
    out,
    parts,
    weights,
    s_q,
    s_qh,
    s_rows,
    s_page,
    rows_end,
    scale,
    H,
    SPLITS,
    R: gl.constexpr,
    P: gl.constexpr,
    PAGE: gl.constexpr,
    BH: gl.constexpr,
    BN: gl.constexpr,
    WHOLE: gl.constexpr,
    LEAN: gl.constexpr,
    PDL: gl.constexpr,
):
    """BH heads of one sequence over one part of its context, two tiles at a time: ``one_side``.

    ``values`` and ``shared`` describe blocks [BN, R / 2] and [BN, P] of the latents; for the rest
    see ``mla_decode_kernel``. After FlashMLA's schedule for Hopper.

    LEAN, with several parts: latents are asked for before the queries, parts are bfloat16 and leave
    by way of shared memory, and empty ones have a weight too, that of nothing.
    """
    if PDL:
        let_next_begin()
        wait_for_inputs()
    Q: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    i_h = gl.program_id(0)
    i_b = gl.program_id(1).to(gl.int64)
    i_s = gl.program_id(2)
    length = gl.load(lengths + i_b).to(gl.int32)
    share = gl.cdiv(gl.cdiv(length, SPLITS), BN) * BN
    start = share * i_s
    end = gl.minimum(start + share, length)
    p_rows = rows + i_b * s_rows
    landed = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(landed.index(i), count=1)
    for i in gl.static_range(5):
        mbarrier.init(told.index(i), count=1)
    m_left = gl.allocate_shared_memory(gl.bfloat16, [2, BN, R // 2], TILE)
    m_right = gl.allocate_shared_memory(gl.bfloat16, [2, BN, R // 2], TILE)
    m_p = gl.allocate_shared_memory(gl.bfloat16, [2, BN, P], TILE)
    m_q = gl.allocate_shared_memory(gl.bfloat16, [2, BH, R // 2], TILE)
    m_qp = gl.allocate_shared_memory(gl.bfloat16, [1, BH, P], TILE)
    m_max = gl.allocate_shared_memory(gl.float32, [2, BH], FLAT)
    m_sum = gl.allocate_shared_memory(gl.float32, [2, BH], FLAT)
    if LEAN:
        fence_async_shared()
        meet()
        if start < end:
            first_tiles(
                values, shared, p_rows, s_page, start, end, rows_end, m_left, m_p, landed, 0, R, P,
                PAGE, BN,
            )  # fmt: skip
            first_tiles(
                values, shared, p_rows, s_page, start, end, rows_end, m_right, m_p, landed, 1, R, P,
                PAGE, BN,
            )  # fmt: skip
    o_h = i_h * BH + gl.arange(0, BH, gl.SliceLayout(1, Q))
    exists = (o_h < H)[:, None]
    o_k = gl.arange(0, 64, gl.SliceLayout(0, Q))
    p_q = q + i_b * s_q + o_h[:, None] * s_qh + o_k[None, :]
    for i in gl.static_range(2):
        for k in gl.static_range(R // 128):
            b_q = gl.load(p_q + i * (R // 2) + k * 64, mask=exists, other=0.0)
            m_q.index(i).slice(k * 64, 64, dim=1).store(b_q)
    m_qp.index(0).store(gl.load(p_q + R, mask=exists, other=0.0))
    fence_async_shared()
    meet()
    gl.warp_specialize(
        [
            (
                one_side,
                (
                    values, shared, p_rows, s_page, rows_end, start, end, length, scale, m_q, m_qp,
                    m_left, m_right, m_p, m_max, m_sum, landed, told, out, parts, weights, i_b, i_h,
                    i_s, H, SPLITS, 0, R, P, PAGE, BH, BN, WHOLE, LEAN,
                ),
            ),
            (
                one_side,
                (
                    values, shared, p_rows, s_page, rows_end, start, end, length, scale, m_q, m_qp,
                    m_right, m_left, m_p, m_max, m_sum, landed, told, out, parts, weights, i_b, i_h,
                    i_s, H, SPLITS, 1, R, P, PAGE, BH, BN, WHOLE, LEAN,
                ),
            ),
        ],
        [4],
        [240],
    )  # fmt: skip
