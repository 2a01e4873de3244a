"""Patch positions against the formulas written out patch by patch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3vl.errors import ShapeError
from k3vl.kernels.vision_pos import resize_position_table, rotary_table, rotate, temporal_rows
from k3vl.kernels.vision_pos.reference import (
    resize_position_table_reference,
    rotate_reference,
    temporal_rows_reference,
)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(1, 12))
def test_resize_samples_at_half_pixel_centres(height, width, rows, columns):
    table = torch.randn(height, width, 3, generator=torch.Generator().manual_seed(1))
    resized = resize_position_table(table, rows, columns)
    expected = resize_position_table_reference(table, rows, columns)
    torch.testing.assert_close(resized.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_grid_of_the_tables_own_size_takes_it_unchanged():
    table = torch.randn(4, 6, 5)
    assert torch.equal(resize_position_table(table, 4, 6), table.reshape(24, 5))
    assert not torch.equal(resize_position_table(table, 6, 4), table.reshape(24, 5))


def test_temporal_rows_are_sines_then_cosines():
    rows = temporal_rows(4, 16)
    torch.testing.assert_close(rows.double(), temporal_rows_reference(4, 16), atol=1e-7, rtol=1e-6)
    assert rows[0].tolist() == [0.0] * 8 + [1.0] * 8


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 4), (4, 2), (3, 5)])
def test_rotation_turns_the_first_pair_by_the_column(rows, columns):
    x = torch.randn(rows * columns, 2, 16, generator=torch.Generator().manual_seed(2))
    turned = rotate(x, rotary_table(rows, columns, 16))
    torch.testing.assert_close(
        turned.double(), rotate_reference(x, rows, columns), atol=1e-6, rtol=1e-5
    )


def test_rotated_products_depend_on_the_offset_alone():
    query, key = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(3))
    table = rotary_table(6, 6, 8)
    q = rotate(query.expand(36, 1, 8), table)[:, 0]
    k = rotate(key.expand(36, 1, 8), table)[:, 0]
    products = (q @ k.T).view(6, 6, 6, 6)
    torch.testing.assert_close(products[1, 2, 3, 3], products[2, 3, 4, 4])
    assert not torch.isclose(products[1, 2, 3, 3], products[1, 2, 2, 4])


def test_rotation_of_bfloat16_is_done_in_float32():
    x = torch.randn(8, 2, 8, generator=torch.Generator().manual_seed(4)).bfloat16()
    table = rotary_table(2, 4, 8)
    assert torch.equal(rotate(x, table), rotate(x.float(), table).bfloat16())


def test_bad_shapes_are_named():
    with pytest.raises(ShapeError, match="grid 0x2"):
        resize_position_table(torch.zeros(2, 2, 3), 0, 2)
    with pytest.raises(ShapeError, match="head width 6"):
        rotary_table(2, 2, 6)
    with pytest.raises(ShapeError, match="width 7"):
        temporal_rows(2, 7)
    with pytest.raises(ShapeError, match=r"x \(3, 1, 8\), table \(4, 4\)"):
        rotate(torch.zeros(3, 1, 8), rotary_table(2, 2, 8))
