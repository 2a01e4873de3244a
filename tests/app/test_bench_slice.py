"""``k3vl bench``: slices of K3 with random weights, on disk and through the whole engine."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from click.testing import CliRunner

import k3vl.app.slice_bench as module
from k3vl.app.cli import cli
from k3vl.app.slice_bench import SliceOptions, bench_slice
from k3vl.app.slice_cost import pass_work, prefill_work, weight_bytes
from k3vl.config import TextConfig, parse_config
from k3vl.errors import BackendError, CapacityError, ConfigError
from k3vl.kernels.bench.timing import Ceilings
from k3vl.kernels.choice import reference_kernels
from k3vl.synthetic import slice_config

if TYPE_CHECKING:
    from pathlib import Path

BF16 = torch.bfloat16
H200 = Ceilings(bandwidth=4.3e12, flops=790e12)
SMALL = SliceOptions(
    tiny=True, prefill=(40,), decode=(2,), context=20, pass_tokens=16, repeat=3, device="cpu"
)


def k3(layers: int) -> TextConfig:
    return parse_config(slice_config(layers)).text


# ---------------------------------------------------------------------- on paper


def test_a_layer_moves_what_was_counted_by_hand() -> None:
    """Bytes of a KDA layer with experts, decoding: spec of K3, 1.561 and 3.482 GB at B1 and B8."""
    for batch, want in ((1, 1.561e9), (8, 3.482e9)):
        six, five = (
            pass_work(k3(n), [(8192, 1)] * batch, dtype=BF16, packed=True, logits=batch).bytes
            for n in (6, 5)
        )
        assert six - five == pytest.approx(want, rel=2e-3)


def test_all_of_k3_is_the_published_size_and_work() -> None:
    whole = k3(93)
    text = 1_560_860_324_864 - 894_717_952
    assert weight_bytes(whole, dtype=BF16, packed=True) == pytest.approx(text, rel=1e-4)
    one = pass_work(whole, [(0, 1)], dtype=BF16, packed=True, logits=1)
    assert one.flops == pytest.approx(2 * 104.19e9, rel=0.01)


def test_the_slice_that_sglang_ran_has_its_limit_where_it_was_computed() -> None:
    """2.3 ms a step at batch 1, 57 and 545 ms for 4k and 32k tokens."""
    five = k3(5)
    step = pass_work(five, [(512, 1)], dtype=BF16, packed=True, logits=1)
    assert step.seconds(H200) == pytest.approx(2.3e-3, rel=0.05)
    for tokens, want in ((4096, 57e-3), (32768, 545e-3)):
        passes = prefill_work(five, tokens, 8192, dtype=BF16, packed=True)
        assert len(passes) == -(-tokens // 8192)
        assert sum(work.seconds(H200) for work in passes) == pytest.approx(want, rel=0.1)


# ---------------------------------------------------------------------- through the engine


def test_a_tiny_slice_is_checked_and_measured(tmp_path: Path) -> None:
    output = tmp_path / "results" / "slices.jsonl"
    options = ["--tiny", "--prefill", "40", "--decode", "1,3", "--context", "20"]
    options += ["--pass-tokens", "16", "--repeat", "3", "--output", str(output)]
    done = CliRunner().invoke(cli, ["bench", "slice", "--device", "cpu", *options])
    assert done.exit_code == 0, done.output
    shown = done.output.splitlines()
    assert [line.split(" ms")[0].split()[:2] for line in shown] == [
        ["prefill", "40"],
        ["decode", "1"],
        ["decode", "3"],
    ]
    assert all("of the limit" in line for line in shown)
    assert not any("published" in line for line in shown), "another slice was published"
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["op"] for line in lines] == ["slice_prefill", "slice_decode", "slice_decode"]
    for line in lines:
        assert line["count"] == 3
        assert line["error"] < 1e-4
        assert line["of_limit"] > 0
        assert line["bytes"] > 0 < line["flops"]
        low, high = line["quartiles_us"]
        assert low <= line["median_us"] <= high
        assert {"commit", "date", "device", "torch", "copy_tb_s", "implementation"} <= line.keys()


def test_a_slice_is_measured_over_two_ranks(tmp_path: Path) -> None:
    output = tmp_path / "slices.jsonl"
    options = replace(SMALL, tensor_parallel=2, output=output)
    rows = list(bench_slice(options))
    alone = list(bench_slice(SMALL))
    assert [(row.what, row.size, row.work) for row in rows] == [
        (row.what, row.size, row.work) for row in alone
    ]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["shape"].rpartition(", ")[2] for line in lines] == ["2 ranks"] * 2
    assert all(line["error"] < 1e-4 for line in lines)
    with pytest.raises(ConfigError, match="3 ranks: num_attention_heads is 4"):
        list(bench_slice(replace(SMALL, tensor_parallel=3)))


def test_packed_experts_go_through_the_engine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "choose", lambda *_: reference_kernels("tests"))
    rows = list(bench_slice(SMALL))
    assert [(row.what, row.size, len(row.seconds)) for row in rows] == [
        ("prefill", 40, 3),
        ("decode", 2, 3),
    ]
    packed = prefill_work(_tiny(), 40, 16, dtype=torch.float32, packed=True)
    assert rows[0].work == tuple(packed)
    assert len(packed) == 3


def _tiny() -> TextConfig:
    return parse_config(slice_config(5, tiny=True)).text


def test_wrong_logits_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(rows: torch.Tensor, query: torch.Tensor, norm: torch.Tensor, eps: float):
        return right.attn_residual(rows, query, norm, eps) * 1.01

    right = reference_kernels("tests")
    monkeypatch.setattr(module, "choose", lambda *_: replace(right, attn_residual=off))
    monkeypatch.setattr(module, "_measure", lambda *_: pytest.fail("timed"))
    with pytest.raises(BackendError, match="logits are off by"):
        list(bench_slice(SMALL))


def test_what_does_not_fit_is_said_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda device: 8 << 30)
    monkeypatch.setattr(module, "random_model", lambda *_, **__: pytest.fail("made"))
    with pytest.raises(CapacityError, match=r"5 layers take \d+\.\d GiB .* 8.0 are free"):
        list(bench_slice(SliceOptions(device="cpu")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 1}, "two at least"),
        ({"pass_tokens": 20}, "multiple of 16"),
        ({"prefill": (70_000,)}, "context is 65536"),
    ],
)
def test_options_that_make_no_sense_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(bench_slice(replace(SMALL, **change)))


def test_a_slice_is_written(tmp_path: Path) -> None:
    arguments = ["bench", "write", str(tmp_path / "s"), "--tiny", "--layers", "3"]
    done = CliRunner().invoke(cli, [*arguments, "--shard-mib", "1"])
    assert done.exit_code == 0, done.output
    total = sum(path.stat().st_size for path in (tmp_path / "s").glob("*.safetensors"))
    written = int(done.output.split(": ")[1].split()[0].replace(",", ""))
    assert 0 < total - written < 40_000, "headers"
    loaded = CliRunner().invoke(cli, ["bench", "load", str(tmp_path / "s"), "--device", "cpu"])
    assert loaded.exit_code == 0, loaded.output
    assert re.fullmatch(
        r"\d\.\d\d GB stored, \d\.\d\d GB held \(experts: float\) in .* GB/s, peak .* GB\n",
        loaded.output,
    )
    again = CliRunner().invoke(cli, arguments)
    assert again.exit_code == 1
    assert "holds weights already" in again.output


@pytest.mark.parametrize("value", ["1,", "a", "0", "1 2"])
def test_lists_of_numbers_are_read_strictly(value: str) -> None:
    done = CliRunner().invoke(cli, ["bench", "slice", "--tiny", "--decode", value])
    assert done.exit_code == 1
    assert "numbers with commas" in done.output
