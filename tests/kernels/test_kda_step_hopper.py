"""The Gluon kernel of KDA decode, on a CPU: all that is asynchronous comes as late as it may."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
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
    weights: KDAWeights, args: Any, memory: Any, cells: torch.Tensor, changed: Any = None
) -> torch.Tensor:
    """By the kernel, or by that of a ``changed`` module; all accesses of shared memory ordered."""
    from k3vl.kernels.kda.gpu import step_arguments
    from k3vl.kernels.kda.step_hopper import hopper_step, hopper_steps
    from tests.kernels.gluon_on_cpu import Descriptor, launch

    def on_cpu(kernel, grid, states, block, *args, **constants) -> None:
        kernel = changed.kda_step_hopper_kernel if changed else kernel
        states = Descriptor(states, tuple(block))
        launch(kernel, grid, states, *args, ordered=True, **constants)

    assert hopper_steps(args[0], weights, *memory)
    out = torch.full(args[1].shape, NAN).bfloat16()
    given = step_arguments(args, weights, *memory, cells, out)
    bounded = weights.lower_bound is not None
    hopper_step(given, memory[1], cells.numel(), bounded=bounded, early=True, launch=on_cpu)
    return out


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_kernel_is_its_reference(lower_bound: float | None) -> None:
    """Cells in any order, padding in between, memory that is nobody's full of NaN."""
    pytest.importorskip("triton.experimental.gluon")
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
    got = run(weights, args, (windows, states), cells)
    assert not got[list(padding)].any(), "padding gets zeros"
    for b in set(range(batch)) - set(padding):
        assert (got[b] - want[b]).norm() <= 4e-3 * want[b].norm(), b
        for cell in cells[b]:
            assert (states[cell] - want_states[cell]).norm() <= 2e-6 * want_states[cell].norm()
            assert torch.equal(windows[cell].double(), want_windows[cell])
    assert states[untouched].isnan().all()
    assert windows[untouched].isnan().all()
    # Its neighbours change no bit of a sequence.
    single = run(weights, [x[2:3] for x in args], alone, cells[2:3])
    assert torch.equal(single, got[2:3])
    assert torch.equal(alone[1][cells[2]], states[cells[2]])


# What orders threads and the copy engine: a line to leave out, found by the text before it.
ORDER = [
    ("        if i * PART % (K // PARTS) == 0:\n", "mbarrier.wait(*, 0)"),
    ("HELD, HELD, K).store(b_s)\n", "fence_async_shared()"),
    ("        fence_async_shared()\n", "meet()"),
]


@pytest.mark.parametrize(("before", "left_out"), ORDER)
def test_whatever_is_left_out_of_the_order_is_a_race(
    tmp_path: Path, before: str, left_out: str
) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.kda import step_hopper_kernel
    from tests.kernels.ordering import RaceError, module_of, without

    text = Path(step_hopper_kernel.__file__).read_text(encoding="utf-8")
    changed = module_of(without(text, before, left_out), tmp_path)
    memory = pool(HEADS)
    with pytest.raises(RaceError):
        run(layer(-5.0), inputs(1), memory, torch.arange(HEADS)[None], changed)


def test_no_program_ends_before_its_state_is_stored(tmp_path: Path) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.kda import step_hopper_kernel
    from tests.kernels.ordering import module_of

    text = Path(step_hopper_kernel.__file__).read_text(encoding="utf-8")
    assert text.count("    wait_for_stores(0)\n") == 1
    changed = module_of(text.replace("    wait_for_stores(0)\n", ""), tmp_path)
    with pytest.raises(AssertionError, match="ended before"):
        run(layer(-5.0), inputs(1), pool(HEADS), torch.arange(HEADS)[None], changed)


def test_the_descriptor_is_asked_for_by_its_name() -> None:
    """Machine language names the kernel's first argument, which is the descriptor."""
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.kda import step_hopper_kernel

    kernel = step_hopper_kernel.kda_step_hopper_kernel.fn
    assert next(iter(inspect.signature(kernel).parameters)) == "pool"
    text = Path(step_hopper_kernel.__file__).read_text(encoding="utf-8")
    assert text.count(f"{kernel.__name__}_param_0;") == 1


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
