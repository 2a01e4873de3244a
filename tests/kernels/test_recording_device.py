"""Steps of two runners, replayed side by side on a CUDA device (``-m gpu``)."""

from __future__ import annotations

import gc

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_that_goes_takes_no_workspace_along(dtype: torch.dtype) -> None:
    """Others of its runner still write there: it must not be somebody's memory."""
    runner, steps, wants = GraphRunner(), [], []
    for seed in range(2):
        generator = torch.Generator("cuda").manual_seed(seed)
        x, w = (
            torch.randn(n, INNER, device="cuda", dtype=dtype, generator=generator)
            for n in (ROWS, OUTER)
        )
        steps.append(runner.make(lambda x=x, w=w: F.linear(x, w)))
        wants.append(steps[-1]().clone())
    del steps[0]
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    others = [torch.full((2**23,), 7.0, device="cuda") for _ in range(64)]  # as large as it is
    for _ in range(5):
        assert torch.equal(steps[0](), wants[1])
    assert all(bool((other == 7).all()) for other in others)


def test_a_capture_that_fails_leaves_its_runner_as_it_was() -> None:
    runner, x, calls = GraphRunner(), torch.arange(4.0, device="cuda"), []

    def fails() -> torch.Tensor:
        calls.append(x + 1)
        if len(calls) == 2:
            raise ValueError("in the capture")
        return x

    with pytest.raises(Exception, match=r"in the capture|capture"):
        runner.make(fails)
    calls.clear()
    torch.cuda.synchronize()
    step = runner.make(lambda: x * 2)
    assert step().tolist() == [0, 2, 4, 6]
