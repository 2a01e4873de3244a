"""Mixture over depth and the norm that follows it, as one Triton kernel."""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


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
    ADDED: tl.constexpr,
    FRESH: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program mixes the R rows of one token: online softmax, every row is read once.

    The last row comes first, as it may take in what was ``added``. The next row is asked for before
    this one is reduced, so that its way here is hidden.
    """
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    inside = o_d < D
    b_query = tl.load(query + o_d, mask=inside, other=0.0)
    p_x = rows + i_n * s_token + o_d
    p_last = p_x + tl.full([], R - 1, tl.int64) * s_row
    if ADDED:
        following = tl.load(added + i_n * s_added + o_d, mask=inside, other=0.0)
        if not FRESH:
            last = tl.load(p_last, mask=inside, other=0.0, cache_modifier=LOAD).to(tl.float32)
            following = (last + following.to(tl.float32)).to(following.dtype)
        tl.store(p_last, following, mask=inside)
    else:
        following = tl.load(p_last, mask=inside, other=0.0, cache_modifier=LOAD)
    mixed = tl.zeros([BD], tl.float32)
    highest = float("-inf")
    total = 0.0
    for r in range(R):
        x = following.to(tl.float32)
        left = o_d < tl.where(r + 1 < R, D, 0)
        following = tl.load(p_x, mask=left, other=0.0, cache_modifier=LOAD)
        p_x += s_row
        # Both sums in one reduction: the threads meet once a row.
        product, square = tl.split(tl.sum(tl.join(x * b_query, x * x), 0))
        score = product * tl.rsqrt(square / D + eps)
        higher = tl.maximum(highest, score)
        kept = tl.exp2((highest - higher) * 1.4426950408889634)
        weight = tl.exp2((score - higher) * 1.4426950408889634)
        mixed = mixed * kept + weight * x
        total = total * kept + weight
        highest = higher
    mixed /= total
    b_norm = tl.load(norm + o_d, mask=inside, other=0.0).to(tl.float32)
    mixed *= tl.rsqrt(tl.sum(mixed * mixed, 0) / D + eps) * b_norm
    y = mixed.to(out.dtype.element_ty)
    tl.store(out + i_n * D + o_d, y, mask=inside, cache_modifier=STORE)
