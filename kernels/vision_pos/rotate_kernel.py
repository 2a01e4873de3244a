"""Rotary positions of a tower's queries and keys as one Triton kernel."""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, unreachable"

import triton
import triton.language as tl

from k3vl.kernels.dependent import let_next_begin, wait_for_inputs


@triton.jit
def rotate_kernel(
    x, table, out, P, H, s_x, s_xh, s_out, s_outh, K: tl.constexpr, BP: tl.constexpr,
    BH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BP patches, BH heads; ``table`` holds cosine and sine of every pair. ``out`` may be ``x``.

    The last patches first, all their heads before others: what was written last may still be in
    the L2 cache.
    """
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    i_p = i // tl.cdiv(H, BH)
    i_h = i % tl.cdiv(H, BH)
    patch = i_p * BP + tl.arange(0, BP)
    o_k = tl.arange(0, K)
    there = (patch < P)[:, None]
    none = tl.zeros([BP, 1], tl.int32)
    patch = patch.to(tl.int64)[:, None]
    turn = tl.load(table + patch * K + o_k[None, :], mask=there, other=0.0)
    cosine, sine = tl.split(tl.reshape(turn, [BP, K // 2, 2]))
    heads = ()  # all on their way before the first is stored: out may be x
    for h in tl.static_range(BH):
        head = i_h * BH + h
        p_x = x + patch * s_x + head * s_xh + o_k[None, :]
        heads = heads + (tl.load(p_x, mask=there & (none + head < H), other=0.0),)  # noqa: RUF005
    for h in tl.static_range(BH):
        head = i_h * BH + h
        even, odd = tl.split(tl.reshape(heads[h].to(tl.float32), [BP, K // 2, 2]))
        turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
        turned = tl.reshape(turned, [BP, K]).to(out.dtype.element_ty)
        p_out = out + patch * s_out + head * s_outh + o_k[None, :]
        tl.store(p_out, turned, mask=there & (none + head < H))
