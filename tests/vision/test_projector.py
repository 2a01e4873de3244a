"""The patch merger against its formula."""

import math

import pytest
import torch

from k3vl.errors import ShapeError
from tests.vision.tiny_vision import TINY, tiny_models


def test_equals_linear_exact_gelu_linear_norm():
    _, projector = tiny_models()
    x = torch.randn(5, TINY.merged_size, generator=torch.Generator().manual_seed(0))
    inner = x.double() @ projector.inner.weight.double().T
    inner = inner / 2 * (1 + torch.erf(inner / math.sqrt(2)))
    y = inner @ projector.outer.weight.double().T
    y = y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * projector.norm.double()
    torch.testing.assert_close(projector(x).double(), y, atol=1e-5, rtol=1e-5)


def test_small_outputs_show_the_eps_of_the_configuration():
    _, projector = tiny_models()
    x = torch.full((1, TINY.merged_size), 1e-3)
    with_eps = projector(x)
    projector.eps = 0.0
    assert with_eps.norm() < projector(x).norm() * 0.9


def test_width_that_disagrees_is_named():
    _, projector = tiny_models()
    with pytest.raises(ShapeError, match=r"input \(2, 24\), weight \(96, 96\)"):
        projector(torch.zeros(2, 24))
