"""The mixture of few tokens for compute capability 9.0, in Gluon, with one exchange instead of two.

As ``cluster_kernel.py``, but tensor cores multiply all rows with each other and with the query.
With G the products of rows and w the weights of the mixture, the square of the mixture is w G w:
so what the norm needs is known before there is a mixture, and multiprocessors need not meet again.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"
# mypy: disable-error-code="unreachable"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from k3vl.kernels.attn_residual.cluster_kernel import from_lane, join_chain
from k3vl.kernels.kda.hopper_kernels import widen

MOST = 9
"""Rows: eight, and one beside the query."""

_CLUSTER, _WARPS = 8, 4
_OWN = 16
"""Where in the room the sums of the own warps lie: 16 bytes of every thread."""
_TOLD = _OWN + 16 * 32 * _WARPS
"""Sums of all multiprocessors: 16 bytes of every lane."""
_ROWS = _TOLD + 16 * 32 * _CLUSTER
"""The rows, for who needs all of a column."""
_STRIDE = 1792
"""Bytes from row to row."""
_SIZE = _ROWS + MOST * _STRIDE
"""Of a token; behind all of them the query as bfloat16, then what that left of it."""


def _columns(tokens: int) -> gl.BlockedLayout:
    bases = [[1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    warps = [1, tokens * _WARPS, 1, 1]
    return gl.BlockedLayout([1, 1, 1, 8], [1, 1, 32, 1], warps, [3, 2, 1, 0], bases)


# Here, as Triton 3.6 cannot compare layouts with such bases that were made inside of a kernel.
_LAYOUTS = tuple(_columns(tokens) for tokens in (1, 2))
COLUMNS_OF = gl.constexpr(_LAYOUTS)
LANES_OF = gl.constexpr(tuple(gl.SliceLayout(3, layout) for layout in _LAYOUTS))


def _thread(tokens: int) -> str:
    """``thread``: among those of its token; ``meeting``: their barrier."""
    if tokens == 1:
        return "mov.u32 thread, %tid.x;\n    mov.u32 meeting, 1;"
    return """mov.u32 thread, %tid.x;
    shr.u32 meeting, thread, 7;
    add.u32 meeting, meeting, 1;
    shfl.sync.idx.b32 meeting, meeting, 0, 31, -1;
    and.b32 thread, thread, 127;"""


def _open(tokens: int) -> str:
    """Room for what is exchanged behind its barrier; the answer is its address."""
    return f"""{{
    .shared .align 16 .b8 room[{tokens * _SIZE + 2 * _STRIDE}];
    .reg .pred one;
    .reg .u32 thread, meeting;
    {_thread(tokens)}
    mov.u32 $0, room;
    mad.lo.u32 $0, meeting, {_SIZE}, $0;
    sub.u32 $0, $0, {_SIZE};
    setp.eq.u32 one, thread, 0;
    @one mbarrier.init.shared::cta.b64 [$0], 1;
    @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {16 * 32 * _CLUSTER};
    @one fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned;
    }}"""


def _keep(tokens: int) -> str:
    """Eight columns of the query, each thread of the first token, in two times 8 bits.

    That the cluster is there is waited for here, where the way of the query from memory hides it.
    """
    pairs = "".join(
        f"""
    cvt.rn.bf16x2.f32 high{i}, ${3 + 2 * i}, ${2 + 2 * i};
    shl.b32 back, high{i}, 16;
    sub.rn.f32 left, ${2 + 2 * i}, back;
    and.b32 back, high{i}, 0xffff0000;
    sub.rn.f32 right, ${3 + 2 * i}, back;
    cvt.rn.bf16x2.f32 low{i}, right, left;"""
        for i in range(4)
    )
    return f"""{{
    .reg .pred one;
    .reg .b32 back, high0, high1, high2, high3, low0, low1, low2, low3;
    .reg .f32 left, right;
    barrier.cluster.wait.acquire.aligned;{pairs}
    mov.u32 $0, %tid.x;
    setp.lt.u32 one, $0, {_STRIDE // 16};
    mad.lo.u32 $0, $0, 16, $1;
    @one st.shared::cta.v4.b32 [$0], {{high0, high1, high2, high3}};
    @one st.shared::cta.v4.b32 [$0 + {_STRIDE}], {{low0, low1, low2, low3}};
    bar.sync 0, {32 * _WARPS * tokens};
    }}"""


def _put(chunk: int) -> str:
    """What a lane has of its row, and where the third operand is not 0 of row 8."""
    return f"""{{
    .reg .pred asks;
    mov.u32 $0, $2;
    setp.ne.u32 asks, $2, 0;
    st.shared::cta.v4.b32 [$1 + {256 * chunk}], {{{_names(3)}}};
    @asks st.shared::cta.v4.b32 [$0 + {256 * chunk}], {{{_names(7)}}};
    }}"""


def _meet(tokens: int) -> str:
    """The warps of a token."""
    return f"""{{
    .reg .u32 thread, meeting;
    {_thread(tokens)}
    bar.sync meeting, {32 * _WARPS};
    mov.u32 $0, 0;
    }}"""


def _get(row: int) -> str:
    """Eight columns of a row as float32."""
    words = "".join(
        f"""
    shl.b32 ${2 * i}, w{i}, 16;
    and.b32 ${2 * i + 1}, w{i}, 0xffff0000;"""
        for i in range(4)
    )
    return f"""{{
    .reg .b32 w0, w1, w2, w3;
    ld.shared::cta.v4.b32 {{w0, w1, w2, w3}}, [$8 + {_ROWS + row * _STRIDE}];{words}
    }}"""


def _join(chunk: int) -> str:
    """The lower rows, with eight columns of the query where the last operand is not 0."""
    return f"""{{
    .reg .pred asks;
    setp.ne.u32 asks, $8, 0;
    @asks ld.shared::cta.v4.b32 {{{_names(0)}}}, [$8 + {256 * chunk}];
    }}"""


def _multiply() -> str:
    """32 columns of a warp, in two products of 16 for each half of the second operand.

    A lane has, of row lane / 4 and of the one eight below, eight columns: which of the 32 these are
    is the same for all rows, and so does not matter to a sum over all of them.
    """
    text = ""
    for half in (0, 1):
        upper, lower = ([f"${first + 2 * half + i}" for i in (0, 1)] for first in (32, 36))
        left = f"{upper[0]}, {lower[0]}, {upper[1]}, {lower[1]}"
        for tile, right in enumerate((upper, lower)):
            at = 8 * half + 4 * tile
            text += f"""
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        {{{_names(at)}}}, {{{left}}}, {{{", ".join(right)}}}, {{{_names(16 + at)}}};"""
    return f"{{{text}\n    }}"


def _names(first: int) -> str:
    return ", ".join(f"${first + i}" for i in range(4))


def _add(base: str, begin: int, count: int) -> str:
    """Four numbers of a lane, added up in their order, which is the same for all who do."""
    lines = f"\n    ld.shared::cta.v4.f32 {{s0, s1, s2, s3}}, [{base} + {begin}];"
    for i in range(1, count):
        lines += f"\n    ld.shared::cta.v4.f32 {{o0, o1, o2, o3}}, [{base} + {begin + 512 * i}];"
        lines += "".join(f"\n    add.rn.f32 s{n}, s{n}, o{n};" for n in range(4))
    return lines


def _tell(tokens: int) -> str:
    """Warps add their multiprocessor's numbers, and each tells them to two of the cluster."""
    send = "".join(
        f"""
    mad.lo.u32 peer, warp, 2, {i};
    mapa.shared::cluster.u32 there, here, peer;
    mapa.shared::cluster.u32 told, $1, peer;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32
        [there], {{s0, s1, s2, s3}}, [told];"""
        for i in range(_CLUSTER // _WARPS)
    )
    return f"""{{
    .reg .u32 here, there, told, thread, meeting, warp, peer;
    .reg .f32 s0, s1, s2, s3, o0, o1, o2, o3;
    {_thread(tokens)}
    mad.lo.u32 here, thread, 16, $1;
    st.shared::cta.v4.f32 [here + {_OWN}], {{$2, $3, $4, $5}};
    bar.sync meeting, {32 * _WARPS};
    and.b32 $0, thread, 31;
    mad.lo.u32 $0, $0, 16, $1;{_add("$0", _OWN, _WARPS)}
    shr.u32 warp, thread, 5;
    mov.u32 here, %cluster_ctarank;
    mad.lo.u32 here, here, 512, $0;
    add.u32 here, here, {_TOLD};{send}
    }}"""


def _hear() -> str:
    """A lane's four numbers, over all warps of all multiprocessors, the same in all of them."""
    return f"""{{
    .reg .pred done;
    .reg .f32 s0, s1, s2, s3, o0, o1, o2, o3;
    again:
    mbarrier.try_wait.parity.shared::cta.b64 done, [$4], 0;
    @!done bra again;{_add("$5", _TOLD, _CLUSTER)}
    mov.f32 $0, s0;
    mov.f32 $1, s1;
    mov.f32 $2, s2;
    mov.f32 $3, s3;
    }}"""


def _load(kind: str, count: int) -> str:
    """Numbers from an address, in fours; zeros where the second operand is 0."""
    zeros = "".join(f"\n    mov.b32 ${i}, 0;" for i in range(count))
    loads = "".join(
        f"\n    @asks ld.global.v4.{kind} {{{_names(i)}}}, [${count} + {4 * i}];"
        for i in range(0, count, 4)
    )
    return f"""{{
    .reg .pred asks;
    setp.ne.u32 asks, ${count + 1}, 0;{zeros}{loads}
    }}"""


OPEN, KEEP, TELL, MEET = (
    gl.constexpr(tuple(text(tokens) for tokens in (1, 2))) for text in (_open, _keep, _tell, _meet)
)
HEAR = gl.constexpr(_hear())
JOIN = gl.constexpr(tuple(_join(chunk) for chunk in range(7)))
MULTIPLY = gl.constexpr(_multiply())
MULTIPLY_TYPES = gl.constexpr(",".join(["=f"] * 16 + [str(i) for i in range(16)] + ["r"] * 8))
LOAD_ROW, LOAD_QUERY = gl.constexpr(_load("b32", 4)), gl.constexpr(_load("f32", 8))
LOG2_E = gl.constexpr(1.4426950408889634)
SIZE, ROWS, STRIDE = gl.constexpr(_SIZE), gl.constexpr(_ROWS), gl.constexpr(_STRIDE)
PUT = gl.constexpr(tuple(_put(chunk) for chunk in range(7)))
GET = gl.constexpr(tuple(_get(row) for row in range(MOST)))


@gluon.jit
def open_room(o_l, TOKENS: gl.constexpr):
    """Address of the room of a token, in every thread."""
    return gl.inline_asm_elementwise(
        OPEN[TOKENS - 1], "=&r,r", [o_l], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_row(pointers, live):
    """Eight columns of a row behind each pointer, as four words."""
    return gl.inline_asm_elementwise(
        LOAD_ROW,
        "=&r,=&r,=&r,=&r,l,r",
        [pointers, live],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_query(pointers, live):
    """Eight columns of the query behind each pointer."""
    return gl.inline_asm_elementwise(
        LOAD_QUERY,
        "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,l,r",
        [pointers, live],
        dtype=(
            gl.float32, gl.float32, gl.float32, gl.float32,
            gl.float32, gl.float32, gl.float32, gl.float32,
        ),
        is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def keep_query(room, b_query, TOKENS: gl.constexpr):
    """Every thread's eight columns of the query to the room, where all warps find them."""
    return gl.inline_asm_elementwise(
        KEEP[TOKENS - 1],
        "=&r,r,f,f,f,f,f,f,f,f",
        (room,) + b_query,  # noqa: RUF005
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def join_query(lower, p_query, CHUNK: gl.constexpr):
    """The query in place of some of the lower rows."""
    return gl.inline_asm_elementwise(
        JOIN[CHUNK],
        "=r,=r,=r,=r,0,1,2,3,r",
        lower + (p_query,),  # noqa: RUF005
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def multiply(sums, upper, lower):
    """Sums of products of all rows with all rows, in two halves."""
    return gl.inline_asm_elementwise(
        MULTIPLY,
        MULTIPLY_TYPES,
        sums + upper + lower,
        dtype=(
            gl.float32, gl.float32, gl.float32, gl.float32,
            gl.float32, gl.float32, gl.float32, gl.float32,
            gl.float32, gl.float32, gl.float32, gl.float32,
            gl.float32, gl.float32, gl.float32, gl.float32,
        ),
        is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def put_rows(p_row, p_ninth, upper, lower, CHUNK: gl.constexpr):
    """What each lane has of its row, and of row 8, to the room."""
    return gl.inline_asm_elementwise(
        PUT[CHUNK],
        "=&r,r,r,r,r,r,r,r,r,r,r",
        (p_row, p_ninth) + upper + lower,  # noqa: RUF005
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def meet_token(o_l, TOKENS: gl.constexpr):
    """All warps of a token have come here."""
    return gl.inline_asm_elementwise(
        MEET[TOKENS - 1], "=r,r", [o_l], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def get_row(places, ROW: gl.constexpr):
    """Columns of a row from the room; ``places`` says where, of a thread eight times the same."""
    return gl.inline_asm_elementwise(
        GET[ROW],
        "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r",
        [places],
        dtype=gl.float32,
        is_pure=False,
        pack=8,
    )


@gluon.jit
def tell(room, numbers, TOKENS: gl.constexpr):
    """Four numbers of every thread to all multiprocessors; the answer is where a lane's lie."""
    return gl.inline_asm_elementwise(
        TELL[TOKENS - 1],
        "=&r,r,f,f,f,f",
        (room,) + numbers,  # noqa: RUF005
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def hear(room, place):
    """Sums over multiprocessors and warps of what was told, in all of them."""
    return gl.inline_asm_elementwise(
        HEAR,
        "=&f,=&f,=&f,=&f,r,r",
        [room, place],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=False,
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
def ask(pointers):
    """Have what lies there brought to the L2 cache: a hint, nothing is read."""
    return gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def of_lane(x, lane):
    """What the lane has that each names."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;",
        "=f,f,r",
        [x, lane],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def products(p_rows, s_row, at, R: gl.constexpr, PART: gl.constexpr, TOKENS: gl.constexpr):
    """Sums over the columns of a warp, four numbers of each lane (g, q) = (lane / 4, lane % 4).

    Rows g and 2 q; g and 2 q + 1; g with row 8 (q = 0) or the query (q = 1); row 8 with the same
    (g = 0). ``at``: warp, lane, whether there is a token, and columns of the query to be kept.
    """
    o_w, half, o_l, there, p_kept, kept, p_norm, inside = at
    g = o_l // 4
    column = o_w * 32 + o_l % 4 * 8
    p_upper = p_rows + (g * s_row + column)
    p_lower = p_rows + (8 * s_row + column)
    upper = ()
    lower = ()
    for c in gl.static_range((PART + 127) // 128):
        live = (column < PART - 128 * c) & there
        first, second = (live & (g < R)).to(gl.int32), (live & (g < R - 8)).to(gl.int32)
        upper = upper + (load_row(p_upper + 128 * c, first),)  # noqa: RUF005
        lower = lower + (load_row(p_lower + 128 * c, second),)  # noqa: RUF005
    b_norm = gl.load(p_norm, mask=inside, other=0.0)
    room = open_room(o_l, TOKENS)
    room_of_all = room + (TOKENS * SIZE - half * SIZE)
    keep_query(room_of_all, load_query(p_kept, kept.to(gl.int32)), TOKENS)
    p_query = room_of_all + column * 2 + gl.where(g == 3, STRIDE, 0)
    p_query = gl.where((g == 2) | (g == 3), p_query, 0)
    # Two rows of 64 bytes at a time, in different banks.
    p_row = room + ROWS + g * STRIDE + (column * 2 ^ g % 2 * 64)
    p_ninth = gl.where(g < R - 8, room + (ROWS + 8 * STRIDE) + column * 2, 0)
    s = (gl.zeros_like(o_l.to(gl.float32)),) * 16
    joined = ()
    for c in gl.static_range((PART + 127) // 128):
        joined = joined + (join_query(lower[c], p_query, c),)  # noqa: RUF005
    for c in gl.static_range((PART + 127) // 128):
        s = multiply(s, upper[c], joined[c])
    beside, last = s[4] + s[12] + (s[5] + s[13]), s[6] + s[14] + (s[7] + s[15])
    place = tell(room, (s[0] + s[8], s[1] + s[9], beside, last), TOKENS)
    # While the others are told: who mixes needs all rows of a column.
    for c in gl.static_range((PART + 127) // 128):
        put_rows(p_row, p_ninth, upper[c], joined[c], c)
    meet_token(o_l, TOKENS)
    return room, place, b_norm


@gluon.jit
def scores_of(sums, o_l, eps, D: gl.constexpr, R: gl.constexpr):
    """Scores of all rows, in powers of two; of rows lane / 4 of the first eight; row 8's square."""
    even, odd, beside, last = sums
    g = o_l // 4
    own = of_lane(gl.where(g % 2 == 0, even, odd), g * 4 + g // 2)
    score = of_lane(beside, g * 4 + 1) * (gl.rsqrt(own / D + eps) * LOG2_E)
    score = gl.where(g < R, score, float("-inf"))
    scores = ()
    for r in gl.static_range(R if R < 8 else 8):
        scores = scores + (from_lane(score, 4 * r),)  # noqa: RUF005
    own = from_lane(last, 0)
    if R > 8:
        scores = scores + (from_lane(last, 1) * (gl.rsqrt(own / D + eps) * LOG2_E),)  # noqa: RUF005
    return scores, score, own


@gluon.jit
def attn_residual_gram_kernel(
    rows,
    query,
    norm,
    out,
    s_row,
    s_token,
    eps,
    N,
    D: gl.constexpr,
    R: gl.constexpr,
    TOKENS: gl.constexpr,
    PDL: gl.constexpr,
):
    """One cluster mixes the R rows of each of TOKENS tokens, of N.

    A tensor is [8, 4 TOKENS, 32, 8], of multiprocessors, warps, lanes, and columns of a lane;
    without the last, a number in every thread.
    """
    PART: gl.constexpr = D // 8
    COLUMNS: gl.constexpr = COLUMNS_OF[TOKENS - 1]
    LANES: gl.constexpr = LANES_OF[TOKENS - 1]
    o_c = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, LANES)))[:, None, None]
    o_w = gl.arange(0, 4 * TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, LANES)))[None, :, None]
    o_l = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LANES)))[None, None, :]
    o_e = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, COLUMNS))))
    o_w = o_w + (o_c * 0 + o_l * 0)
    o_l = o_l + o_w * 0
    i_n = cluster_of(gl.program_id(0)).to(gl.int64) * TOKENS
    there = o_l < 32
    half = 0
    if TOKENS > 1:
        half = o_w // 4
        i_n = i_n + half
        there = i_n < N
        o_w = o_w % 4
    within = o_w * 256 + o_l * 8
    begin = within + o_c * PART
    o_d = begin[:, :, :, None] + o_e[None, None, None, :]
    kept = within < PART
    inside = (kept & there)[:, :, :, None] & (o_e < 8)[None, None, None, :]
    ask(query + gl.where(kept, begin, 0))
    ask(norm + gl.where(kept, begin, 0))
    if PDL:
        o_l = join_chain(o_l)
    at = (o_w, half, o_l, there, query + begin, kept, norm + o_d, inside)
    p_rows = rows + i_n * s_token + o_c * PART
    room, place, b_norm = products(p_rows, s_row, at, R, PART, TOKENS)
    place_of = gl.where(kept, within * 2, 0)
    eight_times = gl.where(o_e < 8, 0, 1)[None, None, None, :]
    p_x = (room + place_of)[:, :, :, None] + eight_times
    p_odd = (room + (place_of ^ 64))[:, :, :, None] + eight_times
    x = ()
    for r in gl.static_range(R):
        x = x + (get_row(p_odd if r % 2 else p_x, r),)  # noqa: RUF005
    sums = hear(room, place)
    scores, score, own = scores_of(sums, o_l, eps, D, R)
    highest = scores[0]
    for r in gl.static_range(1, R):
        highest = gl.maximum(highest, scores[r])
    square = gl.exp2(of_lane(score, o_l % 4 * 8) - highest) * sums[0]
    square += gl.exp2(of_lane(score, o_l % 4 * 8 + 4) - highest) * sums[1]
    if R > 8:
        ninth = gl.exp2(scores[R - 1] - highest)
        square += gl.where(o_l % 4 == 0, 2.0 * ninth * sums[2], 0.0)
        square = square * gl.exp2(score - highest) + gl.where(o_l == 0, ninth * ninth * own, 0.0)
    else:
        square = square * gl.exp2(score - highest)
    square = gl.sum(square, 2)[:, :, None]
    total = gl.zeros_like(highest)
    mixed = gl.zeros([8, 4 * TOKENS, 32, 8], gl.float32, COLUMNS)
    for r in gl.static_range(R):
        weight = gl.exp2(scores[r] - highest)
        total += weight
        mixed += weight[:, :, :, None] * x[r]
    # Nobody divides by ``total``: the norm has no use for a factor, but for eps.
    scale = gl.rsqrt(gl.maximum(square, 0.0) / D + eps * total * total)
    y = mixed * scale[:, :, :, None] * widen(b_norm)
    p_out = (out + i_n * D + begin)[:, :, :, None] + o_e[None, None, None, :]
    gl.store(p_out, y.to(out.dtype.element_ty), mask=inside)
