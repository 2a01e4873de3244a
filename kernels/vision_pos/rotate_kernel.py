"""Rotary positions of a tower's queries and keys as one Triton kernel."""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def rotate_kernel(
    x, table, out, P, H, s_x, s_xh, s_out, s_outh, K: tl.constexpr, BP: tl.constexpr,
    BH: tl.constexpr,
):  # fmt: skip
    """BP patches, BH heads; ``table`` holds cosine and sine of every pair. ``out`` may be ``x``."""
    o_r = tl.arange(0, BP * BH)
    patch = tl.program_id(0) * BP + o_r // BH
    head = tl.program_id(1) * BH + o_r % BH
    o_k = tl.arange(0, K)
    live = ((patch < P) & (head < H))[:, None]
    patch = patch.to(tl.int64)[:, None]
    head = head[:, None]
    turn = tl.load(table + patch * K + o_k[None, :], mask=live, other=0.0)
    cosine, sine = tl.split(tl.reshape(turn, [BP * BH, K // 2, 2]))
    b_x = tl.load(x + patch * s_x + head * s_xh + o_k[None, :], mask=live, other=0.0)
    even, odd = tl.split(tl.reshape(b_x.to(tl.float32), [BP * BH, K // 2, 2]))
    real = even * cosine - odd * sine
    imaginary = even * sine + odd * cosine
    turned = tl.reshape(tl.join(real, imaginary), [BP * BH, K])
    p_out = out + patch * s_out + head * s_outh + o_k[None, :]
    tl.store(p_out, turned.to(out.dtype.element_ty), mask=live)
