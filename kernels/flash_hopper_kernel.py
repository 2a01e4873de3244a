"""Softmax attention over packed sequences for compute capability 9.0, in Gluon.

After FlashAttention 3: a warp copies tiles of keys and values, two groups of four warps hold 64
queries each, so that one's softmax runs beside the other's products; within a group the scores of a
tile are computed beside the mixture of the tile before. Unlike there, where nothing is causal, a
group begins its products when the other has its scores, and powers are relative to the largest
score of a row's first tile: no maxima, no rescaling in the loop. Items where a score outgrows that
are done again.

A work item is a tile of queries of one head. ``tiles`` has a row of five numbers (int64) for each
tile: its first query, how many there are, the sequence's first key, how many keys any of the
queries sees, how many the first one sees.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, attr-defined"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from k3vl.kernels.gluon_parts import (
    begin_copy,
    give_turn,
    let_next_begin,
    meet,
    take_turn,
    wait_for_inputs,
)

ROWS = gl.constexpr(64)
MOST = gl.constexpr(2.0**64)
"""Of a sum of powers that are relative to another score than their largest."""


@gluon.jit
def work_item(tiles, i, M):
    """Head and row of ``tiles`` of the work item ``i``: heads follow one another."""
    p_tile = tiles + i % M * 5
    return i // M, p_tile


@gluon.jit
def fetch_item(
    q, q_rest, k, k_rest, v, tiles, rooms, words, strides, i, done, turn, M, K: gl.constexpr,
    P: gl.constexpr, V: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Queries of a work item, then its keys and values from the last tile to the first."""
    m_q, m_qp, m_k, m_kp, m_v = rooms
    landed_q, landed_k, landed_v, used_q, used_first, used, _ = words
    s_qh, s_kh, s_rest_h, s_vh = strides
    head, p_tile = work_item(tiles, i, M)
    first = gl.load(p_tile).to(gl.int32)
    first_k = gl.load(p_tile + 2).to(gl.int32)
    blocks = gl.cdiv(gl.load(p_tile + 3).to(gl.int32), BN)
    mbarrier.wait(used_q.index(0), (turn & 1) ^ 1)
    mbarrier.expect(landed_q.index(0), 2 * ROWS * (K + P) * 2)
    for side in gl.static_range(2):
        begin_copy(q, [first + side * ROWS, head * s_qh], landed_q.index(0), m_q.index(side))
        if P > 0:
            at = [first + side * ROWS, head * s_qh + K]
            begin_copy(q_rest, at, landed_q.index(0), m_qp.index(side))
    for j in range(blocks):
        stage = done % STAGES
        row = first_k + (blocks - 1 - j) * BN
        # Keys STAGES tiles back are used up: the first ones with a word of their own, later ones
        # with the values before them, which the copy of the last values has waited for.
        if j == STAGES:
            mbarrier.wait(used_first.index(0), turn & 1)
        elif j < STAGES:
            mbarrier.wait(used.index(stage), done // STAGES & 1 ^ 1)
        mbarrier.expect(landed_k.index(stage), BN * (K + P) * 2)
        begin_copy(k, [row, head * s_kh], landed_k.index(stage), m_k.index(stage))
        if P > 0:
            begin_copy(k_rest, [row, head * s_rest_h], landed_k.index(stage), m_kp.index(stage))
        mbarrier.wait(used.index(stage), done // STAGES & 1 ^ 1)
        mbarrier.expect(landed_v.index(stage), BN * V * 2)
        begin_copy(v, [row, head * s_vh], landed_v.index(stage), m_v.index(stage))
        done += 1
    return done, turn + 1


@gluon.jit
def fetch_tiles(
    q, q_rest, k, k_rest, v, tiles, again, rooms, words, strides, M, COUNT, K: gl.constexpr,
    P: gl.constexpr, V: gl.constexpr, BN: gl.constexpr, FIXED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What one warp does: copies of all work items, and of those that are done again."""
    done = 0
    turn = 0
    for i in range(gl.program_id(0), COUNT, gl.num_programs(0)):
        done, turn = fetch_item(
            q, q_rest, k, k_rest, v, tiles, rooms, words, strides, i, done, turn, M, K, P, V, BN,
            STAGES,
        )  # fmt: skip
    if FIXED:
        mbarrier.wait(words[6].index(0), 0)
        if marked(again, COUNT + gl.program_id(0)):
            for i in range(gl.program_id(0), COUNT, gl.num_programs(0)):
                if marked(again, i):
                    done, turn = fetch_item(
                        q, q_rest, k, k_rest, v, tiles, rooms, words, strides, i, done, turn, M, K,
                        P, V, BN, STAGES,
                    )  # fmt: skip


@gluon.jit
def marked(again, i):
    """Whether either side has marked place ``i``."""
    place = again + i * 2
    one = gl.load(place, cache_modifier=".cg")
    return one + gl.load(place + 1, cache_modifier=".cg") > 0


@gluon.jit
def zero_rows(tile, left, BN: gl.constexpr, WIDTH: gl.constexpr):
    """Clear rows from ``left`` on: they may hold NaN, and 0 x NaN is NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_n = gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    for k in gl.static_range(WIDTH // 64):
        piece = tile.slice(k * 64, 64, dim=1)
        piece.store(gl.where((o_n < left)[:, None], piece.load(LAYOUT), 0.0))
    fence_async_shared()
    meet()


@gluon.jit
def turns_of(turns, first, live, K: gl.constexpr):
    """Cosine and sine of every pair of ROWS rows, of which the first ``live`` are there."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_m = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    o_k = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    inside = (o_m < live)[:, None] & (o_k < 64)[None, :]
    at = turns + (first + o_m[:, None]) * K + o_k[None, :]
    pieces = ()
    for k in gl.static_range(K // 64):
        pieces = pieces + (gl.load(at + k * 64, mask=inside, other=0.0),)  # noqa: RUF005
    return pieces


@gluon.jit
def turn_rows(tile, pieces, K: gl.constexpr):
    """Turn pairs of columns of ROWS rows; what is not there becomes 0."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for k in gl.static_range(K // 64):
        piece = tile.slice(k * 64, 64, dim=1)
        cosine, sine = gl.split(gl.reshape(pieces[k], [ROWS, 32, 2]))
        x = gl.reshape(piece.load(LAYOUT).to(gl.float32), [ROWS, 32, 2])
        even, odd = gl.split(x)
        turned = gl.join(even * cosine - odd * sine, even * sine + odd * cosine)
        turned = gl.convert_layout(gl.reshape(turned, [ROWS, 64]), LAYOUT)
        piece.store(turned.to(gl.bfloat16))
    fence_async_shared()
    meet()


@gluon.jit
def row_sums(p, BN: gl.constexpr, FIXED: gl.constexpr):
    """Of every row; ``FIXED``: in eight parts, which no other thread has to be asked for."""
    if FIXED:
        sums = gl.sum(gl.reshape(p, [ROWS, BN // 8, 8]), 1)
    else:
        sums = gl.sum(p, 1)
    return sums


@gluon.jit
def attend_item(
    tiles, turns, rooms, words, out, scale, i, done, turn, H, M, TOTAL, SIDE: gl.constexpr,
    K: gl.constexpr, P: gl.constexpr, V: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr,
    TURN: gl.constexpr, FIXED: gl.constexpr, ORDERED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What four warps do with 64 queries of a work item.

    ``FIXED``: powers are relative to the largest score of the first tile. Then the last result is
    1 where a sum of powers says that a score has outgrown it too far, else 0.
    """
    m_q, m_qp, m_k, m_kp, m_v = rooms
    landed_q, landed_k, landed_v, used_q, used_first, used, _ = words
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    zero = gl.zeros([ROWS, BN], gl.float32, S)
    o_n = gl.arange(0, BN, gl.SliceLayout(0, S))
    o_m = gl.arange(0, ROWS, ROW)
    o_mo = SIDE * ROWS + gl.arange(0, ROWS, ROW_O)
    o_v = gl.arange(0, V, gl.SliceLayout(0, O))
    head, p_tile = work_item(tiles, i, M)
    first = gl.load(p_tile)
    live = gl.load(p_tile + 1).to(gl.int32)
    seen = gl.load(p_tile + 3).to(gl.int32)
    first_sees = gl.load(p_tile + 4).to(gl.int32) + SIDE * ROWS
    blocks = gl.cdiv(seen, BN)
    if TURN:
        pieces = turns_of(turns, first + SIDE * ROWS, live - SIDE * ROWS, K)
    # Keys of the last tile.
    mbarrier.wait(landed_q.index(0), turn & 1)
    if TURN:
        turn_rows(m_q.index(SIDE), pieces, K)
    stage = done % STAGES
    mbarrier.wait(landed_k.index(stage), done // STAGES & 1)
    b_k = m_k.index(stage).permute((1, 0))
    s = warpgroup_mma(m_q.index(SIDE), b_k, zero, use_acc=False, is_async=True)
    if P > 0:
        b_kp = m_kp.index(stage).permute((1, 0))
        s = warpgroup_mma(m_qp.index(SIDE), b_kp, s, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    meet()
    mbarrier.arrive(used_first.index(0), count=1)
    at = (blocks - 1) * BN
    visible = (at + o_n < seen)[None, :]
    if CAUSAL:
        visible = visible & (at + o_n[None, :] < first_sees + o_m[:, None])
    s = gl.where(visible, s, float("-inf"))
    highest = gl.maximum(gl.max(s, 1) * scale, -1e30)
    p = gl.exp2(s * scale - highest[:, None])
    total = row_sums(p, BN, FIXED)
    b_p = gl.convert_layout(p.to(gl.bfloat16), LEFT)
    mixed = gl.zeros([ROWS, V], gl.float32, O)
    mbarrier.wait(landed_v.index(stage), done // STAGES & 1)
    others = seen - at < BN
    if FIXED:  # behind the last row of all there are zeros
        others = others & (gl.load(p_tile + 2) + seen < TOTAL)
    if others:
        zero_rows(m_v.index(stage), seen - at, BN, V)
    meet()
    for j in range(1, blocks):
        before = done % STAGES
        done += 1
        stage = done % STAGES
        phase = done // STAGES & 1
        mbarrier.wait(landed_k.index(stage), phase)
        if ORDERED:
            take_turn(14 + SIDE)
        b_k = m_k.index(stage).permute((1, 0))
        s = warpgroup_mma(m_q.index(SIDE), b_k, zero, use_acc=False, is_async=True)
        if P > 0:
            b_kp = m_kp.index(stage).permute((1, 0))
            s = warpgroup_mma(m_qp.index(SIDE), b_kp, s, is_async=True)
        product = warpgroup_mma(b_p, m_v.index(before), mixed, is_async=True)
        s = warpgroup_mma_wait(1, [s])
        if ORDERED:
            give_turn(15 - SIDE)
        if CAUSAL:
            at = (blocks - 1 - j) * BN
            if at + BN > first_sees:
                visible = at + o_n[None, :] < first_sees + o_m[:, None]
                s = gl.where(visible, s, float("-inf"))
        if FIXED:
            p = gl.exp2(s * scale - highest[:, None])
            total = total + row_sums(p, BN, FIXED)
        else:
            higher = gl.maximum(highest, gl.max(s, 1) * scale)
            p = gl.exp2(s * scale - higher[:, None])
            kept = gl.exp2(highest - higher)
            total = total * kept + row_sums(p, BN, FIXED)
            highest = higher
        # Needed in the next round; here it keeps the assembler from moving the softmax behind
        # the end of the product beside it.
        mbarrier.wait(landed_v.index(stage), phase)
        mixed = warpgroup_mma_wait(0, [product])
        meet()
        mbarrier.arrive(used.index(before), count=1)
        if not FIXED:
            mixed = mixed * gl.convert_layout(kept, ROW_O)[:, None]
        b_p = gl.convert_layout(p.to(gl.bfloat16), LEFT)
    mbarrier.arrive(used_q.index(0), count=1)
    last = done % STAGES
    product = warpgroup_mma(b_p, m_v.index(last), mixed, is_async=True)
    mixed = warpgroup_mma_wait(0, [product])
    meet()
    mbarrier.arrive(used.index(last), count=1)
    done += 1
    turn += 1
    if FIXED:
        total = gl.sum(total, 1)
    total = gl.convert_layout(total, ROW_O)
    mixed = mixed / total[:, None]
    p_out = out + (first + o_mo[:, None]) * (H * V) + head * V + o_v[None, :]
    gl.store(p_out, mixed.to(out.dtype.element_ty), mask=(o_mo < live)[:, None])
    outgrown = 0
    if FIXED:
        outgrown = gl.max(gl.where((total < MOST) | (o_mo >= live), 0, 1).to(gl.int32), 0)
    return done, turn, outgrown


@gluon.jit
def attend_side(
    tiles, again, turns, rooms, words, out, scale, H, M, COUNT, TOTAL, SIDE: gl.constexpr,
    K: gl.constexpr, P: gl.constexpr, V: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr,
    TURN: gl.constexpr, FIXED: gl.constexpr, ORDERED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What four warps do: 64 queries of every work item, those that ask for it twice."""
    done = 0
    turn = 0
    any_outgrown = 0
    if ORDERED and SIDE == 1:
        give_turn(14)
    for i in range(gl.program_id(0), COUNT, gl.num_programs(0)):
        done, turn, outgrown = attend_item(
            tiles, turns, rooms, words, out, scale, i, done, turn, H, M, TOTAL, SIDE, K, P, V, BN,
            CAUSAL, TURN, FIXED, ORDERED, STAGES,
        )  # fmt: skip
        if FIXED:
            gl.store(again + i * 2 + SIDE, outgrown)
            any_outgrown = gl.maximum(any_outgrown, outgrown)
    if FIXED:
        i = COUNT + gl.program_id(0)
        gl.store(again + i * 2 + SIDE, any_outgrown.to(gl.int32))
        meet()
        mbarrier.arrive(words[6].index(0), count=1)
        mbarrier.wait(words[6].index(0), 0)
        if marked(again, i):
            for i in range(gl.program_id(0), COUNT, gl.num_programs(0)):
                if marked(again, i):
                    done, turn, _ = attend_item(
                        tiles, turns, rooms, words, out, scale, i, done, turn, H, M, TOTAL, SIDE,
                        K, P, V, BN, CAUSAL, TURN, False, ORDERED, STAGES,
                    )  # fmt: skip
    if ORDERED and SIDE == 0:
        take_turn(14)  # which nobody needs any more


@gluon.jit
def flash_hopper_kernel(
    q, q_rest, k, k_rest, v, tiles, again, turns, out, s_qh, s_kh, s_rest_h, s_vh, scale, H, M,
    COUNT, TOTAL, K: gl.constexpr, P: gl.constexpr, V: gl.constexpr, BN: gl.constexpr,
    CAUSAL: gl.constexpr, TURN: gl.constexpr, FIXED: gl.constexpr, ORDERED: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Programs take work items of 128 queries in turn; ``scale`` includes the logarithm's base.

    ``q``, ``k`` and ``v`` describe blocks of 64, BN and BN rows, ``q_rest`` and ``k_rest`` those of
    the second part of queries and keys (P columns; None without one). ``s_qh`` and so on lie
    between two heads. ``k`` and ``v`` have TOTAL rows, which counts where FIXED.

    ``TURN``: queries are turned here, as ``vision_pos`` does, by ``turns``, [N, K / 2, 2] float32;
    else None. ``FIXED``: see ``attend_item``; ``again`` is memory for marks, [COUNT + programs, 2]
    int32, else None. ``ORDERED``: a group begins its products when the other has its scores.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Barriers that one group waits for or arrives at between two of its own are allocated apart:
    # Triton would have its warps meet between two uses of one allocation.
    landed_q = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    landed_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    landed_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    used_q = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    used_first = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    through = used_q
    if FIXED:
        through = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(landed_q.index(0), count=1)
    mbarrier.init(used_q.index(0), count=2)
    mbarrier.init(used_first.index(0), count=2)
    if FIXED:
        mbarrier.init(through.index(0), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(landed_k.index(i), count=1)
        mbarrier.init(landed_v.index(i), count=1)
        mbarrier.init(used.index(i), count=2)
    m_q = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, K], TILE)
    m_k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, K], TILE)
    m_v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, V], TILE)
    m_qp = m_q
    m_kp = m_k
    if P > 0:
        m_qp = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, P], TILE)
        m_kp = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, P], TILE)
    meet()
    if PDL:
        let_next_begin()
        wait_for_inputs()
    rooms = (m_q, m_qp, m_k, m_kp, m_v)
    words = (landed_q, landed_k, landed_v, used_q, used_first, used, through)
    strides = (s_qh, s_kh, s_rest_h, s_vh)
    gl.warp_specialize(
        [
            (
                attend_side,
                (
                    tiles, again, turns, rooms, words, out, scale, H, M, COUNT, TOTAL, 0, K, P, V,
                    BN, CAUSAL, TURN, FIXED, ORDERED, STAGES,
                ),
            ),
            (
                attend_side,
                (
                    tiles, again, turns, rooms, words, out, scale, H, M, COUNT, TOTAL, 1, K, P, V,
                    BN, CAUSAL, TURN, FIXED, ORDERED, STAGES,
                ),
            ),
            (
                fetch_tiles,
                (
                    q, q_rest, k, k_rest, v, tiles, again, rooms, words, strides, M, COUNT, K, P,
                    V, BN, FIXED, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
