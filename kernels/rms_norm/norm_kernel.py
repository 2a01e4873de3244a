"""RMSNorm as one Triton kernel."""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from k3vl.kernels.dependent import let_next_begin, wait_for_inputs


@triton.jit
def rms_norm_kernel(
    x, weight, out, s_x, eps, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program a row."""
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    inside = o_d < D
    wide = tl.load(x + i_n * s_x + o_d, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + o_d, mask=inside, other=0.0).to(tl.float32)
    y = wide * tl.rsqrt(tl.sum(wide * wide, 0) / D + eps) * scale
    tl.store(out + i_n * D + o_d, y.to(out.dtype.element_ty), mask=inside)
