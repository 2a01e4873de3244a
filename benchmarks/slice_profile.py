"""Where the time of a slice of K3 goes: every launch of a decode step and of a prefill, by name.

    python -m benchmarks.slice_profile [--layers 5] [--decode 1,32] [--prefill 4096] \
        [--context 512] [--pass-tokens 8192] [--output FILE.json] [--device cpu --tiny] \
        [--ways ';ahead;late;torch;16,512,2,2048,4']

The engine is that of ``k3vl bench slice``, on the same random weights; nothing is compared. First
steps are timed as they are: what the host does before the model is replayed, while it runs and
behind it, and the model's own time between events. Where steps are launched ahead, the model that
is launched is the next step's, and the tokens that are waited for are the last one's. Then a few
more are traced. A step of the trace ends with the copy that brings its tokens back. Of every kernel
and grid: launches a step, microseconds, share of the step, and the time in which nothing ran before
it (``gap``). Tracing makes gaps longer than they are; kernels are what they are. The file has every
launch of a step in order, and when it began: early ones take their wait into their time.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

import k3vl.lm.decode as decode_module
from k3vl.app import slice_bench
from k3vl.app.slice_bench import SliceOptions, config_of
from k3vl.kernels.bench import parts
from k3vl.kernels.bench.about import describe
from k3vl.kernels.choice import choose
from k3vl.lm.decode import padded_size
from k3vl.lm.engine import Engine
from k3vl.load import choose_device
from k3vl.synthetic import random_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from k3vl.kernels.bench.parts import Launch
    from k3vl.lm.backend import Token
    from k3vl.lm.decode import Decode

WARM_UP, TIMED, TRACED = 3, 21, 8
KINDS = {
    "matrix products": r"nvjet|gemm|gemv|cublas|cutlass|splitk|linear_|skinny",
    "experts": r"mxfp4|joined|dense_kernel|plan_|combine_|route_|experts",
    "KDA": r"^kda_",
    "MLA": r"^mla_|^flash_",
    "mixtures over depth": r"attn_residual",
    "activations": r"^glu_",
}
"""What launches are for, by name; everything else is copies, casts and elementwise operators."""


def launches_of(events: Iterable[dict[str, Any]]) -> list[Launch]:
    """What a Chrome trace says of the device, in order, under short names."""
    return [replace(launch, name=short(launch.name)) for launch in parts.launches_of(events)]


def short(name: str) -> str:
    """A kernel's name without what C++ says of its types, but for the operator in it."""
    inner = re.search(r"(\w+(?:Functor|_kernel_cuda|Op)\w*)", name)
    plain = re.sub(r"^void ", "", name).split("<", 1)[0].split("(", 1)[0].split("::")[-1]
    if "elementwise" in plain and inner:
        plain += f" {inner[1]}"
    return plain[:60]


def kind_of(name: str) -> str:
    """One of ``KINDS``, or what is left."""
    found = (kind for kind, words in KINDS.items() if re.search(words, name.lower()))
    return next(found, "copies, elementwise, other")


def steps_of(launches: Sequence[Launch]) -> list[list[Launch]]:
    """Cut where tokens go back to the host; only steps as long as most are kept."""
    steps: list[list[Launch]] = [[]]
    for launch in launches:
        steps[-1].append(launch)
        if "DtoH" in launch.name:
            steps.append([])
    lengths = [len(step) for step in steps if step]
    usual = max(set(lengths), key=lengths.count, default=0)
    return [step for step in steps if step and len(step) == usual]


def summary_of(steps: Sequence[Sequence[Launch]]) -> dict[str, Any]:
    """Tables of some steps that are alike; times are of one step."""
    if not steps:
        return {}
    count = len(steps)
    ends = [max(launch.begin + launch.took for launch in step) for step in steps]
    span = median(end - step[0].begin for end, step in zip(ends, steps, strict=True))
    rows: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    kinds: defaultdict[str, float] = defaultdict(float)
    for step in steps:
        for at, launch in enumerate(step):
            row = rows[launch.name, launch.grid]
            row[0] += 1 / count
            row[1] += launch.took / count
            row[2] += launch.gap / count if at else 0.0
            kinds[kind_of(launch.name)] += launch.took / count
    ordered = sorted(rows.items(), key=lambda item: -item[1][1])
    return {
        "steps": count,
        "launches": len(steps[0]),
        "span_us": span,
        "idle_inside_us": median(sum(launch.gap for launch in step[1:]) for step in steps),
        "idle_before_us": median(step[0].gap for step in steps[1:] or steps),
        "kinds_us": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "by_kernel": [
            {"name": name, "grid": grid, "count": n, "us": us, "share": us / span, "gap_us": gap}
            for (name, grid), (n, us, gap) in ordered
        ],
        "in_order": [
            {
                "name": same[0].name,
                "grid": same[0].grid,
                "at_us": median(
                    launch.begin - step[0].begin for launch, step in zip(same, steps, strict=True)
                ),
                "us": median(launch.took for launch in same),
                "gap_us": median(launch.gap for launch in same),
            }
            for same in zip(*steps, strict=True)
        ],
    }


def traced(work) -> list[Launch]:
    """What ran on the device because of ``work``."""
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        work()
        if cuda:
            torch.cuda.synchronize()
    return launches_of(parts.events_of(profiler))


# ---------------------------------------------------------------------- the engine


class HostClock:
    """When a step's parts begin on the host, and how long the model takes on the device."""

    def __init__(self, engine: Engine, batch: int) -> None:
        sizes = getattr(engine.decoder, "_sizes", {})
        self.size, self.marks, self.device = sizes.get(padded_size(batch)), [], []
        self.settle = decode_module.settle

    def __enter__(self) -> HostClock:
        if self.size is None:
            return self
        self.forward = self.size.forward

        def forward() -> torch.Tensor:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.marks.append(time.perf_counter())
            begin.record()
            out = self.forward()
            end.record()
            self.marks.append(time.perf_counter())
            self.device.append((begin, end))
            return out

        def settle(*args):
            self.marks.append(time.perf_counter())
            chosen = self.settle(*args)
            self.marks.append(time.perf_counter())
            return chosen

        self.size.forward, decode_module.settle = forward, settle
        return self

    def __exit__(self, *_: object) -> None:
        decode_module.settle = self.settle
        if self.size is not None:
            self.size.forward = self.forward

    def report(self, borders: Sequence[tuple[float, float]]) -> dict[str, float]:
        """Microseconds of the parts of a step, by medians."""
        whole = median(end - begin for begin, end in borders) * 1e6
        found = {"step_us": whole}
        if len(self.marks) == 4 * len(borders):
            names = ("before", "launching model", "launching sampling", "waiting", "after")
            rows = [
                (begin, *self.marks[4 * i : 4 * i + 4], end)
                for i, (begin, end) in enumerate(borders)
            ]
            for at, name in enumerate(names):
                found[f"host {name}"] = median(row[at + 1] - row[at] for row in rows) * 1e6
            found["model_us"] = median(a.elapsed_time(b) for a, b in self.device) * 1e3
            found["step less model"] = whole - found["model_us"]
        return found


@contextmanager
def other_way(name: str, decoder: Decode):
    """Record steps in another way.

    ``late``: launches begin one behind the other. ``torch``: its products for a single row, too.
    ``ahead``: steps are launched before the tokens of the last one are known. Numbers: of a
    :class:`~k3vl.kernels.linear.gpu.RowShape`, whatever the width. ``a+b`` is both.
    """
    with ExitStack() as stack:
        for part in name.split("+"):
            _change(part, decoder, stack)
        yield


def _change(name: str, decoder: Any, stack: ExitStack) -> None:
    from k3vl.kernels import dependent
    from k3vl.kernels.linear import gpu as linear
    from k3vl.kernels.moe import gpu as moe

    if name == "late":
        stack.enter_context(dependent.after_all())
    elif name == "torch":
        for module in (linear, moe):
            stack.enter_context(patch.object(module, "is_row", lambda *_: False))
    elif name == "ahead":
        stack.enter_context(patch.object(decoder, "overlaps", True))
    elif name:
        shape = linear.RowShape(*_numbers(name))
        stack.enter_context(patch.object(linear, "row_shape", lambda _: shape))


def compared(engine: Engine, ways: Sequence[str], options: SliceOptions) -> dict[str, Any]:
    """One request's steps, recorded in different ways, each twice in turns."""
    found: dict[str, Any] = {"what": "decode B1, ways"}
    for turn in range(2):
        for way in ways:
            with other_way(way, engine.decoder):
                engine.decoder.renew(engine.model)
                timed = decoding(engine, 1, options, trace=False)
            for key in ("step_us", "model_us"):
                found[f"{way or 'default'} {key} {turn}"] = timed.get(key)
            print(f"{way or 'default':40} {timed['step_us']:9.1f} us a step, ", end="")
            print(f"{timed.get('model_us', 0.0):9.1f} on the device", flush=True)
    engine.decoder.renew(engine.model)
    return found


def decoding(
    engine: Engine, batch: int, options: SliceOptions, *, trace: bool = True
) -> dict[str, Any]:
    """Steps of so many requests."""
    received: list[Token] = []
    most = slice_bench._most_new(batch, options)
    for request in range(batch):
        slice_bench._add(
            engine, request, options.context, options, max_tokens=most, received=received
        )
    while any(not job.sequence.num_generated for job in engine.jobs.values()):
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    borders = []
    with HostClock(engine, batch) as clock:
        for _ in range(TIMED):
            begin = time.perf_counter()
            engine.step()
            borders.append((begin, time.perf_counter()))
    slice_bench._now(engine)  # a step that was launched ahead has events too
    found = clock.report(borders)
    launches = traced(lambda: [engine.step() for _ in range(TRACED)]) if trace else []
    for request in range(batch):
        engine.cancel(request)
    return {"what": f"decode B{batch}", **found, **summary_of(steps_of(launches))}


def prefilling(engine: Engine, tokens: int, options: SliceOptions) -> dict[str, Any]:
    """One prompt after the other."""

    def once(run: int) -> None:
        received: list[Token] = []
        slice_bench._add(engine, run, tokens, options, max_tokens=1, received=received)
        while not received:
            engine.step()

    times = []
    for run in range(5):
        begin = slice_bench._now(engine)
        once(run)
        times.append(slice_bench._now(engine) - begin)
    launches = traced(lambda: once(5))
    found = {"what": f"prefill {tokens}", "step_us": median(times[2:]) * 1e6}
    return {**found, **summary_of([launches] if launches else [])}


def show(found: dict[str, Any], rows: int) -> None:
    """A table of the launches that take longest."""
    host = ", ".join(f"{name} {v:.0f}" for name, v in found.items() if name.startswith("host "))
    print(f"== {found['what']}: step {found['step_us']:.0f} us", end="")
    if "model_us" in found:
        print(f", model on the device {found['model_us']:.0f}; {host}", end="")
    print()
    if "span_us" not in found:
        return
    kinds = ", ".join(f"{kind} {us:.0f}" for kind, us in found["kinds_us"].items())
    print(
        f"traced: {found['launches']} launches, {found['span_us']:.0f} us, idle inside "
        f"{found['idle_inside_us']:.0f}, before {found['idle_before_us']:.0f}; {kinds}"
    )
    for row in found["by_kernel"][:rows]:
        name = f"{row['name']} {row['grid']}"[:70]
        print(
            f"{name:70} {row['count']:5.0f} x {row['us']:9.1f} us {row['share']:6.1%} "
            f"gap {row['gap_us']:.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--decode", type=_numbers, default=(1, 32))
    parser.add_argument("--prefill", type=_numbers, default=(4096,))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--pass-tokens", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=10, help="lines of a table")
    parser.add_argument("--ways", type=lambda text: text.split(";"), help="see other_way")
    parser.add_argument("--commit")
    parser.add_argument("--output", type=Path)
    flags = parser.parse_args()
    options = SliceOptions(
        layers=flags.layers,
        tiny=flags.tiny,
        prefill=flags.prefill,
        decode=flags.decode,
        context=flags.context,
        pass_tokens=flags.pass_tokens,
        repeat=WARM_UP + TIMED + TRACED + 8,
        device=flags.device,
    )
    config = config_of(options)
    device, dtype = choose_device(options.device)
    began = time.perf_counter()
    model = random_model(config, choose(device, dtype), dtype=dtype, device=device)
    engine = Engine(
        model,
        slice_bench._NoMedia(),
        slice_bench._engine_config(config, options, dtype),
        stop_ids=(),
    )
    print(f"built in {time.perf_counter() - began:.1f} s", flush=True)
    found: list[dict[str, Any]] = []
    about = describe(device, None, commit=flags.commit)
    jobs = [(decoding, batch) for batch in options.decode]
    for work, size in (*jobs, *((prefilling, tokens) for tokens in options.prefill)):
        found.append(work(engine, size, options))
        show(found[-1], flags.rows)
        if flags.output:
            flags.output.parent.mkdir(parents=True, exist_ok=True)
            flags.output.write_text(json.dumps({**about, "profiles": found}, indent=1) + "\n")
    if flags.ways:
        found.append(compared(engine, flags.ways, options))
        if flags.output:
            flags.output.write_text(json.dumps({**about, "profiles": found}, indent=1) + "\n")
    print(f"{time.perf_counter() - began:.1f} s", flush=True)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(field) for field in text.split(",") if field)


if __name__ == "__main__":
    main()
