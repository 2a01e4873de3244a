"""As ``cluster_kernel.py``, in fewer instructions: all that a thread does once is done first.

Rows are asked for before all else, a multiprocessor adds its warps' sums before it tells them, and
the second time a warp tells one number only.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"
# mypy: disable-error-code="unreachable"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from k3vl.kernels.attn_residual.cluster_kernel import (
    COLUMNS_8,
    LANES_8,
    fold,
    from_lane,
    join_chain,
    other_half,
)

_SIZE, _WARPS = 8, 4
"""Multiprocessors, and warps of each."""
_LANES = 4 * 32
"""Bytes: a number of every lane."""
_OWN = 16
_TOLD = _OWN + _WARPS * _LANES
_LAST = _TOLD + _SIZE * _LANES


def _open() -> str:
    """Room for two exchanges behind their barriers; the answer is its address.

    All warps meet first, and there is a loop, of which one turn is taken: these keep the assembler
    from moving loads behind them, and what waits for loads before them. The way of the rows from
    memory hides that the cluster meets: from there on what stands in the room counts.
    """
    return f"""{{
    .shared .align 16 .b8 room[{_LAST + _LANES}];
    .reg .pred one, done;
    .reg .u32 thread;
    bar.sync 0;
    mov.u32 $0, room;
    mov.u32 thread, %tid.x;
    setp.eq.u32 one, thread, 0;
    @one mbarrier.init.shared::cta.b64 [$0], 1;
    @one mbarrier.init.shared::cta.b64 [$0 + 8], 1;
    @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {_LANES * _SIZE};
    @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0 + 8], {_LANES};
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
    mad.lo.u32 peer, warp, 2, {i};
    mapa.shared::cluster.u32 there, here, peer;
    mapa.shared::cluster.u32 told, barrier, peer;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], $0, [told];"""
        for i in range(_SIZE // _WARPS)
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
    mad.lo.u32 lane, lane, 4, $1;{_sum("lane", _OWN, _WARPS)}
    shr.u32 warp, thread, 5;
    mov.u32 here, %cluster_ctarank;
    mad.lo.u32 here, here, {_LANES}, lane;
    add.u32 here, here, {_TOLD};
    mov.u32 barrier, $1;{send}{_WAIT}{_sum("lane", _TOLD, _SIZE)}
    }}"""


def _exchange_fours() -> str:
    """The same in messages of four numbers, a quarter as many."""
    # All of them in registers of their own, so that they are read at once.
    held = [[f"s{i}{n}" for n in range(4)] for i in range(_WARPS)]
    lines = "".join(
        f"\n    ld.shared::cta.v4.f32 {{{', '.join(names)}}}, [four + {_OWN + _LANES * i}];"
        for i, names in enumerate(held)
    )
    for names in held[1:]:
        lines += "".join(f"\n    add.rn.f32 s0{n}, s0{n}, {name};" for n, name in enumerate(names))
    return f"""{{
    .reg .pred done, tells;
    .reg .u32 here, there, barrier, told, thread, warp, lane, four, peer;
    .reg .f32 other, {", ".join(name for names in held for name in names)};
    mov.u32 thread, %tid.x;
    mad.lo.u32 here, thread, 4, $1;
    st.shared::cta.f32 [here + {_OWN}], $2;
    and.b32 lane, thread, 31;
    shr.u32 warp, thread, 5;
    shr.u32 peer, lane, 3;
    mad.lo.u32 peer, warp, 2, peer;
    and.b32 four, thread, 7;
    mad.lo.u32 four, four, 16, $1;
    setp.lt.u32 tells, lane, 16;
    mov.u32 here, %cluster_ctarank;
    mad.lo.u32 here, here, {_LANES}, four;
    add.u32 here, here, {_TOLD};
    mov.u32 barrier, $1;
    mad.lo.u32 lane, lane, 4, $1;
    bar.sync 0;{lines}
    @tells mapa.shared::cluster.u32 there, here, peer;
    @tells mapa.shared::cluster.u32 told, barrier, peer;
    @tells st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32
        [there], {{{", ".join(held[0])}}}, [told];{_WAIT}{_sum("lane", _TOLD, _SIZE)}
    }}"""


def _butterfly(steps: tuple[int, ...]) -> str:
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
    mov.f32 $0, $2;{_butterfly((16, 8, 4, 2, 1))}
    mov.u32 warp, %tid.x;
    and.b32 peer, warp, 31;
    shr.u32 warp, warp, 5;
    mov.u32 here, %cluster_ctarank;
    mad.lo.u32 here, here, {_WARPS}, warp;
    mad.lo.u32 here, here, 4, $1;
    add.u32 here, here, {_LAST};
    add.u32 barrier, $1, 8;
    setp.lt.u32 tells, peer, {_SIZE};
    @tells mapa.shared::cluster.u32 there, here, peer;
    @tells mapa.shared::cluster.u32 told, barrier, peer;
    @tells st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], $0, [told];
    and.b32 lane, peer, 7;
    mad.lo.u32 lane, lane, 16, $1;{_WAIT}
    ld.shared::cta.v4.f32 {{s0, s1, s2, s3}}, [lane + {_LAST}];
    add.rn.f32 s0, s0, s1;
    add.rn.f32 s2, s2, s3;
    add.rn.f32 $0, s0, s2;{_butterfly((4, 2, 1))}
    }}"""


OPEN, TOTAL = gl.constexpr(_open()), gl.constexpr(_total())
EXCHANGE = gl.constexpr((_exchange(), _exchange_fours()))
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def open_room(o_l):
    """Address of the cluster's room, in every thread."""
    return gl.inline_asm_elementwise(OPEN, "=&r,r", [o_l], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def exchange(room, x, FOURS: gl.constexpr):
    """Sum of ``x`` [8, 4, 32] over multiprocessors and warps, in all of them."""
    return gl.inline_asm_elementwise(
        EXCHANGE[FOURS], "=&f,r,f", [room, x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def total_of(room, x):
    """Sum of ``x`` [8, 4, 32] over all threads, in all of them."""
    return gl.inline_asm_elementwise(
        TOTAL, "=&f,r,f", [room, x], dtype=gl.float32, is_pure=False, pack=1
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
def widen(x):
    """bfloat16 to float32, one instruction each; the compiler takes two for every upper half."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "=f,=f,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def attn_residual_lean_kernel(
    rows,
    query,
    norm,
    out,
    s_row,
    s_token,
    eps,
    D: gl.constexpr,
    R: gl.constexpr,
    FOURS: gl.constexpr,
    PDL: gl.constexpr,
):
    """One cluster mixes the R rows of one token, all of them in registers.

    A tensor is [8, 4, 32, 8], of multiprocessors, warps, lanes, and columns of a lane; without the
    last, a number in every thread.
    """
    PART: gl.constexpr = D // 8
    i_n = cluster_of(gl.program_id(0)).to(gl.int64)
    o_c = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, LANES_8)))
    o_w = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LANES_8)))
    o_l = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LANES_8)))
    o_e = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, COLUMNS_8))))
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
    wide = ()
    products = ()
    squares = ()
    for r in gl.static_range(R):
        b_x = widen(x[r])
        wide = wide + (b_x,)  # noqa: RUF005
        products = products + (gl.sum(b_x * b_query, 3),)  # noqa: RUF005
        squares = squares + (gl.sum(b_x * b_x, 3),)  # noqa: RUF005
    sums = exchange(room, fold(products + squares, R), FOURS)
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
