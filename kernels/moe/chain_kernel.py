"""A single token's choice of experts beside its shared experts' gates and ups, in Triton.

Triton reads a kernel's annotations, so its arguments have none but ``constexpr``.
"""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from k3vl.kernels.dependent import let_next_begin, wait_for_inputs
from k3vl.kernels.linear.row_kernel import ask_for_rows, row_gated
from k3vl.kernels.moe.experts_kernel import choose_sorted


@triton.jit
def route_and_glu_kernel(
    logits, bias, weights, experts, scale, x, gates, ups, hidden, beta, linear_beta, ROWS,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr, SITU: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    AHEAD: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first program chooses, as ``route_sorted_kernel``; each other has BN gates and ups.

    logits [E] float32; weights, experts [K]; x [D]; gates, ups [ROWS, D]; hidden [ROWS]. The last
    constants are those of ``row_linear_kernel``.
    """
    i_n = tl.program_id(0) - 1
    o_n = tl.maximum(i_n, 0) * BN + tl.arange(0, BN)
    row = tl.minimum(o_n, ROWS - 1)
    ask_for_rows(gates, row, D, AHEAD)
    ask_for_rows(ups, row, D, AHEAD)
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    if i_n < 0:
        choose_sorted(logits, bias, weights, experts, scale, 0, E, K, KP, RENORMALISE, BLOCK)
    else:
        y = row_gated(gates, ups, x, row, beta, linear_beta, D, BK, STAGES, SITU)
        tl.store(hidden + o_n, y.to(hidden.dtype.element_ty), mask=o_n < ROWS)
