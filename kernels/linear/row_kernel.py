"""One row times matrices: what a single token's projections are, as fast as weights can be read."""
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from k3vl.kernels.dependent import ask_for, let_next_begin, wait_for_inputs
from k3vl.kernels.situ.glu_kernel import activated


@triton.jit
def _ask(matrix, o_n, D: tl.constexpr, BYTES: tl.constexpr):
    """For the first BYTES of some rows, in eight pieces each."""
    ELEMENT: tl.constexpr = matrix.dtype.element_ty.primitive_bitwidth // 8
    o_piece = tl.arange(0, 8) * (BYTES // 8 // ELEMENT)
    ask_for(matrix + o_n.to(tl.int64)[:, None] * D + o_piece[None, :], BYTES // 8)


@triton.jit
def _tile(at):
    """Weights, each of which is read once in a step."""
    return tl.load(at, eviction_policy="evict_first")


@triton.jit
def _folded(weights, x):
    """[BN, BK] weights times [BK] inputs, eights of columns added up: [BN, BK / 8] float32."""
    products = weights.to(tl.float32) * x[None, :]
    return tl.sum(tl.reshape(products, [weights.shape[0], weights.shape[1] // 8, 8]), 2)


@triton.jit
def row_linear_kernel(
    x, first, second, out, out_second, onto, beta, linear_beta, ROWS, ROWS_SECOND,
    D: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr,
    STAGES: tl.constexpr, ONTO: tl.constexpr, GLU: tl.constexpr, SITU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BN outputs of one row [D]; programs behind those of ``first`` are of ``second``.

    GLU: ``first`` and ``second`` are gates and ups, a program has both, and stores the activation
    of its BN pairs. ONTO: the result is added to ``onto`` before it is rounded. AHEAD: bytes of a
    matrix' row that are asked for before the input is there. STAGES of weights are under way at
    once. A thread has eights of columns, so nothing is exchanged before the end.
    """
    i_n = tl.program_id(0)
    matrix, rows = first, ROWS
    blocks = tl.cdiv(ROWS, BN)
    behind = (i_n >= blocks) & (not GLU)
    if behind:
        matrix, rows, i_n = second, ROWS_SECOND, i_n - blocks
    o_n = i_n * BN + tl.arange(0, BN)
    row = tl.minimum(o_n, rows - 1)
    if AHEAD > 0:
        _ask(matrix, row, D, AHEAD)
        if GLU:
            _ask(second, row, D, AHEAD)
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    inside = o_n < rows
    base = tl.load(onto + o_n, mask=inside, other=0.0).to(tl.float32) if ONTO else 0.0
    o_k = tl.arange(0, BK)
    at = row.to(tl.int64)[:, None] * D + o_k[None, :]
    sums = tl.zeros([BN, BK // 8], tl.float32)
    ups = tl.zeros([BN, BK // 8], tl.float32)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        given = tl.load(x + k + o_k).to(tl.float32)
        sums += _folded(_tile(matrix + at + k), given)
        if GLU:
            ups += _folded(_tile(second + at + k), given)
    y = tl.sum(sums, 1)
    if GLU:
        y = activated(y, tl.sum(ups, 1), beta, linear_beta, SITU)
    y += base
    if behind:
        tl.store(out_second + o_n, y.to(out_second.dtype.element_ty), mask=inside)
    else:
        tl.store(out + o_n, y.to(out.dtype.element_ty), mask=inside)
