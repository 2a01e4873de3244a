"""The grouped products over MXFP4 weights with one product a step, in place of eight.

``experts_kernel.py`` multiplies eight times a step, and Triton drains the tensor cores after each:
what an earlier product of the same step adds to is read by the next one. Here what a step's words
hold is joined, and one product runs over all 128 columns: eight instructions of the tensor cores
without a wait between them, and none before the next step has decoded its own words.

For this a step's 128 columns of a token lie together, by n and then j: tokens come as
[rows, width / 128, 8, 16]. Gate and up are one product: eight rows of gates, then the same eight of
ups, so that both halves of a feature end in one thread.

Weights and scales lie in tiles (``mxfp4.py``); their shapes below are those of the rows.

Triton reads a kernel's annotations, so its arguments have none but ``constexpr``.
"""
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from k3vl.kernels.moe.mxfp4 import TILE_ROWS
from k3vl.kernels.moe.words_kernel import FIRST, FOURTH, SECOND, THIRD, of_both_halves
from k3vl.kernels.situ.glu_kernel import activated

TILE = tl.constexpr(TILE_ROWS)
FACTOR = tl.constexpr("prmt.b32 $0, $1, 0, $2; mad.lo.u32 $0, $0, 128, 0x3f003f00;")
"""One of four scales in a word, as two numbers of bfloat16."""


@triton.jit
def byte_choices(scale, expert):
    """By pairs of words, what has ``prmt`` choose their scale: its byte and zero, twice.

    As if they were loaded, which they never are (``expert`` is not below 0): Triton computes a
    product's left operand where the product wants it, without an exchange between threads, if all
    that it is made of is loaded.
    """
    pair = tl.arange(0, 8)
    return tl.load(scale + pair, pair < -expert, pair // 2 * 0x0101 + 0x4040)


@triton.jit
def decoded_step(
    w, scale, rows, choices, k, WORDS: tl.constexpr, M: tl.constexpr, COPIES: tl.constexpr,
    PACKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Decoded columns of the 16 words from word ``k`` on, [M, 128], by n, then j."""
    # A load of fewer elements than threads would be laid out badly: some elements are read twice.
    again = tl.arange(0, COPIES) // COPIES
    inside = rows % TILE
    s_at = scale + ((rows - inside) * (WORDS // 16) + inside)[:, None] + k // 16 * TILE
    groups = tl.load(s_at + again[None, :])
    w_at = w + ((rows - inside) * WORDS + inside * 16)[:, None] + k * TILE
    if PACKED:
        codes = tl.load(w_at + tl.arange(0, 16)[None, :])
        groups = tl.broadcast_to(groups[:, :, None], (M, COPIES, 8 // COPIES)).reshape(M, 8)
        which, groups = tl.broadcast(choices[None, :], groups)
        factor = tl.inline_asm_elementwise(
            FACTOR, "=r,r,r", [groups, which], dtype=tl.int32, is_pure=True, pack=1
        )
        factor = tl.broadcast_to(factor[:, :, None], (M, 8, 2)).reshape(M, 16)
        # Of word 2 i + h, n = 4 h + 2 y + x and j = 2 i + p.
        low = tl.join(of_both_halves(codes, factor, FIRST), of_both_halves(codes, factor, SECOND))
        high = tl.join(of_both_halves(codes, factor, THIRD), of_both_halves(codes, factor, FOURTH))
        both = tl.join(low, high).reshape(M, 8, 2, 2, 2, 2)  # [M, i, h, p, x, y]
        values = both.permute(0, 2, 5, 4, 1, 3).reshape(M, 128)
    else:
        o_c = tl.arange(0, 128)
        n, j = o_c // 16, o_c % 16
        u = tl.load(w_at + (j // 2 * 2 + n // 4)[None, :])
        u = (u >> (j % 2 * 16)[None, :]) & 0xFFFF
        f = (n % 4)[None, :]
        sign = tl.where(f == 3, u >> 14, (u << (3 * f)) >> 15) & 1
        size = tl.where(f == 3, ((u >> 11) & 4) | ((u >> 10) & 3), ((u << (3 * f)) >> 6) & 7)
        code = ((sign << 31) | (size << 22)).to(tl.float32, bitcast=True)
        groups = tl.broadcast_to(groups[:, :, None], (M, COPIES, 128 // COPIES)).reshape(M, 128)
        byte = (groups >> (j // 4 % 4 * 8)[None, :]) & 0xFF
        values = (code * 8.507059173023462e37 * (byte << 23).to(tl.float32, bitcast=True)).to(DTYPE)
    return values


@triton.jit
def gate_up_joined_kernel(
    x, w, scale, order, tile_expert, tile_first, tile_end, tile_count, out, top_k,
    beta, linear_beta,
    WIDTH: tl.constexpr, INNER: tl.constexpr, SITU: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, TAIL: tl.constexpr, COPIES: tl.constexpr,
    PACKED: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """``out[pair] = glu(W1 x, W3 x)`` for BM features and one tile of BN + TAIL pairs.

    x [N, WIDTH / 128, 8, 16]; w [E, 2 INNER, WIDTH / 8] words; scale [E, 2 INNER, WIDTH / 128]
    words of four bytes; out [N k, INNER / 128, 8, 16] in sorted order. TURNS: programs are in a row
    and each takes every so many-th block, all blocks of a tile before those of the next.
    """
    count = tl.load(tile_count)
    if TURNS:
        BLOCKS: tl.constexpr = INNER // BM
        for item in range(tl.program_id(0), count * BLOCKS, tl.num_programs(0)):
            _gate_up_tile(
                item // BLOCKS, item % BLOCKS, x, w, scale, order, tile_expert, tile_first,
                tile_end, out, top_k, beta, linear_beta,
                WIDTH, INNER, SITU, BM, BN, TAIL, COPIES, PACKED,
            )  # fmt: skip
    elif tl.program_id(1) < count:
        _gate_up_tile(
            tl.program_id(1), tl.program_id(0), x, w, scale, order, tile_expert, tile_first,
            tile_end, out, top_k, beta, linear_beta,
            WIDTH, INNER, SITU, BM, BN, TAIL, COPIES, PACKED,
        )  # fmt: skip


@triton.jit
def _gate_up_tile(
    tile, block, x, w, scale, order, tile_expert, tile_first, tile_end, out, top_k,
    beta, linear_beta,
    WIDTH: tl.constexpr, INNER: tl.constexpr, SITU: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, TAIL: tl.constexpr, COPIES: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """BM features of one tile."""
    WORDS: tl.constexpr = WIDTH // 8
    expert = tl.load(tile_expert + tile)
    first = tl.load(tile_first + tile)
    end = tl.load(tile_end + tile)
    o_p = first + tl.arange(0, BN)
    there = o_p < end
    token = tl.load(order + o_p, there, 0) // top_k
    o_m = tl.arange(0, 2 * BM)
    feature = block * BM + o_m // 16 * 8 + o_m % 8
    rows = expert.to(tl.int64) * (2 * INNER) + feature + o_m // 8 % 2 * INNER
    o_c = tl.arange(0, 128)
    x_at = token[None, :] * WIDTH + o_c[:, None]
    dtype: tl.constexpr = out.dtype.element_ty
    acc = tl.zeros([2 * BM, BN], tl.float32)
    if TAIL:
        o_t = first + BN + tl.arange(0, TAIL)
        more = o_t < end
        token = tl.load(order + o_t, more, 0) // top_k
        t_at = token[None, :] * WIDTH + o_c[:, None]
        tail = tl.zeros([2 * BM, TAIL], tl.float32)
    choices = byte_choices(scale, expert)
    for k in range(0, WORDS, 16):
        v = decoded_step(w, scale, rows, choices, k, WORDS, 2 * BM, COPIES, PACKED, dtype)
        if TAIL:
            tokens = tl.load(x + (t_at + k * 8), more[None, :], 0)
            tail = tl.dot(v, tokens, tail, input_precision="ieee")
        tokens = tl.load(x + (x_at + k * 8), there[None, :], 0)
        acc = tl.dot(v, tokens, acc, input_precision="ieee")
    _store_glu(acc, block, out, o_p, there, beta, linear_beta, INNER, SITU, BM, BN)
    if TAIL:
        _store_glu(tail, block, out, o_t, more, beta, linear_beta, INNER, SITU, BM, TAIL)


@triton.jit
def _store_glu(
    acc, block, out, o_p, there, beta, linear_beta,
    INNER: tl.constexpr, SITU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Activate [2 BM, BN] and write [BM, BN] to where the second product looks for it."""
    both = acc.reshape(BM // 8, 2, 8, BN).permute(0, 2, 3, 1)
    gate, up = tl.split(both)
    y = activated(gate, up, beta, linear_beta, SITU)
    y = y.reshape(BM, BN).to(out.dtype.element_ty)
    # Stored feature f is column 8 j + n of the next product, f = n (INNER / 8) + j.
    o_f = block * BM + tl.arange(0, BM)
    n, j = o_f // (INNER // 8), o_f % (INNER // 8)
    place = j // 16 * 128 + n * 16 + j % 16
    tl.store(out + o_p[None, :].to(tl.int64) * INNER + place[:, None], y, there[None, :])


@triton.jit
def down_joined_kernel(
    h, w, scale, order, tile_expert, tile_first, tile_end, tile_count, out,
    INNER: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TAIL: tl.constexpr, COPIES: tl.constexpr,
    PACKED: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """``out[pair] = W2 h`` for BM features and one tile of BN + TAIL pairs.

    h [N k, INNER / 128, 8, 16] in sorted order; w [E, WIDTH, INNER / 8] words; scale
    [E, WIDTH, INNER / 128] words of four bytes; out [N k, WIDTH] by pair. TURNS: as above.
    """
    count = tl.load(tile_count)
    if TURNS:
        BLOCKS: tl.constexpr = WIDTH // BM
        for item in range(tl.program_id(0), count * BLOCKS, tl.num_programs(0)):
            _down_tile(
                item // BLOCKS, item % BLOCKS, h, w, scale, order, tile_expert, tile_first,
                tile_end, out, INNER, WIDTH, BM, BN, TAIL, COPIES, PACKED,
            )  # fmt: skip
    elif tl.program_id(1) < count:
        _down_tile(
            tl.program_id(1), tl.program_id(0), h, w, scale, order, tile_expert, tile_first,
            tile_end, out, INNER, WIDTH, BM, BN, TAIL, COPIES, PACKED,
        )  # fmt: skip


@triton.jit
def _down_tile(
    tile, block, h, w, scale, order, tile_expert, tile_first, tile_end, out,
    INNER: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TAIL: tl.constexpr, COPIES: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """BM features of one tile."""
    WORDS: tl.constexpr = INNER // 8
    expert = tl.load(tile_expert + tile)
    first = tl.load(tile_first + tile)
    end = tl.load(tile_end + tile)
    o_p = first + tl.arange(0, BN)
    there = o_p < end
    o_f = block * BM + tl.arange(0, BM)
    rows = expert.to(tl.int64) * WIDTH + o_f
    o_c = tl.arange(0, 128)
    h_at = o_p[None, :] * INNER + o_c[:, None]
    dtype: tl.constexpr = out.dtype.element_ty
    acc = tl.zeros([BM, BN], tl.float32)
    if TAIL:
        o_t = first + BN + tl.arange(0, TAIL)
        more = o_t < end
        t_at = o_t[None, :] * INNER + o_c[:, None]
        tail = tl.zeros([BM, TAIL], tl.float32)
    choices = byte_choices(scale, expert)
    for k in range(0, WORDS, 16):
        v = decoded_step(w, scale, rows, choices, k, WORDS, BM, COPIES, PACKED, dtype)
        if TAIL:
            tokens = tl.load(h + (t_at + k * 8), more[None, :], 0)
            tail = tl.dot(v, tokens, tail, input_precision="ieee")
        tokens = tl.load(h + (h_at + k * 8), there[None, :], 0)
        acc = tl.dot(v, tokens, acc, input_precision="ieee")
    pair = tl.load(order + o_p, there, 0).to(tl.int64)
    to = out + pair[None, :] * WIDTH + o_f[:, None]
    tl.store(to, acc.to(dtype), there[None, :])
    if TAIL:
        pair = tl.load(order + o_t, more, 0).to(tl.int64)
        to = out + pair[None, :] * WIDTH + o_f[:, None]
        tl.store(to, tail.to(dtype), more[None, :])
