"""``benchmarks/tensor_parallel.py`` on a CPU: two processes by gloo, and what it refuses."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.tensor_parallel import CHECKED, KINDS, Case, Held, Summing, check, make
from k3vl.config import parse_config
from k3vl.lm.ranks import allocate, split_kernels
from k3vl.synthetic import slice_config
from tests.device_only import META, device_only

ROOT = Path(__file__).resolve().parents[1]


def test_two_ranks_give_the_whole_layers_results(tmp_path: Path) -> None:
    """Else it times nothing: the error of a line is of weights cut in two and summed by gloo."""
    output = tmp_path / "lines.jsonl"
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    run += ["-m", "benchmarks.tensor_parallel", "--tiny", "--commit", "abc", "--count", "1"]
    run += ["--batches", "1", "3", "--context", "70", "--prefill", "40", "--output", str(output)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["shape"] for line in lines] == [
        f"{kind}, {case}, 2 ranks"
        for case in ("B1 L70", "B3 L70", "T40")
        for kind in ("KDA, dense MLP", "KDA, experts", "MLA, experts")
    ]
    assert done.stdout.count("divided") == len(lines)
    for line in lines:
        assert line["error"] < 1e-5
        assert min(line["whole_us"], line["divided_us"], *line["sums_us"]) > 0
        assert line["commit"] == "abc"
    assert [line["recorded"] for line in lines] == 6 * [True] + 3 * [False]
    assert lines[1]["sum_bytes"] == [128 * 4, (128 + 64) * 4]


@pytest.fixture
def alone(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["layers.0.attn.a_log", "layers.1.mlp.w2", "layers.2.attn.kv_b"])
def test_a_divided_layer_that_is_wrong_is_not_timed(alone, name: str) -> None:
    options = argparse.Namespace(experts=None, tiny=True)
    with torch.inference_mode():
        whole, part = make(options, [Case(1, CHECKED)], Summing(0, 1))
        assert max(check(whole, part).values()) < 1e-5
        part.model.state_dict()[name].zero_()
        with pytest.raises(AssertionError, match="from whole"):
            check(whole, part)


@pytest.mark.parametrize("case", [Case(1, 8192), Case(32, 8192), Case(1, 0, 4096)], ids=str)
def test_at_k3s_dimensions_nothing_waits_for_the_device(case: Case) -> None:
    """So a graph can hold a divided step too; sums left out, which NCCL does on a stream."""
    pytest.importorskip("triton")
    from k3vl.kernels.choice import triton_kernels

    config = parse_config(slice_config(3, vocab=256)).text
    ranks, kernels = Summing(1, 2), triton_kernels("tests")
    ranks.adding = False
    dtype = torch.bfloat16
    models = [
        allocate(config, own, of, form="mxfp4", router=dtype, dtype=dtype, device=META)
        for of, own in ((None, kernels), (ranks, split_kernels(kernels, ranks)))
    ]
    launched = []
    with torch.inference_mode():
        for model in models:
            held = Held.of(model, [case])
            x = torch.empty(case.rows, config.hidden_size, dtype=dtype, device=META)
            for index in range(len(KINDS)):
                step = held.step(index, case, x)
                with device_only() as launches:
                    assert step().shape == x.shape
                launched.append([launch.kernel for launch in launches])
    for whole, divided in zip(launched[:3], launched[3:], strict=True):
        norm = ["rms_norm_kernel"] * ("combine_kernel" in whole)  # behind the sum over ranks
        assert sorted([*whole, *norm]) == sorted(divided), "the same kernels, over less"
