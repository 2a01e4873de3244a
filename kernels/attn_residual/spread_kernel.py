"""The mixture of few tokens for compute capability 9.0, in Gluon: two to eight multiprocessors.

As ``cluster_kernel.py``, but rows are asked for before anything else is done, a multiprocessor adds
its own warps' sums before it tells others, and threads may hold more columns: with two tokens on a
multiprocessor it is their instructions that count. Rows in shared memory are multiplied one after
another as they come, which the assembler does not do with rows in registers.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"
# mypy: disable-error-code="unreachable"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from k3vl.kernels.attn_residual.cluster_kernel import fold, from_lane, join_chain, other_half

SIZES = (2, 4, 8)
"""Multiprocessors of a token."""

WARPS = (2, 4, 8)
"""Of each of them."""

_LANES = 4 * 32
"""Bytes: a number of every lane."""


def _columns(multiprocessors: int, warps: int) -> gl.BlockedLayout:
    bases = [[2**i, 0, 0, 0] for i in range(multiprocessors.bit_length() - 1)]
    return gl.BlockedLayout([1, 1, 1, 8], [1, 1, 32, 1], [1, warps, 1, 1], [3, 2, 1, 0], bases)


# Here, as Triton 3.6 cannot compare layouts with such bases that were made inside of a kernel.
_LAYOUTS = [_columns(size, warps) for size in SIZES for warps in WARPS]
COLUMNS_OF = gl.constexpr(tuple(_LAYOUTS))
LANES_OF = gl.constexpr(tuple(gl.SliceLayout(3, layout) for layout in _LAYOUTS))


def _room(multiprocessors: int, warps: int, which: int) -> tuple[int, int]:
    """Where in the room the sums of the own warps lie, and those of all multiprocessors."""
    own = 16 + which * _LANES * (warps + multiprocessors)
    return own, own + _LANES * warps


def _open(multiprocessors: int, warps: int) -> str:
    """Room for two exchanges behind their barriers; the answer is its address.

    All warps meet first, and there is a loop, of which one turn is taken: these keep the assembler
    from moving loads behind them, and what waits for loads before them. The way of the rows from
    memory hides that the cluster meets: from there on what stands in the room counts.
    """
    size = _room(multiprocessors, warps, 2)[0]
    return f"""{{
    .shared .align 16 .b8 room[{size}];
    .reg .pred one, done;
    .reg .u32 thread;
    bar.sync 0;
    mov.u32 $0, room;
    mov.u32 thread, %tid.x;
    setp.eq.u32 one, thread, 0;
    @one mbarrier.init.shared::cta.b64 [$0], 1;
    @one mbarrier.init.shared::cta.b64 [$0 + 8], 1;
    @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {_LANES * multiprocessors};
    @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0 + 8], {_LANES * multiprocessors};
    @one fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.acquire.aligned;
    again:
    mbarrier.try_wait.parity.shared::cta.b64 done, [$0], 1;
    @!done bra again;
    }}"""


def _sum(base: str, begin: int, count: int) -> str:
    """Add numbers of a lane in their order, which is the same for all who do."""
    first = f"\n    ld.shared::cta.f32 $0, [{base} + {begin}];"
    return first + "".join(
        f"""
    ld.shared::cta.f32 other, [{base} + {begin + _LANES * i}];
    add.rn.f32 $0, $0, other;"""
        for i in range(1, count)
    )


def _exchange(which: int, multiprocessors: int, warps: int) -> str:
    """A lane's sum over all warps of all multiprocessors, the same in all of them.

    Warps add their multiprocessor's numbers, and each tells them to its share of the others.
    """
    own, got = _room(multiprocessors, warps, which)
    send = "".join(
        f"""
    add.u32 peer, warp, {first};
    setp.lt.u32 sends, peer, {multiprocessors};
    @sends mapa.shared::cluster.u32 there, here, peer;
    @sends mapa.shared::cluster.u32 told, barrier, peer;
    @sends st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], $0, [told];"""
        for first in range(0, multiprocessors, warps)
    )
    return f"""{{
    .reg .pred done, sends;
    .reg .u32 here, there, barrier, told, thread, warp, lane, peer;
    .reg .f32 other;
    mov.u32 thread, %tid.x;
    mad.lo.u32 here, thread, 4, $1;
    st.shared::cta.f32 [here + {own}], $2;
    bar.sync 0;
    and.b32 lane, thread, 31;
    mad.lo.u32 lane, lane, 4, $1;{_sum("lane", own, warps)}
    shr.u32 warp, thread, 5;
    mov.u32 here, %cluster_ctarank;
    mad.lo.u32 here, here, {_LANES}, lane;
    add.u32 here, here, {got};
    add.u32 barrier, $1, {8 * which};{send}
    again:
    mbarrier.try_wait.parity.shared::cta.b64 done, [barrier], 0;
    @!done bra again;{_sum("lane", got, multiprocessors)}
    }}"""


OPEN = gl.constexpr(tuple(_open(size, warps) for size in SIZES for warps in WARPS))
EXCHANGES = gl.constexpr(
    tuple(_exchange(which, size, warps) for size in SIZES for warps in WARPS for which in (0, 1))
)


MOST_STAGED = 86
"""Eights of columns of a warp in ``stage_room``: with the other room under 48 KiB."""


def _stage(count: int) -> str:
    return f"""{{
    .shared .align 16 .b8 stage[{512 * count}];
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    mov.u32 $0, stage;
    mad.lo.u32 $0, thread, 16, $0;
    }}"""


def _take(left: int) -> str:
    wait = "" if left < 0 else f"cp.async.wait_group {left}; "
    return f"{{ {wait}ld.shared::cta.v4.b32 {{$0, $1, $2, $3}}, [$4]; }}"


STAGE = gl.constexpr(tuple(_stage(max(count, 1)) for count in range(MOST_STAGED + 1)))
TAKE = gl.constexpr(tuple(_take(left) for left in range(-1, 16)))
BEGIN = gl.constexpr(
    tuple(
        f"{{ cp.async.cg.shared.global [$1], [$2], 16, $3; {commit}mov.u32 $0, 0; }}"
        for commit in ("", "cp.async.commit_group; ")
    )
)


@gluon.jit
def stage_room(o_l, COUNT: gl.constexpr):
    """Where a thread's first eight columns have room in shared memory; COUNT for each warp."""
    return gl.inline_asm_elementwise(
        STAGE[COUNT], "=&r,r", [o_l], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def begin_eight(stage, pointer, size, SLOT: gl.constexpr, WARPS: gl.constexpr, LAST: gl.constexpr):
    """Begin the copy of eight columns, or of zeros where ``size`` is 0; LAST of a row's."""
    return gl.inline_asm_elementwise(
        BEGIN[LAST],
        "=r,r,l,r",
        [stage + SLOT * WARPS * 512, pointer, size],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def take_eight(stage, SLOT: gl.constexpr, WARPS: gl.constexpr, LEFT: gl.constexpr):
    """Eight columns of a thread, once at most LEFT rows are on their way; -1: they are here."""
    return gl.inline_asm_elementwise(
        TAKE[LEFT + 1],
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r",
        [stage + SLOT * WARPS * 512],
        dtype=gl.bfloat16,
        is_pure=False,
        pack=8,
    )


def staged(rows: int, width: int, multiprocessors: int, warps: int) -> int:
    """What ``stage_room`` is to have room for; MOST_STAGED at most."""
    return rows * -(-width // (multiprocessors * warps * 256)) * warps


def place_of(multiprocessors: int, warps: int) -> int:
    """In the tables above.

    Raises:
        ValueError: it is in none.
    """
    return SIZES.index(multiprocessors) * len(WARPS) + WARPS.index(warps)


@gluon.jit
def open_room(o_l, SHAPE: gl.constexpr):
    """Address of the cluster's room, in every thread."""
    return gl.inline_asm_elementwise(
        OPEN[SHAPE], "=&r,r", [o_l], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def exchange(room, x, WHICH: gl.constexpr, SHAPE: gl.constexpr):
    """Sum of ``x`` [C, W, 32] over multiprocessors and warps, in all of them."""
    return gl.inline_asm_elementwise(
        EXCHANGES[2 * SHAPE + WHICH], "=&f,r,f", [room, x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def attn_residual_spread_kernel(
    rows,
    query,
    norm,
    out,
    s_row,
    s_token,
    eps,
    D: gl.constexpr,
    R: gl.constexpr,
    CLUSTER: gl.constexpr,
    WARPS: gl.constexpr,
    SHAPE: gl.constexpr,
    STAGED: gl.constexpr,
    PDL: gl.constexpr,
):
    """One cluster mixes the R rows of one token, all of them in registers or in shared memory.

    ``STAGED``: in shared memory, where a thread finds what it has asked for, row after row.

    A tensor is [C, W, 32, 8], of multiprocessors, warps, lanes, and columns of a lane, which has
    such eights in several pieces; without the last, a number in every thread. ``SHAPE`` is the
    place of CLUSTER and WARPS in the tables above.
    """
    COLUMNS: gl.constexpr = COLUMNS_OF[SHAPE]
    LANES: gl.constexpr = LANES_OF[SHAPE]
    PART: gl.constexpr = D // CLUSTER
    PIECE: gl.constexpr = WARPS * 256
    PIECES: gl.constexpr = (PART + PIECE - 1) // PIECE
    i_n = gl.program_id(0).to(gl.int64)
    o_c = gl.arange(0, CLUSTER, gl.SliceLayout(1, gl.SliceLayout(2, LANES)))
    o_w = gl.arange(0, WARPS, gl.SliceLayout(0, gl.SliceLayout(2, LANES)))
    o_l = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LANES)))
    o_e = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, COLUMNS))))
    within = o_c[:, None, None] * 0 + o_w[None, :, None] * 256 + o_l[None, None, :] * 8
    o_d = (within + o_c[:, None, None] * PART)[:, :, :, None] + o_e[None, None, None, :]
    if PDL:
        within = join_chain(within)
    inside = ()
    for p in gl.static_range(PIECES):
        live = (within < PART - p * PIECE)[:, :, :, None] & (o_e < 8)[None, None, None, :]
        inside = inside + (live,)  # noqa: RUF005
    x = ()
    stage = within
    if STAGED:
        stage = stage_room(within, R * PIECES * WARPS)
        p_first = rows + i_n * s_token + within + o_c[:, None, None] * PART
        for r in gl.static_range(R):
            for p in gl.static_range(PIECES):
                size = gl.where(within < PART - p * PIECE, 16, 0)
                begin_eight(
                    stage, p_first + p * PIECE, size, r * PIECES + p, WARPS, p == PIECES - 1
                )
            p_first = p_first + s_row
        stage = stage[:, :, :, None] + o_e[None, None, None, :] * 0
    else:
        p_x = rows + i_n * s_token + o_d
        for _ in gl.static_range(R):
            for p in gl.static_range(PIECES):
                x = x + (gl.load(p_x + p * PIECE, mask=inside[p], other=0.0),)  # noqa: RUF005
            p_x = p_x + s_row
    b_query = ()
    b_norm = ()
    for p in gl.static_range(PIECES):
        at = o_d + p * PIECE
        b_query = b_query + (gl.load(query + at, mask=inside[p], other=0.0),)  # noqa: RUF005
        b_norm = b_norm + (gl.load(norm + at, mask=inside[p], other=0.0),)  # noqa: RUF005
    room = open_room(within, SHAPE)
    products = ()
    squares = ()
    for r in gl.static_range(R):
        product = gl.zeros([CLUSTER, WARPS, 32], gl.float32, LANES)
        square = gl.zeros_like(product)
        for p in gl.static_range(PIECES):
            if STAGED:
                b_x = take_eight(stage, r * PIECES + p, WARPS, R - 1 - r).to(gl.float32)
            else:
                b_x = x[r * PIECES + p].to(gl.float32)
            product += gl.sum(b_x * b_query[p], 3)
            square += gl.sum(b_x * b_x, 3)
        products = products + (product,)  # noqa: RUF005
        squares = squares + (square,)  # noqa: RUF005
    sums = exchange(room, fold(products + squares, R), 0, SHAPE)
    # Lanes below 16 have a product, the others the square that goes with it.
    score = sums * gl.rsqrt(other_half(sums) / D + eps)
    highest = from_lane(score, 0)
    for r in gl.static_range(1, R):
        highest = gl.maximum(highest, from_lane(score, r))
    total = gl.zeros_like(highest)
    mixed = (gl.zeros([CLUSTER, WARPS, 32, 8], gl.float32, COLUMNS),) * PIECES
    for r in gl.static_range(R):
        weight = gl.exp2((from_lane(score, r) - highest) * 1.4426950408889634)
        total += weight
        more = ()
        for p in gl.static_range(PIECES):
            if STAGED:
                b_x = take_eight(stage, r * PIECES + p, WARPS, -1).to(gl.float32)
            else:
                b_x = x[r * PIECES + p].to(gl.float32)
            more = more + (mixed[p] + weight[:, :, :, None] * b_x,)  # noqa: RUF005
        mixed = more
    square = gl.zeros_like(total)
    for p in gl.static_range(PIECES):
        square += gl.sum(mixed[p] * mixed[p], 3)
    # Not divided by ``total`` yet: that is a factor of the whole mixture.
    share = 1.0 / total
    square = gl.sum(exchange(room, square, 1, SHAPE), 2) / D
    scale = share * gl.rsqrt(square[:, :, None] * share * share + eps)
    for p in gl.static_range(PIECES):
        y = mixed[p] * scale[:, :, :, None] * b_norm[p].to(gl.float32)
        at = out + i_n * D + o_d + p * PIECE
        gl.store(at, y.to(out.dtype.element_ty), mask=inside[p])
