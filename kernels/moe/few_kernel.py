"""The grouped products over MXFP4 weights for few tokens, in Gluon for compute capability 9.0.

Warps share nothing: a thread loads words of its own, 16 bytes at a time and long before it decodes
them, and a warp multiplies what its threads have decoded in one piece of code (``mma.sync``,
16 rows by eight tokens). No barrier, no way through shared memory. What the tensor cores take as
neighbouring columns may be any, as long as weights and tokens agree: of the four threads that share
a row each takes the group of 32 columns that lies in its 16 bytes.

Weights and scales lie in tiles (``mxfp4.py``); their shapes below are those of the rows.

Triton reads a kernel's annotations, so its arguments have none but ``constexpr``.
"""
# ruff: noqa: ANN001, ANN201, ANN202, RUF005 - Triton takes a tuple apart, but not in another one
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from k3vl.kernels.moe.mxfp4 import TILE_ROWS
from k3vl.kernels.moe.words_kernel import decoded
from k3vl.kernels.situ.glu_kernel import activated

TILE = gl.constexpr(TILE_ROWS)
ACC, A, B, X, SCALE = 8, 16, 24, 32, 48
"""First operand of each kind: sums, words of either 16 rows, tokens, words of scales."""
SELECT, LANE = 80, 88


def _product(*, split: bool) -> str:
    """Machine code: 128 columns more for sums of 32 rows and eight tokens; see ``_step``."""
    lines = ["{", ".reg .b32 m, s, f<4>, a<8>, x<16>;"]
    for row in range(4):
        lines += [
            f"shfl.sync.idx.b32 s, ${SCALE + 8 * row}, ${LANE}, 31, -1;",
            f"prmt.b32 s, s, 0, ${SELECT};",
            f"mad.lo.u32 f{row}, s, 128, 0x3f003f00;",
        ]
    if not split:
        lines += map(_neighbours, range(16))
    for i in range(4):
        for rows in range(2):
            for step in range(2):
                lines += _decoded_step(i, rows, step, split=split)
            for step in range(2):
                n = 2 * (i % 2) + 4 * (i // 2) + step
                right = f"${X + 2 * n}, ${X + 2 * n + 1}"
                if not split:
                    right = f"x{4 * i + 2 * step}, x{4 * i + 2 * step + 1}"
                to = [f"${4 * rows + c}" for c in range(4)]
                given = to if i or step else [f"${ACC + 4 * rows + c}" for c in range(4)]
                left = ", ".join(f"a{4 * step + r}" for r in range(4))
                lines.append(
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                    f"{{{', '.join(to)}}}, {{{left}}}, {{{right}}}, {{{', '.join(given)}}};"
                )
    return "\n".join([*lines, "}"])


def _neighbours(at: int, first: int = X) -> str:
    """Columns 16 p + n and 16 p + 8 + n of a token, of which 16 lie in eight registers."""
    word, field = divmod(at, 4)
    n = field + 4 * (word % 2)
    low = first + 8 * (word // 2) + n // 2
    return f"prmt.b32 x{at}, ${low}, ${low + 4}, {'0x7632' if n % 2 else '0x5410'};"


def _decoded_step(i: int, rows: int, step: int, *, split: bool) -> list[str]:
    """The left operand of one product, four registers from a(4 step) on.

    Of 16 columns, half come from one field and half from the next; or, where tokens are split by n,
    from the same field of the words for two neighbouring pairs of j.
    """
    if split:
        source = [(i // 2 + 2 * half, 2 * (i % 2) + step) for half in range(2)]
    else:
        source = [(i, 2 * step + half) for half in range(2)]
    lines = []
    for half, (word, field) in enumerate(source):
        for below in range(2):
            given = f"${(A, B)[rows] + 4 * below + word}"
            to = f"a{4 * step + 2 * half + below}"
            lines += decoded(given, field, f"f{2 * rows + below}", to)
    return lines


PRODUCT = gl.constexpr(_product(split=False))
PRODUCT_SPLIT = gl.constexpr(_product(split=True))
"""The same for tokens that lie split by n, then j, as the first product writes them."""
REGISTERS = gl.constexpr(",".join([*["=&f"] * 8, *map(str, range(8)), *["r"] * 80]))
"""Sums are written before all operands are read, so nothing else may lie where they do."""
STAY = gl.constexpr("bar.warp.sync -1; // dummy $0")
"""Loads in front of it stay there; else the assembler puts them where their results are needed."""
WAIT = gl.constexpr("griddepcontrol.wait; // dummy $0")
GO_ON = gl.constexpr("griddepcontrol.launch_dependents; // dummy $0")


@gluon.jit
def _threads(WARPS: gl.constexpr, COUNT: gl.constexpr):
    """Thread numbers [32 WARPS] and element numbers [COUNT] of a block."""
    L: gl.constexpr = gl.BlockedLayout([1, COUNT], [32, 1], [WARPS, 1], [1, 0])
    t = gl.arange(0, 32 * WARPS, gl.SliceLayout(1, L))
    return t, gl.arange(0, COUNT, gl.SliceLayout(0, L))


@gluon.jit
def _control(CODE: gl.constexpr):
    gl.inline_asm_elementwise(CODE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _words(at, apart, WARPS: gl.constexpr):
    """Four words of rows g and g + 8 of a thread: [32 WARPS, 8]."""
    _t, e = _threads(WARPS, 8)
    return gl.load(at + (e // 4 * apart + e % 4)[None, :], cache_modifier=".cg")


@gluon.jit
def _scales(a_at, b_at, k, apart):
    """A word of four scales for each of a thread's four rows."""
    a_at += k * TILE
    b_at += k * TILE
    return gl.load(a_at), gl.load(a_at + apart), gl.load(b_at), gl.load(b_at + apart)


@gluon.jit
def _step(
    acc, words, i, groups, x_at, k, select, lane, SPLIT: gl.constexpr, WORDS: gl.constexpr
):  # fmt: skip
    """Sums of 32 rows and eight tokens, and 128 columns more of them.

    All [threads, 8]: sums of rows g and g + 8 of ``a``, columns 2 q and 2 q + 1, then of ``b``;
    words; tokens; the other operands are the same for all eight.
    """
    CODE: gl.constexpr = PRODUCT_SPLIT if SPLIT else PRODUCT
    x_at += (k + i) * (8 if SPLIT else 64)
    x0, x1 = gl.load(x_at), gl.load(x_at + (WORDS * 2 if SPLIT else 8))
    s0, acc = gl.broadcast(groups[0], acc)
    s1, acc = gl.broadcast(groups[1], acc)
    s2, acc = gl.broadcast(groups[2], acc)
    s3, acc = gl.broadcast(groups[3], acc)
    select, acc = gl.broadcast(select, acc)
    lane, acc = gl.broadcast(lane, acc)
    return gl.inline_asm_elementwise(
        CODE, REGISTERS,
        [acc, words[2 * i], words[2 * i + 1], x0, x1, s0, s1, s2, s3, select, lane],
        dtype=gl.float32, is_pure=True, pack=8,
    )  # fmt: skip


@gluon.jit
def _rows_times_tokens(
    w, scale, x, row_a, row_b, token,
    WORDS: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr, SPLIT: gl.constexpr,
    WAITS: gl.constexpr,
):  # fmt: skip
    """[32 WARPS, 8] sums of a thread's rows ``row_a``, ``row_b`` and those 8 below them.

    Eight rows of a warp, one for every four threads, are a tile of the weights.
    """
    t, e = _threads(WARPS, 8)
    g, q = t % 32 // 4, t % 4
    a_at = (w + (row_a - g) * WORDS + 16 * g + 4 * q)[:, None]
    b_at = (w + (row_b - g) * WORDS + 16 * g + 4 * q)[:, None]
    sa_at = (scale + (row_a - g) * (WORDS // 16) + g + q % DEPTH * TILE)[:, None]
    sb_at = (scale + (row_b - g) * (WORDS // 16) + g + q % DEPTH * TILE)[:, None]
    if SPLIT:
        x_at = (x + token * (WORDS * 4) + 2 * q)[:, None] + (e // 2 * (WORDS // 2) + e % 2)[None, :]
    else:
        x_at = (x + token * (WORDS * 4) + q * 16)[:, None] + e[None, :]
    select = (q * 0x0101 + 0x4040)[:, None]
    acc = gl.zeros(
        [32 * WARPS, 8], gl.float32, gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])
    )
    return _steps(
        acc, a_at, b_at, sa_at, sb_at, x_at, select, WORDS, WARPS, DEPTH, SPLIT, WAITS
    )  # fmt: skip


@gluon.jit
def _words_of(a_at, b_at, k, BELOW: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr):
    """Ask for the words of DEPTH steps from step ``k`` on, one load behind the other."""
    words = ()
    for i in gl.static_range(DEPTH):
        at = (k + i) * (16 * TILE)
        words = words + (_words(a_at + at, BELOW, WARPS), _words(b_at + at, BELOW, WARPS))
    return words


@gluon.jit
def _steps(
    acc, a_at, b_at, sa_at, sb_at, x_at, select,
    WORDS: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr, SPLIT: gl.constexpr,
    WAITS: gl.constexpr,
):  # fmt: skip
    """All steps of 128 columns, DEPTH at a time.

    The next words are asked for before the present ones are decoded, and lie in registers of their
    own.
    """
    STEPS: gl.constexpr = WORDS // 16
    BELOW: gl.constexpr = 8 * WORDS
    t, _e = _threads(WARPS, 8)
    words = _words_of(a_at, b_at, 0, BELOW, WARPS, DEPTH)
    groups = _scales(sa_at, sb_at, 0, BELOW // 16)
    if WAITS:
        _control(WAIT)
    for k in range(0, STEPS - DEPTH, DEPTH):
        coming = _scales(sa_at, sb_at, k + DEPTH, BELOW // 16)
        later = _words_of(a_at, b_at, k + DEPTH, BELOW, WARPS, DEPTH)
        _control(STAY)
        for i in gl.static_range(DEPTH):
            lane = (t % 32 // 4 * 4 + i)[:, None]
            acc = _step(acc, words, i, groups, x_at, k, select, lane, SPLIT, WORDS)
        words = later
        groups = coming
    for i in gl.static_range(DEPTH):
        lane = (t % 32 // 4 * 4 + i)[:, None]
        acc = _step(acc, words, i, groups, x_at, STEPS - DEPTH, select, lane, SPLIT, WORDS)
    return acc


@gluon.jit
def gate_up_few_kernel(
    x, w, scale, order, experts, tile_first, tile_end, tile_count, out, top_k, beta, linear_beta,
    WIDTH: gl.constexpr, INNER: gl.constexpr, SITU: gl.constexpr, WARPS: gl.constexpr,
    DEPTH: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """``out[pair] = glu(W1 x, W3 x)`` for 16 features a warp and eight pairs.

    x [N, WIDTH / 2] words of two; w [E, 2 INNER, WIDTH / 8] words; scale [E, 2 INNER, WIDTH / 128]
    words; out [N k, INNER] in sorted order.
    """
    if OVERLAP:
        _control(GO_ON)
    tile = gl.program_id(1)
    if tile >= gl.load(tile_count):
        return
    first = gl.load(tile_first + tile)
    end = gl.minimum(gl.load(tile_end + tile), first + 8)
    ROWS: gl.constexpr = 16 * WARPS
    row = gl.load(experts + tile).to(gl.int64) * (2 * INNER) + gl.program_id(0) * ROWS
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    t, _e = _threads(WARPS, 8)
    own = row + t // 32 * 16 + t % 32 // 4
    pair = gl.minimum(first + t % 32 // 4, end - 1)
    token = (gl.load(order + pair) // top_k).to(gl.int64)
    acc = _rows_times_tokens(
        w, scale, x, own, own + INNER, token,
        WIDTH // 8, WARPS, DEPTH, False, False,
    )  # fmt: skip
    gate, up = gl.split(acc.reshape([32 * WARPS, 2, 4]).permute((0, 2, 1)))
    y = activated(gate, up, beta, linear_beta, SITU).to(out.dtype.element_ty)
    y = gl.convert_layout(y, L)
    t = gl.arange(0, 32 * WARPS, gl.SliceLayout(1, L))[:, None]
    e = gl.arange(0, 4, gl.SliceLayout(0, L))[None, :]
    place = first + t % 4 * 2 + e % 2
    feature = gl.program_id(0) * ROWS + t // 32 * 16 + t % 32 // 4 + e // 2 * 8
    gl.store(out + place.to(gl.int64) * INNER + feature, y, mask=place < end)


@gluon.jit
def down_few_kernel(
    h, w, scale, order, experts, tile_first, tile_end, tile_count, out,
    INNER: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """``out[pair] = W2 h`` for 32 features a warp and eight pairs.

    h [N k, 8, INNER / 16] words of two in sorted order; w [E, WIDTH, INNER / 8] words; scale
    [E, WIDTH, INNER / 128] words; out [N k, WIDTH] by pair.
    """
    if OVERLAP:
        _control(GO_ON)
    tile = gl.program_id(1)
    if tile >= gl.load(tile_count):
        return
    first = gl.load(tile_first + tile)
    end = gl.minimum(gl.load(tile_end + tile), first + 8)
    ROWS: gl.constexpr = 32 * WARPS
    row = gl.load(experts + tile).to(gl.int64) * WIDTH + gl.program_id(0) * ROWS
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])
    t, _e = _threads(WARPS, 8)
    own = row + t // 32 * 32 + t % 32 // 4
    place = gl.minimum(first + t % 32 // 4, end - 1).to(gl.int64)
    acc = _rows_times_tokens(
        w, scale, h, own, own + 16, place,
        INNER // 8, WARPS, DEPTH, True, OVERLAP,
    )  # fmt: skip
    y = gl.convert_layout(acc.to(out.dtype.element_ty), L)
    t = gl.arange(0, 32 * WARPS, gl.SliceLayout(1, L))[:, None]
    e = gl.arange(0, 8, gl.SliceLayout(0, L))[None, :]
    place = first + t % 4 * 2 + e % 2
    there = place < end
    pair = gl.load(order + place, mask=there, other=0)
    feature = gl.program_id(0) * ROWS + t // 32 * 32 + t % 32 // 4 + e // 2 * 8
    gl.store(out + pair.to(gl.int64) * WIDTH + feature, y, mask=there)
