"""The parallel kernel of KDA prefill in Gluon, on a CPU: against the definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.test_kda_hopper import (
    BF16,
    CHUNK,
    HEADS,
    KEY,
    Call,
    expected,
    make_call,
    prepare,
    walk,
)


def prepared(call: Call, before: int | None = None) -> tuple[torch.Tensor, ...]:
    """What the kernel writes; in two launches, ``before`` slots and the rest."""
    from k3vl.kernels.kda.hopper import Prepare, hopper_prepare
    from tests.kernels.gluon_on_cpu import Descriptor, launch

    def on_cpu(kernel: Any, grid: Any, matrices: Any, *args: Any, **constants: Any) -> None:
        described = (Descriptor(x, tuple(block)) for x, block in matrices)
        launch(kernel, grid, *described, *args, ordered=True, **constants)

    slots = int(call.cu_seqlens[-1]) // CHUNK + len(call.ends)
    sizes = ((2 * CHUNK, KEY), (KEY, CHUNK), (CHUNK, KEY), (CHUNK, CHUNK))
    chunks = tuple(torch.full((slots * HEADS, *x), float("nan"), dtype=BF16) for x in sizes)
    gamma = torch.full((slots * HEADS, KEY), float("nan"))
    qkv, _, decay, write = call.inputs
    weights = call.weights
    for part in ((0, slots),) if before is None else ((0, before), (before, slots - before)):
        job = Prepare(
            inputs=(qkv, decay, write),
            weights=((weights.conv.t() / 2).contiguous(), weights.a_log, weights.dt_bias),
            pool=(call.windows, call.cells, call.cu_seqlens, call.ends),
            chunks=(*chunks, gamma),
            lower_bound=-5.0,
            searched=16,
            chunk=CHUNK,
            slots=part,
            aside=part[0] > 0,
        )
        hopper_prepare(job, early=True, launch=on_cpu)
    return *chunks, gamma


def test_kernel_and_walk_are_their_reference() -> None:
    """Odd lengths, padding of NaN, whole chunks of padding, windows anywhere."""
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.kda.hopper import HopperShape

    torch.manual_seed(3)
    call = make_call([1, 2, 33, 64, 100, 31], [0, 3, 0, 0, 40, 70])
    chunks = prepared(call)
    for got, want in zip(chunks, prepare(call), strict=True):
        assert torch.equal(got.isnan(), want.isnan())
    got, _, states = walk(call, HopperShape(128, 3), chunks=chunks)
    want, _, want_states = expected(call)
    assert (got - want).norm() <= 1e-2 * want.norm()
    assert (states - want_states).norm() <= 8e-3 * want_states.norm()


@pytest.mark.parametrize("values", [128, 64])
def test_two_parts_are_the_whole(values: int) -> None:
    """Bit for bit, snapshots on both sides of the border and at it, and padding too."""
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.kda.hopper import HopperShape

    torch.manual_seed(4)
    call = make_call([200], [70])
    for got, want in zip(prepared(call, 3), prepared(call), strict=True):
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
    spare = torch.tensor([x for x in range(len(call.states)) if x not in call.cells])
    depths = torch.tensor([[64, 96, 128]])
    snapshots = depths, spare[:3].view(1, 3, 1).expand(1, 3, HEADS)
    shape, chunks = HopperShape(values, 3), prepare(call)
    for got, want in zip(
        walk(call, shape, snapshots, chunks, border=96),
        walk(call, shape, snapshots, chunks),
        strict=True,
    ):
        assert torch.equal(got, want)
