"""Block-diagonal attention: each item alone, whatever shares the batch."""

import pytest
import torch

from k3vl.errors import ShapeError
from k3vl.kernels.packed import Packed
from k3vl.kernels.vision_attention import vision_attention
from k3vl.kernels.vision_attention.reference import vision_attention_reference


def packed(lengths) -> Packed:
    return Packed.of(lengths, torch.device("cpu"))


def random_heads(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, rows, 3, 8, generator=generator)
    return q, k, v


@pytest.mark.parametrize("lengths", [[1], [4], [4, 4, 4], [4, 6, 4, 1, 6], [40, 4]])
def test_equals_the_plain_formula(lengths):
    q, k, v = random_heads(sum(lengths))
    out = vision_attention(q, k, v, packed(lengths))
    torch.testing.assert_close(
        out, vision_attention_reference(q, k, v, lengths), atol=2e-6, rtol=1e-5
    )


def test_an_item_is_not_touched_by_its_neighbours():
    lengths = [4, 6, 4]
    q, k, v = random_heads(14)
    before = vision_attention(q, k, v, packed(lengths))
    k[4:10] = 100.0
    v[4:10] = float("nan")
    after = vision_attention(q, k, v, packed(lengths))
    assert torch.equal(before[:4], after[:4])
    assert torch.equal(before[10:], after[10:])
    assert after[4:10].isnan().all()


def test_bfloat16_stays_bfloat16_and_close():
    q, k, v = (x.bfloat16() for x in random_heads(12))
    out = vision_attention(q, k, v, packed([8, 4]))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out, vision_attention_reference(q, k, v, [8, 4]), atol=2e-2, rtol=2e-2
    )


@pytest.mark.parametrize("lengths", [[], [3], [5], [4, 0], [-1, 5]])
def test_lengths_that_do_not_add_up_are_named(lengths):
    with pytest.raises(ShapeError, match=f"{len(lengths)} items of {sum(lengths)} patches"):
        vision_attention(*random_heads(4), packed(lengths))


def test_heads_that_disagree_are_named():
    q, k, v = random_heads(4)
    with pytest.raises(ShapeError, match=r"k \(3, 3, 8\)"):
        vision_attention(q, k[:3], v, packed([4]))
