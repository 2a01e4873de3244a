"""The largest value of long rows in two launches: of parts, then of these."""
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from k3vl.kernels.dependent import let_next_begin, wait_for_inputs


@triton.jit
def argmax_parts_kernel(x, best, place, s_x, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """BLOCK values of a row: the largest, and where in the row the first of them is."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    o = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * s_x + o, mask=o < N, other=float("-inf"))
    values = tl.where(values == values, values, float("inf"))
    largest, at = tl.max(values, 0, return_indices=True)
    to = row * tl.num_programs(1) + part
    tl.store(best + to, largest)
    tl.store(place + to, part * BLOCK + at)


@triton.jit
def argmax_merge_kernel(best, place, out, PARTS, BP: tl.constexpr, PDL: tl.constexpr):
    """Of a row's parts the first that is largest."""
    let_next_begin(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BP)
    values = tl.load(best + row * PARTS + o, mask=o < PARTS, other=float("-inf"))
    at = tl.argmax(values, 0)
    tl.store(out + row, tl.load(place + row * PARTS + at).to(tl.int64))
