"""MXFP4 decoding against values worked out in Python floats."""

import math

import pytest
import torch

from k3vl.errors import ShapeError
from k3vl.kernels.mxfp4 import dequantize_mxfp4

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def value_of(code: int, scale: int) -> float:
    sign = -1.0 if code & 8 else 1.0
    return sign * MAGNITUDES[code & 7] * 2.0 ** (scale - 127)


def packed_row(codes: list[int]) -> torch.Tensor:
    pairs = zip(codes[::2], codes[1::2], strict=True)
    return torch.tensor([[low | high << 4 for low, high in pairs]], dtype=torch.uint8)


@pytest.mark.parametrize("scale", [0, 1, 100, 127, 130, 253, 254])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_under_every_kind_of_scale_is_exact(scale, dtype):
    codes = list(range(16)) * 2
    decoded = dequantize_mxfp4(
        packed_row(codes), torch.tensor([[scale]], dtype=torch.uint8), dtype=dtype
    )
    expected = torch.tensor([[value_of(code, scale) for code in codes]], dtype=torch.float64)
    assert decoded.dtype == dtype
    assert torch.equal(decoded.double(), expected.float().double())
    if scale < 253:
        assert torch.equal(decoded.double(), expected)


def test_low_nibble_is_the_even_column():
    codes = [0] * 32
    codes[0], codes[31] = 2, 7
    packed = packed_row(codes)
    assert packed[0, 0] == 0x02
    assert packed[0, 15] == 0x70
    decoded = dequantize_mxfp4(
        packed, torch.tensor([[127]], dtype=torch.uint8), dtype=torch.float32
    )
    assert decoded[0, 0] == 1.0
    assert decoded[0, 1] == 0.0
    assert decoded[0, 31] == 6.0


def test_each_group_of_32_columns_and_each_row_has_its_own_scale():
    packed = torch.full((2, 32), 0x22, dtype=torch.uint8)
    scale = torch.tensor([[127, 128], [126, 130]], dtype=torch.uint8)
    decoded = dequantize_mxfp4(packed, scale, dtype=torch.float32)
    expected = torch.tensor([[1.0, 2.0], [0.5, 8.0]]).repeat_interleave(32, dim=1)
    assert torch.equal(decoded, expected)


def test_negative_zero_keeps_its_sign_and_scale_255_is_nan():
    packed = torch.full((1, 32), 0x88, dtype=torch.uint8)
    scale = torch.tensor([[127, 255]], dtype=torch.uint8)
    decoded = dequantize_mxfp4(packed, scale, dtype=torch.float32)
    assert math.copysign(1.0, decoded[0, 0].item()) == -1.0
    assert decoded[0, 32:].isnan().all()


def test_leading_axes_are_kept():
    packed = torch.randint(0, 256, (3, 5, 16), dtype=torch.uint8)
    scale = torch.randint(120, 130, (3, 5, 1), dtype=torch.uint8)
    decoded = dequantize_mxfp4(packed, scale, dtype=torch.float32)
    assert decoded.shape == (3, 5, 32)
    assert torch.equal(decoded[2], dequantize_mxfp4(packed[2], scale[2], dtype=torch.float32))


@pytest.mark.parametrize(
    ("packed", "scale"),
    [((2, 16), (2, 2)), ((2, 16), (3, 1)), ((2, 15), (2, 1)), ((), (1,)), ((2, 8), (2, 0))],
)
def test_disagreeing_shapes_are_named(packed, scale):
    with pytest.raises(ShapeError, match="MXFP4 packed"):
        dequantize_mxfp4(
            torch.zeros(packed, dtype=torch.uint8),
            torch.zeros(scale, dtype=torch.uint8),
            dtype=torch.float32,
        )


def test_signed_bytes_are_refused():
    with pytest.raises(ShapeError, match="int8"):
        dequantize_mxfp4(
            torch.zeros(1, 16, dtype=torch.int8),
            torch.zeros(1, 1, dtype=torch.uint8),
            dtype=torch.float32,
        )
