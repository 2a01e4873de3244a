"""Normalised pixels as one Triton kernel."""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def pixel_kernel(
    pixels, mean, deviation, out, N, C: tl.constexpr, AREA: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK values of the flat [P, C, h, w] array."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < N
    channel = ((at // AREA) % C).to(tl.int32)
    x = tl.load(pixels + at, mask=live, other=0).to(tl.float32) * (1.0 / 255.0)
    x = (x - tl.load(mean + channel)) / tl.load(deviation + channel)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=live)
