"""Absorbed MLA decode for compute capability 9.0, in Gluon: two sides that do the same.

Tiles, copies and memory are those of ``hopper_kernels``, launched lean. There, side 1 knows the
maximum of both tiles and side 0 rescales twice; here the sides tell each other their maxima before
either has probabilities, so that both have them at once, once and for all.
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
from k3vl.kernels.mla.hopper_kernels import (
    ask_for_tiles,
    fetch,
    first_tiles,
    tile_row,
    write_half,
    zero_rows,
)


@gluon.jit
def score(m_q, m_qp, m_mine, m_others, m_p, landed, j, SIDE: gl.constexpr, BH: gl.constexpr,
          BN: gl.constexpr):  # fmt: skip
    """Begin the scores of this side's tile, its halves in the order in which they land."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    # Zero, but the compiler cannot know: see ``one_side``.
    none = j >> 30
    own, other = SIDE + none, 1 - SIDE + none
    zero = gl.zeros([BH, BN], gl.float32, S)
    mbarrier.wait(landed.index(3 * SIDE), j & 1)
    b_k = m_mine.index(own).permute((1, 0))
    s = warpgroup_mma(m_q.index(own), b_k, zero, use_acc=False, is_async=True)
    mbarrier.wait(landed.index(2 - SIDE), j & 1)
    s = warpgroup_mma(m_q.index(other), m_others.index(own).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(m_qp.index(none), m_p.index(own).permute((1, 0)), s, is_async=True)


@gluon.jit
def even_side(
    values, shared, latents, s_latents, p_rows, s_page, rows_end, start, end, scale, m_q, m_qp,
    m_mine, m_others, m_p, m_max, m_sum, landed, told, target, weights, i_b, i_h, i_s, H, SPLITS,
    SIDE: gl.constexpr, R: gl.constexpr, P: gl.constexpr, PAGE: gl.constexpr, BH: gl.constexpr,
    BN: gl.constexpr, WHOLE: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """What four warps do: as ``one_side``, with one order for both.

    Barriers ``told``: maxima of side 0 and of side 1, probabilities, sums. A side has read the
    other's maximum when it tells of its probabilities, which the other waits for before it has
    another one; it has used the other's probabilities when it fetches the keys that replace them.
    The tests take every wait, meeting and fence away, and expect a race.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R // 2, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    HALF: gl.constexpr = BN * (R // 2) * 2
    COLUMN: gl.constexpr = SIDE * (R // 2)
    LAST: gl.constexpr = 1 + SIDE
    pairs = gl.cdiv(gl.maximum(end - start, 0), 2 * BN)
    highest = gl.full([BH], float("-inf"), gl.float32, ROW)
    total = gl.zeros([BH], gl.float32, ROW)
    mixed = gl.zeros([BH, R // 2], gl.float32, O)
    for j in range(pairs):
        phase = j & 1
        none = j >> 30
        at = start + j * 2 * BN
        own, other = SIDE + none, 1 - SIDE + none
        b_own, b_other = m_mine.index(own), m_mine.index(other)
        next_own = tile_row(p_rows, s_page, at + (2 + SIDE) * BN, end, rows_end, PAGE)
        next_other = tile_row(p_rows, s_page, at + (3 - SIDE) * BN, end, rows_end, PAGE)
        s = score(m_q, m_qp, m_mine, m_others, m_p, landed, j, SIDE, BH, BN)
        if SIDE == 1 and AHEAD > 0:
            if i_h == 0:
                at_ahead = at + AHEAD * 2 * BN
                ask_for_tiles(latents, s_latents, p_rows, s_page, at_ahead, 2, end, PAGE, BN, R + P)
        s = warpgroup_mma_wait(0, [s])
        left = end - at - SIDE * BN
        if left < BN:
            o_n = gl.arange(0, BN, gl.SliceLayout(0, S))
            s = gl.where((o_n < left)[None, :], s, float("-inf"))
        peak = gl.max(s, 1) * scale
        m_max.index(SIDE).store(peak)
        # By now all four warps have read the keys that the probabilities replace.
        meet()
        mbarrier.arrive(told.index(SIDE), count=1)
        mbarrier.wait(told.index(1 - SIDE), phase)
        higher = gl.maximum(highest, gl.maximum(peak, m_max.index(1 - SIDE).load(ROW)))
        p = gl.exp2(s * scale - higher[:, None])
        b_p = p.to(gl.bfloat16)
        m_p.index(own).store(b_p)
        fence_async_shared()
        meet()
        mbarrier.arrive(told.index(2 + SIDE), count=1)
        kept = gl.exp2(highest - higher)
        total = total * kept + gl.sum(p, 1)
        highest = higher
        mixed = mixed * gl.convert_layout(kept, ROW_O)[:, None]
        if left < BN:
            zero_rows(b_own, left, BN, R // 2)
        product = warpgroup_mma(gl.convert_layout(b_p, LEFT), b_own, mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, [product])
        meet()
        if j + 1 < pairs:
            fetch(values, b_own, landed.index(3 * SIDE), next_own, COLUMN, HALF, 0)
        # The other side has waited for this tile; who reads what a copy wrote waits himself.
        mbarrier.wait(landed.index(LAST), phase)
        mbarrier.wait(told.index(3 - SIDE), phase)
        left = end - at - (1 - SIDE) * BN
        if left < BN:
            zero_rows(b_other, left, BN, R // 2)
        product = warpgroup_mma(m_p.index(other), b_other, mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, [product])
        meet()
        if j + 1 < pairs:
            fetch(values, b_other, landed.index(LAST), next_other, COLUMN, HALF, BN * P * 2)
            begin_copy(shared, [next_other, R], landed.index(LAST), m_p.index(other))
    m_sum.index(SIDE).store(total)
    meet()
    mbarrier.arrive(told.index(4 + SIDE), count=1)
    mbarrier.wait(told.index(5 - SIDE), 0)
    total = total + m_sum.index(1 - SIDE).load(ROW)
    mixed = mixed / gl.convert_layout(gl.maximum(total, 1.0), ROW_O)[:, None]
    there = WHOLE or start < end
    m_half = m_mine.index(SIDE)
    write_half(m_half, mixed, target, i_b, i_h, i_s, H, SPLITS, there, COLUMN, R, BH)
    if SIDE == 0 and not WHOLE:
        # Of a part that is empty there is only the weight, and that is nothing.
        o_w = i_h * BH + gl.arange(0, BH, ROW)
        p_weights = weights + (i_b * H + o_w) * SPLITS + i_s
        gl.store(p_weights, highest + gl.log2(total), mask=o_w < H)


@gluon.jit
def mla_decode_even_kernel(
    values,
    shared,
    latents,
    q,
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
    AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):
    """BH heads of one sequence over one part of its context, two tiles at a time: ``even_side``.

    See ``mla_decode_sides_kernel``: it is lean.
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
    for i in gl.static_range(6):
        mbarrier.init(told.index(i), count=1)
    m_left = gl.allocate_shared_memory(gl.bfloat16, [2, BN, R // 2], TILE)
    m_right = gl.allocate_shared_memory(gl.bfloat16, [2, BN, R // 2], TILE)
    m_p = gl.allocate_shared_memory(gl.bfloat16, [2, BN, P], TILE)
    m_q = gl.allocate_shared_memory(gl.bfloat16, [2, BH, R // 2], TILE)
    m_qp = gl.allocate_shared_memory(gl.bfloat16, [1, BH, P], TILE)
    m_max = gl.allocate_shared_memory(gl.float32, [2, BH], FLAT)
    m_sum = gl.allocate_shared_memory(gl.float32, [2, BH], FLAT)
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
    if AHEAD > 0:
        if i_h == 0:
            ask_for_tiles(
                latents, s_latents, p_rows, s_page, start + 2 * BN, 2 * AHEAD - 2, end, PAGE, BN,
                R + P,
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
                even_side,
                (
                    values, shared, latents, s_latents, p_rows, s_page, rows_end, start, end,
                    scale, m_q, m_qp, m_left, m_right, m_p, m_max, m_sum, landed, told,
                    out if WHOLE else parts, weights, i_b, i_h, i_s, H, SPLITS, 0, R, P, PAGE, BH,
                    BN, WHOLE, AHEAD,
                ),
            ),
            (
                even_side,
                (
                    values, shared, latents, s_latents, p_rows, s_page, rows_end, start, end,
                    scale, m_q, m_qp, m_right, m_left, m_p, m_max, m_sum, landed, told,
                    out if WHOLE else parts, weights, i_b, i_h, i_s, H, SPLITS, 1, R, P, PAGE, BH,
                    BN, WHOLE, AHEAD,
                ),
            ),
        ],
        [4],
        [240],
    )  # fmt: skip
