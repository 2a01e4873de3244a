"""Absorbed MLA decode of 96 heads for compute capability 9.0, turned: heads are columns.

Rows of the tensor cores come 64 at a time, columns by eights. With latents as rows of the scores
and channels as rows of the mixtures nothing of 96 heads is padding, and one program serves them
all, so a latent is fetched once. Products with such widths are PTX (``turned_ptx.py``).
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from k3vl.kernels.gluon_parts import begin_copy, let_next_begin, meet, seen_as, wait_for_inputs
from k3vl.kernels.mla import turned_ptx as ptx
from k3vl.kernels.mla.hopper_kernels import tile_row

BEGIN_SCORES, BEGIN_TYPES = gl.constexpr(ptx.BEGIN_SCORES), gl.constexpr(ptx.BEGIN_TYPES)
SHARED_SCORES, END_SCORES = gl.constexpr(ptx.SHARED_SCORES), gl.constexpr(ptx.END_SCORES)
SCORES_TYPES = gl.constexpr(ptx.SCORES_TYPES)
MIX_LATE, MIX_EARLY = gl.constexpr(ptx.MIX_LATE), gl.constexpr(ptx.MIX_EARLY)
MIX_TYPES = gl.constexpr(ptx.MIX_TYPES)
ADD, ADD_TYPES = gl.constexpr(ptx.ADD), gl.constexpr(ptx.ADD_TYPES)
MIX_WAITS, MIX_WAIT_TYPES = gl.constexpr(ptx.MIX_WAITS), gl.constexpr(ptx.MIX_WAIT_TYPES)
WEIGH, SOFTMAX_TYPES = gl.constexpr(ptx.WEIGH), gl.constexpr(ptx.SOFTMAX_TYPES)
REFER = gl.constexpr(ptx.REFER)
SCORES_WAIT_TYPES = gl.constexpr(ptx.SCORES_WAIT_TYPES)
VERDICT, CHECK_PLACE = gl.constexpr(ptx.VERDICT), gl.constexpr(ptx.CHECK_PLACE)
SLABS = gl.constexpr(ptx.SLABS)
TWO_ONES = gl.constexpr(ptx.TWO_ONES)
EARLY_SLAB, LATE_SLAB, SHARED_SLAB, QUERY_SLAB, PROBABILITY_SLAB = (
    gl.constexpr(x // 4096)
    for x in (ptx.EARLY, ptx.LATE, ptx.SHARED, ptx.QUERIES, ptx.PROBABILITIES)
)


@gluon.jit
def begin_scores(_room, offset):
    """Three tensors [2 x 64 latents, 16 heads]: of the early channels, under way."""
    return gl.inline_asm_elementwise(
        BEGIN_SCORES, BEGIN_TYPES, [offset],
        dtype=(gl.float32, gl.float32, gl.float32), is_pure=False, pack=8,
    )  # fmt: skip


@gluon.jit
def more_scores(_room, s, LAST: gl.constexpr):
    """Add the shared part's scores, or the late channels'; those are waited for."""
    return gl.inline_asm_elementwise(
        END_SCORES if LAST else SHARED_SCORES, SCORES_TYPES, [s[0], s[1], s[2], 0],
        dtype=(gl.float32, gl.float32, gl.float32), is_pure=False, pack=8,
    )  # fmt: skip


@gluon.jit
def no_scores(s):
    """Wait for scores that were begun for nothing."""
    gl.inline_asm_elementwise(
        MIX_WAITS[0], SCORES_WAIT_TYPES, [s[0], s[1], s[2]],
        dtype=(gl.float32, gl.float32, gl.float32), is_pure=False, pack=8,
    )  # fmt: skip


@gluon.jit
def verdict(_notes):
    """What has been noted."""
    return gl.inline_asm_elementwise(VERDICT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def check_place(_notes):
    """Fail unless the notes lie where PTX expects them, and so the room before them."""
    gl.inline_asm_elementwise(CHECK_PLACE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def refer(_notes, s, scale):
    """Make the first latent's scores the references."""
    gl.inline_asm_elementwise(
        REFER, SOFTMAX_TYPES, [s[0], s[1], s[2], scale], dtype=gl.int32, is_pure=False, pack=8
    )


@gluon.jit
def weigh(_room, _notes, s, scale):
    """Write probabilities; note if a score exceeds its reference by too much.

    In a line with its operands, by which ``benchmarks/sanitize.py`` knows it.
    """
    gl.inline_asm_elementwise(WEIGH, SOFTMAX_TYPES, [s[0], s[1], s[2], scale],
                              dtype=gl.int32, is_pure=False, pack=8)  # fmt: skip


@gluon.jit
def mix(_room, acc, offset, LATE: gl.constexpr):
    """Begin to add a tile's values: its late channels to the first half, or its early ones."""
    if LATE:
        a, b, c, d, e, f = acc[0], acc[1], acc[2], acc[3], acc[4], acc[5]
    else:
        a, b, c, d, e, f = acc[6], acc[7], acc[8], acc[9], acc[10], acc[11]
    more = gl.inline_asm_elementwise(
        MIX_LATE if LATE else MIX_EARLY, MIX_TYPES, [a, b, c, d, e, f, offset],
        dtype=(gl.float32,) * 6, is_pure=False, pack=16,
    )  # fmt: skip
    if LATE:
        acc = (more[0], more[1], more[2], more[3], more[4], more[5], acc[6], acc[7], acc[8],
               acc[9], acc[10], acc[11])  # fmt: skip
    else:
        acc = (acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], more[0], more[1], more[2], more[3],
               more[4], more[5])  # fmt: skip
    return acc


@gluon.jit
def add_up(_room, _notes, total):
    """Begin to add probabilities: rows [64 of 96 heads, 8 times] of either group of warps."""
    return gl.inline_asm_elementwise(
        ADD, ADD_TYPES, [total], dtype=gl.float32, is_pure=False, pack=4
    )


@gluon.jit
def mix_wait(acc, LEFT: gl.constexpr):
    """Wait until at most so many halves are under way."""
    return gl.inline_asm_elementwise(
        MIX_WAITS[LEFT], MIX_WAIT_TYPES,
        [acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7], acc[8], acc[9], acc[10],
         acc[11]],
        dtype=(gl.float32,) * 12, is_pure=False, pack=16,
    )  # fmt: skip


@gluon.jit
def slabs(room, FIRST: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, at):
    """A part of the room as [ROWS, COLUMNS]; it begins at a multiple of its own size."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    COUNT: gl.constexpr = ROWS * COLUMNS // 2048
    parts = seen_as(room, gl.bfloat16, [SLABS // COUNT, ROWS, COLUMNS], TILE)
    return parts.index((FIRST + at) // COUNT)


@gluon.jit
def keep(room):
    """Nothing else may lie there before: the compiler does not know what PTX uses."""
    room._keep_alive()


@gluon.jit
def zero_rows(tile, left):
    """Clear rows of [64, 64] from ``left`` on: they may hold NaN, and 0 x NaN is NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    o_n = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    tile.store(gl.where((o_n < left)[:, None], tile.load(LAYOUT), 0.0))


@gluon.jit
def aside(notes):
    """Room for a number for each of the rows that are added up."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return seen_as(notes, gl.float32, [4, 128], FLAT).index(1)


@gluon.jit
def raised(s, acc, total, notes, scale):
    """Raise every head's reference to the highest score so far; what was added becomes less."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 8, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 32, 16])
    more = ()
    for n in gl.static_range(3):
        peak = gl.max(s[n].reshape([2, 64, 16]), 1).reshape([32]) * scale
        old = notes.index(n).load(FLAT)
        new = gl.maximum(old, gl.convert_layout(peak, FLAT))
        notes.index(n).store(new)
        kept = gl.exp2(old - new)
        # The rows of the first group of warps are heads of n = 0 and 1, of the second 1 and 2.
        if n < 2:
            notes.index(4 + n).store(kept)
        if n > 0:
            notes.index(5 + n).store(kept)
        column = gl.convert_layout(kept, gl.SliceLayout(0, O))[None, :]
        for m in gl.static_range(4):
            more = more + (acc[3 * m + n] * column,)  # noqa: RUF005
    notes.index(3).store(gl.zeros([32], gl.float32, FLAT))
    meet()
    total = total * aside(notes).load(gl.SliceLayout(1, SUM))[:, None]
    acc = (more[0], more[4], more[8], more[1], more[5], more[9], more[2], more[6], more[10],
           more[3], more[7], more[11])  # fmt: skip
    return acc, total


@gluon.jit
def load_queries(p_q, s_qh, H):
    """All of them, into registers: 8, 8, 8, 2 and 1 slabs, heads fastest, then columns."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    o_k = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    parts = ()
    for i in gl.static_range(5):
        o_r = gl.arange(0, (256, 256, 256, 64, 32)[i], gl.SliceLayout(1, ROWS))
        o_r += (0, 256, 512, 768, 832)[i]
        o_h = o_r % 96
        at = (o_h * s_qh + o_r // 96 * 64)[:, None] + o_k[None, :]
        parts = parts + (gl.load(p_q + at, mask=(o_h < H)[:, None], other=0.0),)  # noqa: RUF005
    return parts


@gluon.jit
def store_queries(room, parts):
    """Where products look for them."""
    for i in gl.static_range(3):
        slabs(room, QUERY_SLAB + 8 * i, 256, 64, 0).store(parts[i])
    slabs(room, QUERY_SLAB + 24, 64, 64, 0).store(parts[3])
    slabs(room, QUERY_SLAB + 26, 32, 64, 0).store(parts[4])


@gluon.jit
def all_tiles(
    values, shared, room, notes, landed, landed_late, landed_shared, p_rows, s_page, start, end,
    tiles, next_row, rows_end, scale, acc, total, R: gl.constexpr, P: gl.constexpr,
    PAGE: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Mixtures and sums of probabilities over a part's tiles; the first copies are under way.

    The tensor cores go from a tile's values to the next tile's scores without a wait; behind the
    last tile they compute scores that nobody needs.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 16, 16])
    HALF: gl.constexpr = BN * (R // 2) * 2
    o_n = gl.arange(0, 128, gl.SliceLayout(1, S)) % 64
    mbarrier.wait(landed.index(0), 0)
    s = begin_scores(room, gl.full([128, 16], 0, gl.int32, S))
    for j in range(tiles):
        odd = j & 1
        at = start + j * BN
        early_row = tile_row(p_rows, s_page, at + 2 * BN, end, rows_end, PAGE)
        mbarrier.wait(landed_shared.index(0), odd)
        s = more_scores(room, s, False)
        mbarrier.wait(landed_late.index(0), odd)
        s = more_scores(room, s, True)
        left = end - at
        if left < BN:
            there = (o_n < left)[:, None]
            s = (
                gl.where(there, s[0], float("-inf")),
                gl.where(there, s[1], float("-inf")),
                gl.where(there, s[2], float("-inf")),
            )
            meet()
            for k in gl.static_range(4):
                zero_rows(slabs(room, LATE_SLAB + 2 * k, BN, 64, 0), left)
                zero_rows(slabs(room, EARLY_SLAB + 2 * k, BN, 64, 8 * odd), left)
        if j == 0:
            refer(notes, s, scale)
            meet()
        weigh(room, notes, s, scale)
        fence_async_shared()
        meet()
        if verdict(notes) != 0:
            acc, total = raised(s, acc, total, notes, scale)
            weigh(room, notes, s, scale)
            fence_async_shared()
            meet()
        more = j + 1 < tiles
        total = add_up(room, notes, total)
        acc = mix(room, acc, 0, True)
        mbarrier.expect(landed_shared.index(0), BN * P * 2, pred=more)
        begin_copy(
            shared, [next_row, R], landed_shared.index(0), slabs(room, SHARED_SLAB, BN, P, 0),
            pred=more,
        )  # fmt: skip
        acc = mix(room, acc, odd * HALF, False)
        acc = mix_wait(acc, 1)
        mbarrier.expect(landed_late.index(0), HALF, pred=more)
        meet()
        begin_copy(
            values, [next_row, R // 2], landed_late.index(0),
            slabs(room, LATE_SLAB, BN, R // 2, 0), pred=more,
        )  # fmt: skip
        following = odd
        if more:
            following = 1 - odd
            mbarrier.wait(landed.index(following), ((j + 1) >> 1) & 1)
        s = begin_scores(room, gl.full([128, 16], following * HALF, gl.int32, S))
        acc = mix_wait(acc, 1)
        more = j + 2 < tiles
        mbarrier.expect(landed.index(odd), HALF, pred=more)
        meet()
        begin_copy(
            values, [early_row, 0], landed.index(odd), slabs(room, EARLY_SLAB, BN, R // 2, 8 * odd),
            pred=more,
        )  # fmt: skip
        next_row = early_row
    no_scores(s)
    meet()
    return acc, total


@gluon.jit
def mla_decode_turned_kernel(
    values,
    shared,
    q,
    rows,
    lengths,
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
    BN: gl.constexpr,
    WHOLE: gl.constexpr,
    PDL: gl.constexpr,
):
    """All heads of one sequence over one part of its context; see ``mla_decode_sides_kernel``."""
    if PDL:
        let_next_begin()
        wait_for_inputs()
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 8, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 32, 16])
    i_b = gl.program_id(1).to(gl.int64)
    i_s = gl.program_id(2)
    b_q = load_queries(q + i_b * s_q, s_qh, H)
    length = gl.load(lengths + i_b).to(gl.int32)
    share = gl.cdiv(gl.cdiv(length, SPLITS), BN) * BN
    start = share * i_s
    end = gl.minimum(start + share, length)
    tiles = gl.cdiv(gl.maximum(end - start, 0), BN)
    p_rows = rows + i_b * s_rows
    room = gl.allocate_shared_memory(gl.bfloat16, [SLABS, 32, 64], gl.NVMMASharedLayout(128, 16, 2))
    notes = gl.allocate_shared_memory(gl.float32, [16, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Apart, as the compiler orders accesses of the same allocation by barriers of all warps.
    landed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    landed_late = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    landed_shared = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(landed.index(0), count=1)
    mbarrier.init(landed.index(1), count=1)
    mbarrier.init(landed_late.index(0), count=1)
    mbarrier.init(landed_shared.index(0), count=1)
    fence_async_shared()
    meet()
    HALF: gl.constexpr = BN * (R // 2) * 2
    if tiles > 0:
        row = tile_row(p_rows, s_page, start, end, rows_end, PAGE)
        mbarrier.expect(landed.index(0), HALF)
        begin_copy(values, [row, 0], landed.index(0), slabs(room, EARLY_SLAB, BN, R // 2, 0))
        mbarrier.expect(landed_shared.index(0), BN * P * 2)
        begin_copy(shared, [row, R], landed_shared.index(0), slabs(room, SHARED_SLAB, BN, P, 0))
        mbarrier.expect(landed_late.index(0), HALF)
        begin_copy(
            values, [row, R // 2], landed_late.index(0), slabs(room, LATE_SLAB, BN, R // 2, 0)
        )
    next_row = tile_row(p_rows, s_page, start + BN, end, rows_end, PAGE)
    if tiles > 1:
        mbarrier.expect(landed.index(1), HALF)
        begin_copy(values, [next_row, 0], landed.index(1), slabs(room, EARLY_SLAB, BN, R // 2, 8))
    for n in gl.static_range(4):
        notes.index(n).store(gl.full([32], -1e30 if n < 3 else 0.0, gl.float32, FLAT))
    for n in gl.static_range(8):
        notes.index(8 + n).store(gl.full([32], TWO_ONES, gl.float32, FLAT))
    meet()
    check_place(notes)
    # Behind the check, or another warp's references might be there before a late one looks.
    store_queries(room, b_q)
    fence_async_shared()
    meet()
    acc = (gl.zeros([128, 32], gl.float32, O),) * 12
    total = gl.zeros([128, 8], gl.float32, SUM)
    if tiles > 0:
        acc, total = all_tiles(
            values, shared, room, notes, landed, landed_late, landed_shared, p_rows, s_page, start,
            end, tiles, next_row, rows_end, scale, acc, total, R, P, PAGE, BN,
        )  # fmt: skip
    write(acc, total, room, notes, parts, weights, i_b, i_s, H, SPLITS, R, WHOLE)


@gluon.jit
def write(
    acc, total, room, notes, parts, weights, i_b, i_s, H, SPLITS, R: gl.constexpr,
    WHOLE: gl.constexpr,
):  # fmt: skip
    """Mixtures to [B, SPLITS, H, R], a head's channels together, by way of the room.

    Column c of block n is head 16 n + c % 16 of the first or, from 16 on, the second 48.
    """
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 32, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, O)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    SUMS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
    o_c = gl.arange(0, 32, gl.SliceLayout(1, ROWS))
    o_r = gl.arange(0, 128, gl.SliceLayout(0, ROWS))
    o_w = gl.arange(0, 32, SUMS)
    aside(notes).store(gl.max(total, 1))
    for n in gl.static_range(3):
        sums = notes.index(4 + n + n // 2).load(COLUMN)
        share = (1.0 / gl.maximum(sums, 1e-30))[None, :]
        for m in gl.static_range(4):
            stage = slabs(room, 2 * (4 * n + m), 32, 128, 0)
            stage.permute((1, 0)).store((acc[3 * m + n] * share).to(gl.bfloat16))
    for n in gl.static_range(3):
        o_h = o_c // 16 * 48 + n * 16 + o_c % 16
        row = (i_b * SPLITS + i_s) * H + o_h
        for m in gl.static_range(4):
            stage = slabs(room, 2 * (4 * n + m), 32, 128, 0)
            channel = (1 - m // 2) * (R // 2) + o_r // 64 * 128 + m % 2 * 64 + o_r % 64
            at = row[:, None] * R + channel[None, :]
            gl.store(parts + at, stage.load(ROWS), mask=(o_h < H)[:, None])
        if not WHOLE:
            # Of a part that is empty the weight is that of nothing; it has zeros.
            o_h = o_w // 16 * 48 + n * 16 + o_w % 16
            sums = notes.index(4 + n + n // 2).load(SUMS)
            p_weights = weights + (i_b * H + o_h) * SPLITS + i_s
            gl.store(p_weights, notes.index(n).load(SUMS) + gl.log2(sums), mask=o_h < H)
    keep(room)
