"""The sequential half of KDA prefill, behind ``prepare_kernel``, and the norm behind that.

The two products with the state that a chunk begins with are one of twice the width: three waits for
the tensor core a chunk instead of four.
"""
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from k3vl.kernels.kda.prepare_kernel import chunk_of
from k3vl.kernels.kda.step_kernel import sigmoid


@triton.jit
def _advance_windows(
    qkv, s_qkv, p_window, s_tap, s_stream, begin, end, column, stream, K: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """Make the last W - 1 inputs before ``end`` the window; from the old one where it is short."""
    o_w = tl.arange(0, W)[:, None]
    o_k = tl.arange(0, K)[None, :]
    kept = o_w < W - 1
    at = end - (W - 1) + o_w
    new = tl.load(qkv + at * s_qkv + column + o_k, mask=kept & (at >= begin), other=0.0)
    p_tap = p_window + stream * s_stream + o_k
    old = tl.load(p_tap + (at - begin + (W - 1)) * s_tap, mask=kept & (at < begin), other=0.0)
    return tl.where(at >= begin, new.to(old.dtype), old)


@triton.jit
def kda_walk_kernel(
    qkv,
    gate,
    o_norm,
    windows,
    states,
    cells,
    cu_seqlens,
    ends,
    wq,
    u,
    kl,
    scores,
    gamma,
    depths,
    snapshots,
    out,
    s_qkv,
    s_gate,
    s_cells,
    s_window,
    s_tap,
    s_stream,
    s_state,
    eps,
    H,
    C: tl.constexpr,
    K: tl.constexpr,
    BV: tl.constexpr,
    W: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    FUSED: tl.constexpr,
    DEPTHS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Carry the state of one head (BV of its value channels) through one sequence.

    Everything is transposed, values first: then the state is the left operand of every product and
    goes from its accumulator into the tensor core without a way through shared memory.
    """
    PARTS: tl.constexpr = K // BV
    i_v = tl.program_id(0) % PARTS  # the parts of a head start together and read the same
    i_s = tl.program_id(0) // PARTS // H
    i_h = tl.program_id(0) // PARTS % H
    o_t = tl.arange(0, C)
    o_k = tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    column = i_h * K
    begin = tl.load(cu_seqlens + i_s)
    behind = tl.load(cu_seqlens + i_s + 1)
    end = tl.load(ends + i_s)
    cell = tl.load(cells + i_s * s_cells + i_h)
    length = (end - begin).to(tl.int32)
    room = (behind - begin).to(tl.int32)
    chunks = tl.cdiv(length, C)
    block = (begin // C + i_s) * H + i_h

    p_state = states + cell * s_state + o_k[:, None] * K + o_v[None, :]
    b_s = tl.trans(tl.load(p_state))  # [V, K] float32
    p_out = out + begin * (H * K) + column + o_t[:, None] * (H * K) + o_v[None, :]
    p_gate = gate + begin * s_gate + column + o_t[:, None] * s_gate + o_v[None, :]
    norm = tl.load(o_norm + o_v)
    p_wq = wq + block * (2 * C * K) + tl.arange(0, 2 * C)[:, None] * K + o_k[None, :]
    p_u = u + block * C * K + o_v[:, None] * C + o_t[None, :]
    p_kl = kl + block * C * K + o_t[:, None] * K + o_k[None, :]
    p_scores = scores + block * C * C + o_t[:, None] * C + o_t[None, :]
    p_gamma = gamma + block * K + o_k
    for c in tl.range(0, chunks, num_stages=STAGES):
        b_wq = tl.load(p_wq)
        b_u = tl.load(p_u)
        b_kl = tl.load(p_kl)
        b_scores = tl.load(p_scores)
        b_gamma = tl.load(p_gamma)
        row = c * C + o_t
        live = row < length
        both = tl.dot(b_s.to(DTYPE), tl.trans(b_wq), input_precision=PRECISION)  # [V, 2C]
        seen, o = tl.split(tl.permute(tl.reshape(both, (BV, 2, C)), (0, 2, 1)))
        x = (b_u.to(tl.float32) - seen).to(DTYPE)
        b_s = tl.dot(x, b_kl, b_s * b_gamma[None, :], input_precision=PRECISION)
        # Of -q: a sum would become the product's accumulator, and an accumulator that is half of
        # another one makes the assembler wait for every single instruction of the tensor core.
        o = tl.dot(x, tl.trans(b_scores), input_precision=PRECISION) - o

        if FUSED:
            o *= tl.rsqrt(tl.sum(o * o, 0) / K + eps)[None, :] * norm[:, None]
        y = tl.trans(o.to(out.dtype.element_ty))
        if FUSED:
            logits = tl.load(p_gate, mask=live[:, None], other=0.0).to(tl.float32)
            y = (y.to(tl.float32) * sigmoid(logits)).to(out.dtype.element_ty)
            p_gate += C * s_gate
        y = tl.where(live[:, None], y, 0.0)
        tl.store(p_out, y, mask=(row < room)[:, None])
        p_out += C * H * K
        p_wq += H * (2 * C * K)
        p_u += H * (C * K)
        p_kl += H * (C * K)
        p_scores += H * (C * C)
        p_gamma += H * K
        for d in tl.static_range(DEPTHS):
            wanted = tl.load(depths + i_s * DEPTHS + d)
            if wanted == (c + 1) * C:
                copy = tl.load(snapshots + (i_s * DEPTHS + d) * H + i_h)
                p_copy = states + copy * s_state + o_k[:, None] * K + o_v[None, :]
                tl.store(p_copy, tl.trans(b_s))
    tl.store(p_state, tl.trans(b_s))
    for c in range(chunks, tl.cdiv(room, C)):  # chunks of padding alone
        row = c * C + o_t
        nothing = tl.zeros([C, BV], out.dtype.element_ty)
        tl.store(p_out, nothing, mask=(row < room)[:, None])
        p_out += C * H * K

    if i_v == 0:
        o_w = tl.arange(0, W)[:, None]
        for stream in tl.static_range(3):
            at = column + stream * H * K
            for d in tl.static_range(DEPTHS):
                wanted = tl.load(depths + i_s * DEPTHS + d)
                if wanted > 0:
                    taps = _advance_windows(qkv, s_qkv, windows, s_tap, s_stream, begin,
                                            begin + wanted, at, stream, K, W)  # fmt: skip
                    copy = tl.load(snapshots + (i_s * DEPTHS + d) * H + i_h)
                    p_tap = windows + copy * s_window + stream * s_stream + o_k[None, :]
                    tl.store(p_tap + o_w * s_tap, taps, mask=o_w < W - 1)
            taps = _advance_windows(qkv, s_qkv, windows + cell * s_window, s_tap, s_stream, begin,
                                    end, at, stream, K, W)  # fmt: skip
            tl.debug_barrier()  # several threads may hold one tap
            p_tap = windows + cell * s_window + stream * s_stream + o_k[None, :]
            tl.store(p_tap + o_w * s_tap, taps, mask=o_w < W - 1)


@triton.jit
def kda_norm_kernel(
    x, gate, o_norm, cu_seqlens, ends, s_gate, eps, S, H,
    BS: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Gated RMSNorm of one head of one chunk in place; padding stays as it is."""
    i_h = tl.program_id(0)
    slot = tl.program_id(1)
    _, _, start, count = chunk_of(slot, cu_seqlens, ends, S, BS, C)
    if count <= 0:
        return
    o_t = tl.arange(0, C)
    o_k = tl.arange(0, K)
    live = (o_t < count)[:, None]
    p_x = x + start * (H * K) + i_h * K + o_t[:, None] * (H * K) + o_k[None, :]
    p_gate = gate + start * s_gate + i_h * K + o_t[:, None] * s_gate + o_k[None, :]
    logits = tl.load(p_gate, mask=live, other=0.0).to(tl.float32)
    o = tl.load(p_x, mask=live, other=0.0).to(tl.float32)
    o *= tl.rsqrt(tl.sum(o * o, 1) / K + eps)[:, None] * tl.load(o_norm + o_k)[None, :]
    tl.store(p_x, (o * sigmoid(logits)).to(x.dtype.element_ty), mask=live)
