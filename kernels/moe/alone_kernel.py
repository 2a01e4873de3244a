"""The products over MXFP4 weights for a single token, in Gluon for compute capability 9.0.

The inner loop is that of ``few_kernel.py``; what differs is how rows are dealt out. Every warp
takes the same number of them, all columns of each, and all warps fit on the device at once: none
waits for another, none comes second, nothing is added up between warps. A warp multiplies tiles of
16 rows of which the last may be partly empty: K3's way in is 24 features a warp, 24 gates and their
ups in three tiles, its way back 28 in two.

Triton reads a kernel's annotations, so its arguments have none but ``constexpr``.
"""
# ruff: noqa: ANN001, ANN201, ANN202, RUF005 - Triton takes a tuple apart, but not in another one
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from k3vl.kernels.moe.few_kernel import (
    GO_ON,
    STAY,
    WAIT,
    _control,
    _decoded,
    _neighbours,
    _threads,
)
from k3vl.kernels.situ.glu_kernel import activated

ACC, TOP, BELOW, X, SCALE, SELECT = 4, 8, 12, 16, 32, 40
FACTOR = 32
"""First operand of each kind: sums, words of either 8 rows, the token, scales, the rest."""


def _tile(nth: int = 0, *, split: bool, plain: bool = False) -> str:
    """Machine code: 128 columns more for the sums of 16 rows; see ``few_kernel._product``.

    Plain: without their scales. A product has eight columns of tokens, and one token: column n is
    the token in the n-th group of 32 of 256 columns and zero elsewhere, so a row's sums come by
    groups. Codes are decoded to their value times 2^-126, so the token is multiplied by 2^64.
    """
    lines = ["{", ".reg .b32 m, s, f<2>, a<4>, x<16>;"]
    for row in range(0 if plain else 2):
        lines += [
            f"shfl.sync.idx.b32 s, ${SCALE + 4 * row}, {nth}, 0x1c1f, -1;",
            f"prmt.b32 s, s, 0, ${SELECT};",
            f"mad.lo.u32 f{row}, s, 128, 0x3f003f00;",
        ]
    if not split:
        lines += [_neighbours(at, X) for at in range(16)]
    if plain:
        lines += [
            f"mul.rn.bf16x2 x{at}, {f'${X + at}' if split else f'x{at}'}, ${FACTOR};"
            for at in range(16)
        ]
    for i in range(4):
        for step in range(2):
            source = [(i, 2 * step + half) for half in range(2)]
            right = f"x{4 * i + 2 * step}, x{4 * i + 2 * step + 1}"
            if split:
                source = [(i // 2 + 2 * half, 2 * (i % 2) + step) for half in range(2)]
                n = 2 * (i % 2) + 4 * (i // 2) + step
                right = f"${X + 2 * n}, ${X + 2 * n + 1}"
                if plain:
                    right = f"x{2 * n}, x{2 * n + 1}"
            for half, (word, field) in enumerate(source):
                for row, first in enumerate((TOP, BELOW)):
                    to = f"a{2 * half + row}"
                    codes = _decoded(f"${first + word}", field, f"f{row}", to)
                    if plain:
                        codes = [*codes[:-2], codes[-2].replace(" m,", f" {to},", 1)]
                    lines += codes
            given = 0 if i or step else ACC
            lines.append(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                f"{{$0, $1, $2, $3}}, {{a0, a1, a2, a3}}, {{{right}}}, "
                f"{{{', '.join(f'${given + c}' for c in range(4))}}};"
            )
    return "\n".join([*lines, "}"])


TILE = gl.constexpr(tuple(_tile(nth, split=False) for nth in range(4)))
TILE_SPLIT = gl.constexpr(tuple(_tile(nth, split=True) for nth in range(4)))
"""The same for tokens as the first product writes them; see ``_place``."""
OPERANDS = gl.constexpr(",".join([*["=&f"] * 4, *map(str, range(4)), *["r"] * 36]))
"""Sums are written before all operands are read, so nothing else may lie where they do."""


def _fold() -> str:
    """Machine code: sums of two groups of two rows, times their scales, onto others."""
    lines = ["{", ".reg .b32 f, s<2>;", "mov.b32 s0, $20;", "add.u32 s1, $20, 0x100;"]
    for c in range(4):
        lines += [
            f"prmt.b32 f, ${12 + 4 * (c // 2)}, 0, s{c % 2};",
            "mad.lo.u32 f, f, 128, 0x1f000000;",
            f"fma.rn.f32 ${c}, ${8 + c}, f, ${4 + c};",
        ]
    return "\n".join([*lines, "}"])


def _whole() -> str:
    """Machine code: the sum of all groups, in every column."""
    lines = ["{", ".reg .b32 f, g;"]
    for c in (0, 2):
        lines.append(f"add.f32 f, ${4 + c}, ${5 + c};")
        for lane in (1, 2):
            lines += [f"shfl.sync.bfly.b32 g, f, {lane}, 31, -1;", "add.f32 f, f, g;"]
        lines += [f"mov.b32 ${c}, f;", f"mov.b32 ${c + 1}, f;"]
    return "\n".join([*lines, "}"])


PLAIN = gl.constexpr(_tile(split=False, plain=True))
PLAIN_SPLIT = gl.constexpr(_tile(split=True, plain=True))
PLAIN_OPERANDS = gl.constexpr(",".join([*["=&f"] * 4, *map(str, range(4)), *["r"] * 28]))
FOLD = gl.constexpr(_fold())
FOLD_OPERANDS = gl.constexpr(",".join([*["=&f"] * 4, *map(str, range(4)), *["f"] * 4, *["r"] * 12]))
WHOLE = gl.constexpr(_whole())
WHOLE_OPERANDS = gl.constexpr(",".join([*["=&f"] * 4, *["f"] * 4]))


@gluon.jit
def _asked(
    at, k, WORDS: gl.constexpr, WARPS: gl.constexpr, ROWS: gl.constexpr, STRIDE: gl.constexpr
):
    """Ask for 16 bytes of each of a thread's rows, of columns 128 k and on: [32 WARPS, 4] each."""
    _t, e = _threads(WARPS, 4)
    words = ()
    for r in gl.static_range(len(ROWS)):
        there = (at + k * STRIDE)[:, None] + (e + ROWS[r] * WORDS)[None, :]
        words = words + (gl.load(there, cache_modifier=".cg"),)
    return words


@gluon.jit
def _scales(at, k, GROUPS: gl.constexpr, ROWS: gl.constexpr, STRIDE: gl.constexpr):
    """A word of four scales for each of a thread's rows."""
    scales = ()
    for r in gl.static_range(len(ROWS)):
        scales = scales + (gl.load((at + k * STRIDE + ROWS[r] * GROUPS)[:, None]),)
    return scales


@gluon.jit
def _token(x_at, k, WARPS: gl.constexpr):
    """Columns 32 q of a step and on, four registers each."""
    _t, e = _threads(WARPS, 4)
    at = (x_at + 64 * k)[:, None] + e[None, :]
    return gl.load(at), gl.load(at + 4), gl.load(at + 8), gl.load(at + 12)


@gluon.jit
def _step(sums, words, scales, token, i: gl.constexpr, WARPS: gl.constexpr, SPLIT: gl.constexpr):
    """128 columns more in the sums of all tiles."""
    CODE: gl.constexpr = TILE_SPLIT[i] if SPLIT else TILE[i]
    t, _e = _threads(WARPS, 4)
    x0, x1, x2, x3 = token
    select, _ = gl.broadcast((t % 4 * 0x0101 + 0x4040)[:, None], x0)
    more = ()
    for r in gl.static_range(len(sums)):
        top, _ = gl.broadcast(scales[2 * r], x0)
        below, _ = gl.broadcast(scales[2 * r + 1], x0)
        more = more + (
            gl.inline_asm_elementwise(
                CODE, OPERANDS,
                [sums[r], words[2 * r], words[2 * r + 1], x0, x1, x2, x3, top, below, select],
                dtype=gl.float32, is_pure=True, pack=4,
            ),
        )  # fmt: skip
    return more


@gluon.jit
def _plain_step(sums, words, token, i, WARPS: gl.constexpr, SPLIT: gl.constexpr):
    """128 columns more, the first or the second of 256, in sums by groups."""
    CODE: gl.constexpr = PLAIN_SPLIT if SPLIT else PLAIN
    t, _e = _threads(WARPS, 4)
    x0, x1, x2, x3 = token
    factor = gl.where(t % 32 // 4 == t % 4 + 4 * i, 0x5F805F80, 0)
    factor, _ = gl.broadcast(factor[:, None], x0)
    more = ()
    for r in gl.static_range(len(sums)):
        more = more + (
            gl.inline_asm_elementwise(
                CODE, PLAIN_OPERANDS,
                [sums[r], words[2 * r], words[2 * r + 1], x0, x1, x2, x3, factor],
                dtype=gl.float32, is_pure=True, pack=4,
            ),
        )  # fmt: skip
    return more


@gluon.jit
def _folded(sums, parts, scales, WARPS: gl.constexpr):
    """Onto sums those of 256 columns by groups, of which a thread has two, times their scales."""
    t, _e = _threads(WARPS, 4)
    more = ()
    for r in gl.static_range(len(sums)):
        top, _ = gl.broadcast(scales[2 * r], sums[r])
        below, _ = gl.broadcast(scales[2 * r + 1], sums[r])
        select, _ = gl.broadcast((t % 2 * 0x200 + 0x4044)[:, None], sums[r])
        more = more + (
            gl.inline_asm_elementwise(
                FOLD, FOLD_OPERANDS, [sums[r], parts[r], top, below, select],
                dtype=gl.float32, is_pure=True, pack=4,
            ),
        )  # fmt: skip
    return more


@gluon.jit
def _touched(x, nothing, WORDS: gl.constexpr, WARPS: gl.constexpr):
    """Zero, once all of a warp's token is in the L1 cache: steps ask for little of it at a time."""
    t, _e = _threads(WARPS, 4)
    seen = gl.load(x + t % 32 * 8)
    for i in gl.static_range(1, WORDS // 64):
        seen ^= gl.load(x + t % 32 * 8 + 256 * i)
    return seen & nothing


@gluon.jit
def _rows_times_token(
    w, scale, x, row, nothing,
    WORDS: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr, EARLY: gl.constexpr,
    SPLIT: gl.constexpr, WAITS: gl.constexpr, ROWS: gl.constexpr, TILED: gl.constexpr,
    PLAINLY: gl.constexpr,
):  # fmt: skip
    """Sums of the rows ROWS behind a thread's ``row``, two a tile: [32 WARPS, 4] a tile.

    Steps of 128 columns, DEPTH at a time. EARLY: the next words are asked for before the present
    ones are decoded. One loop of one body: what is not in the caches is read once, code as well.
    """
    STEPS: gl.constexpr = WORDS // 16
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    t, _e = _threads(WARPS, 4)
    q = t % 4
    x_at = x + 16 * q
    step = q // 2 if PLAINLY else q % DEPTH
    if TILED:
        g = gl.minimum(t % 32 // 4, TILED - 1)
        w_at = w + (row - g) * WORDS + g * 16 + 4 * q
        s_at = scale + (row - g) * STEPS + g + TILED * step
    else:
        w_at = w + row * WORDS + 4 * q
        s_at = scale + row * STEPS + step
    words, sums = (), ()
    for i in gl.static_range(DEPTH):
        words = words + (_asked(w_at, i, WORDS, WARPS, ROWS, 16 * TILED if TILED else 16),)
    scales = _scales(s_at, 0, STEPS, ROWS, TILED if TILED else 1)
    zero = gl.zeros([32 * WARPS, 4], gl.float32, L)
    if WAITS:
        _control(WAIT)
        zero += _touched(x, nothing, WORDS, WARPS)[:, None].to(gl.float32)
    for _r in gl.static_range(len(ROWS) // 2):
        sums = sums + (zero,)
    zeros = ()
    for _r in gl.static_range(len(ROWS) // 2):
        zeros = zeros + (gl.zeros([32 * WARPS, 4], gl.float32, L),)
    parts = zeros
    for k in range(0, STEPS, DEPTH):
        # Behind the last steps they come again, from the L2 cache.
        then = gl.minimum(k + DEPTH, STEPS - DEPTH)
        coming = _scales(s_at, then, STEPS, ROWS, TILED if TILED else 1)
        second = scales
        if PLAINLY and DEPTH == 4:
            second = _scales(s_at, k + 2, STEPS, ROWS, TILED if TILED else 1)
        later = ()
        if EARLY:
            for i in gl.static_range(DEPTH):
                later = later + (
                    _asked(w_at, then + i, WORDS, WARPS, ROWS, 16 * TILED if TILED else 16),
                )
            _control(STAY)
        for i in gl.static_range(DEPTH):
            token = _token(x_at, k + i, WARPS)
            if PLAINLY:
                parts = _plain_step(parts if i % 2 else zeros, words[i], token, i % 2, WARPS, SPLIT)
                if i % 2:
                    sums = _folded(sums, parts, scales if i == 1 else second, WARPS)
            else:
                sums = _step(sums, words[i], scales, token, i, WARPS, SPLIT)
            if not EARLY:
                later = later + (
                    _asked(w_at, then + i, WORDS, WARPS, ROWS, 16 * TILED if TILED else 16),
                )
        words = later
        scales = coming
    if PLAINLY:
        whole = ()
        for r in gl.static_range(len(ROWS) // 2):
            whole = whole + (
                gl.inline_asm_elementwise(
                    WHOLE, WHOLE_OPERANDS, [sums[r]], dtype=gl.float32, is_pure=True, pack=4
                ),
            )
        sums = whole
    return sums


@gluon.jit
def _firsts(sums, BOTH: gl.constexpr):
    """Of every tile the sums of rows g and g + 8, which all its columns hold."""
    return gl.split(sums.reshape([BOTH, 2, 2]))[0]


@gluon.jit
def _place(row, EIGHTH: gl.constexpr):
    """Where the way back reads what is row n INNER / 8 + j: features 8 j + n by j / 4, n, j % 4."""
    n = row // EIGHTH
    j = row % EIGHTH
    return j // 4 * 32 + n * 4 + j % 4


@gluon.jit
def gate_up_alone_kernel(
    x, w, scale, experts, out, beta, linear_beta,
    WIDTH: gl.constexpr, INNER: gl.constexpr, SITU: gl.constexpr, WARPS: gl.constexpr,
    DEPTH: gl.constexpr, EARLY: gl.constexpr, TILED: gl.constexpr, PLAINLY: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """``out[pair] = glu(W1 x, W3 x)`` for 24 features a warp.

    x [WIDTH / 2] words of two; w [E, 2 INNER, WIDTH / 8] words; scale [E, 2 INNER, WIDTH / 128]
    words; experts [k] of a token; out [k, INNER / 32, 8, 4], features 32 a + 8 b + c as [a, c, b].
    """
    if OVERLAP:
        _control(GO_ON)
    WORDS: gl.constexpr = WIDTH // 8
    pair = gl.program_id(1)
    begin = gl.load(experts + pair).to(gl.int64) * (2 * INNER)
    t, _e = _threads(WARPS, 4)
    gate = (gl.program_id(0) * WARPS + t // 32) * 24 + t % 32 // 4
    ROWS: gl.constexpr = (0, 8, 16, 16 + INNER, INNER, 8 + INNER)
    top, middle, low = _rows_times_token(
        w + begin * WORDS, scale + begin * (WORDS // 16), x, gate, 0,
        WORDS, WARPS, DEPTH, EARLY, False, False, ROWS, TILED, PLAINLY,
    )  # fmt: skip
    gates, ups = _firsts(top, 32 * WARPS), _firsts(low, 32 * WARPS)
    last, last_up = gl.split(_firsts(middle, 32 * WARPS))
    L: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
    y = activated(gates, ups, beta, linear_beta, SITU).to(out.dtype.element_ty)
    z = activated(last, last_up, beta, linear_beta, SITU).to(out.dtype.element_ty)
    t, e = _threads(WARPS, 2)
    row = (gl.program_id(0) * WARPS + t // 32) * 24 + t % 32 // 4
    first = t % 4 == 0
    place = out + pair * INNER + _place(row[:, None] + 8 * e[None, :], INNER // 8)
    gl.store(place, gl.convert_layout(y, L), mask=first[:, None])
    z = gl.convert_layout(z, gl.SliceLayout(1, L))
    gl.store(out + pair * INNER + _place(row + 16, INNER // 8), z, mask=first)


@gluon.jit
def _back(
    h, w, scale, rows, nothing,
    INNER: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr, EARLY: gl.constexpr,
    TILED: gl.constexpr, PLAINLY: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Sums of 28 rows a warp: [32 WARPS, 2] for rows g and g + 7, and for those 14 below them."""
    high, low = _rows_times_token(
        w, scale, h, rows, nothing,
        INNER // 8, WARPS, DEPTH, EARLY, True, OVERLAP, (0, 7, 14, 21), TILED, PLAINLY,
    )  # fmt: skip
    return _firsts(high, 32 * WARPS), _firsts(low, 32 * WARPS)


@gluon.jit
def down_alone_kernel(
    h, w, scale, experts, out, nothing,
    INNER: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr,
    EARLY: gl.constexpr, TILED: gl.constexpr, PLAINLY: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """``out[pair] = W2 h`` for 28 features a warp.

    h [k, INNER / 2] words of two, as the way in leaves them; w [E, WIDTH, INNER / 8] words; scale
    [E, WIDTH, INNER / 128] words; experts [k] of a token; out [k, WIDTH].
    """
    if OVERLAP:
        _control(GO_ON)
    WORDS: gl.constexpr = INNER // 8
    pair = gl.program_id(1)
    begin = gl.load(experts + pair).to(gl.int64) * WIDTH
    t, _e = _threads(WARPS, 4)
    row = (gl.program_id(0) * WARPS + t // 32) * 28 + gl.minimum(t % 32 // 4, 6)
    high, low = _back(
        h + pair * (4 * WORDS), w + begin * WORDS, scale + begin * (WORDS // 16), row, nothing,
        INNER, WARPS, DEPTH, EARLY, TILED, PLAINLY, OVERLAP,
    )  # fmt: skip
    L: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
    t, e = _threads(WARPS, 2)
    row = (gl.program_id(0) * WARPS + t // 32) * 28 + t % 32 // 4
    place = (out + pair * WIDTH + row)[:, None] + 7 * e[None, :]
    first = ((t % 4 == 0) & (t % 32 < 28))[:, None]
    gl.store(place, gl.convert_layout(high.to(out.dtype.element_ty), L), mask=first)
    gl.store(place + 14, gl.convert_layout(low.to(out.dtype.element_ty), L), mask=first)


@gluon.jit
def down_sum_kernel(
    h, w, scale, experts, weights, out, nothing,
    INNER: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr,
    EARLY: gl.constexpr, TILED: gl.constexpr, PLAINLY: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """``out = sum of weights[pair] W2 h[pair]`` for 28 features a program, one pair a warp.

    h [k, INNER / 2] words of two, as the way in leaves them; w [E, WIDTH, INNER / 8] words; scale
    [E, WIDTH, INNER / 128] words; experts, weights [k] of a token, k = WARPS; out [WIDTH] float32.
    """
    if OVERLAP:
        _control(GO_ON)
    WORDS: gl.constexpr = INNER // 8
    t, _e = _threads(WARPS, 4)
    begin = gl.load(experts + t // 32).to(gl.int64) * WIDTH
    row = gl.program_id(0) * 28 + gl.minimum(t % 32 // 4, 6)
    high, low = _back(
        h + t // 32 * (4 * WORDS), w + begin * WORDS, scale + begin * (WORDS // 16), row, nothing,
        INNER, WARPS, DEPTH, EARLY, TILED, PLAINLY, OVERLAP,
    )  # fmt: skip
    L: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
    t, _e = _threads(WARPS, 2)
    share = gl.load(weights + t // 32)[:, None]
    high = gl.convert_layout(high, L) * share
    low = gl.convert_layout(low, L) * share
    high = gl.convert_layout(gl.sum(high.reshape([WARPS, 32, 2]), axis=0), L)
    low = gl.convert_layout(gl.sum(low.reshape([WARPS, 32, 2]), axis=0), L)
    t = gl.arange(0, 32, gl.SliceLayout(1, L))[:, None]
    e = gl.arange(0, 2, gl.SliceLayout(0, L))[None, :]
    place = out + gl.program_id(0) * 28 + t // 4 + 7 * e
    first = (t % 4 == 0) & (t < 28)
    gl.store(place, high, mask=first)
    gl.store(place + 14, low, mask=first)


@gluon.jit
def gate_up_trio_kernel(
    x, w, scale, experts, out, beta, linear_beta,
    WIDTH: gl.constexpr, INNER: gl.constexpr, SITU: gl.constexpr, WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """``out[pair] = glu(W1 x, W3 x)`` for 24 features a warp: 16, and half the columns of 16.

    As ``gate_up_alone_kernel``. Two warps take 48 features: each 16 of its own, then its half of
    the columns of the 16 between them, which are added up at the end. So a step is of 32 rows, and
    two steps' words and the next two's fit into registers.
    """
    if OVERLAP:
        _control(GO_ON)
    WORDS: gl.constexpr = WIDTH // 8
    STEPS: gl.constexpr = WORDS // 16
    TRIOS: gl.constexpr = WARPS // 2
    ROWS: gl.constexpr = (0, 8, INNER, INNER + 8)
    L4: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    pair = gl.program_id(1)
    begin = gl.load(experts + pair).to(gl.int64) * (2 * INNER)
    t, _e = _threads(WARPS, 4)
    q = t % 4
    half = t // 32 // TRIOS
    own = gl.program_id(0) * (TRIOS * 48) + t // 32 % TRIOS * 48 + half * 32 + t % 32 // 4
    w_at = w + begin * WORDS + own * WORDS + 4 * q
    s_at = scale + begin * STEPS + own * STEPS + q % 2
    # From behind the own rows' last step to the first of the shared ones.
    column = half * (STEPS // 2) - STEPS
    over = (1 - 2 * half) * (16 * STEPS) + column
    words = (_asked(w_at, 0, WORDS, WARPS, ROWS, 16), _asked(w_at, 1, WORDS, WARPS, ROWS, 16))
    scales = _scales(s_at, 0, STEPS, ROWS, 1)
    sums = (gl.zeros([32 * WARPS, 4], gl.float32, L4), gl.zeros([32 * WARPS, 4], gl.float32, L4))
    gates, ups = _firsts(sums[0], 32 * WARPS), _firsts(sums[1], 32 * WARPS)
    LAST: gl.constexpr = STEPS + STEPS // 2 - 2
    for k in range(0, LAST + 2, 2):
        then = gl.minimum(k + 2, LAST)
        there = gl.where(then < STEPS, then, then + over)
        coming = _scales(s_at + there, 0, STEPS, ROWS, 1)
        at = w_at + there * 16
        later = (_asked(at, 0, WORDS, WARPS, ROWS, 16), _asked(at, 1, WORDS, WARPS, ROWS, 16))
        _control(STAY)
        x_at = x + 16 * q + gl.where(k < STEPS, k, k + column) * 64
        for i in gl.static_range(2):
            sums = _step(sums, words[i], scales, _token(x_at, i, WARPS), i, WARPS, False)
        turn = k == STEPS - 2
        gates = gl.where(turn, _firsts(sums[0], 32 * WARPS), gates)
        ups = gl.where(turn, _firsts(sums[1], 32 * WARPS), ups)
        sums = (gl.where(turn, 0.0, sums[0]), gl.where(turn, 0.0, sums[1]))
        words = later
        scales = coming
    L: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
    y = activated(gates, ups, beta, linear_beta, SITU).to(out.dtype.element_ty)
    t, e = _threads(WARPS, 2)
    own = gl.program_id(0) * (TRIOS * 48) + t // 32 % TRIOS * 48 + t // 32 // TRIOS * 32
    own += t % 32 // 4
    place = out + pair * INNER + _place(own[:, None] + 8 * e[None, :], INNER // 8)
    gl.store(place, gl.convert_layout(y, L), mask=(t % 4 == 0)[:, None])
    gates = gl.sum(_firsts(sums[0], 32 * WARPS).reshape([2, 32 * TRIOS, 2]), axis=0)
    ups = gl.sum(_firsts(sums[1], 32 * WARPS).reshape([2, 32 * TRIOS, 2]), axis=0)
    y = activated(gates, ups, beta, linear_beta, SITU).to(out.dtype.element_ty)
    t = gl.arange(0, 32 * TRIOS, gl.SliceLayout(1, L))
    shared = gl.program_id(0) * (TRIOS * 48) + t // 32 * 48 + 16 + t % 32 // 4
    place = out + pair * INNER + _place(shared[:, None] + 8 * e[None, :], INNER // 8)
    gl.store(place, gl.convert_layout(y, L), mask=(t % 4 == 0)[:, None])
