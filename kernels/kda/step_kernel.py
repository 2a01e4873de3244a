"""One token of Kimi Delta Attention as one Triton kernel.

Triton reads a kernel's annotations, so its arguments have none but ``constexpr``.
"""
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import triton
import triton.language as tl

from k3vl.kernels.dependent import let_next_begin, wait_for_inputs


@triton.jit
def sigmoid(x):
    """As a power of two and a reciprocal root: two instructions of the special unit, no division.

    A third of the instructions of ``tl.sigmoid``, which KDA prefill spends a sixth of its time on.
    """
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def log_decay(logits, rate, bias, lower_bound, BOUNDED: tl.constexpr):
    """Natural logarithm of the decay; float32."""
    shifted = logits.to(tl.float32) + bias
    if BOUNDED:
        return lower_bound * sigmoid(rate * shifted)
    # softplus without overflow: max(x, 0) + log(1 + exp(-|x|))
    return -rate * (tl.maximum(shifted, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(shifted))))


@triton.jit
def _convolve_step(x, p_window, p_conv, s_tap, o_k, W: tl.constexpr):
    """Weigh the W inputs of every channel, add, SiLU: [K] float32; and the inputs, oldest first.

    Vectors, not a [K, W] tile: its layout would spread to the state, which would then be shuffled.
    """
    taps = ()
    y = tl.zeros([o_k.shape[0]], tl.float32)
    for j in tl.static_range(W):
        tap = tl.load(p_window + j * s_tap + o_k) if j < W - 1 else tl.load(x + o_k)
        y += tap.to(tl.float32) * tl.load(p_conv + o_k * W + j)
        taps = taps + (tap,)  # noqa: RUF005
    return y * sigmoid(y), taps


@triton.jit
def _carry_on(p_window, taps, s_tap, o_k, W: tl.constexpr):
    """Store all taps but the oldest as the new window."""
    for j in tl.static_range(1, W):
        tl.store(p_window + (j - 1) * s_tap + o_k, taps[j].to(p_window.dtype.element_ty))


@triton.jit
def kda_step_kernel(
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
    K: tl.constexpr,
    BV: tl.constexpr,
    W: tl.constexpr,
    BOUNDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program advances one head of one sequence; a cell below 0 is padding, answered by zeros.

    Nobody else reads the window that this program moves on. The state is worked on in tiles of BV
    value channels.
    """
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    i_b = (tl.program_id(0) // H).to(tl.int64)
    i_h = tl.program_id(0) % H
    o_k = tl.arange(0, K)
    o_v = tl.arange(0, BV)
    column = i_h * K
    p_out = out + i_b * H * K + column
    cell = tl.load(cells + i_b * s_cells + i_h)
    if cell < 0:
        tl.store(p_out + o_k, tl.zeros([K], out.dtype.element_ty))
        return

    # Everything is asked for before anything is used: the state comes last in its chain.
    p_state = states + cell * s_state + o_k[:, None] * K + o_v[None, :]
    tiles = ()
    for i in tl.static_range(K // BV):
        tiles = tiles + (tl.load(p_state + i * BV),)  # noqa: RUF005
    # Or the assembler, to save registers, asks for the state when the windows have come.
    tl.debug_barrier()
    x = qkv + i_b * s_qkv + column
    p_window = windows + cell * s_window
    p_conv = conv + column * W
    b_q, q_taps = _convolve_step(x, p_window, p_conv, s_tap, o_k, W)
    at = H * K
    b_k, k_taps = _convolve_step(x + at, p_window + s_stream, p_conv + at * W, s_tap, o_k, W)
    logits = tl.load(decay + i_b * s_decay + column + o_k)
    bias = tl.load(dt_bias + column + o_k)
    rate = tl.exp(tl.load(a_log + i_h))
    beta = sigmoid(tl.load(write + i_b * s_write + i_h).to(tl.float32))
    v_taps = ()
    values = ()
    gains = ()
    for i in tl.static_range(K // BV):
        at = 2 * H * K + i * BV
        value, taps = _convolve_step(
            x + at, p_window + 2 * s_stream + i * BV, p_conv + at * W, s_tap, o_v, W
        )
        v_taps = v_taps + (taps,)  # noqa: RUF005
        values = values + (value,)  # noqa: RUF005
        open_to = tl.load(gate + i_b * s_gate + column + i * BV + o_v).to(tl.float32)
        gain = tl.load(o_norm + i * BV + o_v) * sigmoid(open_to)
        gains = gains + (gain,)  # noqa: RUF005

    b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6) * (K**-0.5)
    b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
    g = log_decay(logits, rate, bias, lower_bound, BOUNDED)
    alpha = tl.exp2(g * 1.4426950408889634)
    overlap = tl.sum(b_q * b_k, 0)
    outputs = ()
    squares = 0.0
    for i in tl.static_range(K // BV):
        b_s = tiles[i] * alpha[:, None]
        # Both reads of the decayed state before the write: S^T q after it is S'^T q + (k . q) u.
        u = beta * (values[i] - tl.sum(b_s * b_k[:, None], 0))
        o = tl.sum(b_s * b_q[:, None], 0) + overlap * u
        b_s += b_k[:, None] * u[None, :]
        tl.store(p_state + i * BV, b_s)
        squares += tl.sum(o * o, 0)
        outputs = outputs + (o,)  # noqa: RUF005
    scale = tl.rsqrt(squares / K + eps)
    for i in tl.static_range(K // BV):
        y = outputs[i] * scale * gains[i]
        tl.store(p_out + i * BV + o_v, y.to(out.dtype.element_ty))

    # Several threads may hold one tap: none may store before all have loaded.
    tl.debug_barrier()
    _carry_on(p_window, q_taps, s_tap, o_k, W)
    _carry_on(p_window + s_stream, k_taps, s_tap, o_k, W)
    for i in tl.static_range(K // BV):
        _carry_on(p_window + 2 * s_stream + i * BV, v_taps[i], s_tap, o_v, W)
