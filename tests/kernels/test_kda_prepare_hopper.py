"""The parallel kernel of KDA prefill in Gluon, on a CPU: against the definitions."""

from __future__ import annotations

import re
from pathlib import Path
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


def prepared(
    call: Call, before: int | None = None, changed: Any = None
) -> tuple[torch.Tensor, ...]:
    """What the kernel, or that of a ``changed`` module, writes.

    In two launches, ``before`` slots and the rest.
    """
    from k3vl.kernels.kda.hopper import Prepare, hopper_prepare
    from tests.kernels.gluon_on_cpu import Descriptor, launch

    def on_cpu(kernel: Any, grid: Any, matrices: Any, *args: Any, **constants: Any) -> None:
        described = (Descriptor(x, tuple(block)) for x, block in matrices)
        kernel = changed.kda_prepare_hopper_kernel if changed else kernel
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
    got, windows, states = walk(call, HopperShape(128, 3), chunks=chunks)
    want, want_windows, want_states = expected(call)
    assert (got - want).norm() <= 1e-2 * want.norm()
    assert (states - want_states).norm() <= 8e-3 * want_states.norm()
    assert torch.equal(windows.double(), want_windows)


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


# What orders threads, products and the copy engine, from the file's beginning on: a call, and as
# what its absence is found, or None.
ORDER = [
    ("fence_async_shared()", "without knowing of"),  # the next fence has no meeting behind it
    ("meet()", "without knowing of"),
    ("fence_async_shared()", "without a fence"),
    ("meet()", "without knowing of"),
    ("wait_for_stores(0)", None),
    ("meet()", None),
    ("fence_async_shared()", "without a fence"),
    ("meet()", "without knowing of"),
    ("meet()", "without knowing of"),
    ("fence_async_shared()", "without a fence"),
    ("meet()", "without knowing of"),
    ("wait_for_stores(0)", "ended before its copies"),
]


def calls_of_order() -> tuple[str, list[re.Match[str]]]:
    """The kernel's file, and the lines in it that are about nothing but order."""
    from k3vl.kernels.kda import prepare_hopper_kernel

    text = Path(prepare_hopper_kernel.__file__).read_text(encoding="utf-8")
    line = r"^ +((?:meet|fence_async_shared|wait_for_stores)\(.*\))$"
    return text, list(re.finditer(line, text, re.MULTILINE))


def test_nothing_that_orders_is_forgotten_here() -> None:
    pytest.importorskip("triton.experimental.gluon")
    text, lines = calls_of_order()
    assert [line[1] for line in lines] == [call for call, _ in ORDER]
    for name in ("meet", "fence_async_shared", "wait_for_stores"):
        assert text.count(f"{name}(") == sum(line[1].startswith(name) for line in lines)


@pytest.mark.parametrize("number", [i for i, (_, found) in enumerate(ORDER) if found])
def test_whatever_is_left_out_of_the_order_is_found(tmp_path: Path, number: int) -> None:
    """One chunk is all that a program has.

    One meeting is not found, that between the sums of groups of rows and their readers: the
    imitation leaves to the compiler what threads store and load, and Triton 3.6 makes the same PTX
    with it and without. Nor is the wait before it, as every chunk has other memory here.
    """
    pytest.importorskip("triton.experimental.gluon")
    from tests.kernels.ordering import module_of

    text, lines = calls_of_order()
    begin, end = lines[number].span(1)
    changed = module_of(f"{text[:begin]}pass{text[end:]}", tmp_path)
    torch.manual_seed(number)
    with pytest.raises(AssertionError, match=ORDER[number][1]):
        prepared(make_call([CHUNK], [0]), changed=changed)
