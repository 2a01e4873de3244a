"""One row times matrices: what a single token's projections are, as fast as weights can be read."""
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from k3vl.kernels.dependent import ask_for, let_next_begin, wait_for_inputs
from k3vl.kernels.situ.glu_kernel import activated


@triton.jit
def ask_for_rows(matrix, o_n, D: tl.constexpr, BYTES: tl.constexpr):
    """For the first BYTES of some rows, in eight pieces each."""
    ELEMENT: tl.constexpr = matrix.dtype.element_ty.primitive_bitwidth // 8
    if BYTES > 0:
        o_piece = tl.arange(0, 8) * (BYTES // 8 // ELEMENT)
        ask_for(matrix + o_n.to(tl.int64)[:, None] * D + o_piece[None, :], BYTES // 8)


@triton.jit
def _tile(at):
    """Weights, each of which is read once in a step."""
    return tl.load(at, eviction_policy="evict_first")


@triton.jit
def folded(weights, x):
    """[BN, BK] weights times [BK] inputs, eights of columns added up: [BN, BK / 8] float32."""
    products = weights.to(tl.float32) * x[None, :]
    return tl.sum(tl.reshape(products, [weights.shape[0], weights.shape[1] // 8, 8]), 2)


@triton.jit
def row_times(matrix, x, row, D: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):
    """Inputs [D] times rows ``row`` [BN] of a matrix [., D]: float32 [BN].

    STAGES of BK columns are under way at once. A thread has eights of columns, so nothing is
    exchanged before the end.
    """
    o_k = tl.arange(0, BK)
    at = row.to(tl.int64)[:, None] * D + o_k[None, :]
    sums = tl.zeros([row.shape[0], BK // 8], tl.float32)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        sums += folded(_tile(matrix + at + k), tl.load(x + k + o_k).to(tl.float32))
    return tl.sum(sums, 1)


@triton.jit
def row_normed(
    matrix, x, norm, row, eps, D: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """RMSNorm of inputs [D] with weights ``norm``, times rows of a matrix: float32 [BN].

    Nothing is rounded on the way, and squares are added up beside the products.
    """
    o_k = tl.arange(0, BK)
    at = row.to(tl.int64)[:, None] * D + o_k[None, :]
    sums = tl.zeros([row.shape[0], BK // 8], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        given = tl.load(x + k + o_k).to(tl.float32)
        squares += given * given
        sums += folded(_tile(matrix + at + k), given * tl.load(norm + k + o_k).to(tl.float32))
    return tl.sum(sums, 1) * tl.rsqrt(tl.sum(squares, 0) / D + eps)


@triton.jit
def row_gated(
    gates, ups, x, row, beta, linear_beta,
    D: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, SITU: tl.constexpr,
):  # fmt: skip
    """The activation of two such products, of the same rows of two matrices: float32 [BN]."""
    o_k = tl.arange(0, BK)
    at = row.to(tl.int64)[:, None] * D + o_k[None, :]
    sums = tl.zeros([row.shape[0], BK // 8], tl.float32)
    others = tl.zeros([row.shape[0], BK // 8], tl.float32)
    for k in tl.range(0, D, BK, num_stages=STAGES):
        given = tl.load(x + k + o_k).to(tl.float32)
        sums += folded(_tile(gates + at + k), given)
        others += folded(_tile(ups + at + k), given)
    return activated(tl.sum(sums, 1), tl.sum(others, 1), beta, linear_beta, SITU)


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
    matrix' row that are asked for before the input is there.
    """
    i_n = tl.program_id(0)
    matrix, rows = first, ROWS
    blocks = tl.cdiv(ROWS, BN)
    behind = (i_n >= blocks) & (not GLU)
    if behind:
        matrix, rows, i_n = second, ROWS_SECOND, i_n - blocks
    o_n = i_n * BN + tl.arange(0, BN)
    row = tl.minimum(o_n, rows - 1)
    ask_for_rows(matrix, row, D, AHEAD)
    if GLU:
        ask_for_rows(second, row, D, AHEAD)
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    inside = o_n < rows
    base = tl.load(onto + o_n, mask=inside, other=0.0).to(tl.float32) if ONTO else 0.0
    if GLU:
        y = row_gated(matrix, second, x, row, beta, linear_beta, D, BK, STAGES, SITU)
    else:
        y = row_times(matrix, x, row, D, BK, STAGES)
    y += base
    if behind:
        tl.store(out_second + o_n, y.to(out_second.dtype.element_ty), mask=inside)
    else:
        tl.store(out + o_n, y.to(out.dtype.element_ty), mask=inside)
