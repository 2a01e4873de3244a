"""The mechanism of ``python -m k3vl.kernels.bench`` without a device: who runs, who is believed."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("triton")

import k3vl.kernels.bench.__main__ as bench
from k3vl.config import parse_config
from k3vl.kernels.bench import kda_cases, peers, sglang_kda
from k3vl.kernels.bench.case import Case, Peer, Work
from k3vl.kernels.bench.parts import Part, summarise, table
from k3vl.kernels.bench.sglang_kda import _Pool
from k3vl.kernels.bench.sglang_moe import repacked_once
from k3vl.kernels.bench.timing import Ceilings, Timing
from k3vl.kernels.bench.tower_cases import build
from k3vl.kernels.moe.mxfp4 import prepare_experts
from k3vl.kernels.vision import REFERENCE
from k3vl.synthetic import slice_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace

CEILINGS = Ceilings(bandwidth=4.3e12, flops=790e12)
OURS = torch.arange(1.0, 5.0)


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_call(work: Callable[[], object]) -> Timing:
        work()
        return Timing(median=2.0, low=1.0, high=3.0, count=1)

    monkeypatch.setattr(bench, "time_call", time_call)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def measured(
    peer: Callable[[], object] | Peer, ceilings: Ceilings | None = CEILINGS
) -> dict[str, dict[str, Any]]:
    case = Case(
        op="add", shape="4", ours=lambda: OURS, want=lambda: OURS, limit=1e-6, bytes=32, flops=4,
        peers={"theirs": peer, "last": lambda: None},
    )  # fmt: skip
    lines = bench.run(case, ceilings, variants=False, peers=True)
    return {line["implementation"]: line for line in lines}


def prepared(result: Callable[[], torch.Tensor] | None) -> Peer:
    return Peer(lambda: Work(lambda: None, result))


def test_a_peer_with_our_result_is_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    line = measured(prepared(lambda: OURS * 1.01))["theirs"]
    assert line["agrees"]
    assert line["apart"] == pytest.approx(0.01)
    assert "WARNING" not in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [OURS * 1.1, OURS.flip(0), OURS * float("nan")])
def test_a_peer_with_another_result_is_timed_and_marked(
    wrong: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = measured(prepared(lambda: wrong))
    assert lines["theirs"]["agrees"] is False
    assert lines["theirs"]["median_us"] == 2.0
    assert json.loads(json.dumps(lines["theirs"], allow_nan=False)) == lines["theirs"]
    warning = [x for x in capsys.readouterr().out.splitlines() if "WARNING" in x]
    assert len(warning) == 1
    assert "theirs" in warning[0]


def test_what_is_not_the_same_work_is_not_compared() -> None:
    line = measured(prepared(None))["theirs"]
    assert (line["apart"], line["agrees"]) == (None, None)


def failing() -> Any:
    raise OSError("no such library")


@pytest.mark.parametrize(
    "peer",
    [failing, Peer(failing), Peer(lambda: Work(failing)), prepared(failing)],
    ids=["call", "prepare", "work", "result"],
)
def test_a_peer_that_fails_costs_nobody_else_anything(
    peer: Callable[[], object] | Peer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(measured(peer)) == ["k3vl", "last"]
    assert "no such library" in capsys.readouterr().out


def test_compiling_runs_and_compares_but_times_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []
    peer = Peer(lambda: Work(lambda: calls.append("timed"), lambda: OURS.neg()))
    assert measured(peer, None) == {}
    assert calls == ["timed"]
    assert "WARNING" in capsys.readouterr().out


def test_peers_are_prepared_without_gradients() -> None:
    modes: list[bool] = []
    measured(Peer(lambda: modes.append(torch.is_grad_enabled()) or Work(lambda: None)))
    assert modes == [False]


def test_sglang_is_named_only_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def spec(name: str) -> object:
        return found if name == "sglang" else importlib.util.find_spec(name)

    monkeypatch.setattr(peers, "find_spec", spec)
    found: object = None
    assert peers.named({"kernel": lambda: Work(lambda: None)}) == {}
    found = object()
    monkeypatch.setattr(peers, "version", lambda name: "0.5.17")
    assert list(peers.named({"kernel": lambda: Work(lambda: None)})) == ["SGLang 0.5.17 kernel"]


def test_states_lie_as_sglang_reads_them() -> None:
    batch, heads, width = 2, 3, 4
    cells = torch.randperm(batch * heads).view(batch, heads)
    windows = torch.randn(batch * heads, 3, 3, width)
    states = torch.randn(batch * heads, width, width)
    pool = _Pool.of(windows, states, cells)
    b, h, kind, key, value, age = 1, 2, 1, 3, 0, 2
    channel = (kind * heads + h) * width + key
    assert pool.windows[b, age, channel] == windows[cells[b, h], age, kind, key]
    assert pool.states[b, h, value, key] == states[cells[b, h], key, value]


def test_peers_of_a_step_begin_where_ours_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ran before them, the reference among others, has left the states as they were."""

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype)

    def step(*args: Any) -> torch.Tensor:
        *inputs, weights, windows, states, cells = args
        single = (x.float() for x in inputs)
        return kda_cases.kda_decode_reference(*single, weights, windows.float(), states, cells)

    def theirs(args: Any, weights: Any, windows: Any, states: Any, cells: Any) -> dict[str, Peer]:
        result = partial(step, *args, weights, windows, states, cells)
        return {"theirs": Peer(lambda: Work(lambda: None, result))}

    monkeypatch.setattr(kda_cases, "normal", normal)
    monkeypatch.setattr(kda_cases, "kda_decode", step)
    monkeypatch.setattr(sglang_kda, "decode_peers", theirs)
    case = next(kda_cases.decode_cases())
    *_, line = bench.run(case, CEILINGS, variants=False, peers=True)
    assert line["implementation"] == "theirs"
    assert line["apart"] < 1e-6


def test_experts_reach_marlin_as_a_checkpoint_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    count, latent, inner = 2, 64, 32
    codes = {
        "w13": torch.randint(0, 256, (count, 2 * inner, latent // 2), dtype=torch.uint8),
        "w13_scale": torch.randint(117, 121, (count, 2 * inner, latent // 32), dtype=torch.uint8),
        "w2": torch.randint(0, 256, (count, latent, inner // 2), dtype=torch.uint8),
        "w2_scale": torch.randint(117, 121, (count, latent, inner // 32), dtype=torch.uint8),
    }
    given: list[SimpleNamespace] = []
    module = type(torch)("sglang.srt.layers.quantization.marlin_utils_fp4")
    monkeypatch.setattr(module, "prepare_moe_mxfp4_layer_for_marlin", given.append, raising=False)
    parts = module.__name__.split(".")
    for n in range(1, len(parts)):
        name = ".".join(parts[:n])
        monkeypatch.setitem(sys.modules, name, type(torch)(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    marlin = repacked_once(prepare_experts(**codes))
    assert marlin() is marlin()
    (layer,) = given
    assert torch.equal(layer.w13_weight, codes["w13"])
    assert torch.equal(layer.w13_weight_scale, codes["w13_scale"])
    assert torch.equal(layer.w2_weight, codes["w2"])
    assert torch.equal(layer.w2_weight_scale, codes["w2_scale"])


def test_the_measured_tower_is_whole() -> None:
    """Every tensor of a checkpoint has its place, and patches become rows of the language model."""
    config = parse_config(slice_config(2, tiny=True)).vision
    encode, tensors = build(config, REFERENCE, torch.float32, "cpu")
    for tensor in tensors.values():
        tensor.normal_(0, 0.1)
    rows = encode(torch.randn(24, 3, 14, 14), [(1, 4, 6)])
    assert rows.shape == (6, config.text_hidden_size)
    assert rows.isfinite().all()


def test_a_profile_counts_equal_launches_of_a_call() -> None:
    def ran(name: str, begin: float, took: float, *grid: int) -> dict[str, Any]:
        return {"cat": "kernel", "name": name, "ts": begin, "dur": took, "args": {"grid": grid}}

    events = [
        ran("void at::native::spin_kernel(long)", 0, 90, 1, 1, 1),
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 50},
        ran("flash", 108, 8, 2, 1, 1),  # the trace is not in order
        ran("norm", 100, 2, 4, 1, 1),
        {"cat": "gpu_memset", "name": "Memset", "ts": 101, "dur": 3},  # beside it
        ran("flash", 130, 10, 2, 1, 1),
        ran("flash", 140, 1, 3, 1, 1),
    ]
    found = summarise(events, 2)
    assert found.parts == (
        Part(name="flash", grid="2x1x1", count=1, total=9),
        Part(name="Memset", grid="", count=0.5, total=1.5),
        Part(name="norm", grid="4x1x1", count=0.5, total=1),
        Part(name="flash", grid="3x1x1", count=0.5, total=0.5),
    )
    assert (found.span, found.idle) == (20.5, (4 + 14) / 2)
    first, *lines = table(found, rows=2)
    assert "20 us from the first of 2.5 launches to the last's end, nothing running 9" in first
    assert "9.0 us  43.9%     1 x     9.00  flash 2x1x1" in lines[0]
    assert "1.5 us   7.3%     1 x     1.50  2 others" in lines[-1]


def test_profiles_are_printed_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = summarise([{"cat": "kernel", "name": "only", "ts": 0, "dur": 7}], 1)
    monkeypatch.setattr(bench, "profile_call", lambda work: found)
    case = Case(
        op="add", shape="4", ours=lambda: OURS, want=None, limit=1e-6, bytes=32, flops=4
    )  # fmt: skip
    for wanted in (True, False):
        bench.run(case, CEILINGS, variants=False, peers=False, profiles=wanted)
        assert ("x     7.00  only" in capsys.readouterr().out) is wanted
