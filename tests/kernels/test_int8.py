"""8-bit weights: error bounds and edge values of rounding and decoding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3vl.errors import ShapeError, WeightError
from k3vl.kernels.int8 import dequantize_int8, quantize_int8


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    groups=st.integers(1, 4),
    size=st.sampled_from([1, 3, 32]),
    magnitude=st.floats(1e-2, 1e3),
    seed=st.integers(0, 1000),
)
def test_error_is_at_most_half_a_step(rows, groups, size, magnitude, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, groups * size, generator=generator) * magnitude
    codes, scale = quantize_int8(weight, size)
    assert codes.dtype == torch.int8
    assert scale.dtype == torch.float16
    assert scale.shape == (rows, groups)
    error = (dequantize_int8(codes, scale, dtype=torch.float32) - weight).abs()
    # The scale itself is rounded to 11 bits, so the largest value of a group may be cut by 127
    # such roundings.
    step = scale.float().repeat_interleave(size, dim=1)
    assert (error <= step * (0.5 + 127 * 2.0**-11)).all()


def test_decoded_weights_quantize_to_themselves():
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    codes, scale = quantize_int8(weight, 32)
    again, same_scale = quantize_int8(dequantize_int8(codes, scale, dtype=torch.float32), 32)
    assert torch.equal(codes, again)
    assert torch.equal(scale, same_scale)


def test_zero_and_tiny_groups_become_zero():
    weight = torch.zeros(1, 8)
    weight[0, 4:] = 1e-12
    codes, scale = quantize_int8(weight, 4)
    decoded = dequantize_int8(codes, scale, dtype=torch.float32)
    assert torch.equal(decoded, torch.zeros(1, 8))


def test_axes_after_the_first_are_columns():
    weight = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    codes, scale = quantize_int8(weight, 16)
    assert codes.shape == weight.shape
    assert scale.shape == (3, 2)
    flat = dequantize_int8(codes.flatten(1), scale, dtype=torch.float32)
    assert torch.equal(flat.view_as(weight), dequantize_int8(codes, scale, dtype=torch.float32))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e8])
def test_values_that_no_scale_can_hold_are_refused(value):
    with pytest.raises(WeightError, match="cannot hold"):
        quantize_int8(torch.tensor([[0.0, value]]), 2)


@pytest.mark.parametrize(("shape", "group"), [((4,), 2), ((2, 6), 4), ((2, 6), 0), ((2, 0), 1)])
def test_groups_must_divide_the_columns(shape, group):
    with pytest.raises(ShapeError, match="groups of"):
        quantize_int8(torch.zeros(shape), group)


def test_disagreeing_scale_is_named():
    with pytest.raises(ShapeError, match=r"codes \(2, 8\) torch.int8, scale \(2, 3\)"):
        dequantize_int8(torch.zeros(2, 8, dtype=torch.int8), torch.zeros(2, 3), dtype=torch.float32)
