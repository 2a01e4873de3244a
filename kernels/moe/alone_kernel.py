"""The products over MXFP4 weights for a single token, in Gluon for compute capability 9.0.

As in ``few_kernel.py`` warps share nothing while they multiply. Rows are dealt out differently:
every warp takes the same number of them, all columns of each, and all warps fit on the device at
once. A warp multiplies 16 rows at a time, of which the last may be partly empty: 24 features are 24
gates and their ups in three products, 28 on the way back are in two.

Scales multiply sums. The tensor cores take eight columns of tokens, and there is one token: column
n is the token in the n-th group of 32 of 256 columns, and zero elsewhere, so that a row's sums come
by groups. A code is decoded to its value times 2^-126, which is not multiplied by anything before
the product; the token is, by 2^64.

Weights and scales lie in tiles (``mxfp4.py``); their shapes below are those of the rows.

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
    _neighbours,
    _threads,
)
from k3vl.kernels.moe.mxfp4 import TILE_ROWS
from k3vl.kernels.moe.words_kernel import decoded
from k3vl.kernels.situ.glu_kernel import activated

TILE = gl.constexpr(TILE_ROWS)
ACC, TOP, BELOW, X, FACTOR = 4, 8, 12, 16, 32
"""First operand of each kind: sums, words of either 8 rows, the token and what multiplies it."""


def _sixteen_rows(*, split: bool) -> str:
    """Machine code: 128 columns more for the sums of 16 rows; see ``few_kernel._product``."""
    lines = ["{", ".reg .b32 m, s, a<4>, x<16>;"]
    if not split:
        lines += [_neighbours(at, X) for at in range(16)]
    lines += [
        f"mul.rn.bf16x2 x{at}, {f'${X + at}' if split else f'x{at}'}, ${FACTOR};"
        for at in range(16)
    ]
    for i in range(4):
        for step in range(2):
            source = [(i, 2 * step + half) for half in range(2)]
            first = 4 * i + 2 * step
            if split:
                source = [(i // 2 + 2 * half, 2 * (i % 2) + step) for half in range(2)]
                first = 4 * (i % 2) + 8 * (i // 2) + 2 * step
            for half, (word, field) in enumerate(source):
                for row, words in enumerate((TOP, BELOW)):
                    lines += _codes(f"${words + word}", field, f"a{2 * half + row}")
            given = 0 if i or step else ACC
            lines.append(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                f"{{$0, $1, $2, $3}}, {{a0, a1, a2, a3}}, {{x{first}, x{first + 1}}}, "
                f"{{{', '.join(f'${given + c}' for c in range(4))}}};"
            )
    return "\n".join([*lines, "}"])


def _codes(word: str, field: int, to: str) -> list[str]:
    """A pair of columns of a stored word, times 2^-126."""
    *lines, last, _times_scale = decoded(word, field, "", "")
    return [*lines, last.replace(" m,", f" {to},", 1)]


def _fold() -> str:
    """Machine code: sums of two groups of two rows, times their scales and 2^62, onto others."""
    lines = ["{", ".reg .b32 f, s<2>;", "mov.b32 s0, $20;", "add.u32 s1, $20, 0x100;"]
    for c in range(4):
        lines += [
            f"prmt.b32 f, ${12 + 4 * (c // 2)}, 0, s{c % 2};",
            "mad.lo.u32 f, f, 128, 0x1f000000;",
            f"fma.rn.f32 ${c}, ${8 + c}, f, ${4 + c};",
        ]
    return "\n".join([*lines, "}"])


def _whole() -> str:
    """Machine code: the sums of all groups, for both groups that a thread has."""
    lines = ["{", ".reg .b32 f, g;"]
    for c in (0, 2):
        lines.append(f"add.f32 f, ${4 + c}, ${5 + c};")
        for lane in (1, 2):
            lines += [f"shfl.sync.bfly.b32 g, f, {lane}, 31, -1;", "add.f32 f, f, g;"]
        lines += [f"mov.b32 ${c}, f;", f"mov.b32 ${c + 1}, f;"]
    return "\n".join([*lines, "}"])


SUMS = ["=&f"] * 4
"""Written before all operands are read, so nothing else may lie where they do."""
GIVEN = [str(c) for c in range(4)]
ROWS_16 = gl.constexpr(_sixteen_rows(split=False))
ROWS_16_SPLIT = gl.constexpr(_sixteen_rows(split=True))
"""The same for tokens as the first product writes them; see ``_place``."""
OPERANDS = gl.constexpr(",".join([*SUMS, *GIVEN, *["r"] * 28]))
FOLD = gl.constexpr(_fold())
FOLD_OPERANDS = gl.constexpr(",".join([*SUMS, *GIVEN, *["f"] * 4, *["r"] * 12]))
WHOLE = gl.constexpr(_whole())
WHOLE_OPERANDS = gl.constexpr(",".join([*SUMS, *["f"] * 4]))


@gluon.jit
def _asked(
    at, k, last, WORDS: gl.constexpr, WARPS: gl.constexpr, ROWS: gl.constexpr, HALF: gl.constexpr
):
    """Ask for 16 bytes of each of a thread's rows, of columns 128 k and on: [32 WARPS, 4] each."""
    _t, e = _threads(WARPS, 4)
    words = ()
    for r in gl.static_range(len(ROWS)):
        there = (at + k * (16 * TILE))[:, None] + (e + ROWS[r] * WORDS)[None, :]
        if HALF and r == len(ROWS) - 1:
            mask, _ = gl.broadcast(last[:, None], e[None, :])
            words = words + (gl.load(there, mask=mask, cache_modifier=".cg"),)
        else:
            words = words + (gl.load(there, cache_modifier=".cg"),)
    return words


@gluon.jit
def _scales(at, k, last, GROUPS: gl.constexpr, ROWS: gl.constexpr, HALF: gl.constexpr):
    """A word of four scales for each of a thread's rows."""
    scales = ()
    for r in gl.static_range(len(ROWS)):
        there = (at + k * TILE + ROWS[r] * GROUPS)[:, None]
        if HALF and r == len(ROWS) - 1:
            scales = scales + (gl.load(there, mask=last[:, None]),)
        else:
            scales = scales + (gl.load(there),)
    return scales


@gluon.jit
def _step(sums, words, x_at, k, i, WARPS: gl.constexpr, SPLIT: gl.constexpr):
    """128 columns more, the first or the second of 256, in all tiles' sums by groups."""
    CODE: gl.constexpr = ROWS_16_SPLIT if SPLIT else ROWS_16
    t, e = _threads(WARPS, 4)
    at = (x_at + 64 * (k + i))[:, None] + e[None, :]
    x0, x1, x2, x3 = gl.load(at), gl.load(at + 4), gl.load(at + 8), gl.load(at + 12)
    factor = gl.where(t % 32 // 4 == t % 4 + 4 * i, 0x5F805F80, 0)
    factor, _ = gl.broadcast(factor[:, None], x0)
    more = ()
    for r in gl.static_range(len(sums)):
        more = more + (
            gl.inline_asm_elementwise(
                CODE, OPERANDS,
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
    WORDS: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr, SPLIT: gl.constexpr,
    WAITS: gl.constexpr, ROWS: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Sums of the rows ROWS behind a thread's ``row``: [32 WARPS, 2] for every two of them.

    ROWS are multiples of TILE, so a thread's rows have the same place in their tiles. HALF: half of
    a warp has the last of them, the other half reads nothing there and its sums mean nothing.

    Two steps of 128 columns at a time. EARLY: the next words are asked for before the present ones
    are decoded. One loop of one body: what is not in the caches is read once, code as well.
    """
    STEPS: gl.constexpr = WORDS // 16
    TILES: gl.constexpr = len(ROWS) // 2
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    t, _e = _threads(WARPS, 4)
    q = t % 4
    x_at = x + 16 * q
    g = row % TILE
    last = t % 32 < 16
    w_at = w + (row - g) * WORDS + 16 * g + 4 * q
    s_at = scale + (row - g) * STEPS + g + q // 2 * TILE
    words = ()
    for i in gl.static_range(2):
        words = words + (_asked(w_at, i, last, WORDS, WARPS, ROWS, HALF),)
    scales = _scales(s_at, 0, last, STEPS, ROWS, HALF)
    zero = gl.zeros([32 * WARPS, 4], gl.float32, L)
    first = zero
    if WAITS:
        _control(WAIT)
        first = zero + _touched(x, nothing, WORDS, WARPS)[:, None].to(gl.float32)
    zeros, sums = (), ()
    for _r in gl.static_range(TILES):
        zeros = zeros + (zero,)
        sums = sums + (first,)
    for k in range(0, STEPS, 2):
        # Behind the last steps they come again, from the L2 cache.
        then = gl.minimum(k + 2, STEPS - 2)
        coming = _scales(s_at, then, last, STEPS, ROWS, HALF)
        later = ()
        if EARLY:
            for i in gl.static_range(2):
                later = later + (_asked(w_at, then + i, last, WORDS, WARPS, ROWS, HALF),)
            _control(STAY)
        parts = zeros
        for i in gl.static_range(2):
            parts = _step(parts, words[i], x_at, k, i, WARPS, SPLIT)
            if not EARLY:
                later = later + (_asked(w_at, then + i, last, WORDS, WARPS, ROWS, HALF),)
        sums = _folded(sums, parts, scales, WARPS)
        words = later
        scales = coming
    rows = ()
    for r in gl.static_range(TILES):
        whole = gl.inline_asm_elementwise(
            WHOLE, WHOLE_OPERANDS, [sums[r]], dtype=gl.float32, is_pure=True, pack=4
        )
        rows = rows + (gl.split(whole.reshape([32 * WARPS, 2, 2]))[0],)
    return rows


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
):  # fmt: skip
    """``out[pair] = glu(W1 x, W3 x)`` for 24 features a warp.

    x [WIDTH / 2] words of two; w [E, 2 INNER, WIDTH / 8] words; scale [E, 2 INNER, WIDTH / 128]
    words; experts [k] of a token; out [k, INNER / 32, 8, 4], features 32 a + 8 b + c as [a, c, b].
    """
    _control(GO_ON)
    WORDS: gl.constexpr = WIDTH // 8
    pair = gl.program_id(1)
    begin = gl.load(experts + pair).to(gl.int64) * (2 * INNER)
    t, _e = _threads(WARPS, 4)
    gate = (gl.program_id(0) * WARPS + t // 32) * 24 + t % 32 // 4
    gates, both, ups = _rows_times_token(
        w + begin * WORDS, scale + begin * (WORDS // 16), x, gate, 0,
        WORDS, WARPS, False, False, False, (0, 8, 16, 16 + INNER, INNER, 8 + INNER), False,
    )  # fmt: skip
    last, last_up = gl.split(both)
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
def down_alone_kernel(
    h, w, scale, experts, weights, out, nothing,
    INNER: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """``out = sum of weights[pair] W2 h[pair]`` for 28 features a program, one pair a warp.

    h [k, INNER / 2] words of two, as the way in leaves them; w [E, WIDTH, INNER / 8] words; scale
    [E, WIDTH, INNER / 128] words; experts, weights [k] of a token, k = WARPS; out [WIDTH] float32;
    nothing is 0, which the compiler must not know.
    """
    _control(GO_ON)
    WORDS: gl.constexpr = INNER // 8
    t, _e = _threads(WARPS, 4)
    begin = gl.load(experts + t // 32).to(gl.int64) * WIDTH
    row = gl.program_id(0) * 28 + t % 32 // 4
    high, low = _rows_times_token(
        w + begin * WORDS, scale + begin * (WORDS // 16), h + t // 32 * (4 * WORDS), row, nothing,
        WORDS, WARPS, True, True, True, (0, 8, 16, 24), True,
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
    place = out + gl.program_id(0) * 28 + t // 4 + 8 * e
    first = t % 4 == 0
    gl.store(place, high, mask=first)
    gl.store(place + 16, low, mask=first & (t + 16 * e < 32))
