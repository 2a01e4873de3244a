"""One token of Kimi Delta Attention by programs that stay and fetch the next state meanwhile."""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import triton
import triton.language as tl

from k3vl.kernels.kda.step_kernel import _convolve_step, log_decay, sigmoid


@triton.jit
def kda_steps_kernel(
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
    N,
    K: tl.constexpr,
    W: tl.constexpr,
    BOUNDED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As ``kda_step_kernel`` for every P-th of the N = B H heads, P programs.

    No two items share a cell, so what comes next may be loaded before this one is stored.
    """
    o_k = tl.arange(0, K)
    for item in tl.range(tl.program_id(0), N, tl.num_programs(0), num_stages=STAGES):
        i_b = (item // H).to(tl.int64)
        i_h = item % H
        column = i_h * K
        p_out = out + i_b * H * K + column
        cell = tl.load(cells + i_b * s_cells + i_h)
        real = o_k * 0 <= cell  # all or none
        cell = tl.maximum(cell, 0)
        p_state = states + cell * s_state + o_k[:, None] * K + o_k[None, :]
        b_s = tl.load(p_state)
        x = qkv + i_b * s_qkv + column
        p_window = windows + cell * s_window
        p_conv = conv + column * W
        at = H * K
        b_q, q_taps = _convolve_step(x, p_window, p_conv, s_tap, o_k, W)
        b_k, k_taps = _convolve_step(x + at, p_window + s_stream, p_conv + at * W, s_tap, o_k, W)
        b_v, v_taps = _convolve_step(
            x + 2 * at, p_window + 2 * s_stream, p_conv + 2 * at * W, s_tap, o_k, W
        )
        logits = tl.load(decay + i_b * s_decay + column + o_k)
        bias = tl.load(dt_bias + column + o_k)
        rate = tl.exp(tl.load(a_log + i_h))
        beta = sigmoid(tl.load(write + i_b * s_write + i_h).to(tl.float32))
        open_to = tl.load(gate + i_b * s_gate + column + o_k).to(tl.float32)
        gain = tl.load(o_norm + o_k) * sigmoid(open_to)

        b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6) * (K**-0.5)
        b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
        g = log_decay(logits, rate, bias, lower_bound, BOUNDED)
        b_s *= tl.exp2(g * 1.4426950408889634)[:, None]
        u = beta * (b_v - tl.sum(b_s * b_k[:, None], 0))
        o = tl.sum(b_s * b_q[:, None], 0) + tl.sum(b_q * b_k, 0) * u
        # Everybody has waited in the sums above: all old taps are loaded before any is replaced.
        tl.store(p_state, b_s + b_k[:, None] * u[None, :], mask=real[:, None])
        o *= tl.rsqrt(tl.sum(o * o, 0) / K + eps) * gain
        tl.store(p_out + o_k, tl.where(real, o, 0.0).to(out.dtype.element_ty))
        for j in tl.static_range(1, W):
            p_tap = p_window + (j - 1) * s_tap + o_k
            tl.store(p_tap, q_taps[j].to(windows.dtype.element_ty), mask=real)
            tl.store(p_tap + s_stream, k_taps[j].to(windows.dtype.element_ty), mask=real)
            tl.store(p_tap + 2 * s_stream, v_taps[j].to(windows.dtype.element_ty), mask=real)
