"""Mixture over depth and the norm that follows it, as one Triton kernel."""
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from k3vl.kernels.dependent import let_next_begin, wait_for_inputs


@triton.jit
def _taken_in(p_last, p_added, inside, FRESH: tl.constexpr, LOAD: tl.constexpr):
    """The last row with what was added, which is stored there too."""
    following = tl.load(p_added, mask=inside, other=0.0)
    if not FRESH:
        last = tl.load(p_last, mask=inside, other=0.0, cache_modifier=LOAD).to(tl.float32)
        following = (last + following.to(tl.float32)).to(following.dtype)
    tl.store(p_last, following, mask=inside)
    return following


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
    added,
    out,
    s_row,
    s_token,
    s_added,
    eps,
    R,
    D: tl.constexpr,
    BD: tl.constexpr,
    PDL: tl.constexpr,
    ADDED: tl.constexpr,
    FRESH: tl.constexpr,
    STAGES: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program mixes the R rows of one token: online softmax, every row is read once.

    The last row comes first, as it may take in what was ``added``. The next row is asked for before
    this one is reduced, and last the norm, so that their way here is hidden.
    """
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    inside = o_d < D
    b_query = tl.load(query + o_d, mask=inside, other=0.0)
    p_row = rows + i_n * s_token
    p_last = p_row + tl.full([], R - 1, tl.int64) * s_row + o_d
    if ADDED:
        following = _taken_in(p_last, added + i_n * s_added + o_d, inside, FRESH, LOAD)
    elif STAGES == 1:
        following = tl.load(p_last, mask=inside, other=0.0, cache_modifier=LOAD)
    mixed = tl.zeros([BD], tl.float32)
    highest = float("-inf")
    total = 0.0
    if STAGES == 1:
        AHEAD: tl.constexpr = norm.dtype == rows.dtype
        for r in range(R):
            x = following.to(tl.float32)
            if AHEAD:
                p_next = tl.where(r + 1 < R, p_row, norm)
                following = tl.load(p_next + o_d, mask=inside, other=0.0, cache_modifier=LOAD)
            else:
                left = o_d < tl.where(r + 1 < R, D, 0)
                following = tl.load(p_row + o_d, mask=left, other=0.0, cache_modifier=LOAD)
            p_row += s_row
            mixed, total, highest = _mix_in(x, b_query, mixed, total, highest, eps, D)
        if AHEAD:
            b_norm = following.to(tl.float32)
        else:
            b_norm = tl.load(norm + o_d, mask=inside, other=0.0).to(tl.float32)
    else:
        for _ in tl.range(R - 1 if ADDED else R, num_stages=STAGES):
            x = tl.load(p_row + o_d, mask=inside, other=0.0, cache_modifier=LOAD).to(tl.float32)
            p_row += s_row
            mixed, total, highest = _mix_in(x, b_query, mixed, total, highest, eps, D)
        if ADDED:
            x = following.to(tl.float32)
            mixed, total, highest = _mix_in(x, b_query, mixed, total, highest, eps, D)
        b_norm = tl.load(norm + o_d, mask=inside, other=0.0).to(tl.float32)
    mixed /= total
    mixed *= tl.rsqrt(tl.sum(mixed * mixed, 0) / D + eps) * b_norm
    y = mixed.to(out.dtype.element_ty)
    tl.store(out + i_n * D + o_d, y, mask=inside, cache_modifier=STORE)
