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
from k3vl.kernels.attn_residual.gram_code import (
    COLUMNS_OF,
    LANES_OF,
    ROWS,
    SIZE,
    STRIDE,
    ask,
    cluster_of,
    get_row,
    hear,
    join_query,
    keep_query,
    load_query,
    load_row,
    meet_token,
    multiply,
    of_lane,
    open_room,
    put_rows,
    tell,
)

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def products(p_rows, s_row, at, R: gl.constexpr, PART: gl.constexpr, TOKENS: gl.constexpr):
    """Sums over the columns of a warp, four numbers of each lane (g, q) = (lane / 4, lane % 4).

    Rows g and 2 q; g and 2 q + 1; g with row 8 (q = 0) or the query (q = 1); row 8 with the same
    (g = 0). ``at``: warp, lane, whether there is a token, and columns of the query to be kept.
    """
    o_w, half, o_l, there, p_kept, kept, p_norm, inside = at
    g = o_l // 4
    column = o_w * 32 + o_l % 4 * 8
    p_upper = p_rows + (g.to(gl.int64) * s_row + column)
    p_lower = p_rows + ((o_l * 0 + 8).to(gl.int64) * s_row + column)
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
def mixture(sums, o_l, eps, D: gl.constexpr, R: gl.constexpr):
    """Weights of all rows, not normalised, and in every lane the square of what they mix."""
    even, odd, beside, last = sums
    g = o_l // 4
    q = o_l % 4
    # In powers of two: of row g, for which lane (g, q) is one of four, then of all in all lanes.
    own = of_lane(gl.where(g % 2 == 0, even, odd), g * 4 + g // 2)
    score = of_lane(beside, g * 4 + 1) * (gl.rsqrt(own / D + eps) * LOG2_E)
    score = gl.where(g < R, score, float("-inf"))
    scores = ()
    for r in gl.static_range(R if R < 8 else 8):
        scores = scores + (from_lane(score, 4 * r),)  # noqa: RUF005
    ninth = from_lane(last, 0)
    if R > 8:
        of_ninth = from_lane(last, 1) * (gl.rsqrt(ninth / D + eps) * LOG2_E)
        scores = scores + (of_ninth,)  # noqa: RUF005
    # In pairs: a chain of maxima takes longer.
    highest = scores[R - 1]
    for r in gl.static_range(0, R - 1, 2):
        highest = gl.maximum(highest, gl.maximum(scores[r], scores[r + 1]))
    weights = ()
    for r in gl.static_range(R):
        weights = weights + (gl.exp2(scores[r] - highest),)  # noqa: RUF005
    square = gl.exp2(of_lane(score, q * 8) - highest) * even
    square += gl.exp2(of_lane(score, q * 8 + 4) - highest) * odd
    if R > 8:
        square += gl.where(q == 0, 2.0 * weights[R - 1] * beside, 0.0)
    square *= gl.exp2(score - highest)
    if R > 8:
        square += gl.where(o_l == 0, weights[R - 1] * weights[R - 1] * ninth, 0.0)
    return weights, gl.sum(square, 2)[:, :, None]


@gluon.jit
def rows_of_columns(room, within, kept, o_e, R: gl.constexpr):
    """Of the columns of a thread, all rows, from the room."""
    begin = gl.where(kept, within * 2, 0)
    eight_times = gl.where(o_e < 8, 0, 1)[None, None, None, :]
    even = (room + begin)[:, :, :, None] + eight_times
    odd = (room + (begin ^ 64))[:, :, :, None] + eight_times
    x = ()
    for r in gl.static_range(R):
        x = x + (get_row(odd if r % 2 else even, r),)  # noqa: RUF005
    return x


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
    x = rows_of_columns(room, within, kept, o_e, R)
    weights, square = mixture(hear(room, place), o_l, eps, D, R)
    total = gl.zeros_like(weights[0])
    mixed = gl.zeros([8, 4 * TOKENS, 32, 8], gl.float32, COLUMNS)
    for r in gl.static_range(R):
        total += weights[r]
        mixed += weights[r][:, :, :, None] * x[r]
    # Nobody divides by ``total``: the norm has no use for a factor, but for eps.
    scale = gl.rsqrt(gl.maximum(square, 0.0) / D + eps * total * total)
    y = mixed * b_norm.to(gl.float32) * scale[:, :, :, None]
    p_out = (out + i_n * D + begin)[:, :, :, None] + o_e[None, None, None, :]
    gl.store(p_out, y.to(out.dtype.element_ty), mask=inside)
