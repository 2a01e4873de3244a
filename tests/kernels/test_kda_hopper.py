"""The Gluon kernel of KDA prefill, on a CPU: all that is asynchronous comes as late as it may."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F

from k3vl.kernels.kda import KDAWeights
from k3vl.kernels.kda.reference import _inputs, kda_prefill_reference

HEADS, KEY, CHUNK, TAPS = 2, 128, 32, 4
BF16 = torch.bfloat16


class Call(NamedTuple):
    """Inputs as of the op; ``gate`` is in columns of a wider matrix."""

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    weights: KDAWeights
    windows: torch.Tensor
    states: torch.Tensor
    cells: torch.Tensor
    cu_seqlens: torch.Tensor
    ends: torch.Tensor


def make_call(lengths: list[int], pads: list[int]) -> Call:
    starts = torch.tensor([0, *(n + p for n, p in zip(lengths, pads, strict=True))]).cumsum(0)
    ends = starts[:-1] + torch.tensor(lengths)
    rows, inner = int(starts[-1]), HEADS * KEY
    widths = (3 * inner, inner, inner, HEADS)
    qkv, gate, decay, write = torch.randn(rows, sum(widths)).to(BF16).split(widths, -1)
    for begin, end in zip(ends.tolist(), starts[1:].tolist(), strict=True):
        for x in (qkv, gate, decay, write):
            x[begin:end] = float("nan")
    weights = KDAWeights(
        conv=torch.randn(3 * inner, TAPS) / 2,
        a_log=torch.randn(HEADS) / 3,
        dt_bias=torch.randn(inner),
        o_norm=torch.randn(KEY).abs() + 0.5,
        eps=1e-5,
        lower_bound=-5.0,
    )
    cells = torch.randperm(len(lengths) * HEADS + 3)[: len(lengths) * HEADS].view(-1, HEADS)
    windows = torch.randn(len(lengths) * HEADS + 3, TAPS - 1, 3, KEY).to(BF16)
    states = torch.randn(len(lengths) * HEADS + 3, KEY, KEY)
    return Call((qkv, gate, decay, write), weights, windows, states, cells, starts, ends)


def wide(weights: KDAWeights) -> KDAWeights:
    """In float64."""
    return KDAWeights(
        conv=weights.conv.double(),
        a_log=weights.a_log.double(),
        dt_bias=weights.dt_bias.double(),
        o_norm=weights.o_norm.double(),
        eps=weights.eps,
        lower_bound=weights.lower_bound,
    )


def prepare(call: Call) -> tuple[torch.Tensor, ...]:
    """What the parallel kernel leaves in memory, from the definitions; NaN in slots of nobody."""
    clean = [x.double().nan_to_num() for x in call.inputs]
    places = (call.windows.double(), call.cells, call.cu_seqlens, call.ends)
    q, k, v, g, beta = _inputs(clean[0], clean[2], clean[3], wide(call.weights), *places)
    sequences = len(call.ends)
    slots = int(call.cu_seqlens[-1]) // CHUNK + sequences
    sizes = ((2 * CHUNK, KEY), (KEY, CHUNK), (CHUNK, KEY), (CHUNK, CHUNK), (KEY,))
    wq, u, kl, scores, gamma = (
        torch.full((slots, HEADS, *size), float("nan"), dtype=torch.float64) for size in sizes
    )
    for s in range(sequences):
        begin, end = int(call.cu_seqlens[s]), int(call.ends[s])
        for c, at in enumerate(range(begin, end, CHUNK)):
            slot = begin // CHUNK + s + c
            left = min(end - at, CHUNK)
            for h in range(HEADS):
                b_q, b_k, b_v, b_g = (
                    F.pad(x[at : at + left, h].double(), (0, 0, 0, CHUNK - left))
                    for x in (q, k, v, g)
                )
                b_beta = F.pad(beta[at : at + left, h].double(), (0, CHUNK - left)).unsqueeze(1)
                total = b_g.cumsum(0)
                apart = (total.unsqueeze(1) - total.unsqueeze(0)).clamp(max=0).exp()  # [i, j, K]
                mix = (b_beta * torch.einsum("ik,jk,ijk->ij", b_k, b_k, apart)).tril(-1)
                solve = (mix + torch.eye(CHUNK, dtype=torch.float64)).inverse() * b_beta.mT
                wq[slot, h, :CHUNK] = -solve @ (b_k * total.exp())
                wq[slot, h, CHUNK:] = b_q * total.exp()
                u[slot, h] = (solve @ b_v).mT
                kl[slot, h] = b_k * (total[-1] - total).exp()
                scores[slot, h] = torch.einsum("ik,jk,ijk->ij", b_q, b_k, apart).tril()
                gamma[slot, h] = total[-1].exp()
    halves = (x.flatten(0, 1).to(BF16) for x in (wq, u, kl, scores))
    return *halves, gamma.flatten(0, 1).float()


def walk(
    call: Call,
    shape: Any,
    snapshots: tuple[torch.Tensor, torch.Tensor] | None = None,
    chunks: tuple[torch.Tensor, ...] | None = None,
    border: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, windows and states behind the kernel, in two launches where there is a border."""
    from k3vl.kernels.kda.hopper import Walk, hopper_walk
    from tests.kernels.gluon_on_cpu import Descriptor, launch

    def on_cpu(kernel: Any, grid: Any, matrices: Any, *args: Any, **constants: Any) -> None:
        described = (Descriptor(x, tuple(block)) for x, block in matrices)
        launch(kernel, grid, *described, *args, **constants)

    windows, states = call.windows.clone(), call.states.clone()
    out = torch.full_like(call.inputs[1], float("nan")).contiguous()
    job = Walk(
        chunks=chunks or prepare(call),
        inputs=call.inputs[:2],
        o_norm=call.weights.o_norm,
        pool=(windows, states, call.cells, call.cu_seqlens, call.ends),
        snapshots=snapshots,
        out=out,
        eps=call.weights.eps,
        chunk=CHUNK,
    )
    for part in (
        (job,) if border is None else (job._replace(last=border), job._replace(first=border))
    ):
        hopper_walk(part, shape, early=True, launch=on_cpu)
    return out, windows, states


def expected(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    windows, states = call.windows.double(), call.states.double()
    clean = [x.double().nan_to_num() for x in call.inputs]
    places = (windows, states, call.cells, call.cu_seqlens, call.ends)
    return kda_prefill_reference(*clean, wide(call.weights), *places), windows, states


def normed(rows: torch.Tensor, call: Call) -> torch.Tensor:
    """What the launch behind the kernel makes of rows, where that has half of a head."""
    heads = rows.double().unflatten(-1, (HEADS, KEY))
    heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + call.weights.eps)
    heads = heads * call.weights.o_norm
    return heads.flatten(1) * torch.sigmoid(call.inputs[1].double().nan_to_num())


@pytest.mark.parametrize(("values", "stages"), [(128, 5), (64, 3), (128, 2)])
def test_kernel_is_its_reference(values: int, stages: int) -> None:
    """Odd lengths, padding of NaN, whole chunks of padding, states and windows anywhere."""
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.kda.hopper import HopperShape

    torch.manual_seed(values)
    random.seed(values)
    call = make_call([1, 2, 33, 64, 200, 31], [0, 3, 0, 0, 40, 70])
    want, want_windows, want_states = expected(call)
    got, windows, states = walk(call, HopperShape(values, stages))
    for begin, end in zip(call.ends.tolist(), call.cu_seqlens[1:].tolist(), strict=True):
        assert not got[begin:end].any(), "padding gets zeros"
    if values < KEY:
        got = normed(got, call)
    assert (got - want).norm() <= 1e-2 * want.norm()
    assert (states - want_states).norm() <= 8e-3 * want_states.norm()
    assert torch.equal(windows.double(), want_windows)
    others = torch.ones(len(states), dtype=torch.bool)
    others[call.cells.flatten()] = False
    assert torch.equal(states[others], call.states[others])
    assert torch.equal(windows[others], call.windows[others])


@pytest.mark.parametrize("values", [128, 64])
def test_snapshots_are_what_a_shorter_sequence_leaves(values: int) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.kda.hopper import HopperShape

    torch.manual_seed(values + 1)
    shape = HopperShape(values, 2)
    call = make_call([70, 100], [2, 0])
    spare = [x for x in range(len(call.states)) if x not in call.cells]
    depths = torch.tensor([[0, 0], [64, 32]])
    copies = torch.tensor([[[0, 0], [0, 0]], [spare[:2], [spare[2], spare[2]]]])
    _, windows, states = walk(call, shape, (depths, copies))
    for depth, cells in ((64, spare[:2]), (32, [spare[2]])):
        short = call._replace(ends=call.ends - torch.tensor([0, 100 - depth]))
        _, want_windows, want_states = walk(short, shape)
        for h, cell in enumerate(cells):
            head = h if len(cells) == HEADS else HEADS - 1  # the last one to write
            own = call.cells[1, head]
            assert torch.equal(states[cell], want_states[own]), depth
            assert torch.equal(windows[cell], want_windows[own]), depth


@pytest.mark.parametrize("values", [128, 64])
def test_neighbours_change_no_bit(values: int) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from k3vl.kernels.kda.hopper import HopperShape

    torch.manual_seed(3)
    call = make_call([40, 70, 5], [0, 0, 1])
    alone = call._replace(
        inputs=tuple(x[40:110] for x in call.inputs),
        cells=call.cells[1:2],
        cu_seqlens=torch.tensor([0, 70]),
        ends=torch.tensor([70]),
    )
    shape = HopperShape(values, 3)
    got, _, states = walk(call, shape)
    want, _, want_states = walk(alone, shape)
    assert torch.equal(got[40:110], want)
    assert torch.equal(states[call.cells[1]], want_states[call.cells[1]])


def test_choice_of_the_layout() -> None:
    """By the model alone."""
    pytest.importorskip("triton")
    from k3vl.kernels.kda.gpu import PrefillShape, _shape
    from k3vl.kernels.kda.hopper import HopperShape

    assert _shape(96, 128, half=True, hopper=True) == HopperShape(128, 5)
    assert _shape(48, 128, half=True, hopper=True) == HopperShape(64, 3)
    assert _shape(12, 128, half=True, hopper=True) == HopperShape(64, 3, 3 / 4)
    assert _shape(96, 128, half=True, hopper=False) == PrefillShape(64, 4, 3, 128)
    assert _shape(4, 16, half=False, hopper=False) == PrefillShape(16, 4, 1, None)


def test_what_the_kernel_does_not_take() -> None:
    pytest.importorskip("triton")
    from k3vl.kernels.kda.hopper import hopper_takes

    inputs, _, windows, states, *_ = make_call([3], [0])
    assert hopper_takes(inputs, windows, states)
    for i, x in enumerate(inputs):
        others = (*inputs[:i], x.float(), *inputs[i + 1 :])
        assert not hopper_takes(others, windows, states), "each in bfloat16"
    assert not hopper_takes(inputs, windows.float(), states)
    assert not hopper_takes(inputs, windows[:, 1:], states)
    assert not hopper_takes(inputs, windows[..., :64], states[..., :64])
