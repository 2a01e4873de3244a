"""Steps of two runners, replayed side by side on a CUDA device (``-m gpu``)."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from k3vl.kernels.recording import GraphRunner

pytestmark = pytest.mark.gpu

ROWS, INNER, OUTER = 64, 8192, 256
"""Few results of long sums: the library adds parts of them up, in its workspace."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_two_runners_do_not_share_a_workspace(dtype: torch.dtype) -> None:
    steps, streams, wants = [], [torch.cuda.Stream() for _ in range(2)], []
    for seed in range(2):
        generator = torch.Generator("cuda").manual_seed(seed)
        x, w = (
            torch.randn(n, INNER, device="cuda", dtype=dtype, generator=generator)
            for n in (ROWS, OUTER)
        )
        steps.append(
            GraphRunner().make(lambda x=x, w=w: torch.stack([F.linear(x, w) for _ in range(100)]))
        )
        wants.append(steps[-1]().clone())
    assert all(want.isfinite().all() for want in wants)
    for turn in range(20):
        torch.cuda.synchronize()
        got = []
        for step, stream in zip(steps, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(step())
        torch.cuda.synchronize()
        for mine, want in zip(got, wants, strict=True):
            assert torch.equal(mine, want), f"turn {turn}"
