"""The mixture of few tokens for compute capability 9.0, in Gluon: eight multiprocessors a token.

At few tokens one multiprocessor's own work on a token is all that counts: to fetch 129 KB and to
multiply them. So a cluster takes it, and they tell each other sums through their shared
memory, twice: once for the scores, once for the norm.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"
# mypy: disable-error-code="unreachable, misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SIZE, WARPS, SLOTS = 8, 4, 16
"""Multiprocessors of a token and warps of each; at most so many rows."""

_LANES = 4 * 32
"""Bytes: a number of every lane."""

_OWN = 16
_TOLD = _OWN + WARPS * _LANES
_LAST = _TOLD + SIZE * _LANES
_END = _LAST + 4 * WARPS * SIZE
"""In a room, behind two barriers: sums of the own warps, those of all multiprocessors, and what
every warp of all of them tells last."""

# Here, as Triton 3.6 cannot compare layouts with such bases that were made inside of a kernel.
COLUMNS = gl.constexpr(
    gl.BlockedLayout(
        [1, 1, 1, 8],
        [1, 1, 32, 1],
        [1, WARPS, 1, 1],
        [3, 2, 1, 0],
        [[1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
    )
)
LANES = gl.constexpr(gl.SliceLayout(3, COLUMNS.value))


def _open() -> str:
    """Room for two exchanges behind their barriers; the answer is its address.

    All warps meet first, which keeps the assembler from moving loads behind this.
    """
    return f"""{{
    .shared .align 16 .b8 room[{_END}];
    .reg .pred one;
    .reg .u32 thread;
    bar.sync 0;
    mov.u32 $0, room;
    mov.u32 thread, %tid.x;
    setp.eq.u32 one, thread, 0;
    @one mbarrier.init.shared::cta.b64 [$0], 1;
    @one mbarrier.init.shared::cta.b64 [$0 + 8], 1;
    @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {_LANES * SIZE};
    @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0 + 8], {4 * WARPS * SIZE};
    @one fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned;
    }}"""


_MEET = """{
    .reg .pred open;
    barrier.cluster.wait.acquire.aligned;
    mbarrier.test_wait.parity.shared::cta.b64 open, [$1], 1;
    selp.b32 $0, 65536, 0, open;
    }"""
"""Nothing has been told yet, as this warp has not: the phase before the first is what is over."""


def _sum(begin: int, count: int) -> str:
    """Add numbers of a lane in their order, which is the same for all who do."""
    first = f"\n    ld.shared::cta.f32 $0, [lane + {begin}];"
    return first + "".join(
        f"""
    ld.shared::cta.f32 other, [lane + {begin + _LANES * i}];
    add.rn.f32 $0, $0, other;"""
        for i in range(1, count)
    )


_WAIT = """
    again:
    mbarrier.try_wait.parity.shared::cta.b64 done, [barrier], 0;
    @!done bra again;"""


def _exchange() -> str:
    """A lane's sum over all warps of all multiprocessors, the same in all of them.

    Warps add their multiprocessor's numbers, and each tells them to two of the cluster.
    """
    send = "".join(
        f"""
    mad.lo.u32 peer, warp, {SIZE // WARPS}, {i};
    mapa.shared::cluster.u32 there, here, peer;
    mapa.shared::cluster.u32 told, barrier, peer;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], $0, [told];"""
        for i in range(SIZE // WARPS)
    )
    return f"""{{
    .reg .pred done;
    .reg .u32 here, there, barrier, told, thread, warp, lane, peer;
    .reg .f32 other;
    mov.u32 thread, %tid.x;
    mad.lo.u32 here, thread, 4, $1;
    st.shared::cta.f32 [here + {_OWN}], $2;
    bar.sync 0;
    and.b32 lane, thread, 31;
    mad.lo.u32 lane, lane, 4, $1;{_sum(_OWN, WARPS)}
    shr.u32 warp, thread, 5;
    mov.u32 here, %cluster_ctarank;
    mad.lo.u32 here, here, {_LANES}, lane;
    add.u32 here, here, {_TOLD};
    mov.u32 barrier, $1;{send}{_WAIT}{_sum(_TOLD, SIZE)}
    }}"""


def _butterfly(*steps: int) -> str:
    return "".join(
        f"""
    shfl.sync.bfly.b32 other, $0, {step}, 31, -1;
    add.rn.f32 $0, $0, other;"""
        for step in steps
    )


def _total() -> str:
    """The sum of a number over all threads of the cluster, the same in all of them.

    Eight lanes of a warp tell its sum, each to one multiprocessor; 32 sums come, in fours.
    """
    return f"""{{
    .reg .pred done, tells;
    .reg .u32 here, there, barrier, told, lane, warp, peer;
    .reg .f32 other, s0, s1, s2, s3;
    mov.f32 $0, $2;{_butterfly(16, 8, 4, 2, 1)}
    mov.u32 warp, %tid.x;
    and.b32 peer, warp, 31;
    shr.u32 warp, warp, 5;
    mov.u32 here, %cluster_ctarank;
    mad.lo.u32 here, here, {WARPS}, warp;
    mad.lo.u32 here, here, 4, $1;
    add.u32 here, here, {_LAST};
    add.u32 barrier, $1, 8;
    setp.lt.u32 tells, peer, {SIZE};
    @tells mapa.shared::cluster.u32 there, here, peer;
    @tells mapa.shared::cluster.u32 told, barrier, peer;
    @tells st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], $0, [told];
    and.b32 lane, peer, 7;
    mad.lo.u32 lane, lane, 16, $1;{_WAIT}
    ld.shared::cta.v4.f32 {{s0, s1, s2, s3}}, [lane + {_LAST}];
    add.rn.f32 s0, s0, s1;
    add.rn.f32 s2, s2, s3;
    add.rn.f32 $0, s0, s2;{_butterfly(4, 2, 1)}
    }}"""


def _fold(rows: int) -> str:
    """Sums over a warp's lanes of 2 ``rows`` numbers, number i to lane i, the others to 16 + i.

    Lanes give away half of what they hold in every step: 24 exchanges for nine rows, not 90.
    """
    held = [f"${1 + i}" if i < rows else None for i in range(16)]
    held += [f"${1 + rows + i}" if i < rows else None for i in range(16)]
    lines = []
    for step in (16, 8, 4, 2, 1):
        lines.append(f"and.b32 bit, lane, {step}; setp.ne.u32 upper, bit, 0;")
        kept: list[str | None] = []
        for i in range(step):
            low, high = held[i], held[i + step]
            if low is None and high is None:
                kept.append(None)
                continue
            low, high, name = low or "0f00000000", high or "0f00000000", f"v{step}_{i}"
            lines.append(
                f".reg .f32 {name}; selp.f32 give, {low}, {high}, upper; "
                f"selp.f32 {name}, {high}, {low}, upper; "
                f"shfl.sync.bfly.b32 give, give, {step}, 31, -1; add.rn.f32 {name}, {name}, give;"
            )
            kept.append(name)
        held = kept
    body = "\n".join(lines)
    return f"""{{
    .reg .pred upper;
    .reg .u32 lane, bit;
    .reg .f32 give;
    mov.u32 lane, %laneid;
    {body}
    mov.f32 $0, {held[0]};
    }}"""


OPEN, MEET = gl.constexpr(_open()), gl.constexpr(_MEET)
EXCHANGE, TOTAL = gl.constexpr(_exchange()), gl.constexpr(_total())
FOLD = gl.constexpr(tuple(_fold(rows) for rows in range(1, SLOTS + 1)))
FROM_LANE = gl.constexpr(
    tuple(f"shfl.sync.idx.b32 $0, $1, {lane}, 31, -1;" for lane in range(SLOTS))
)
FOLD_TYPES = gl.constexpr(tuple("=&f" + 2 * rows * ",f" for rows in range(1, SLOTS + 1)))
WIDEN = gl.constexpr("mul.lo.u32 $0, $2, $3; and.b32 $1, $2, $5;")
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def open_room(o_l):
    """Address of the multiprocessor's room, in every thread; the cluster is told of it."""
    return gl.inline_asm_elementwise(OPEN, "=&r,r", [o_l], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def meet(room):
    """The cluster has met, and what stands in the rooms counts. The answer is 2**16.

    Rows are widened by it, so that the assembler cannot have them waited for before the cluster
    meets: their way from memory is to hide that.
    """
    return gl.inline_asm_elementwise(MEET, "=r,r", [room], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def exchange(room, x):
    """Sum of ``x`` [8, 4, 32] over multiprocessors and warps, in all of them."""
    return gl.inline_asm_elementwise(
        EXCHANGE, "=&f,r,f", [room, x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def total_of(room, x):
    """Sum of ``x`` [8, 4, 32] over all threads, in all of them."""
    return gl.inline_asm_elementwise(
        TOTAL, "=&f,r,f", [room, x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def fold(numbers, R: gl.constexpr):
    """Of 2 R tensors [8, 4, 32]: lane i gets number i's sum over lanes, 16 + i that of R + i."""
    return gl.inline_asm_elementwise(
        FOLD[R - 1], FOLD_TYPES[R - 1], numbers, dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def from_lane(x, LANE: gl.constexpr):
    """What one lane has, in all of them."""
    return gl.inline_asm_elementwise(
        FROM_LANE[LANE], "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def other_half(x):
    """Lane i's from lane i ^ 16."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 16, 31, -1;",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def cluster_of(i):
    """``i`` again, the number of the cluster, without the constants that a division would load."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %ctaid.x; shr.u32 $0, $0, 3;",
        "=r,r",
        [i],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def widen(x, factor, mask):
    """bfloat16 to float32, one instruction each, of different units.

    The compiler takes two for every upper half, all of one unit.
    """
    return gl.inline_asm_elementwise(
        WIDEN,
        "=f,=f,r,r,r,r,r",
        [x, factor, mask],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def join_chain(o_l):
    """The next launch may begin; wait for those before this one (``dependent.py``)."""
    return gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, $1;",
        "=r,r",
        [o_l],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def attn_residual_cluster_kernel(
    rows,
    query,
    norm,
    out,
    s_row,
    s_token,
    eps,
    D: gl.constexpr,
    R: gl.constexpr,
    PDL: gl.constexpr,
):
    """One cluster mixes the R rows of one token, all of them in registers.

    A tensor is [8, 4, 32, 8], of multiprocessors, warps, lanes, and columns of a lane; without the
    last, a number in every thread.
    """
    PART: gl.constexpr = D // 8
    i_n = cluster_of(gl.program_id(0)).to(gl.int64)
    o_c = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, LANES)))
    o_w = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LANES)))
    o_l = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LANES)))
    o_e = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, COLUMNS))))
    within = o_c[:, None, None] * 0 + o_w[None, :, None] * 256 + o_l[None, None, :] * 8
    o_d = (within + o_c[:, None, None] * PART)[:, :, :, None] + o_e[None, None, None, :]
    inside = (within < PART)[:, :, :, None] & (o_e < 8)[None, None, None, :]
    if PDL:
        within = join_chain(within)
    p_x = rows + i_n * s_token + o_d
    x = ()
    for _ in gl.static_range(R):
        x = x + (gl.load(p_x, mask=inside, other=0.0),)  # noqa: RUF005
        p_x = p_x + s_row
    b_query = gl.load(query + o_d, mask=inside, other=0.0)
    b_norm = gl.load(norm + o_d, mask=inside, other=0.0)
    room = open_room(within)
    factor = meet(room)[:, :, :, None] + o_e[None, None, None, :] * 0
    mask = 0 - factor
    wide = ()
    products = ()
    squares = ()
    for r in gl.static_range(R):
        b_x = widen(x[r], factor, mask)
        wide = wide + (b_x,)  # noqa: RUF005
        products = products + (gl.sum(b_x * b_query, 3),)  # noqa: RUF005
        squares = squares + (gl.sum(b_x * b_x, 3),)  # noqa: RUF005
    sums = exchange(room, fold(products + squares, R))
    # Lanes below 16 have a product, the others the square that goes with it. In powers of two.
    score = sums * (gl.rsqrt(other_half(sums) / D + eps) * LOG2_E)
    scores = ()
    for r in gl.static_range(R):
        scores = scores + (from_lane(score, r),)  # noqa: RUF005
    # In pairs: a chain of maxima takes longer.
    highest = scores[R - 1]
    for r in gl.static_range(0, R - 1, 2):
        highest = gl.maximum(highest, gl.maximum(scores[r], scores[r + 1]))
    weight = gl.exp2(scores[0] - highest)
    sum_of_weights = weight
    mixed = weight[:, :, :, None] * wide[0]
    for r in gl.static_range(1, R):
        weight = gl.exp2(scores[r] - highest)
        sum_of_weights += weight
        mixed += weight[:, :, :, None] * wide[r]
    # Nobody divides by the weights' sum: the norm has no use for a factor, but for eps.
    square = total_of(room, gl.sum(mixed * mixed, 3))
    y = mixed * b_norm.to(gl.float32)
    y *= gl.rsqrt(square / D + eps * sum_of_weights * sum_of_weights)[:, :, :, None]
    gl.store(out + i_n * D + o_d, y.to(out.dtype.element_ty), mask=inside)
