"""Where every segment of a sequence starts, without walking the segments before it one by one.

The state is linear in where it comes from: over a segment, with states transposed,
``S_end = S_start A + N``. N is what a walk from zero leaves, the rows of A what walks from unit
rows leave that read no values. All segments but the last are walked so at once; then the starts
follow from each other by one product a segment. Worth its second walk where heads are few.

A segment is so many chunks from the beginning of its sequence in this call, whatever else is in the
batch.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import torch
import triton
import triton.language as tl


@triton.jit
def kda_transfer_kernel(
    cu_seqlens, ends, wq, u, kl, gamma, transfers, H,
    C: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BV rows of [N; A] of one segment of one head: ``transfers`` [segment, H, 2 K, K] float32."""
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    i_s = tl.program_id(1) // H
    i_h = tl.program_id(1) % H
    segment = tl.program_id(2)
    begin = tl.load(cu_seqlens + i_s)
    chunks = tl.cdiv(tl.load(ends + i_s) - begin, C).to(tl.int32)
    if (segment + 1) * L >= chunks:
        return
    o_t = tl.arange(0, C)
    o_k = tl.arange(0, K)
    block = (begin // C + i_s + segment * L) * H + i_h
    p_wq = wq + block * (2 * C * K) + o_t[:, None] * K + o_k[None, :]
    p_u = u + block * C * K + o_v[:, None] * C + o_t[None, :]
    p_kl = kl + block * C * K + o_t[:, None] * K + o_k[None, :]
    p_gamma = gamma + block * K + o_k
    # Rows behind K are units and read no values.
    b_s = tl.where(o_v[:, None] - K == o_k[None, :], 1.0, 0.0)
    valued = o_v[:, None] < K
    for _ in tl.range(0, L, num_stages=STAGES):
        b_w = tl.load(p_wq)
        b_u = tl.load(p_u, mask=valued, other=0.0)
        b_kl = tl.load(p_kl)
        b_gamma = tl.load(p_gamma)
        seen = tl.dot(b_s.to(DTYPE), tl.trans(b_w), input_precision=PRECISION)
        x = (b_u.to(tl.float32) - seen).to(DTYPE)
        b_s = tl.dot(x, b_kl, b_s * b_gamma[None, :], input_precision=PRECISION)
        p_wq += H * (2 * C * K)
        p_u += H * (C * K)
        p_kl += H * (C * K)
        p_gamma += H * K
    at = ((begin // (C * L) + i_s + segment) * H + i_h) * 2 * K
    tl.store(transfers + (at + o_v[:, None]) * K + o_k[None, :], b_s)


@triton.jit
def kda_starts_kernel(
    cu_seqlens, ends, cells, states, transfers, starts, s_cells, s_state, H,
    C: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """BV value channels of the states that the segments start from: [segment, H, V, K] float32."""
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    i_s = tl.program_id(1) // H
    i_h = tl.program_id(1) % H
    o_k = tl.arange(0, K)
    begin = tl.load(cu_seqlens + i_s)
    chunks = tl.cdiv(tl.load(ends + i_s) - begin, C).to(tl.int32)
    cell = tl.load(cells + i_s * s_cells + i_h)
    b_s = tl.trans(tl.load(states + cell * s_state + o_k[:, None] * K + o_v[None, :]))
    at = (begin // (C * L) + i_s) * H + i_h
    o_vk = o_v[:, None] * K + o_k[None, :]
    tl.store(starts + at * K * K + o_vk, b_s)
    for _ in range(1, tl.cdiv(chunks, L)):
        p_transfer = transfers + at * 2 * K * K
        b_n = tl.load(p_transfer + o_vk)
        b_a = tl.load(p_transfer + K * K + o_k[:, None] * K + o_k[None, :])
        b_s = tl.dot(b_s, b_a, b_n, input_precision="tf32x3")
        at += H
        tl.store(starts + at * K * K + o_vk, b_s)


def start_states(
    states: torch.Tensor,
    cells: torch.Tensor,
    cu_seqlens: torch.Tensor,
    ends: torch.Tensor,
    chunks: tuple[torch.Tensor, ...],
    rows: int,
    length: int,
) -> torch.Tensor:
    """States that segments of ``length`` chunks start from.

    Args:
        states, cells, cu_seqlens, ends: as of the op.
        chunks: wq, u, kl, scores and gamma as ``rows_kernel`` leaves them.
        rows: of all sequences. length: chunks of a segment.

    Returns:
        [segments, H, V, K] float32; segment g of sequence s is number ``cu_seqlens[s] // (C length)
        + s + g``.
    """
    wq, u, kl, _, gamma = chunks
    sequences, heads = cells.shape
    key, chunk = u.shape[-2:]
    most = triton.cdiv(rows, chunk * length)
    size = (rows // (chunk * length) + sequences, heads, key, key)
    starts = torch.empty(size, dtype=torch.float32, device=u.device)
    transfers = torch.empty(2, *size, dtype=torch.float32, device=u.device)
    half = u.dtype != torch.float32
    tile = min(64, key)
    if most > 1:
        kda_transfer_kernel[(2 * key // tile, sequences * heads, most - 1)](
            cu_seqlens,
            ends,
            wq,
            u,
            kl,
            gamma,
            transfers,
            heads,
            C=chunk,
            K=key,
            BV=tile,
            L=length,
            DTYPE=tl.bfloat16 if half else tl.float32,
            PRECISION="tf32" if half else "tf32x3",
            STAGES=3 if half else 1,
            num_warps=4,
        )
    kda_starts_kernel[(key // 16, sequences * heads)](
        cu_seqlens,
        ends,
        cells,
        states,
        transfers,
        starts,
        cells.stride(0),
        states.stride(0),
        heads,
        C=chunk,
        K=key,
        BV=16,
        L=length,
        num_warps=4,
    )
    return starts
