"""The tiles of many pairs in one launch, once the pairs are sorted.

Triton reads a kernel's annotations, so its arguments have none but ``constexpr``.
"""
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def tiles_kernel(
    experts, tile_expert, tile_first, tile_end, tile_count, M, pairs, halvings,
    E: tl.constexpr, SIXTEENTHS: tl.constexpr, NUM: tl.constexpr, JOINED: tl.constexpr,
    FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lists of ``plan_experts``, [NUM, M], one row a width; a lane of one program per expert.

    experts [pairs], ascending; ``halvings`` of so many leave none. SIXTEENTHS has a digit of base
    16 for each of NUM widths, the first the lowest; rests up to JOINED join a full tile.
    """
    o_e = tl.arange(0, BLOCK)
    start, stop = o_e * 0, o_e * 0
    start_most, stop_most = start + pairs, stop + pairs
    for _ in range(halvings):  # both at once: each waits for its own last load
        start, start_most = _halved(experts, o_e, start, start_most)
        stop, stop_most = _halved(experts, o_e + 1, stop, stop_most)
    count = tl.where(o_e < E, stop - start, 0)
    full, rest = count // FULL, count % FULL
    joined = ((full > 0) & (rest > 0) & (rest <= JOINED)).to(tl.int32)
    alone = full - joined
    rest += joined * FULL
    for n in tl.static_range(NUM):
        width = (SIXTEENTHS >> 4 * n & 15) * 16
        less = (SIXTEENTHS << 4 >> 4 * n & 15) * 16
        tiles = ((rest > less) & (rest <= width)).to(tl.int32)
        behind = alone * FULL
        if width == FULL:
            tiles += alone
            behind = 0 * alone
        place = n * M + tl.cumsum(tiles, 0) - tiles
        tl.store(tile_count + n, tl.sum(tiles))
        for i in range(tl.max(tiles, 0)):
            there = i < tiles
            tl.store(tile_expert + place + i, o_e, there)
            tl.store(tile_first + place + i, start + behind + i * FULL, there)
            tl.store(tile_end + place + i, stop, there)


@triton.jit
def _halved(experts, wanted, low, high):
    """Half of low..high, in which the first of the ascending ``experts`` is that is not below."""
    middle = (low + high) // 2
    go_on = low < high
    below = tl.load(experts + middle, go_on, 0).to(tl.int32) < wanted
    return tl.where(go_on & below, middle + 1, low), tl.where(go_on & (below == 0), middle, high)
