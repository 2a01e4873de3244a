"""Gated activations in Triton: in registers for kernels that fuse them, and as one launch."""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from k3vl.kernels.dependent import let_next_begin, wait_for_inputs


@triton.jit
def activated(gate, up, beta, linear_beta, SITU: tl.constexpr):
    """SiTU-GLU or SwiGLU of float32, with one division.

    Exponents are held below 28, so that the product of three denominators is a float32; beyond,
    every factor is within 1e-12 of its limit. What is not a number stays so.
    """
    keep: tl.constexpr = tl.PropagateNan.ALL
    e = tl.exp(tl.minimum(-gate, 28.0, keep))
    if SITU:
        f = tl.exp(tl.minimum(gate * (-2 / beta), 28.0, keep))
        g = tl.exp(tl.minimum(up * (-2 / linear_beta), 28.0, keep))
        top = (beta * linear_beta) * ((1 - f) * (1 - g))
        y = top / ((1 + e) * ((1 + f) * (1 + g)))
    else:
        y = gate * up / (1 + e)
    return y


@triton.jit
def glu_kernel(
    gate_up, out, beta, linear_beta,
    INNER: tl.constexpr, SITU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[N, 2 INNER], gates first, to [N, INNER]; one program a block of a row."""
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o_i < INNER
    at = gate_up + row * (2 * INNER) + o_i
    gate = tl.load(at, inside, 0).to(tl.float32)
    up = tl.load(at + INNER, inside, 0).to(tl.float32)
    y = activated(gate, up, beta, linear_beta, SITU)
    tl.store(out + row * INNER + o_i, y.to(out.dtype.element_ty), inside)
