"""RMSNorm of whole rows as one Triton kernel."""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from k3vl.kernels.dependent import let_next_begin, wait_for_inputs


@triton.jit
def rms_norm_kernel(
    x, weight, out, rows, s_x, eps, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BR rows of ``x``."""
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    live = (o_r < rows)[:, None] & (o_d < D)[None, :]
    row = o_r.to(tl.int64)[:, None]
    b_x = tl.load(x + row * s_x + o_d[None, :], mask=live, other=0.0)
    b_w = tl.load(weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    b_x = b_x.to(tl.float32)
    by = 1 / tl.sqrt_rn(tl.sum(b_x * b_x, 1) / D + eps)
    normed = b_x * by[:, None] * b_w[None, :]
    tl.store(out + row * D + o_d[None, :], normed.to(out.dtype.element_ty), mask=live)
