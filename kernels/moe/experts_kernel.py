"""The grouped matrix products over routed experts, in Triton.

Weights are the left operand, tokens the right one: features lie along the tensor core's tall side,
and a tile may be as narrow as 16 tokens. MXFP4 codes are decoded in registers between the load and
the product. A word holds columns 8 j .. 8 j + 7; instead of interleaving what it decodes to, the
product runs eight times, over the columns 8 j + n for every n, so the right operand comes split
that way ([rows, 8, width / 8]).

Weights and scales lie in tiles (``mxfp4.py``); their shapes below are those of the rows.

Triton reads a kernel's annotations, so its arguments have none but ``constexpr``.
"""
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# mypy: disable-error-code="assignment, union-attr"

import triton
import triton.language as tl

from k3vl.kernels.dependent import let_next_begin, wait_for_inputs
from k3vl.kernels.moe.words_kernel import FIRST, FOURTH, SECOND, THIRD, of_both_halves


@triton.jit
def _field(u, NTH: tl.constexpr, HALF: tl.constexpr):
    """Sign and magnitude of one code of a stored word, at float32's sign and exponent."""
    u = (u >> 16) & 0xFFFF if HALF else u & 0xFFFF
    if NTH == 3:
        sign = (u >> 14) & 1
        magnitude = ((u >> 11) & 4) | ((u >> 10) & 3)
    else:
        sign = (u >> (15 - 3 * NTH)) & 1
        magnitude = (u >> (6 - 3 * NTH)) & 7
    return ((sign << 31) | (magnitude << 22)).to(tl.float32, bitcast=True)


@triton.jit
def _pair(u, power, NTH: tl.constexpr, DTYPE: tl.constexpr):
    """The two columns of a pair of words that field NTH holds, [M, B]."""
    M: tl.constexpr = power.shape[0]
    B: tl.constexpr = power.shape[1]
    both = tl.join(_field(u, NTH, False), _field(u, NTH, True)).reshape(M, B)
    return (both * 8.507059173023462e37 * power).to(DTYPE)


@triton.jit
def _by_word(both, M: tl.constexpr, B: tl.constexpr):
    """What the first words of pairs hold, and the second: [M, B, 2] -> [M, B] each."""
    first, second = tl.split(both.reshape(M, B // 2, 2, 2).permute(0, 1, 3, 2))
    return first.reshape(M, B), second.reshape(M, B)


@triton.jit
def _decode(codes, scale, PACKED: tl.constexpr, DTYPE: tl.constexpr):
    """[M, B] words, [M, B / 4] scale bytes -> columns 8 j + n of the B words, for n = 0..7."""
    M: tl.constexpr = codes.shape[0]
    B: tl.constexpr = codes.shape[1]
    if PACKED:
        factor = (scale.to(tl.int32) + 126) * 0x00800080
        factor = tl.broadcast_to(factor[:, :, None], (M, B // 4, 4)).reshape(M, B)
        a, e = _by_word(of_both_halves(codes, factor, FIRST), M, B)
        b, f = _by_word(of_both_halves(codes, factor, SECOND), M, B)
        c, g = _by_word(of_both_halves(codes, factor, THIRD), M, B)
        d, h = _by_word(of_both_halves(codes, factor, FOURTH), M, B)
    else:
        power = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        power = tl.broadcast_to(power[:, :, None], (M, B // 4, 4)).reshape(M, B)
        u, v = tl.split(codes.reshape(M, B // 2, 2))
        a = _pair(u, power, 0, DTYPE)
        b = _pair(u, power, 1, DTYPE)
        c = _pair(u, power, 2, DTYPE)
        d = _pair(u, power, 3, DTYPE)
        e = _pair(v, power, 0, DTYPE)
        f = _pair(v, power, 1, DTYPE)
        g = _pair(v, power, 2, DTYPE)
        h = _pair(v, power, 3, DTYPE)
    return a, b, c, d, e, f, g, h


@triton.jit
def decoded_weights(
    w, scale, rows, live, k,
    WORDS: tl.constexpr, BK: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    PACKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Decoded columns of BK words from word ``k`` on, eight tensors [M, BK].

    TILE rows lie together; 1: every row by itself.
    """
    o_w = tl.arange(0, BK)
    o_s = tl.arange(0, BK // 4)
    inside = rows % TILE
    w_at = w + ((rows - inside) * WORDS + inside * 16)[:, None] + k * TILE
    w_at += (o_w // 16 * (16 * TILE) + o_w % 16)[None, :]
    s_at = scale + ((rows - inside) * (WORDS // 4) + inside * 4)[:, None] + k // 4 * TILE
    s_at += (o_s // 4 * (4 * TILE) + o_s % 4)[None, :]
    if WHOLE:
        codes = tl.load(w_at)
        s = tl.load(s_at)
    else:
        codes = tl.load(w_at, live[:, None] & (k + o_w < WORDS)[None, :], 0)
        s = tl.load(s_at, live[:, None] & (k // 4 + o_s < WORDS // 4)[None, :], 0)
    return _decode(codes, s, PACKED, DTYPE)


@triton.jit
def _add_products(
    acc, values, x_at, k, there,
    WORDS: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Add the product of BK words of weights with the same columns of the tokens, [M, N]."""
    if WHOLE:
        mask = there[None, :]
    else:
        mask = ((k + tl.arange(0, BK)) < WORDS)[:, None] & there[None, :]
    for n in tl.static_range(8):
        tokens = tl.load(x_at + k + n * WORDS, mask, 0)
        acc = tl.dot(values[n], tokens, acc, input_precision="ieee")
    return acc


@triton.jit
def _glu(gate, up, beta, linear_beta, SITU: tl.constexpr):
    """The gated activation, float32; tanh(z) = 2 sigmoid(2 z) - 1."""
    sigmoid = 1 / (1 + tl.exp(-gate))
    if SITU:
        capped = beta * (2 / (1 + tl.exp(-2 * gate / beta)) - 1)
        return capped * sigmoid * linear_beta * (2 / (1 + tl.exp(-2 * up / linear_beta)) - 1)
    return gate * sigmoid * up


@triton.jit
def gate_up_mxfp4_kernel(
    x, w, scale, order, tile_expert, tile_first, tile_end, tile_count, out, top_k,
    beta, linear_beta,
    WIDTH: tl.constexpr, INNER: tl.constexpr, SITU: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, TAIL: tl.constexpr, BK: tl.constexpr, TILE: tl.constexpr,
    WHOLE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """``out[pair] = glu(W1 x, W3 x)`` for one block of features and one tile of BN + TAIL pairs.

    x [N, 8, WIDTH / 8]; w [E, 2 INNER, WIDTH / 8] words; scale [E, 2 INNER, WIDTH / 32]; out
    [N k, INNER] in sorted order.
    """
    tile = tl.program_id(1)
    if tile >= tl.load(tile_count):
        return
    WORDS: tl.constexpr = WIDTH // 8
    expert = tl.load(tile_expert + tile)
    first = tl.load(tile_first + tile)
    end = tl.load(tile_end + tile)
    o_p = first + tl.arange(0, BN)
    there = o_p < end
    token = (tl.load(order + o_p, there, 0) // top_k).to(tl.int64)
    o_f = tl.program_id(0) * BM + tl.arange(0, BM)
    live = o_f < INNER
    gate_rows = expert.to(tl.int64) * (2 * INNER) + o_f
    up_rows = gate_rows + INNER
    o_w = tl.arange(0, BK)
    x_at = x + token[None, :] * WIDTH + o_w[:, None]
    dtype: tl.constexpr = out.dtype.element_ty
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    if TAIL:
        o_t = first + BN + tl.arange(0, TAIL)
        more = o_t < end
        token = (tl.load(order + o_t, more, 0) // top_k).to(tl.int64)
        t_at = x + token[None, :] * WIDTH + o_w[:, None]
        gate_tail = tl.zeros([BM, TAIL], tl.float32)
        up_tail = tl.zeros([BM, TAIL], tl.float32)
    for k in range(0, WORDS, BK):
        v = decoded_weights(w, scale, gate_rows, live, k, WORDS, BK, TILE, WHOLE, PACKED, dtype)
        gate = _add_products(gate, v, x_at, k, there, WORDS, BK, WHOLE)
        if TAIL:
            gate_tail = _add_products(gate_tail, v, t_at, k, more, WORDS, BK, WHOLE)
        v = decoded_weights(w, scale, up_rows, live, k, WORDS, BK, TILE, WHOLE, PACKED, dtype)
        up = _add_products(up, v, x_at, k, there, WORDS, BK, WHOLE)
        if TAIL:
            up_tail = _add_products(up_tail, v, t_at, k, more, WORDS, BK, WHOLE)
    y = _glu(gate, up, beta, linear_beta, SITU)
    to = out + o_p[None, :].to(tl.int64) * INNER + o_f[:, None]
    tl.store(to, y.to(dtype), live[:, None] & there[None, :])
    if TAIL:
        y = _glu(gate_tail, up_tail, beta, linear_beta, SITU)
        to = out + o_t[None, :].to(tl.int64) * INNER + o_f[:, None]
        tl.store(to, y.to(dtype), live[:, None] & more[None, :])


@triton.jit
def down_mxfp4_kernel(
    h, w, scale, order, tile_expert, tile_first, tile_end, tile_count, out,
    INNER: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TAIL: tl.constexpr, BK: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """``out[pair] = W2 h`` for one block of features and one tile of BN + TAIL pairs.

    h [N k, 8, INNER / 8] in sorted order; w [E, WIDTH, INNER / 8] words; out [N k, WIDTH] by pair.
    """
    tile = tl.program_id(1)
    if tile >= tl.load(tile_count):
        return
    WORDS: tl.constexpr = INNER // 8
    expert = tl.load(tile_expert + tile)
    first = tl.load(tile_first + tile)
    end = tl.load(tile_end + tile)
    o_p = first + tl.arange(0, BN)
    there = o_p < end
    o_f = tl.program_id(0) * BM + tl.arange(0, BM)
    live = o_f < WIDTH
    rows = expert.to(tl.int64) * WIDTH + o_f
    o_w = tl.arange(0, BK)
    h_at = h + o_p[None, :].to(tl.int64) * INNER + o_w[:, None]
    dtype: tl.constexpr = out.dtype.element_ty
    acc = tl.zeros([BM, BN], tl.float32)
    if TAIL:
        o_t = first + BN + tl.arange(0, TAIL)
        more = o_t < end
        t_at = h + o_t[None, :].to(tl.int64) * INNER + o_w[:, None]
        tail = tl.zeros([BM, TAIL], tl.float32)
    for k in range(0, WORDS, BK):
        v = decoded_weights(w, scale, rows, live, k, WORDS, BK, TILE, WHOLE, PACKED, dtype)
        acc = _add_products(acc, v, h_at, k, there, WORDS, BK, WHOLE)
        if TAIL:
            tail = _add_products(tail, v, t_at, k, more, WORDS, BK, WHOLE)
    pair = tl.load(order + o_p, there, 0).to(tl.int64)
    to = out + pair[None, :] * WIDTH + o_f[:, None]
    tl.store(to, acc.to(dtype), live[:, None] & there[None, :])
    if TAIL:
        pair = tl.load(order + o_t, more, 0).to(tl.int64)
        to = out + pair[None, :] * WIDTH + o_f[:, None]
        tl.store(to, tail.to(dtype), live[:, None] & more[None, :])


@triton.jit
def combine_kernel(y, weights, norm, out, eps, WIDTH: tl.constexpr, K: tl.constexpr,
                   NORM: tl.constexpr, OVERLAP: tl.constexpr, AT_ONCE: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """Sum of a token's K outputs by their weights, rounded, then RMSNorm; one program a token.

    y [N K, WIDTH]; weights [N, K] float32; norm [WIDTH]; out [N, WIDTH]. AT_ONCE: all outputs are
    asked for before the first is used, in registers of their own.
    """
    n = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    live = o_d < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    scales = tl.load(norm + o_d, live, 0) if NORM else 0
    let_next_begin(OVERLAP)
    wait_for_inputs(OVERLAP)
    y += n * K * WIDTH + o_d
    weights += n * K
    rows = ()
    if AT_ONCE:
        for j in tl.static_range(K):
            rows = rows + (tl.load(y + j * WIDTH, live, 0),)  # noqa: RUF005
        # Or the assembler puts each load behind the use of the one before.
        tl.debug_barrier()
    for j in tl.static_range(K):
        row = rows[j] if AT_ONCE else tl.load(y + j * WIDTH, live, 0)
        total += tl.load(weights + j) * row.to(tl.float32)
    total = total.to(out.dtype.element_ty)  # the reference rounds the sum before its norm
    if NORM:
        wide = total.to(tl.float32)
        rms = tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
        total = (wide * rms * scales.to(tl.float32)).to(total.dtype)
    tl.store(out + n * WIDTH + o_d, total, live)


@triton.jit
def norm_sum_kernel(
    total, norm, out, eps, WIDTH: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A token's sum [WIDTH] float32, rounded, then RMSNorm: the end of ``combine_kernel``."""
    o_d = tl.arange(0, BLOCK)
    live = o_d < WIDTH
    scales = tl.load(norm + o_d, live, 0) if NORM else 0
    let_next_begin(True)
    wait_for_inputs(True)
    y = tl.load(total + o_d, live, 0).to(out.dtype.element_ty)
    if NORM:
        wide = y.to(tl.float32)
        rms = tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
        y = (wide * rms * scales.to(tl.float32)).to(y.dtype)
    tl.store(out + o_d, y, live)


LEAST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _key(biased, live):
    """Scores to choose by, of which K are above -inf whatever they are: NaN is the greatest."""
    key = tl.where(biased > LEAST, biased, LEAST)
    key = tl.where(biased == biased, key, float("inf"))
    return tl.where(live, key, float("-inf"))


@triton.jit
def route_kernel(
    logits, bias, weights, experts, scale,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Top K experts of one token by biased sigmoid; ties go to the lower index.

    K different ones of the E whatever the logits are: plans and products index by them.
    """
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    n = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BLOCK)
    live = o_e < E
    score = 1 / (1 + tl.exp(-tl.load(logits + n * E + o_e, live, 0)))
    biased = _key(score + tl.load(bias + o_e, live, 0), live)
    o_k = tl.arange(0, KP)
    chosen = tl.zeros([KP], tl.int32)
    for j in tl.static_range(K):
        best = tl.argmax(biased, 0)
        chosen = tl.where(o_k == j, best, chosen)
        biased = tl.where(o_e == best, float("-inf"), biased)
    # Read again: to find a score among all of them costs as much as to find the best.
    weight = 1 / (1 + tl.exp(-tl.load(logits + n * E + chosen, o_k < K, 0)))
    weight = tl.where(o_k < K, weight, 0)
    if RENORMALISE:
        weight = weight / (tl.sum(weight) + 1e-20)
    tl.store(weights + n * K + o_k, weight * scale, o_k < K)
    tl.store(experts + n * K + o_k, chosen.to(tl.int64), o_k < K)


@triton.jit
def route_sorted_kernel(
    logits, bias, weights, experts, scale,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``route_kernel`` by a sorting network: many threads, few steps.

    KP, a power of two, is 2 at least: Triton 3.6's ``topk`` does not compile for one.
    """
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    n = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BLOCK)
    live = o_e < E
    score = 1 / (1 + tl.exp(-tl.load(logits + n * E + o_e, live, 0)))
    biased = _key(score + tl.load(bias + o_e, live, 0), live)
    bits = biased.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # in the order of the numbers
    key = (bits.to(tl.int64) << 32) | (BLOCK - 1 - o_e).to(tl.int64)
    chosen = BLOCK - 1 - (tl.topk(key, KP) & (BLOCK - 1))
    o_k = tl.arange(0, KP)
    wanted = o_k < K
    weight = 1 / (1 + tl.exp(-tl.load(logits + n * E + chosen, wanted, 0)))
    weight = tl.where(wanted, weight, 0)
    if RENORMALISE:
        weight = weight / (tl.sum(weight) + 1e-20)
    tl.store(weights + n * K + o_k, weight * scale, wanted)
    tl.store(experts + n * K + o_k, chosen, wanted)


@triton.jit
def plan_kernel(
    experts, order, tile_expert, tile_first, tile_end, tile_count, M,
    PAIRS: tl.constexpr, E: tl.constexpr, NUM_WIDTHS: tl.constexpr, NARROW: tl.constexpr,
    BY_PAIR: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``plan_experts`` for few pairs in one launch: a program does one expert's share.

    Every program counts all pairs again, which costs less than a second launch. With fewer pairs
    than experts (BY_PAIR) a program takes the expert of its pair, if no earlier pair has it.
    The tile lists are [5, M], one row a width, of which NUM_WIDTHS can have any.
    """
    o_p = tl.arange(0, BLOCK_P)
    of = tl.load(experts + o_p, o_p < PAIRS, E).to(tl.int32)
    e = tl.program_id(0)
    if BY_PAIR:
        p = e
        e = tl.load(experts + p).to(tl.int32)
        if tl.sum(((of == e) & (o_p < p)).to(tl.int32)) > 0:
            return
    mine = of == e
    start = tl.sum((of < e).to(tl.int32))
    count = tl.sum(mine.to(tl.int32))
    rank = tl.cumsum(mine.to(tl.int32)) - 1
    tl.store(order + start + rank, o_p, mine)
    o_e = tl.arange(0, BLOCK_E)
    every = tl.histogram(of, BLOCK_E)  # bin E holds what is past the end
    every = tl.where(o_e < E, every, 0)
    for n in tl.static_range(NUM_WIDTHS):
        # The same rule for all experts, to know this one's place, and for this one.
        all_tiles = _tiles_of(every, n, NARROW)
        tl.store(tile_count + n, tl.sum(all_tiles), tl.program_id(0) == 0)
        place = n * M + tl.sum(tl.where(o_e < e, all_tiles, 0))
        begins = start + _behind(count, n)
        for i in range(_tiles_of(count, n, NARROW)):
            tl.store(tile_expert + place + i, e)
            tl.store(tile_first + place + i, begins + i * (NARROW if n == 0 else 128))
            tl.store(tile_end + place + i, start + count)


@triton.jit
def _tiles_of(count, NTH: tl.constexpr, NARROW: tl.constexpr):
    """``plan.tiles_of`` for the NTH of the five widths."""
    rest = count % 128
    full = count // 128
    joined = ((full > 0) & (rest > 0) & (rest <= 32)).to(tl.int32)
    if NTH == 0:
        tiles = ((full == 0) & (rest > 0) & (rest <= 16)).to(tl.int32)
        tiles *= (rest + NARROW - 1) // NARROW
    elif NTH == 1:
        tiles = ((full == 0) & (rest > 16) & (rest <= 32)).to(tl.int32)
    elif NTH == 2:
        tiles = ((rest > 32) & (rest <= 64)).to(tl.int32)
    elif NTH == 3:
        tiles = full - joined + (rest > 64).to(tl.int32)
    else:
        tiles = joined
    return tiles


@triton.jit
def _behind(count, NTH: tl.constexpr):
    """How many of an expert's pairs lie before its first tile of the NTH width."""
    full = count // 128
    if NTH < 3:
        behind = full * 128
    elif NTH == 3:
        behind = 0 * full
    else:
        behind = (full - 1) * 128
    return behind
