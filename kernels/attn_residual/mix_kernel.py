"""Mixture over depth and the norm that follows it, as one Triton kernel."""
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from k3vl.kernels.dependent import let_next_begin, wait_for_inputs


@triton.jit
def _mix_in(x, b_query, mixed, total, highest, eps, D: tl.constexpr):
    """One more row: all sums so far are kept relative to the highest score."""
    # Both sums in one reduction: the threads meet once a row.
    product, square = tl.split(tl.sum(tl.join(x * b_query, x * x), 0))
    score = product * tl.rsqrt(square / D + eps)
    higher = tl.maximum(highest, score)
    kept = tl.exp2((highest - higher) * 1.4426950408889634)
    weight = tl.exp2((score - higher) * 1.4426950408889634)
    return mixed * kept + weight * x, total * kept + weight, higher


@triton.jit
def attn_residual_kernel(
    rows,
    query,
    norm,
    out,
    s_row,
    s_token,
    eps,
    R,
    D: tl.constexpr,
    BD: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program mixes the R rows of one token: online softmax, every row is read once.

    All but one of STAGES rows are on their way while one is reduced.
    """
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    inside = o_d < D
    b_query = tl.load(query + o_d, mask=inside, other=0.0)
    p_row = rows + i_n * s_token
    mixed = tl.zeros([BD], tl.float32)
    highest = float("-inf")
    total = 0.0
    for _ in tl.range(R, num_stages=STAGES):
        x = tl.load(p_row + o_d, mask=inside, other=0.0).to(tl.float32)
        p_row += s_row
        mixed, total, highest = _mix_in(x, b_query, mixed, total, highest, eps, D)
    b_norm = tl.load(norm + o_d, mask=inside, other=0.0).to(tl.float32)
    mixed /= total
    mixed *= tl.rsqrt(tl.sum(mixed * mixed, 0) / D + eps) * b_norm
    tl.store(out + i_n * D + o_d, mixed.to(out.dtype.element_ty), mask=inside)
