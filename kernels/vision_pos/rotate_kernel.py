"""Rotary positions of a tower's queries and keys as one Triton kernel."""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def rotate_kernel(
    x, table, out, s_x, s_xh, H, K: tl.constexpr, BH: tl.constexpr
):  # fmt: skip
    """One program turns all heads of one patch; ``table`` holds cosine and sine of every pair."""
    i_p = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BH)
    o_k = tl.arange(0, K)
    exists = (o_h < H)[:, None]
    turn = tl.load(table + i_p * K + o_k)
    cosine, sine = tl.split(tl.reshape(turn, [K // 2, 2]))
    b_x = tl.load(x + i_p * s_x + o_h[:, None] * s_xh + o_k[None, :], mask=exists, other=0.0)
    even, odd = tl.split(tl.reshape(b_x.to(tl.float32), [BH, K // 2, 2]))
    real = even * cosine[None, :] - odd * sine[None, :]
    imaginary = even * sine[None, :] + odd * cosine[None, :]
    turned = tl.reshape(tl.join(real, imaginary), [BH, K])
    p_out = out + (i_p * H + o_h[:, None]) * K + o_k[None, :]
    tl.store(p_out, turned.to(out.dtype.element_ty), mask=exists)
