"""Values for the sequential half of KDA prefill on compute capability 9.0: convolution and SiLU.

A warp has four rows of a chunk and a thread four columns of them, so that the convolution takes a
neighbour's registers, as in ``prepare_kernel``.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from k3vl.kernels.gluon_parts import meet


@gluon.jit
def widen(x):
    """bfloat16 to float32, one instruction each; the compiler takes two for every upper half."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=gl.float32,
        is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def reciprocal(x):
    """One instruction, right but for the last bit; 0 of infinity."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def power_of_two(x):
    """One instruction, where the compiler takes four for the sake of denormal results."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def silu_of_half(y):
    """SiLU of 2 y, as the fast one of ``prepare_kernel``."""
    tanh = gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [y], dtype=gl.float32, is_pure=True, pack=1
    )
    return y + y * tanh


@gluon.jit
def value_rows(p_v, o_g, left, S_QKV: gl.constexpr, W: gl.constexpr):
    """Four rows of every group, from ``p_v`` on, and the W - 1 in front of them.

    As tensors [C/4, K], as narrow as they are stored; 0 from row ``left`` of the chunk on.
    """
    rows = ()
    for s in gl.static_range(W + 3):
        live = o_g * 4 + (s - W + 1) < left
        x = gl.load(p_v + (s - W + 1) * S_QKV, mask=live[:, None], other=0.0)
        rows = rows + (x,)  # noqa: RUF005
    return rows


@gluon.jit
def first_value_rows(
    p_v, p_window, s_tap, o_g, o_k, left, S_QKV: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """As :func:`value_rows`; what was before row 0 is in the window."""
    rows = ()
    for s in gl.static_range(W + 3):
        at = o_g * 4 + (s - W + 1)
        old = (at < 0)[:, None]
        p_old = p_window + ((at + (W - 1)) * s_tap)[:, None] + o_k[None, :]
        x = gl.load(p_v + (s - W + 1) * S_QKV, mask=((at >= 0) & (at < left))[:, None], other=0.0)
        rows = rows + (gl.where(old, gl.load(p_old, mask=old, other=0.0), x),)  # noqa: RUF005
    return rows


@gluon.jit
def make_values(
    rows, p_taps, m_v, made, b, S_TAPS: gl.constexpr, C: gl.constexpr, K: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """Convolution and SiLU of :func:`value_rows`, for those who wait for ``made``.

    The taps, halves, are loaded every time: registers are scarce.
    """
    taps = ()
    for j in gl.static_range(W):
        taps = taps + (gl.load(p_taps + j * S_TAPS)[None, :],)  # noqa: RUF005
    wide = ()
    for s in gl.static_range(W + 3):
        wide = wide + (widen(rows[s]),)  # noqa: RUF005
    out = ()
    for s in gl.static_range(4):
        y = wide[s] * taps[0]
        for j in gl.static_range(1, W):
            y += wide[s + j] * taps[j]
        out = out + (silu_of_half(y).to(gl.bfloat16),)  # noqa: RUF005
    # [C/4, K, 2, 2], the upper bit of the row first.
    whole = gl.join(gl.join(out[0], out[2]), gl.join(out[1], out[3]))
    m_v.index(b).store(gl.reshape(whole.permute((0, 2, 3, 1)), (C, K)))
    fence_async_shared()  # products read it
    meet()
    mbarrier.arrive(made.index(b), count=1)


@gluon.jit
def gate_rows(p_gate, s_gate, o_t, o_k, left, ALIGNED: gl.constexpr):
    """Logits [C, K] of the output gate; 0 behind the last token."""
    at = (o_t * s_gate)[:, None] * ALIGNED + o_k[None, :]
    return gl.load(p_gate + at, mask=(o_t < left)[:, None], other=0.0)


@gluon.jit
def walk_rows_and_values(
    qkv, gate, o_norm, taps, p_window, out, m_o, m_v, made, told, taken, begin, length, room,
    s_gate, s_tap, eps, i_h, S_QKV: gl.constexpr, H: gl.constexpr, C: gl.constexpr,
    K: gl.constexpr, W: gl.constexpr, OUTS: gl.constexpr, WARPS: gl.constexpr,
    ALIGNED: gl.constexpr,
):  # fmt: skip
    """As :func:`walk_rows` for all of a head, and the values of two chunks ahead.

    Who has the outputs of a chunk has used its values, so there is room for others then. What is
    loaded is not carried into the next turn: that would take twice the registers.
    """
    R: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    V: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    o_t = gl.arange(0, C, gl.SliceLayout(1, R))
    o_k = gl.arange(0, K, gl.SliceLayout(0, R))
    o_g = gl.arange(0, C // 4, gl.SliceLayout(1, V))
    o_c = gl.arange(0, K, gl.SliceLayout(0, V))
    chunks = gl.cdiv(length, C)
    p_out = out + begin * (H * K) + i_h * K
    at = o_t[:, None] * (H * K) + o_k[None, :]
    p_gate = gate + begin * (s_gate * ALIGNED) + i_h * K
    p_taps = taps + (2 * H + i_h) * K + o_c
    p_v = qkv + begin * S_QKV + (2 * H + i_h) * K
    p_v += (o_g * 4 * S_QKV)[:, None] + o_c[None, :]
    values = first_value_rows(p_v, p_window, s_tap, o_g, o_c, length, S_QKV, W)
    make_values(values, p_taps, m_v, made, 0, 3 * H * K, C, K, W)
    values = value_rows(p_v + C * S_QKV, o_g, length - C, S_QKV, W)
    make_values(values, p_taps, m_v, made, 1, 3 * H * K, C, K, W)
    for c in range(chunks):
        b = c % OUTS
        left = length - c * C
        logits = gate_rows(p_gate, s_gate, o_t, o_k, left, ALIGNED)
        values = value_rows(p_v + 2 * C * S_QKV, o_g, left - 2 * C, S_QKV, W)
        mbarrier.wait(told.index(b), c // OUTS & 1)
        y = m_o.index(b).load(R)
        meet()
        mbarrier.arrive(taken.index(b), count=1)
        make_values(values, p_taps, m_v, made, c % 2, 3 * H * K, C, K, W)
        o = widen(y)
        o *= gl.rsqrt(gl.sum(o * o, 1) / K + eps)[:, None]
        norm = gl.load(o_norm + o_k)[None, :]
        o *= norm * reciprocal(1.0 + power_of_two(widen(logits) * -1.4426950408889634))
        y = o.to(gl.bfloat16)
        if left < C:
            y = gl.where((o_t < left)[:, None], y, 0.0)
        gl.store(p_out + at, y, mask=(o_t < room - c * C)[:, None])
        p_out += C * H * K
        p_gate += C * (s_gate * ALIGNED)
        p_v += C * S_QKV
    nothing = gl.zeros([C, K], gl.bfloat16, R)
    for c in range(chunks, gl.cdiv(room, C)):  # chunks of padding alone
        gl.store(p_out + at, nothing, mask=(o_t < room - c * C)[:, None])
        p_out += C * H * K
