r"""Do two GPUs of one host serve one user faster? Layers of K3, whole and divided among ranks.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.tensor_parallel \
        [--output benchmarks/results/tensor_parallel_h200.jsonl]

Of every kind of layer (KDA with the dense MLP, KDA and MLA with experts) one decode step and one
pass over a prompt, with its reads of the residual stream: whole on one GPU, and divided
(``k3vl/lm/ranks.py``) with its sums by NCCL; decode steps are CUDA graphs. First both are compared,
so what is timed is right. Beside them: the divided layer without its sums, and the sums alone, many
in a graph. Times are medians of the slower rank. Without GPUs: ``--tiny``, by gloo, for its tests.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from k3vl.config import parse_config
from k3vl.kernels.bench.about import append_lines, describe
from k3vl.kernels.bench.case import ratio_of_norms
from k3vl.kernels.bench.timing import ColdCache
from k3vl.kernels.choice import choose, reference_kernels
from k3vl.kernels.recording import EagerRunner, GraphRunner
from k3vl.lm.batch import Row, build_batch
from k3vl.lm.cache import HybridCache, plan_cache
from k3vl.lm.ranks import Ranks, split_kernels
from k3vl.load import choose_device
from k3vl.synthetic import random_model, slice_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3vl.lm.batch import Batch
    from k3vl.lm.model import K3Model

KINDS = ("KDA, dense MLP", "KDA, experts", "MLA, experts")
"""The layers of a slice of three."""
PAGE, CHECKED = 64, 48
CHAIN = 50
"""All-reduces of a graph, one behind the other; of a whole prompt's rows fewer."""
ALLOWED = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
"""Ratio of norms of a divided layer's results and the whole one's."""
_AHEAD = 5_000_000


class Summing(Ranks):
    """``adding`` False leaves sums out, to time what is left."""

    adding = True

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return super().add(x) if self.adding else x


@dataclass(frozen=True, slots=True)
class Case:
    """``batch`` requests with ``context`` tokens behind them, ``tokens`` each in this step."""

    batch: int
    context: int
    tokens: int = 1

    @property
    def name(self) -> str:
        return f"B{self.batch} L{self.context}" if self.tokens == 1 else f"T{self.tokens}"

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A model and a cache that has room for all cases, full of random values."""

    model: K3Model
    cache: HybridCache

    @classmethod
    def of(cls, model: K3Model, cases: list[Case]) -> Held:
        dtype, device = model.embedding.dtype, model.embedding.device
        sizes = plan_cache(model.config, dtype, budget_bytes=1 << 50, page_size=PAGE)
        units = max(c.batch * (sizes.units_per_slot + _pages(c)) for c in cases)
        sizes = replace(sizes, num_units=units)
        cache = HybridCache(model.config, sizes, dtype=dtype, device=device)
        cache.buffer.view(dtype).normal_()  # two halves of float32 are about their first
        return cls(model, cache)

    def batch(self, case: Case) -> Batch:
        """The step's rows, each request in units of its own."""
        slot, pages = self.cache.sizes.units_per_slot, _pages(case)
        rows = []
        for b in range(case.batch):
            first = b * (slot + pages)
            units = range(first, first + slot + pages)
            ids = [0] * case.tokens
            row = Row(
                token_ids=ids, context_len=case.context, slot=units[:slot], pages=units[slot:]
            )
            rows.append(row)
        batch = build_batch(rows, self.cache)
        if case.tokens > 1:
            return batch
        # As recorded steps have it: pages, not rows.
        return replace(batch, decode_rows=batch.decode_rows[:, ::PAGE].contiguous(), page=PAGE)

    def step(self, index: int, case: Case, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A layer behind a stream that holds ``x``."""
        model, state = self.model, self.cache.layers[index]
        batch = self.batch(case)

        def step() -> torch.Tensor:
            stream = model.stream(len(x), x, model.config)
            stream.first.copy_(x)
            stream.begin_layer(1)  # not the first of a block
            model.layers[index](stream, batch, state)
            return stream.rows[0]

        return step


def _pages(case: Case) -> int:
    return -(-(case.context + case.tokens) // PAGE)


def inputs(case: Case, held: Held, seed: int = 1) -> torch.Tensor:
    """[N, D], the same on every rank."""
    like = held.model.embedding
    generator = torch.Generator(like.device).manual_seed(seed)
    shape = case.rows, held.model.config.hidden_size
    return torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)


def check(whole: Held, part: Held) -> dict[int, float]:
    """By layer the largest error of attention and MLP, over a prompt and a token behind it.

    Raises:
        AssertionError: it is too large.
    """
    errors = {}
    allowed = ALLOWED[whole.model.embedding.dtype]
    for held in (whole, part):
        held.cache.clear(range(held.cache.sizes.units_per_slot))
    for index, kind in enumerate(KINDS):
        worst = 0.0
        for case in (Case(1, 0, CHECKED), Case(1, CHECKED)):
            x = inputs(case, whole)
            results = []
            for held in (whole, part):
                layer, state = held.model.layers[index], held.cache.layers[index]
                results.append((layer.attn(x, held.batch(case), state), layer.mlp(x)))
            for want, got in zip(*results, strict=True):
                error = ratio_of_norms(got, want)
                assert error < allowed, f"{kind}: divided is {error:.1e} from whole, {case.name}"
                worst = max(worst, error)
        errors[index] = worst
    return errors


# ---------------------------------------------------------------------- time


def spans_us(step: Callable[[], object], count: int) -> list[float]:
    """Of calls that begin together on all ranks, each with a cold cache."""
    if not torch.cuda.is_available():
        return [_seconds_on_cpu(step) * 1e6 for _ in range(count)]
    together = torch.zeros(1, device="cuda")
    cool = ColdCache()
    for _ in range(3):
        step()
    marks = []
    for _ in range(count):
        cool()
        torch.cuda._sleep(_AHEAD)  # the host is ahead of the device
        dist.all_reduce(together)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return [1e3 * begin.elapsed_time(end) for begin, end in marks]


def _seconds_on_cpu(step: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def slowest(us: float) -> float:
    """Of all ranks."""
    worst = torch.tensor(us, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def median_us(step: Callable[[], torch.Tensor], *, recorded: bool, count: int) -> float:
    """Of a step, as a graph or launched; of the slowest rank."""
    cuda = torch.cuda.is_available()
    if recorded:
        step = (GraphRunner() if cuda else EagerRunner()).make(step)
    return slowest(statistics.median(spans_us(step, count)))


def sum_us(values: int, dtype: torch.dtype, count: int) -> float:
    """One all-reduce of many in a row."""
    x = torch.zeros(values, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")
    chain = CHAIN if values < 1 << 20 else 5

    def sums() -> torch.Tensor:
        for _ in range(chain):
            dist.all_reduce(x)
        return x

    return median_us(sums, recorded=True, count=count) / chain


def measure(
    index: int, case: Case, whole: Held, part: Held, ranks: Summing, count: int
) -> dict[str, Any]:
    """One layer in one case: all that a line of results says of it."""
    config, dtype = whole.model.config, whole.model.embedding.dtype
    x, recorded = inputs(case, whole), case.tokens == 1
    spans = {}
    for name, held, adding in (
        ("whole", whole, True),
        ("divided", part, True),
        ("without_sums", part, False),
    ):
        ranks.adding = adding
        step = held.step(index, case, x)
        spans[name] = median_us(step, recorded=recorded, count=count)
    ranks.adding = True
    behind = config.hidden_size + (config.expert_hidden_size if index else 0)
    widths = (config.hidden_size, behind)
    return {
        "op": "tensor_parallel_layer",
        "shape": f"{KINDS[index]}, {case.name}, {dist.get_world_size()} ranks",
        "implementation": f"k3vl, {whole.model.kernels.name} kernels",
        **{f"{name}_us": round(us, 2) for name, us in spans.items()},
        "sum_bytes": [case.rows * width * dtype.itemsize for width in widths],
        "sums_us": [round(sum_us(case.rows * width, dtype, count), 2) for width in widths],
        "speedup": round(spans["whole"] / spans["divided"], 3),
        "recorded": recorded,
        "count": count,
    }


def warm_up(helds: list[Held], case: Case, ranks: Summing) -> None:
    """Compile what a case needs, each rank beginning with another model; others find it done."""
    ranks.adding = False
    turn = dist.get_rank() % len(helds)
    for held in helds[turn:] + helds[:turn]:
        x = inputs(case, held)
        for index in range(len(KINDS)):
            held.step(index, case, x)()
    ranks.adding = True
    dist.barrier()


def make(options: argparse.Namespace, cases: list[Case], ranks: Summing) -> tuple[Held, Held]:
    """The whole model, drawn from the same seed on every rank, and this rank's part of it."""
    device, dtype = choose_device("auto")
    kernels = choose(device, dtype) if device.type == "cuda" else reference_kernels("no GPU")
    content = slice_config(len(KINDS), vocab=256, experts=options.experts, tiny=options.tiny)
    config = parse_config(content, origin="slice").text
    if options.tiny:
        config = replace(config, moe_intermediate_size=64)  # whole groups of 32 for every rank
    whole = random_model(config, kernels, dtype=dtype, device=device)
    split = split_kernels(kernels, ranks)
    part = random_model(config, split, dtype=dtype, device=device, ranks=ranks)
    return Held.of(whole, cases), Held.of(part, cases)


def tell(line: dict[str, Any]) -> None:
    sums = " + ".join(f"{us:.1f}" for us in line["sums_us"])
    print(
        f"{line['shape']:42} whole {line['whole_us']:9.1f} us  divided {line['divided_us']:9.1f}  "
        f"without sums {line['without_sums_us']:9.1f}  sums alone {sums}  "
        f"{line['speedup']:.2f}x",
        flush=True,
    )


@torch.inference_mode()
def run(options: argparse.Namespace) -> None:
    """Everything between the beginning and the end of a process group."""
    ranks = Summing(dist.get_rank(), dist.get_world_size())
    first = ranks.rank == 0
    cases = [Case(batch, options.context) for batch in options.batches]
    cases += [Case(1, 0, tokens) for tokens in options.prefill]
    device, _ = choose_device("auto")
    about = describe(device, None, commit=options.commit)
    if device.type == "cuda":
        about["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        about["nccl_nvls"] = os.environ.get("NCCL_NVLS_ENABLE", "default")
    whole, part = make(options, cases, ranks)
    warm_up([whole, part], Case(1, 0, CHECKED), ranks)
    errors = check(whole, part)
    for case in cases:
        warm_up([whole, part], case, ranks)
        for index in range(len(KINDS)):
            line = measure(index, case, whole, part, ranks, options.count)
            if first:
                tell(line)
                if options.output:
                    append_lines(options.output, [{**about, **line, "error": errors[index]}])
            gc.collect()  # graphs go before the communicator that they hold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--context", type=int, default=8192, help="of requests that decode")
    parser.add_argument("--prefill", type=int, nargs="*", default=[4096], help="tokens")
    parser.add_argument("--count", type=int, default=21, help="timed calls")
    parser.add_argument("--experts", type=int, help="of a layer, in place of K3's 896")
    parser.add_argument("--tiny", action="store_true", help="small numbers in place of K3's")
    parser.add_argument("--commit", help="of the code, where there is no repository")
    parser.add_argument("--output", type=Path, help="append JSON lines here")
    options = parser.parse_args()
    limit = timedelta(minutes=4)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=limit, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=limit)
    run(options)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
