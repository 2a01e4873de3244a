"""A single token's queries and its row of the cache as one launch, in Triton.

Triton reads a kernel's annotations, so its arguments have none but ``constexpr``.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from k3vl.kernels.dependent import let_next_begin, wait_for_inputs
from k3vl.kernels.linear.row_kernel import ask_for_rows, row_normed


@triton.jit
def mla_enter_kernel(
    x, q_norm, q_b, out, c, shared, kv_norm, latents, rows, s_latents, eps, ROWS, R, P,
    D: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    AHEAD: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first program stores, as ``mla_store_kernel``; each other makes BN outputs of queries.

    x [D], q_norm [D], q_b [ROWS, D], out [ROWS]; c [R], shared [P], kv_norm [R]; rows [1]. The last
    constants are those of ``row_linear_kernel``.
    """
    i_n = tl.program_id(0) - 1
    o_n = tl.maximum(i_n, 0) * BN + tl.arange(0, BN)
    row = tl.minimum(o_n, ROWS - 1)
    ask_for_rows(q_b, row, D, AHEAD)
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    if i_n < 0:
        place = tl.load(rows)
        o_r = tl.arange(0, BR)
        o_p = tl.arange(0, BP)
        latent = tl.load(c + o_r, mask=o_r < R, other=0.0).to(tl.float32)
        tail = tl.load(shared + o_p, mask=o_p < P, other=0.0)
        weight = tl.load(kv_norm + o_r, mask=o_r < R, other=0.0).to(tl.float32)
        latent *= tl.rsqrt(tl.sum(latent * latent, 0) / R + eps) * weight
        if place >= 0:
            p_row = latents + place * s_latents
            tl.store(p_row + o_r, latent.to(latents.dtype.element_ty), mask=o_r < R)
            tl.store(p_row + R + o_p, tail.to(latents.dtype.element_ty), mask=o_p < P)
    else:
        y = row_normed(q_b, x, q_norm, row, eps, D, BK, STAGES)
        tl.store(out + o_n, y.to(out.dtype.element_ty), mask=o_n < ROWS)
