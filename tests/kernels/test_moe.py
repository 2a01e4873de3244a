"""Routed experts: the plan, the stored form of 4-bit weights, and the Triton kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3vl.errors import ShapeError, WeightError
from k3vl.kernels.moe import moe_experts
from k3vl.kernels.moe.experts import FloatExperts
from k3vl.kernels.moe.mxfp4 import (
    Mxfp4Experts,
    Part,
    in_rows,
    in_tiles,
    pack_words,
    prepare_experts,
    tile_rows,
    unpack_words,
)
from k3vl.kernels.moe.plan import (
    EIGHT,
    FINE_WIDTHS,
    WIDTHS,
    most_tiles,
    plan_experts,
    tiles_of,
)
from k3vl.kernels.mxfp4 import dequantize_mxfp4
from k3vl.kernels.situ import SituGLU
from tests.process import run_check

CHECK = Path(__file__).with_name("moe_check.py")


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=9),
    st.integers(0, 2**31),
    st.sampled_from([16, EIGHT]),
    st.sampled_from([WIDTHS, FINE_WIDTHS]),
)
def test_tiles_cover_every_pair_once(
    counts: list[int], seed: int, narrow: int, widths: tuple[int, ...]
) -> None:
    chosen = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)])
    generator = torch.Generator().manual_seed(seed)
    chosen = chosen[torch.randperm(len(chosen), generator=generator)].view(-1, 1)
    plan = plan_experts(chosen, len(counts), narrow, widths)
    assert plan.order.sort().values.tolist() == list(range(len(chosen)))
    bounds = most_tiles(len(chosen), 1, len(counts), narrow, widths)
    seen = []
    for width, tiles in plan.tiles.items():
        assert int(tiles.count) <= bounds[width] == len(tiles.expert)
        for i in range(int(tiles.count)):
            first, end = int(tiles.first[i]), int(tiles.end[i])
            rows = plan.order[first : min(first + width, end)]
            assert (chosen[rows.long(), 0] == tiles.expert[i]).all()
            seen += rows.tolist()
    assert sorted(seen) == list(range(len(chosen)))


def test_pairs_come_into_the_narrowest_tile_that_holds_them() -> None:
    counts = torch.tensor([128, 129, 144, 145, 160, 161, 192, 193, 290, 33, 48, 80, 81, 97])
    want = {144: [1, 2], 160: [3, 4], 192: [5, 6, 8], 128: [0, 7, 8, 13], 48: [9, 10], 96: [12]}
    want[80] = [7, 11]
    for width, tiles in tiles_of(counts, widths=FINE_WIDTHS).items():
        experts = torch.arange(len(counts)).repeat_interleave(tiles).tolist()
        assert experts == want.get(width, []), width


def test_stored_words_hold_the_same_codes() -> None:
    packed = torch.randint(0, 256, (3, 5, 48), dtype=torch.uint8)
    stored = pack_words(packed)
    assert stored.shape == (3, 5, 12)
    assert stored.dtype == torch.int32
    assert torch.equal(unpack_words(stored), packed)


def test_one_shift_and_mask_bring_a_code_to_its_place_in_bfloat16() -> None:
    packed = torch.randint(0, 256, (1, 16), dtype=torch.uint8)
    want = dequantize_mxfp4(packed, torch.full((1, 1), 127, dtype=torch.uint8), dtype=torch.float32)
    stored = pack_words(packed)[0]
    for word, n in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)):
        bits = (stored[word : word + 1] << 3 * n) & (0x81C081C0 - (1 << 32))
        low, high = bits.view(torch.int16).view(torch.bfloat16).float() * 2.0**126
        column = 4 * word + n
        assert (low, high) == (want[0, column], want[0, 8 + column])


@pytest.mark.parametrize(("latent", "inner"), [(64, 32), (128, 256)])
def test_experts_in_four_bits_are_the_decoded_experts(latent: int, inner: int) -> None:
    experts = 3
    w13 = torch.randint(0, 256, (experts, 2 * inner, latent // 2), dtype=torch.uint8)
    w2 = torch.randint(0, 256, (experts, latent, inner // 2), dtype=torch.uint8)
    s13 = torch.randint(118, 124, (experts, 2 * inner, latent // 32), dtype=torch.uint8)
    s2 = torch.randint(118, 124, (experts, latent, inner // 32), dtype=torch.uint8)
    x, weights = torch.randn(6, latent), torch.rand(6, 2)
    chosen = torch.randint(0, experts, (6, 2))
    activation = SituGLU(beta=4.0, linear_beta=25.0)
    stored = prepare_experts(w13, s13, w2, s2)
    decoded = [dequantize_mxfp4(*p, dtype=torch.float32) for p in ((w13, s13), (w2, s2))]
    floats = FloatExperts(w13=decoded[0], w2=decoded[1])
    norm = torch.rand(latent)
    for more in ((), (norm, 1e-5)):
        got = moe_experts(x, weights, chosen, stored, activation, *more)
        assert torch.equal(got, moe_experts(x, weights, chosen, floats, activation, *more))


def test_rows_of_the_way_in_lie_by_class() -> None:
    """What the first product writes is split the way the second one reads it."""
    stored = Mxfp4Experts.empty(2, 32, 32, torch.device("cpu"))
    scale = torch.arange(32, dtype=torch.uint8).unsqueeze(1)
    packed = torch.randint(0, 256, (32, 16), dtype=torch.uint8)
    stored.put(1, "up", packed, scale)
    by_class = [8 * j + n for n in range(8) for j in range(4)]
    assert stored.w13_scale[1, 32:, 0].tolist() == by_class
    assert torch.equal(unpack_words(stored.w13[1, 32:]), packed[by_class])


def test_eight_rows_by_128_columns_lie_together() -> None:
    """As the products address them; columns that are no whole tiles stay in rows."""
    words = torch.arange(3 * 16 * 48, dtype=torch.int32).view(3, 16, 48)
    scales = torch.randint(0, 256, (3, 16, 12), dtype=torch.uint8)
    for rows, step in ((words, 16), (scales, 4)):
        tiles = in_tiles(rows)
        for r, c in ((0, 0), (1, 0), (7, step - 1), (8, step), (13, 2 * step + 3)):
            place = r // 8 * 8 * 3 * step + c // step * 8 * step + r % 8 * step + c % step
            assert torch.equal(tiles[:, r, c], rows[:, r, c]) == (r == c == 0), "they move"
            assert torch.equal(tiles.flatten(1)[:, place], rows[:, r, c])
        assert torch.equal(in_rows(tiles), rows)
        assert torch.equal(in_rows(in_tiles(rows[1])), rows[1])
        odd = rows[..., : step + step // 2].contiguous()
        assert in_tiles(odd) is odd
        assert in_rows(odd) is odd
    assert tile_rows(384) == 8
    assert tile_rows(192) == 1


@pytest.mark.parametrize("shape", [(96, 64), (256, 128)], ids=str)
@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_a_matrix_comes_back_as_it_was_put(part: Part, shape: tuple[int, int]) -> None:
    """From bytes that begin at an odd place of a file, into its own place."""
    latent, inner = shape
    rows, columns = (inner, latent) if part != "down" else shape
    raw = torch.randint(0, 256, (rows * columns // 2 + 1,), dtype=torch.uint8)
    packed = raw[1:].view(rows, columns // 2)
    scale = torch.randint(0, 129, (rows, columns // 32), dtype=torch.uint8)
    stored = Mxfp4Experts.empty(3, latent, inner, torch.device("cpu"))
    tensors = (stored.w13, stored.w13_scale, stored.w2, stored.w2_scale)
    for tensor in tensors:
        tensor.fill_(7)
    stored.put(1, part, packed, scale)
    got = stored.taken(1, part)
    assert torch.equal(got[0], packed)
    assert torch.equal(got[1], scale)
    written = sum(int((tensor != 7).flatten(1).any(1).sum()) for tensor in tensors)
    assert written == 2, "one matrix of one expert and its scales"
    assert not any((tensor[[0, 2]] != 7).any() for tensor in tensors)


def test_a_scale_out_of_range_is_refused() -> None:
    w = torch.zeros(1, 64, 16, dtype=torch.uint8), torch.zeros(1, 32, 16, dtype=torch.uint8)
    s = torch.zeros(1, 64, 1, dtype=torch.uint8), torch.zeros(1, 32, 1, dtype=torch.uint8)
    prepare_experts(w[0], s[0], w[1], s[1])
    s[1][0, 7, 0] = 129
    with pytest.raises(WeightError, match="expert 0: down has a scale byte of 129"):
        prepare_experts(w[0], s[0], w[1], s[1])
    with pytest.raises(ShapeError, match="prepare_experts"):
        prepare_experts(w[0], s[1], w[1], s[1])


def test_experts_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ShapeError, match="experts: w13"):
        Mxfp4Experts.empty(2, 40, 32, torch.device("cpu"))
    with pytest.raises(ShapeError, match="experts: w13"):
        FloatExperts(w13=torch.zeros(2, 8, 6), w2=torch.zeros(2, 6, 3))
    floats = FloatExperts(w13=torch.zeros(2, 8, 6), w2=torch.zeros(2, 6, 4))
    weights, chosen = torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"moe_experts: x \(3, 5\)"):
        moe_experts(torch.zeros(3, 5), weights, chosen, floats, SituGLU(beta=4.0, linear_beta=25.0))


def run(part: str, device: str) -> None:
    run_check(CHECK, part, device, interpret=device == "cpu")


@pytest.mark.parametrize("part", ["odd", "few"])
def test_kernels_are_their_references_in_the_interpreter(part: str) -> None:
    pytest.importorskip("triton")
    run(part, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["odd", "few", "large"])
def test_kernels_are_their_references_on_the_device(part: str) -> None:
    run(part, "cuda")
