"""The Gluon kernel of KDA decode, on a CPU: all that is asynchronous comes as late as it may."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from k3vl.kernels.kda import KDAWeights
from k3vl.kernels.kda.reference import kda_decode_reference

HEADS, KEY = 3, 128
NAN = float("nan")


def layer(lower_bound: float | None) -> KDAWeights:
    return KDAWeights(
        conv=torch.randn(3 * HEADS * KEY, 4) / 2,
        a_log=torch.randn(HEADS) / 3,
        dt_bias=torch.randn(HEADS * KEY),
        o_norm=torch.rand(KEY) + 0.5,
        eps=1e-5,
        lower_bound=lower_bound,
    )


def inputs(batch: int) -> tuple[torch.Tensor, ...]:
    """qkv, gate, decay and write as columns of one projection, with strangers between them."""
    widths = (3 * HEADS * KEY, 8, HEADS * KEY, HEADS * KEY, HEADS)
    qkv, _, gate, decay, write = torch.randn(batch, sum(widths)).bfloat16().split(widths, -1)
    return qkv, gate, decay, write


def pool(cells: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows and states of one strided buffer each; NaN between them and in every one."""
    windows = torch.full((cells, 9 * KEY + 16), NAN).bfloat16()[:, : 9 * KEY]
    states = torch.full((cells, KEY * KEY + 16), NAN)[:, : KEY * KEY]
    return windows.view(cells, 3, 3, KEY), states.view(cells, KEY, KEY)


def run(
    weights: KDAWeights, args: Any, memory: Any, cells: torch.Tensor, shape: Any = None
) -> torch.Tensor:
    from k3vl.kernels.kda.gpu import step_arguments
    from k3vl.kernels.kda.step_hopper import StepShape, hopper_step, hopper_steps
    from tests.kernels.gluon_on_cpu import Descriptor, launch

    def on_cpu(kernel, grid, states, block, *args, **constants) -> None:
        states = Descriptor(states, tuple(block))
        launch(kernel, grid, states, *args, ordered=True, **constants)

    assert hopper_steps(args[0], weights, *memory)
    out = torch.full(args[1].shape, NAN).bfloat16()
    given = step_arguments(args, weights, *memory, cells, out)
    bounded = weights.lower_bound is not None
    how: dict[str, Any] = {"bounded": bounded, "early": True, "shape": shape or StepShape()}
    hopper_step(given, memory[1], cells.numel(), **how, launch=on_cpu)
    return out


SHAPES: list[dict[str, Any]] = [
    {},
    {"first": False},
    {"later": 1},
    {"later": 2},
    {"copied": True},
    {"copied": True, "pieces": 4, "later": 2},
]


@pytest.mark.parametrize("how", SHAPES)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_kernel_is_its_reference(lower_bound: float | None, how: dict[str, Any]) -> None:
    """Cells in any order, padding in between, memory that is nobody's full of NaN."""
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.kda.step_hopper import StepShape

    shape = StepShape(**how)
    torch.manual_seed(1)
    random.seed(1)
    batch, padding = 6, (1, 4, 5)
    weights, args = layer(lower_bound), inputs(batch)
    windows, states = pool(batch * HEADS + 4)
    cells = torch.randperm(batch * HEADS + 4)[: batch * HEADS].view(batch, HEADS).contiguous()
    cells[list(padding)] = -1
    real = cells >= 0
    windows[cells[real]] = torch.randn(int(real.sum()), 3, 3, KEY).bfloat16()
    states[cells[real]] = torch.randn(int(real.sum()), KEY, KEY)
    for x in args:
        x[list(padding)] = NAN
    untouched = torch.ones(len(states), dtype=torch.bool)
    untouched[cells[real]] = False
    wide = KDAWeights(
        **{
            name: getattr(weights, name).double() for name in ("conv", "a_log", "dt_bias", "o_norm")
        },
        eps=weights.eps,
        lower_bound=lower_bound,
    )
    want_windows, want_states = windows.double(), states.double()
    want = kda_decode_reference(*(x.double() for x in args), wide, want_windows, want_states, cells)
    alone = windows.clone(), states.clone()
    got = run(weights, args, (windows, states), cells, shape)
    assert not got[list(padding)].any(), "padding gets zeros"
    for b in set(range(batch)) - set(padding):
        assert (got[b] - want[b]).norm() <= 4e-3 * want[b].norm(), b
        for cell in cells[b]:
            assert (states[cell] - want_states[cell]).norm() <= 2e-6 * want_states[cell].norm()
            assert torch.equal(windows[cell].double(), want_windows[cell])
    assert states[untouched].isnan().all()
    assert windows[untouched].isnan().all()
    # Its neighbours change no bit of a sequence.
    single = run(weights, [x[2:3] for x in args], alone, cells[2:3], shape)
    assert torch.equal(single, got[2:3])
    assert torch.equal(alone[1][cells[2]], states[cells[2]])


def test_what_the_kernel_does_not_take() -> None:
    from k3vl.kernels.kda.step_hopper import hopper_steps

    weights, (qkv, *_) = layer(-5.0), inputs(1)
    windows, states = pool(3)
    assert hopper_steps(qkv, weights, windows, states)
    assert not hopper_steps(qkv.float(), weights, windows, states)
    assert not hopper_steps(qkv, weights, windows, states.half())
    assert not hopper_steps(qkv, weights, windows[..., :64], states[:, :64, :64])
    odd = torch.zeros(3, KEY * KEY + 2)[:, : KEY * KEY].view(3, KEY, KEY)
    assert not hopper_steps(qkv, weights, windows, odd), "states at 65,544 bytes"
    assert not hopper_steps(qkv, weights, windows, states.transpose(1, 2))


def test_decode_takes_it_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from k3vl.kernels.kda import gpu

    calls = []
    monkeypatch.setattr(gpu, "hopper_step", lambda *args, early, **_: calls.append(early))
    monkeypatch.setattr(gpu, "hopper_runs", lambda _: True)
    weights, args = layer(-5.0), inputs(2)
    windows, states = pool(2 * HEADS)
    cells = torch.arange(2 * HEADS).view(2, HEADS)
    gpu.kda_decode(*args, weights, windows, states, cells)
    assert calls == [False], "no launch on a CPU begins early"
    gpu.kda_decode(*(x[:0] for x in args), weights, windows, states, cells[:0])
    assert len(calls) == 1, "nothing to do"
