"""The products of ``few_kernel.py`` with words that the copy engine brings, in Gluon for Hopper.

A program is 32 whole rows of one expert. They lie in few runs of memory, and all of them are asked
for at its start, into shared memory: what is under way does not depend on registers, on the order
in which warps decode, or on how soon the assembler wants a load. Every of four warps takes each
fourth step of 128 columns of all rows.

Rows of 128 bytes lie in shared memory with their eighths exchanged, so that rows four apart differ
in the banks in which the same words are. Two neighbouring rows of a product are such rows.
"""
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from k3vl.kernels.gluon_parts import begin_copy, meet
from k3vl.kernels.moe.few_kernel import (
    GO_ON,
    PRODUCT,
    PRODUCT_SPLIT,
    REGISTERS,
    WAIT,
    control,
    product,
    threads,
)
from k3vl.kernels.situ.glu_kernel import activated

__all__ = [
    "PRODUCT",
    "PRODUCT_SPLIT",
    "REGISTERS",
    "down_whole_kernel",
    "gate_up_stay_kernel",
    "gate_up_whole_kernel",
]


@gluon.jit
def _asked_for(w, matrix, row, TURNS: gl.constexpr, APART: gl.constexpr):
    """All words of 32 rows on their way: their room and the barriers at which they land.

    w [L / 256, matrices, rows, 32]; a turn is two of the first axis, two of the second, 16 rows.
    A barrier is for APART turns.
    """
    LAID: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4)
    room = gl.allocate_shared_memory(gl.int32, [TURNS, 2, 2, 16, 32], LAID)
    landed = gl.allocate_shared_memory(
        gl.int64, [(TURNS + APART - 1) // APART, 1], mbarrier.MBarrierLayout()
    )
    for i in gl.static_range(0, TURNS, APART):
        mbarrier.init(landed.index(i // APART), count=1)
    meet()
    for i in gl.static_range(TURNS):
        at = landed.index(i // APART)
        if i % APART == 0:
            mbarrier.expect(at, (APART if i + APART < TURNS else TURNS - i) * 8192)
        begin_copy(w, [2 * i, matrix, row, 0], at, room.index(i))
    return room, landed


@gluon.jit
def _words_of(room):
    """Of a turn: four words of rows r and r + 8 of either 16 rows, [128, 8] each."""
    LAID: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 8, 0], [0, 1, 0, 0]],
        [[0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 4, 0], [0, 0, 1, 0], [0, 0, 2, 0]],
        [[0, 0, 0, 16], [1, 0, 0, 0]],
        [],
        [2, 2, 16, 32],
    )
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])
    # 128 columns of two, which 16 rows, their bits 3 to 0, half of the columns, q, word
    words = room.load(LAID).reshape([2, 2, 2, 2, 4, 2, 4, 4])
    words = words.permute((0, 5, 4, 3, 6, 2, 7, 1)).reshape([128, 8, 2])
    a, b = gl.split(words)
    return gl.convert_layout(a, FLAT), gl.convert_layout(b, FLAT)


@gluon.jit
def _row_of(t):
    """Which of eight rows is row g of a product, of the threads ``t`` = 4 g + q."""
    g = t % 32 // 4
    return g % 2 * 4 + g // 2


@gluon.jit
def _scales(a_at, b_at, k, apart):
    """A word of four scales for each of a thread's four rows."""
    a_at += k
    b_at += k
    return gl.load(a_at), gl.load(a_at + apart), gl.load(b_at), gl.load(b_at + apart)


@gluon.jit
def _groups(scale, row_a, row_b, WORDS: gl.constexpr):
    """All scales of a thread's rows, a tuple by four turns: one turn's for each q."""
    TURNS: gl.constexpr = WORDS // 64
    BELOW: gl.constexpr = 8 * (WORDS // 16)
    t, _e = threads(4, 8)
    sa_at = (scale + row_a * (WORDS // 16) + t // 32)[:, None]
    sb_at = (scale + row_b * (WORDS // 16) + t // 32)[:, None]
    groups = ()
    for k in gl.static_range(0, TURNS, 4):
        turn = gl.minimum(k + t % 4, TURNS - 1)[:, None]
        groups = groups + (_scales(sa_at, sb_at, 4 * turn, BELOW),)  # noqa: RUF005
    return groups


@gluon.jit
def _multiplied(
    room, landed, phase, groups, x, token, w, matrix, row, more,
    WORDS: gl.constexpr, APART: gl.constexpr, SPLIT: gl.constexpr, STAYS: gl.constexpr,
):  # fmt: skip
    """[32, 8] sums of 32 rows. Warp p takes steps 4 i + p.

    STAYS: while there are ``more`` rows to come, theirs are asked for into the place of each turn
    as soon as all warps have read it.
    """
    TURNS: gl.constexpr = WORDS // 64
    t, e = threads(4, 8)
    q = t % 4
    part = t // 32
    if SPLIT:
        x_at = (x + token * (WORDS * 4) + part * 8 + 2 * q)[:, None] + (
            e // 2 * (WORDS // 2) + e % 2
        )[None, :]
    else:
        x_at = (x + token * (WORDS * 4) + (part * 4 + q) * 16)[:, None] + e[None, :]
    select = (q * 0x0101 + 0x4040)[:, None]
    acc = gl.zeros([128, 8], gl.float32, gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0]))
    for i in gl.static_range(TURNS):
        at = x_at + i * (32 if SPLIT else 256)
        x0, x1 = gl.load(at), gl.load(at + (WORDS * 2 if SPLIT else 8))
        if i % APART == 0:
            mbarrier.wait(landed.index(i // APART), phase)
        a, b = _words_of(room.index(i))
        if STAYS:
            meet()
            mbarrier.expect(landed.index(i), 8192, pred=more)
            begin_copy(w, [2 * i, matrix, row, 0], landed.index(i), room.index(i), pred=more)
        lane = (t % 32 // 4 * 4 + i % 4)[:, None]
        acc = product(acc, a, b, x0, x1, groups[i // 4], select, lane, SPLIT)
    return gl.sum(acc.reshape([4, 32, 8]), axis=0)


@gluon.jit
def _activated(acc, out, begin, first, end, beta, linear_beta, INNER, SITU: gl.constexpr):
    """Of 16 gates and their ups, into ``out``."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [1, 0])
    BOTH: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, 4, 1], [2, 1, 0])
    # A gate and its up to each thread: else every warp would do the same.
    both = gl.convert_layout(acc.reshape([32, 2, 4]).permute((0, 2, 1)), BOTH)
    gate, up = gl.split(both)
    y = activated(gate, up, beta, linear_beta, SITU).to(out.dtype.element_ty)
    y = gl.convert_layout(y, L)
    t = gl.arange(0, 32, gl.SliceLayout(1, L))[:, None]
    e = gl.arange(0, 4, gl.SliceLayout(0, L))[None, :]
    place = first + t % 4 * 2 + e % 2
    feature = begin + _row_of(t) + e // 2 * 8
    gl.store(out + place.to(gl.int64) * INNER + feature, y, mask=place < end)


@gluon.jit
def _pairs(tile, tile_first, tile_end, ALONE: gl.constexpr):
    """Where a tile begins and ends."""
    if ALONE:
        first, end = tile, tile + 1
    else:
        first = gl.load(tile_first + tile)
        end = gl.minimum(gl.load(tile_end + tile), first + 8)
    return first, end


@gluon.jit
def _token(order, first, end, top_k, ALONE: gl.constexpr):
    """Of every thread's column, g."""
    t, _e = threads(4, 8)
    pair = gl.minimum(first + t % 32 // 4, end - 1)
    if not ALONE:
        pair = gl.load(order + pair)
    return (pair // top_k).to(gl.int64)


@gluon.jit
def gate_up_whole_kernel(
    x, w, scale, order, experts, tile_first, tile_end, tile_count, out, top_k, beta, linear_beta,
    WIDTH: gl.constexpr, INNER: gl.constexpr, SITU: gl.constexpr, APART: gl.constexpr,
    ALONE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """``out[pair] = glu(W1 x, W3 x)`` for 16 features and eight pairs.

    As ``gate_up_few_kernel``; w a descriptor of [WIDTH / 256, 2 E, INNER, 32] words.
    """
    if OVERLAP:
        control(GO_ON)
    tile = gl.program_id(1)
    if not ALONE:  # noqa: SIM102 - what is behind it is then not compiled
        if tile >= gl.load(tile_count):
            return
    first, end = _pairs(tile, tile_first, tile_end, ALONE)
    expert = gl.load(experts + tile).to(gl.int32)
    begin = gl.program_id(0) * 16
    room, landed = _asked_for(w, 2 * expert, begin, WIDTH // 512, APART)
    t, _e = threads(4, 8)
    row = expert.to(gl.int64) * (2 * INNER) + begin + _row_of(t)
    groups = _groups(scale, row, row + INNER, WIDTH // 8)
    token = _token(order, first, end, top_k, ALONE)
    acc = _multiplied(
        room, landed, 0, groups, x, token, w, 0, 0, False, WIDTH // 8, APART, False, False
    )
    _activated(acc, out, begin, first, end, beta, linear_beta, INNER, SITU)


@gluon.jit
def gate_up_stay_kernel(
    x, w, scale, order, experts, tile_first, tile_end, tile_count, out, top_k, beta, linear_beta,
    tiles, WIDTH: gl.constexpr, INNER: gl.constexpr, SITU: gl.constexpr, ALONE: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """:func:`gate_up_whole_kernel` with programs that stay: each takes every so manieth block.

    There are at most ``tiles``, where ALONE just so many.
    """
    if OVERLAP:
        control(GO_ON)
    BLOCKS: gl.constexpr = INNER // 16
    total = (tiles if ALONE else gl.load(tile_count)) * BLOCKS
    block = gl.program_id(0)
    if block >= total:
        return
    expert = gl.load(experts + block // BLOCKS).to(gl.int32)
    room, landed = _asked_for(w, 2 * expert, block % BLOCKS * 16, WIDTH // 512, 1)
    t, _e = threads(4, 8)
    row = expert.to(gl.int64) * (2 * INNER) + block % BLOCKS * 16 + _row_of(t)
    groups = _groups(scale, row, row + INNER, WIDTH // 8)
    phase = 0
    for now in range(block, total, gl.num_programs(0)):
        tile = now // BLOCKS
        begin = now % BLOCKS * 16
        first, end = _pairs(tile, tile_first, tile_end, ALONE)
        token = _token(order, first, end, top_k, ALONE)
        more = now + gl.num_programs(0) < total
        then = gl.minimum(now + gl.num_programs(0), total - 1)
        expert = gl.load(experts + then // BLOCKS).to(gl.int32)
        row = expert.to(gl.int64) * (2 * INNER) + then % BLOCKS * 16 + _row_of(t)
        coming = _groups(scale, row, row + INNER, WIDTH // 8)
        acc = _multiplied(
            room, landed, phase, groups, x, token, w, 2 * expert, then % BLOCKS * 16, more,
            WIDTH // 8, 1, False, True,
        )  # fmt: skip
        _activated(acc, out, begin, first, end, beta, linear_beta, INNER, SITU)
        groups = coming
        phase ^= 1


@gluon.jit
def down_whole_kernel(
    h, w, scale, order, experts, tile_first, tile_end, tile_count, out,
    INNER: gl.constexpr, WIDTH: gl.constexpr, APART: gl.constexpr, ALONE: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """``out[pair] = W2 h`` for 32 features and eight pairs.

    As ``down_few_kernel``; w a descriptor of [INNER / 256, E WIDTH / 16, 16, 32] words. Its words
    are asked for before ``h`` is waited for.
    """
    if OVERLAP:
        control(GO_ON)
    tile = gl.program_id(1)
    if not ALONE:  # noqa: SIM102 - what is behind it is then not compiled
        if tile >= gl.load(tile_count):
            return
    first, end = _pairs(tile, tile_first, tile_end, ALONE)
    expert = gl.load(experts + tile).to(gl.int32)
    begin = gl.program_id(0) * 32
    room, landed = _asked_for(w, (expert * WIDTH + begin) // 16, 0, INNER // 512, APART)
    t, _e = threads(4, 8)
    row = expert.to(gl.int64) * WIDTH + begin + _row_of(t)
    groups = _groups(scale, row, row + 16, INNER // 8)
    place = gl.minimum(first + t % 32 // 4, end - 1).to(gl.int64)
    if OVERLAP:
        control(WAIT)
    acc = _multiplied(
        room, landed, 0, groups, h, place, w, 0, 0, False, INNER // 8, APART, True, False
    )
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])
    y = gl.convert_layout(acc.to(out.dtype.element_ty), L)
    t = gl.arange(0, 32, gl.SliceLayout(1, L))[:, None]
    e = gl.arange(0, 8, gl.SliceLayout(0, L))[None, :]
    pair = first + t % 4 * 2 + e % 2
    there = pair < end
    if not ALONE:
        pair = gl.load(order + pair, mask=there, other=0)
    feature = begin + _row_of(t) + e // 2 * 8
    gl.store(out + pair.to(gl.int64) * WIDTH + feature, y, mask=there)
