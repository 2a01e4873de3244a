"""Would two GPUs of one host decode faster than one? Half of the model, and what it sends.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py [--output r.json]

Tensor parallelism as docs/slices.md has it: every rank holds half of the heads, of every expert's
inner width, of the dense MLP and of the vocabulary; routers, latent projections and low-rank ones
are on both. Two all-reduces a layer, of [7168] after attention and of [3584 + 7168] after the
experts, each token.

Measured are one step of decoding of the whole slice on one GPU and of such a half, by the engine,
and the all-reduces alone, as NCCL does them inside a CUDA graph on all GPUs. A step of tensor
parallelism takes at least the half and its all-reduces; what the shares of projections that stay
whole cost is in the half. Nothing is measured of waiting for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from k3vl.app.slice_bench import SliceOptions, bench_config, config_of
from k3vl.kernels.bench.about import append_lines, describe

if TYPE_CHECKING:
    from k3vl.config import TextConfig

LAYERS = 5
ATTENTION, EXPERTS = 7168, 3584 + 7168
"""Values of a token that ranks add up, twice a layer."""
CHAIN = 50
"""All-reduces of a graph, one behind the other."""


def part(config: TextConfig, ranks: int) -> TextConfig:
    """What one of so many ranks holds; what every rank keeps whole stays as it is."""
    linear = config.linear_attn_config
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // ranks,
        linear_attn_config=replace(linear, num_heads=linear.num_heads // ranks),
        intermediate_size=config.intermediate_size // ranks,
        moe_intermediate_size=config.moe_intermediate_size // ranks,
        vocab_size=config.vocab_size // ranks,
    )


def steps_us(batches: list[int], ranks: int) -> list[float]:
    """Medians of decoding steps of a slice, or of one rank's part of it."""
    options = SliceOptions(layers=LAYERS, prefill=(), decode=tuple(batches), device="cuda")
    rows = bench_config(part(config_of(options), ranks), options)
    return [1e6 * statistics.median(row.seconds) for row in rows]


def all_reduce_us(values: int) -> float:
    """Median of one all-reduce of bfloat16 values, of many in a CUDA graph."""
    x = torch.ones(values, device="cuda", dtype=torch.bfloat16)
    dist.all_reduce(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            dist.all_reduce(x)
    spans = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(1e3 * begin.elapsed_time(end) / CHAIN)
    return statistics.median(spans)


def tell(
    batch: int,
    whole: float,
    share: float,
    sums: list[float],
    *,
    ranks: int,
    about: dict[str, Any],
    output: Path | None,
) -> None:
    line = {
        "op": "tensor_parallel_decode",
        "shape": f"{LAYERS} layers of K3, B{batch}, {ranks} ranks",
        "whole_us": round(whole, 1),
        "part_us": round(share, 1),
        "all_reduces_us": [round(us, 2) for us in sums],
        "speedup_at_most": round(whole / (share + LAYERS * sum(sums)), 3),
    }
    print(json.dumps(line), flush=True)
    if output:
        append_lines(output, [{**about, **line}])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--commit", help="of the code, where there is no repository")
    parser.add_argument("--output", type=Path, help="append JSON lines here")
    flags = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    about = describe(torch.device("cuda"), None, commit=flags.commit)
    sums = [[all_reduce_us(b * width) for width in (ATTENTION, EXPERTS)] for b in flags.batches]
    if first:  # the others have nothing to do, and wait
        whole, share = (steps_us(flags.batches, n) for n in (1, ranks))
        for numbers in zip(flags.batches, whole, share, sums, strict=True):
            tell(*numbers, ranks=ranks, about=about, output=flags.output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
