"""What ``benchmarks/slice_profile.py`` makes of a trace."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest

from benchmarks.slice_profile import (
    HostClock,
    kind_of,
    launches_of,
    main,
    other_way,
    short,
    steps_of,
    summary_of,
)
from k3vl.types import SamplingParams
from tests.lm.test_decode import engine
from tests.lm.test_engine import PROMPTS, Inbox


def kernel(name: str, begin: float, took: float, **more) -> dict:
    event = {"cat": "kernel", "name": name, "ts": begin, "dur": took, "args": {"grid": [4, 1, 1]}}
    return {**event, **more}


def step(begin: float, *, product: float = 10.0) -> list[dict]:
    return [
        kernel("Memcpy HtoD (Pinned -> Device)", begin, 1, cat="gpu_memcpy"),
        kernel("nvjet_tst_64x8", begin + 2, product),
        kernel("glu_kernel", begin + 3, 2),  # beside it
        kernel("kda_step_kernel", begin + 3 + product, 5),
        kernel("Memcpy DtoH (Device -> Pageable)", begin + 10 + product, 1, cat="gpu_memcpy"),
        {"cat": "cpu_op", "name": "aten::mm", "ts": begin, "dur": 50},
    ]


def test_a_trace_is_cut_into_steps_and_counted() -> None:
    events = [e for i in range(4) for e in step(100.0 * i, product=10 + i)]
    first = kernel("left over from before", -50, 1)
    cut = kernel("Memcpy DtoH (Device -> Pageable)", -49, 1, cat="gpu_memcpy")
    steps = steps_of(launches_of([*events, cut, first]))
    assert [len(own) for own in steps] == [5] * 4
    found = summary_of(steps)
    assert (found["steps"], found["launches"]) == (4, 5)
    assert found["span_us"] == pytest.approx(21 + 1.5)
    assert found["idle_inside_us"] == pytest.approx(1 + 1 + 2)
    assert found["idle_before_us"] == pytest.approx(100 - 22)
    assert [row["name"] for row in found["in_order"]][1] == "nvjet_tst_64x8"
    longest = found["by_kernel"][0]
    assert (longest["name"], longest["grid"], longest["count"]) == ("nvjet_tst_64x8", "4x1x1", 1)
    assert longest["us"] == pytest.approx(11.5)
    assert found["kinds_us"]["matrix products"] == pytest.approx(11.5)
    assert found["kinds_us"]["KDA"] == 5


def test_names_are_short_and_of_a_kind() -> None:
    add = "void at::native::elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
    assert short(add) == "elementwise_kernel CUDAFunctor_add"
    assert kind_of(short(add)) == "copies, elementwise, other"
    assert kind_of("gemv2T_kernel_val") == "matrix products"
    assert kind_of("gate_up_mxfp4_kernel") == kind_of("combine_kernel") == "experts"
    assert kind_of("mla_decode_sides_kernel") == "MLA"


def test_a_recorded_step_is_timed_part_by_part(monkeypatch) -> None:
    """Events need a device; here each is the moment of its recording."""

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = time.perf_counter()

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) * 1e3

    monkeypatch.setattr("torch.cuda.Event", Event)
    runner = engine(static=True)
    runner.add(0, PROMPTS[0], SamplingParams(max_tokens=20), Inbox())
    runner.step()
    runner.step()
    borders = []
    with HostClock(runner, 1) as clock:
        for _ in range(3):
            begin = time.perf_counter()
            runner.step()
            borders.append((begin, time.perf_counter()))
    runner.step()
    assert len(clock.device) == 3, "only what was timed"
    found = clock.report(borders)
    parts = [value for name, value in found.items() if name.startswith("host ")]
    assert len(parts) == 5
    assert all(value > 0 for value in parts)
    assert 0 < found["model_us"] < found["step_us"]


def test_it_runs_where_nothing_is_traced(monkeypatch, capsys, tmp_path) -> None:
    out = tmp_path / "found.json"
    flags = "--tiny --device cpu --decode 2 --prefill 40 --context 20 --pass-tokens 16 --commit x"
    monkeypatch.setattr(sys, "argv", ["slice_profile", *flags.split(), "--output", str(out)])
    main()
    shown = capsys.readouterr().out
    assert "decode B2" in shown
    assert "prefill 40" in shown
    assert out.stat().st_size


def test_other_ways_are_undone() -> None:
    from k3vl.kernels import dependent
    from k3vl.kernels.linear import gpu

    usual, takes, decoder = gpu.row_shape, gpu.is_row, SimpleNamespace(overlaps=False)
    with other_way("late", decoder):
        assert dependent._joined.get()
    with other_way("torch", decoder):
        assert not gpu.is_row()
    with other_way("16,512,2,2048,3", decoder):
        assert {gpu.row_shape(width) for width in (128, 7168, 12288)} == {
            gpu.RowShape(16, 512, 2, 2048, 3)
        }
    with other_way("ahead", decoder):
        assert decoder.overlaps
    with other_way("ahead+late", decoder):
        assert decoder.overlaps
        assert dependent._joined.get()
    assert not decoder.overlaps
    assert (gpu.row_shape, gpu.is_row) == (usual, takes)
    assert not dependent._joined.get()
