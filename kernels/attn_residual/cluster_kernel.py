"""The mixture of few tokens for compute capability 9.0, in Gluon: several multiprocessors a token.

At few tokens one multiprocessor's own work on a token is all that counts: to fetch 129 KB and to
multiply them. So a cluster takes it, and they tell each other sums through their shared
memory, twice: once for the scores, once for the norm.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"
# mypy: disable-error-code="unreachable"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPS, SLOTS = 32, 16
"""Warps of a token in all, on four or eight multiprocessors; at most so many rows."""

_EVERYBODY = WARPS * 32


def _columns(multiprocessors: int) -> gl.BlockedLayout:
    bases = [[2**i, 0, 0, 0] for i in range(multiprocessors.bit_length() - 1)]
    warps = WARPS // multiprocessors
    return gl.BlockedLayout([1, 1, 1, 8], [1, 1, 32, 1], [1, warps, 1, 1], [3, 2, 1, 0], bases)


# Here, as Triton 3.6 cannot compare layouts with such bases that were made inside of a kernel.
COLUMNS_4, COLUMNS_8 = gl.constexpr(_columns(4)), gl.constexpr(_columns(8))
LANES_4 = gl.constexpr(gl.SliceLayout(3, COLUMNS_4.value))
LANES_8 = gl.constexpr(gl.SliceLayout(3, COLUMNS_8.value))


def _open() -> str:
    """Room for two exchanges behind their barriers; the answer is its address.

    What stands in the room counts from where the cluster has met: that is waited for before the
    first exchange, so that the way of the rows from memory hides it.
    """
    return f"""{{
    .shared .align 16 .b8 room[{16 + 2 * 4 * _EVERYBODY}];
    .reg .pred one;
    .reg .u32 thread;
    mov.u32 $0, room;
    mov.u32 thread, %tid.x;
    setp.eq.u32 one, thread, 0;
    @one mbarrier.init.shared::cta.b64 [$0], 1;
    @one mbarrier.init.shared::cta.b64 [$0 + 8], 1;
    @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {4 * _EVERYBODY};
    @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0 + 8], {4 * _EVERYBODY};
    @one fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned;
    }}"""


def _exchange(which: int, multiprocessors: int) -> str:
    """Every thread tells every multiprocessor a number; a lane adds what its like have told.

    In the order of multiprocessors and warps, so that all have the same sums, every time.
    """
    begin, barrier = 16 + which * 4 * _EVERYBODY, 8 * which
    send = "".join(
        f"""
    mapa.shared::cluster.u32 there, here, {peer};
    mapa.shared::cluster.u32 told, barrier, {peer};
    st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], $2, [told];"""
        for peer in range(multiprocessors)
    )
    add = "".join(
        f"""
    ld.shared::cta.f32 other, [here + {128 * warp}];
    add.rn.f32 $0, $0, other;"""
        for warp in range(WARPS)
    )
    met = "" if which else "barrier.cluster.wait.acquire.aligned;"
    return f"""{{
    .reg .pred done;
    .reg .u32 here, there, barrier, told, thread, rank;
    .reg .f32 other;
    mov.u32 thread, %tid.x;
    mov.u32 rank, %cluster_ctarank;
    add.u32 barrier, $1, {barrier};
    mad.lo.u32 here, rank, {4 * _EVERYBODY // multiprocessors}, $1;
    mad.lo.u32 here, thread, 4, here;
    add.u32 here, here, {begin};
    {met}{send}
    again:
    mbarrier.try_wait.parity.shared::cta.b64 done, [barrier], 0;
    @!done bra again;
    and.b32 thread, thread, 31;
    mad.lo.u32 here, thread, 4, $1;
    add.u32 here, here, {begin};
    mov.f32 $0, 0f00000000;{add}
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


OPEN = gl.constexpr(_open())
EXCHANGES = gl.constexpr(tuple(_exchange(which, size) for size in (4, 8) for which in (0, 1)))
FOLD = gl.constexpr(tuple(_fold(rows) for rows in range(1, SLOTS + 1)))
FROM_LANE = gl.constexpr(tuple(f"shfl.sync.idx.b32 $0, $1, {lane}, 31, -1;" for lane in range(32)))
FOLD_TYPES = gl.constexpr(tuple("=&f" + 2 * rows * ",f" for rows in range(1, SLOTS + 1)))


@gluon.jit
def open_room(o_l):
    """Address of the cluster's room, in every thread."""
    return gl.inline_asm_elementwise(OPEN, "=&r,r", [o_l], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def exchange(room, x, WHICH: gl.constexpr, CLUSTER: gl.constexpr):
    """Sum of ``x`` [8, 4, 32] over multiprocessors and warps, in all of them."""
    return gl.inline_asm_elementwise(
        EXCHANGES[CLUSTER // 8 * 2 + WHICH],
        "=&f,r,f",
        [room, x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
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
    CLUSTER: gl.constexpr,
    PDL: gl.constexpr,
):
    """One cluster mixes the R rows of one token, all of them in registers.

    A tensor is [8, 4, 32, 8], of multiprocessors (or 4 of them and 8), warps, lanes, and columns of
    a lane; without the last, a number in every thread.
    """
    COLUMNS: gl.constexpr = COLUMNS_8 if CLUSTER == 8 else COLUMNS_4
    LANES: gl.constexpr = LANES_8 if CLUSTER == 8 else LANES_4
    EACH: gl.constexpr = 32 // CLUSTER
    PART: gl.constexpr = D // CLUSTER
    i_n = gl.program_id(0).to(gl.int64)
    o_c = gl.arange(0, CLUSTER, gl.SliceLayout(1, gl.SliceLayout(2, LANES)))
    o_w = gl.arange(0, EACH, gl.SliceLayout(0, gl.SliceLayout(2, LANES)))
    o_l = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LANES)))
    o_e = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, COLUMNS))))
    within = o_c[:, None, None] * 0 + o_w[None, :, None] * 256 + o_l[None, None, :] * 8
    begin = within + o_c[:, None, None] * PART
    o_d = begin[:, :, :, None] + o_e[None, None, None, :]
    inside = (within < PART)[:, :, :, None] & (o_e < 8)[None, None, None, :]
    if PDL:
        within = join_chain(within)
    room = open_room(within)
    b_query = gl.load(query + o_d, mask=inside, other=0.0)
    p_x = rows + i_n * s_token + o_d
    x = ()
    for _ in gl.static_range(R):
        x = x + (gl.load(p_x, mask=inside, other=0.0),)  # noqa: RUF005
        p_x = p_x + s_row
    b_norm = gl.load(norm + o_d, mask=inside, other=0.0).to(gl.float32)
    products = ()
    squares = ()
    for r in gl.static_range(R):
        b_x = x[r].to(gl.float32)
        products = products + (gl.sum(b_x * b_query, 3),)  # noqa: RUF005
        squares = squares + (gl.sum(b_x * b_x, 3),)  # noqa: RUF005
    sums = exchange(room, fold(products + squares, R), 0, CLUSTER)
    # Lanes below 16 have a product, the others the square that goes with it.
    score = sums * gl.rsqrt(other_half(sums) / D + eps)
    highest = from_lane(score, 0)
    for r in gl.static_range(1, R):
        highest = gl.maximum(highest, from_lane(score, r))
    total = gl.zeros_like(highest)
    mixed = gl.zeros([CLUSTER, EACH, 32, 8], gl.float32, COLUMNS)
    for r in gl.static_range(R):
        weight = gl.exp2((from_lane(score, r) - highest) * 1.4426950408889634)
        total += weight
        mixed += weight[:, :, :, None] * x[r].to(gl.float32)
    mixed *= (1.0 / total)[:, :, :, None]
    square = gl.sum(exchange(room, gl.sum(mixed * mixed, 3), 1, CLUSTER), 2)
    scale = gl.rsqrt(square / D + eps)
    y = mixed * scale[:, :, None, None] * b_norm
    gl.store(out + i_n * D + o_d, y.to(out.dtype.element_ty), mask=inside)
