"""Absorbed MLA decode for compute capability 9.0, in Gluon: layouts and the order of waits by hand.

A tile is BN latents; it lies in shared memory once and is keys and values at once. Pages hold whole
tiles, so a tile is one run of rows, which the copy engine fetches by itself. Two tiles fit beside
the queries of 64 heads; what counts is that the next copy begins as soon as a tile is used up.
"""
# ruff: noqa: ANN001, ANN201, SIM102
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

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
def first_tile(
    values, shared, row, m_own, m_last, m_p, landed, TILE: gl.constexpr, R: gl.constexpr,
    P: gl.constexpr, BN: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Begin to copy tile 0 or 1: one half is for the side of that number, one for the other."""
    PIECES: gl.constexpr = R // 2 // W
    for k in gl.static_range(PIECES):
        own = landed.index(2 * TILE * PIECES + k)
        column = TILE * (R // 2) + k * W
        fetch(values, m_own.index(TILE * PIECES + k), own, row, column, BN * W * 2, 0)
    for k in gl.static_range(PIECES):
        last = landed.index((3 - 2 * TILE) * PIECES + k)
        column = (1 - TILE) * (R // 2) + k * W
        fetch(
            values, m_last.index(TILE * PIECES + k), last, row, column, BN * W * 2,
            (k == PIECES - 1) * BN * P * 2,
        )  # fmt: skip
    begin_copy(shared, [row, R], landed.index((4 - 2 * TILE) * PIECES - 1), m_p.index(TILE))


@gluon.jit
def first_queries(
    q_values, q_shared, row, m_q, m_qp, landed,
    R: gl.constexpr, P: gl.constexpr, BH: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Begin to copy the queries of BH heads; heads that there are not get somebody's, or zeros."""
    mbarrier.expect(landed, BH * (R + P) * 2)
    for k in gl.static_range(R // W):
        begin_copy(q_values, [row, k * W], landed, m_q.index(k))
    begin_copy(q_shared, [row, R], landed, m_qp.index(0))


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
def write_piece(
    m_piece, mixed, target, i_b, i_h, i_s, H, SPLITS, COLUMN: gl.constexpr, R: gl.constexpr,
    BH: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """W channels to [B, SPLITS, H, R], whole sectors at a time, by way of a tile that is done."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m_piece.store(mixed.to(gl.bfloat16))
    o_h = i_h * BH + gl.arange(0, BH, gl.SliceLayout(1, ROWS))
    part = (i_b * SPLITS + i_s) * H + o_h
    o_r = COLUMN + gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    for k in gl.static_range(W // 64):
        b_x = m_piece.slice(k * 64, 64, dim=1).load(ROWS)
        p_target = target + part[:, None] * R + (k * 64 + o_r)[None, :]
        gl.store(p_target, b_x, mask=(o_h < H)[:, None])


@gluon.jit
def begin_scores(
    m_q, m_qp, m_mine, m_others, m_p, landed, own, other, none, phase, zero,
    SIDE: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Begin the scores of a side's tile, its pieces in the order in which they land."""
    s = zero
    for k in gl.static_range(PIECES):
        mbarrier.wait(landed.index(2 * SIDE * PIECES + k), phase)
        b_k = m_mine.index(own * PIECES + k).permute((1, 0))
        s = warpgroup_mma(m_q.index(own * PIECES + k), b_k, s, use_acc=k > 0, is_async=True)
    for k in gl.static_range(PIECES):
        mbarrier.wait(landed.index((3 - 2 * SIDE) * PIECES + k), phase)
        b_k = m_others.index(own * PIECES + k).permute((1, 0))
        s = warpgroup_mma(m_q.index(other * PIECES + k), b_k, s, is_async=True)
    return warpgroup_mma(m_qp.index(none), m_p.index(own).permute((1, 0)), s, is_async=True)


@gluon.jit
def rescale(mixed, factor, PIECES: gl.constexpr):
    """Mixtures times what a new maximum makes of their rows."""
    scaled = ()
    for k in gl.static_range(PIECES):
        scaled = scaled + (mixed[k] * factor,)  # noqa: RUF005
    return scaled


@gluon.jit
def begin_mixtures(left, m_tile, tile, mixed, PIECES: gl.constexpr):
    """Begin to add probabilities times values of a side's half of a tile, a product a piece."""
    products = ()
    for k in gl.static_range(PIECES):
        b_v = m_tile.index(tile * PIECES + k)
        product = warpgroup_mma(left, b_v, mixed[k], is_async=True)
        products = products + (product,)  # noqa: RUF005
    return products


@gluon.jit
def end_mixtures(
    products, values, shared, m_tile, m_p, landed, tile, row, more, SIDE: gl.constexpr,
    OWN: gl.constexpr, R: gl.constexpr, P: gl.constexpr, BN: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Wait for products; if there is more, begin to copy what is next to where each has read.

    Behind the other side's tile comes the shared part of its keys.
    """
    PIECES: gl.constexpr = R // 2 // W
    FIRST: gl.constexpr = (2 * SIDE if OWN else 2 * SIDE + 1) * PIECES
    mixed = ()
    for k in gl.static_range(PIECES):
        mixed = mixed + (warpgroup_mma_wait(PIECES - 1 - k, [products[k]]),)  # noqa: RUF005
        # All warps have read this piece, of the last one's product also the probabilities.
        meet()
        if more:
            fetch(
                values, m_tile.index(tile * PIECES + k), landed.index(FIRST + k), row,
                SIDE * (R // 2) + k * W, BN * W * 2,
                (k == PIECES - 1) * (not OWN) * BN * P * 2,
            )  # fmt: skip
    if not OWN:
        if more:
            begin_copy(shared, [row, R], landed.index(FIRST + PIECES - 1), m_p.index(tile))
    return mixed


@gluon.jit
def end_side(
    highest, total, mixed, m_mine, m_sum, told, parts, weights, i_b, i_h, i_s, H, SPLITS,
    SIDE: gl.constexpr, R: gl.constexpr, BH: gl.constexpr, W: gl.constexpr,
    WHOLE: gl.constexpr, ROW: gl.constexpr, ROW_O: gl.constexpr,
):  # fmt: skip
    """Add both sides' sums; write the side's half of the channels, and side 0 the weight."""
    PIECES: gl.constexpr = R // 2 // W
    m_sum.index(SIDE).store(total)
    meet()
    mbarrier.arrive(told.index(3 + SIDE), count=1)
    mbarrier.wait(told.index(4 - SIDE), 0)
    total = total + m_sum.index(1 - SIDE).load(ROW)
    # Of somebody's part there is at least its highest score, which adds 1; padding gets zeros.
    share = gl.convert_layout(1.0 / gl.maximum(total, 1.0), ROW_O)[:, None]
    for k in gl.static_range(PIECES):
        write_piece(
            m_mine.index(SIDE * PIECES + k), mixed[k] * share, parts, i_b, i_h, i_s, H, SPLITS,
            SIDE * (R // 2) + k * W, R, BH, W,
        )  # fmt: skip
    if SIDE == 0:
        if not WHOLE:
            # A part that is empty is zeros, and its weight is that of nothing.
            o_w = i_h * BH + gl.arange(0, BH, ROW)
            p_weights = weights + (i_b * H + o_w) * SPLITS + i_s
            gl.store(p_weights, highest + gl.log2(total), mask=o_w < H)


@gluon.jit
def one_side(
    values,
    shared,
    p_rows,
    s_page,
    rows_end,
    start,
    end,
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
    W: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """What four warps do: the scores of every second tile, and half of the channels of all values.

    The two sides exchange maxima and probabilities, so that one's softmax runs beside the other's
    products. Nobody but this side uses its halves of the tiles last, so it fetches them itself, W
    channels at a time, each as soon as its product is done.
    Probabilities lie where the shared part of the keys lay, which is used up by then.

    Barriers ``landed``, one for every piece of W channels: side 0's of tile 0 and of tile 1, side
    1's of tile 1 and of tile 0; then the queries. ``told``: side 0 has a maximum; side 1 has one,
    and probabilities; side 0 has probabilities; sums of 0; of 1.

    Order: 0, 1 and 2 of ``told`` take turns. All four warps wait before they load, and meet between
    their last access and the arrival or copy that lets the other side, or the copy engine, write
    again: side 1 has read maximum 0 when it tells of its own, side 0 maximum 1 when it tells of its
    probabilities. What threads store and products read is fenced by whoever stored it. The tests
    take every one of these waits, meetings and fences away, and expect a race.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    PIECES: gl.constexpr = R // 2 // W
    LAST: gl.constexpr = (2 * SIDE + 1) * PIECES
    pairs = gl.cdiv(gl.maximum(end - start, 0), 2 * BN)
    highest = gl.full([BH], float("-inf"), gl.float32, ROW)
    total = gl.zeros([BH], gl.float32, ROW)
    zero = gl.zeros([BH, BN], gl.float32, S)
    o_n = gl.arange(0, BN, gl.SliceLayout(0, S))
    mixed = ()
    for _ in gl.static_range(PIECES):
        mixed = mixed + (gl.zeros([BH, W], gl.float32, O),)  # noqa: RUF005
    mbarrier.wait(landed.index(4 * PIECES), 0)
    for j in range(pairs):
        phase = j & 1
        # Zero, but the compiler cannot know: else it would compute the operands' addresses before
        # the loop and spill them (112 registers).
        none = j >> 30
        at = start + j * 2 * BN
        own, other = SIDE + none, 1 - SIDE + none
        next_own = tile_row(p_rows, s_page, at + (2 + SIDE) * BN, end, rows_end, PAGE)
        next_other = tile_row(p_rows, s_page, at + (3 - SIDE) * BN, end, rows_end, PAGE)
        s = begin_scores(
            m_q, m_qp, m_mine, m_others, m_p, landed, own, other, none, phase, zero, SIDE, PIECES
        )  # fmt: skip
        s = warpgroup_mma_wait(0, [s])
        left = end - at - SIDE * BN
        if left < BN:
            s = gl.where((o_n < left)[None, :], s, float("-inf"))
            for k in gl.static_range(PIECES):
                zero_rows(m_mine.index(own * PIECES + k), left, BN, W)
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
        left_p = gl.convert_layout(b_p, LEFT)
        mixed = rescale(mixed, gl.convert_layout(kept, ROW_O)[:, None], PIECES)
        products = begin_mixtures(left_p, m_mine, own, mixed, PIECES)
        mixed = end_mixtures(
            products, values, shared, m_mine, m_p, landed, own, next_own, j + 1 < pairs, SIDE, True,
            R, P, BN, W,
        )  # fmt: skip
        if SIDE == 0:
            mbarrier.wait(told.index(1), phase)
            highest = m_max.index(1).load(ROW)
            kept = gl.exp2(higher - highest)
            total = total * kept
            m_p.index(own).store((p * kept[:, None]).to(gl.bfloat16))
            fence_async_shared()
            meet()
            mbarrier.arrive(told.index(2), count=1)
            mixed = rescale(mixed, gl.convert_layout(kept, ROW_O)[:, None], PIECES)
        else:
            mbarrier.wait(told.index(2), phase)
            highest = higher
        # The other side has waited for this tile; who reads what a copy wrote waits himself.
        for k in gl.static_range(PIECES):
            mbarrier.wait(landed.index(LAST + k), phase)
        left = end - at - (1 - SIDE) * BN
        if left < BN:
            for k in gl.static_range(PIECES):
                zero_rows(m_mine.index(other * PIECES + k), left, BN, W)
        products = begin_mixtures(m_p.index(other), m_mine, other, mixed, PIECES)
        mixed = end_mixtures(
            products, values, shared, m_mine, m_p, landed, other, next_other, j + 1 < pairs, SIDE,
            False, R, P, BN, W,
        )  # fmt: skip
    end_side(
        highest, total, mixed, m_mine, m_sum, told, parts, weights, i_b, i_h, i_s, H, SPLITS,
        SIDE, R, BH, W, WHOLE, ROW, ROW_O,
    )  # fmt: skip


@gluon.jit
def mla_decode_sides_kernel(
    values,
    shared,
    q_values,
    q_shared,
    rows,
    lengths,
    parts,
    weights,
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
    W: gl.constexpr,
    WHOLE: gl.constexpr,
    PDL: gl.constexpr,
):
    """BH heads of one sequence over one part of its context, two tiles at a time: ``one_side``.

    ``values`` and ``shared`` describe blocks [BN, W] and [BN, P] of the latents, ``q_values`` and
    ``q_shared`` [BH, W] and [BH, P] of the queries [B H, R + P]. ``parts`` [B, SPLITS, H, R] are
    bfloat16; with WHOLE they are the result, else empty ones are zeros, with the weight of nothing.
    For the rest see ``mla_decode_kernel``. After FlashMLA's schedule for Hopper.
    """
    if PDL:
        # Programs that add parts would gather where there are none of these, and read for all.
        if WHOLE:
            let_next_begin()
        wait_for_inputs()
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PIECES: gl.constexpr = R // 2 // W
    i_h = gl.program_id(0)
    i_b = gl.program_id(1).to(gl.int64)
    i_s = gl.program_id(2)
    length = gl.load(lengths + i_b).to(gl.int32)
    landed = gl.allocate_shared_memory(gl.int64, [16, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4 * PIECES + 1):
        mbarrier.init(landed.index(i), count=1)
    for i in gl.static_range(5):
        mbarrier.init(told.index(i), count=1)
    m_left = gl.allocate_shared_memory(gl.bfloat16, [2 * PIECES, BN, W], TILE)
    m_right = gl.allocate_shared_memory(gl.bfloat16, [2 * PIECES, BN, W], TILE)
    m_p = gl.allocate_shared_memory(gl.bfloat16, [2, BN, P], TILE)
    m_q = gl.allocate_shared_memory(gl.bfloat16, [2 * PIECES, BH, W], TILE)
    m_qp = gl.allocate_shared_memory(gl.bfloat16, [1, BH, P], TILE)
    m_max = gl.allocate_shared_memory(gl.float32, [2, BH], FLAT)
    m_sum = gl.allocate_shared_memory(gl.float32, [2, BH], FLAT)
    fence_async_shared()
    meet()
    # Nothing is waited for before the queries are asked for, and latents' rows only for the length.
    first = gl.program_id(1) * H + i_h * BH
    first_queries(
        q_values, q_shared, first, m_q, m_qp, landed.index(4 * PIECES), R, P, BH, W
    )  # fmt: skip
    # Tiles are spread evenly: no program has more than one above another.
    tiles = gl.cdiv(length, BN)
    start = tiles * i_s // SPLITS * BN
    end = gl.minimum(tiles * (i_s + 1) // SPLITS * BN, length)
    p_rows = rows + i_b * s_rows
    if start < end:
        row_0 = tile_row(p_rows, s_page, start, end, rows_end, PAGE)
        row_1 = tile_row(p_rows, s_page, start + BN, end, rows_end, PAGE)
        first_tile(values, shared, row_0, m_left, m_right, m_p, landed, 0, R, P, BN, W)
        first_tile(values, shared, row_1, m_right, m_left, m_p, landed, 1, R, P, BN, W)
    gl.warp_specialize(
        [
            (
                one_side,
                (
                    values, shared, p_rows, s_page, rows_end, start, end, scale, m_q, m_qp, m_left,
                    m_right, m_p, m_max, m_sum, landed, told, parts, weights, i_b, i_h, i_s, H,
                    SPLITS, 0, R, P, PAGE, BH, BN, W, WHOLE,
                ),
            ),
            (
                one_side,
                (
                    values, shared, p_rows, s_page, rows_end, start, end, scale, m_q, m_qp, m_right,
                    m_left, m_p, m_max, m_sum, landed, told, parts, weights, i_b, i_h, i_s, H,
                    SPLITS, 1, R, P, PAGE, BH, BN, W, WHOLE,
                ),
            ),
        ],
        [4],
        [240],
    )  # fmt: skip
