"""One token of Kimi Delta Attention for compute capability 9.0, in Gluon.

A program is one head of one sequence. Its state, 64 KB in one run of memory, is fetched by the copy
engine into shared memory, where it is changed, and stored by it; so threads need no registers for
it, and a multiprocessor holds three programs where it held two.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from k3vl.kernels.gluon_parts import (
    begin_copy,
    begin_store,
    let_next_begin,
    meet,
    wait_for_inputs,
    wait_for_stores,
)


@gluon.jit
def sigmoid(x):
    """As in ``step_kernel``: a power of two and a reciprocal root."""
    root = gl.rsqrt(1.0 + gl.exp2(x * -1.4426950408889634))
    return root * root


@gluon.jit
def decay_factor(logits, rate, lower_bound, BOUNDED: gl.constexpr):
    """What a key channel keeps of its state; float32."""
    if BOUNDED:
        g = lower_bound * sigmoid(rate * logits)
    else:
        # softplus without overflow: max(x, 0) + log(1 + exp(-|x|))
        g = -rate * (gl.maximum(logits, 0.0) + gl.log(1.0 + gl.exp(-gl.abs(logits))))
    return gl.exp2(g * 1.4426950408889634)


@gluon.jit
def vectors(K: gl.constexpr):
    """Room for vectors and for the sums of warps.

    Apart, or the compiler puts a barrier between one store and the next.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    m_row = ()
    m_sum = ()
    for _ in gl.static_range(6):
        m_row = m_row + (gl.allocate_shared_memory(gl.float32, [K], FLAT),)  # noqa: RUF005
    for _ in gl.static_range(3):
        m_sum = m_sum + (gl.allocate_shared_memory(gl.float32, [4], FLAT),)  # noqa: RUF005
    return m_row, m_sum


@gluon.jit
def weighed(taps, b_conv, LAYOUT: gl.constexpr):
    """The convolution of one stream: taps times the four columns of ``b_conv`` [K, 4], SiLU."""
    even, odd = gl.split(gl.reshape(b_conv, [b_conv.shape[0], 2, 2]))
    conv_0, conv_2 = gl.split(even)
    conv_1, conv_3 = gl.split(odd)
    y = taps[0].to(gl.float32) * gl.convert_layout(conv_0, LAYOUT)
    y += taps[1].to(gl.float32) * gl.convert_layout(conv_1, LAYOUT)
    y += taps[2].to(gl.float32) * gl.convert_layout(conv_2, LAYOUT)
    y += taps[3].to(gl.float32) * gl.convert_layout(conv_3, LAYOUT)
    return y * sigmoid(y)


@gluon.jit
def rounded_product(x, y):
    """``x * y``, rounded before it is added to anything.

    A sum of products is one of lanes two by two, each of which would add the other's product to its
    own, not yet rounded: sums that differ in the last bit, all stored to the same place.
    """
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def taps_of(newest, p_window, s_tap, o_k):
    """The last four inputs of every channel, oldest first."""
    return (
        gl.load(p_window + o_k),
        gl.load(p_window + s_tap + o_k),
        gl.load(p_window + 2 * s_tap + o_k),
        newest,
    )


@gluon.jit
def times(taps, one):
    """Taps of one stream by a number of every channel."""
    return (taps[0] * one, taps[1] * one, taps[2] * one, taps[3] * one)


@gluon.jit
def carry_on(p_window, taps, s_tap, o_k):
    """Store all taps but the oldest as the new window."""
    for j in gl.static_range(3):
        gl.store(p_window + j * s_tap + o_k, taps[j + 1].to(p_window.dtype.element_ty))


@gluon.jit
def ask_for_descriptor():
    """Fetch the descriptor, the first argument of ``kda_step_hopper_kernel``, beside the cell."""
    gl.inline_asm_elementwise(
        "{ .reg .b64 at; mov.b64 at, kda_step_hopper_kernel_param_0; cvta.param.u64 at, at; "
        "prefetch.tensormap [at]; mov.u32 $0, 0; }",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def begin_state(
    pool, cell, landed, buffer, K: gl.constexpr, PARTS: gl.constexpr, PIECES: gl.constexpr
):
    """Have a state brought to ``buffer`` in PIECES; each of PARTS barriers tells of its share."""
    for i in gl.static_range(PIECES):
        at = [cell, i * (K // PIECES), 0]
        begin_copy(pool, at, landed.index(i * PARTS // PIECES), buffer.index(i))


@gluon.jit
def held(buffer, begin: gl.constexpr, ROWS: gl.constexpr, HELD: gl.constexpr, K: gl.constexpr):
    """Some rows of a state that lies in ``buffer`` in pieces of HELD rows."""
    return buffer.index(begin // HELD).reshape([HELD, K]).slice(begin % HELD, ROWS)


@gluon.jit
def row_of_head(qkv, gate, decay, write, conv, a_log, dt_bias, o_norm, i_h, H, K: gl.constexpr):
    """What is read without knowing where the state lies; asked for, not used."""
    P: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    FOUR: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    o_k = i_h * K + gl.arange(0, K, P)
    newest = (gl.load(qkv + o_k), gl.load(qkv + H * K + o_k), gl.load(qkv + 2 * H * K + o_k))
    o_c = i_h * K + gl.arange(0, K, gl.SliceLayout(1, FOUR))
    p_conv = conv + o_c[:, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, FOUR))[None, :]
    convs = (gl.load(p_conv), gl.load(p_conv + H * K * 4), gl.load(p_conv + 2 * H * K * 4))
    b_decay, b_bias, b_gate = gl.load(decay + o_k), gl.load(dt_bias + o_k), gl.load(gate + o_k)
    b_norm = gl.load(o_norm + gl.arange(0, K, P))
    # A number of the head's, in every thread.
    p_log, p_write = a_log + i_h + o_k * 0, write + i_h + o_k * 0
    return newest, convs, b_decay, b_bias, b_gate, b_norm, gl.load(p_log), gl.load(p_write)


@gluon.jit
def advance(
    pool,
    cell,
    landed,
    buffer,
    m_row,
    m_sum,
    m_one,
    given,
    p_window,
    p_out,
    s_tap,
    s_stream,
    eps,
    lower_bound,
    K: gl.constexpr,
    PARTS: gl.constexpr,
    PIECES: gl.constexpr,
    BOUNDED: gl.constexpr,
):
    """Advance one head of one sequence, whose state lands in PARTS, key channels in order.

    Vectors, those ``given`` too (:func:`row_of_head`), have a channel a thread; ``m_row`` brings
    them to where the state's rows and columns are; ``m_one`` has ones. Keys and queries get their
    length last: of q~ = q / |q| the mixture is ``(S^T q) / |q|``, so the threads meet once before
    the state is read.
    """
    P: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ALL: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    S: gl.constexpr = gl.BlockedLayout([4, 4], [4, 8], [1, 4], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    PART: gl.constexpr = 16
    HELD: gl.constexpr = K // PIECES
    o_k = gl.arange(0, K, P)
    newest, convs, b_decay, b_bias, b_gate, b_norm, b_log, b_write = given
    q_taps = taps_of(newest[0], p_window, s_tap, o_k)
    k_taps = taps_of(newest[1], p_window + s_stream, s_tap, o_k)
    v_taps = taps_of(newest[2], p_window + 2 * s_stream, s_tap, o_k)
    # Behind the window, which would wait for 64 KB otherwise. All that was loaded gets a factor of
    # one from behind the copies: or the assembler waits for it before it begins them.
    begin_state(pool, cell, landed, buffer, K, PARTS, PIECES)
    meet()
    one = m_one.load(P)
    q_taps = times(q_taps, one)
    k_taps = times(k_taps, one)
    v_taps = times(v_taps, one)
    b_decay *= one
    b_gate *= one
    b_write *= one
    b_log *= one.to(gl.float32)
    rate = gl.exp(b_log)
    beta = sigmoid(b_write.to(gl.float32))

    b_q = weighed(q_taps, convs[0], P)
    b_k = weighed(k_taps, convs[1], P)
    alpha = decay_factor(b_decay.to(gl.float32) + b_bias, rate, lower_bound, BOUNDED)
    written = beta * b_k
    m_row[0].store(b_k * alpha)
    m_row[1].store(b_q * alpha)
    m_row[2].store(alpha)
    m_row[3].store(written)
    m_row[4].store(weighed(v_taps, convs[2], P))
    m_row[5].store(b_norm * sigmoid(b_gate.to(gl.float32)))
    m_sum[0].store(gl.sum(gl.reshape(rounded_product(b_q, b_q), [4, K // 4]), 1))
    m_sum[1].store(gl.sum(gl.reshape(rounded_product(b_k, b_k), [4, K // 4]), 1))
    m_sum[2].store(gl.sum(gl.reshape(rounded_product(b_q, written), [4, K // 4]), 1))
    # From here on nobody reads the window, and everybody may read what was stored.
    meet()
    carry_on(p_window, q_taps, s_tap, o_k)
    carry_on(p_window + s_stream, k_taps, s_tap, o_k)
    carry_on(p_window + 2 * s_stream, v_taps, s_tap, o_k)
    q_scale = gl.rsqrt(gl.sum(m_sum[0].load(ALL), 0) + 1e-6) * K**-0.5
    k_scale = gl.rsqrt(gl.sum(m_sum[1].load(ALL), 0) + 1e-6)
    overlap = gl.sum(m_sum[2].load(ALL), 0) * q_scale * k_scale

    by_k = gl.zeros([PART, K], gl.float32, S)
    by_q = gl.zeros([PART, K], gl.float32, S)
    for i in gl.static_range(K // PART):
        if i * PART % (K // PARTS) == 0:
            mbarrier.wait(landed.index(i * PART // (K // PARTS)), 0)
        b_s = held(buffer, i * PART, PART, HELD, K).load(S)
        by_k += b_s * m_row[0].slice(i * PART, PART).load(ROW)[:, None]
        by_q += b_s * m_row[1].slice(i * PART, PART).load(ROW)[:, None]
    # Both reads of the decayed state before the write: S^T q after it is S'^T q + (k . q) u.
    u = m_row[4].load(COLUMN) - k_scale * gl.sum(by_k, 0)
    o = q_scale * gl.sum(by_q, 0) + overlap * u
    o_v = gl.arange(0, K, COLUMN)
    # Before the state is stored, behind which it would wait.
    scale = gl.rsqrt(gl.sum(o * o, 0) / K + eps)
    y = o * scale * m_row[5].load(COLUMN)
    gl.store(p_out + o_v, y.to(p_out.dtype.element_ty))
    step = k_scale * u
    for i in gl.static_range(PIECES):
        kept = m_row[2].slice(i * HELD, HELD).load(ROW)
        added = m_row[3].slice(i * HELD, HELD).load(ROW)
        b_s = held(buffer, i * HELD, HELD, HELD, K).load(S)
        b_s = b_s * kept[:, None] + added[:, None] * step[None, :]
        held(buffer, i * HELD, HELD, HELD, K).store(b_s)
        fence_async_shared()
        meet()
        begin_store(pool, [cell, i * HELD, 0], buffer.index(i))
    # From the first of them on nothing may ask for shared memory: it would get the buffer's.
    wait_for_stores(0)


@gluon.jit
def kda_step_hopper_kernel(
    pool,
    qkv,
    gate,
    decay,
    write,
    conv,
    a_log,
    dt_bias,
    o_norm,
    windows,
    states,
    cells,
    out,
    s_qkv,
    s_gate,
    s_decay,
    s_write,
    s_cells,
    s_window,
    s_tap,
    s_stream,
    s_state,
    eps,
    lower_bound,
    H,
    K: gl.constexpr,
    PARTS: gl.constexpr,
    PIECES: gl.constexpr,
    BOUNDED: gl.constexpr,
    PDL: gl.constexpr,
):
    """One program advances one head of one sequence; a cell below 0 is padding: zeros.

    ``pool``, the first argument, describes blocks [1, K / PIECES, K] of ``states``. What is left of
    ``states`` itself and of its stride is for other kernels: see ``kda_step_kernel``.
    """
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(0, 32, 3)
    V: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if PDL:
        let_next_begin()
    ask_for_descriptor()
    landed = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PARTS):
        mbarrier.init(landed.index(i), count=1)
    m_one = gl.allocate_shared_memory(gl.bfloat16, [K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    m_one.store(gl.full([K], 1.0, gl.bfloat16, V))
    meet()
    for i in gl.static_range(PARTS):
        mbarrier.expect(landed.index(i), K // PARTS * K * 4)
    if PDL:
        wait_for_inputs()
    i_b = (gl.program_id(0) // H).to(gl.int64)
    i_h = gl.program_id(0) % H
    cell = gl.load(cells + i_b * s_cells + i_h)
    given = row_of_head(
        qkv + i_b * s_qkv, gate + i_b * s_gate, decay + i_b * s_decay, write + i_b * s_write,
        conv, a_log, dt_bias, o_norm, i_h, H, K,
    )  # fmt: skip
    # Or the compiler asks for the row where it is used.
    meet()
    p_out = out + (i_b * H + i_h) * K
    if cell >= 0:
        buffer = gl.allocate_shared_memory(gl.float32, [PIECES, 1, K // PIECES, K], PLAIN)
        m_row, m_sum = vectors(K)
        advance(
            pool, cell.to(gl.int32), landed, buffer, m_row, m_sum, m_one, given,
            windows + cell * s_window, p_out, s_tap, s_stream, eps, lower_bound,
            K, PARTS, PIECES, BOUNDED,
        )  # fmt: skip
    else:
        o_v = gl.arange(0, K, V)
        gl.store(p_out + o_v, gl.zeros([K], out.dtype.element_ty, V))
