"""The demo model's held-out answers on a CUDA device in float32, its engine taken apart.

    python -m benchmarks.gpu_ways [--ways 'recorded,shared;recorded'] [--every 1] [--times 2]

Every way is a process of its own. It asks the questions of ``tests/e2e/heldout_answers.py``, 64 at
once, ``--times`` times of the same engine (the first records sizes in the middle of traffic and
fills the cache, later ones find both), and says how many answers are not the CPU's. A way is some
of these, joined by commas:

- ``plain``: decode steps and the tower are recorded, and nothing is launched ahead.
- ``padded``: prompts at fixed sizes, launched; ``recorded``: the same as graphs.
- ``ahead``: decode steps are launched before tokens are known, where they can be: not beside a
  prompt, nor an answer that has a mask. So hardly ever here, but with ``waves``: without the 11
  that have one, and the next 64 when all are answered. Then it is an error if none was.
- ``dropped``: of the tower one record is kept, so graphs go all the time.
- ``shared``: all graphs are captured on one stream, so they share a workspace of cuBLAS.
- ``no workspace``: cuBLAS has none at all.
- ``in step``: pictures are encoded in the engine's own stream; ``tower launched``: not as graphs.
- ``kept``: no record of the tower is dropped. Where torch has
  ``clearCublasWorkspacesForStream`` (printed), a graph that goes takes the workspace of all that
  were captured on its stream with it.
- ``plain tower``: its blocks from smaller operators.
- ``late``: no launch begins before the one in front of it has ended.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from k3vl.kernels.choice import Kernels
    from k3vl.kernels.recording import Step
    from k3vl.lm.decode import Launched

WAYS = (
    "ahead,recorded,waves;ahead,recorded,waves,dropped;ahead,recorded,waves,in step;"
    "ahead,recorded;ahead,recorded,shared;plain"
)


def patch(way: frozenset[str]) -> None:
    """Change what an engine is made of, before one is."""
    import k3vl.load
    from k3vl.kernels import recording as made
    from k3vl.lm import engine
    from k3vl.lm.decode import StaticDecode
    from k3vl.lm.encoding import EncodeInStep
    from k3vl.lm.prompts import DirectPrompts, StaticPrompts
    from k3vl.vision import repeats

    k3vl.load.choose_device = lambda device: (torch.device("cuda"), torch.float32)
    one = torch.cuda.Stream()

    def runner() -> made.GraphRunner:
        new = made.GraphRunner()
        if "shared" in way:
            new._stream = one
        return new

    k3vl.load.GraphRunner = (lambda: None) if "tower launched" in way else runner
    engine.decoder = lambda model, cache: StaticDecode(
        model, cache, runner(), overlaps="ahead" in way
    )
    engine.prompts = DirectPrompts
    if way & {"padded", "recorded"}:
        engine.prompts = lambda model, cache: StaticPrompts(
            model, cache, runner() if "recorded" in way else made.EagerRunner()
        )
    if "kept" in way:
        repeats._MOST_RECORDS, repeats._MOST_BYTES = 1 << 20, 1 << 40
    if "dropped" in way:
        repeats._MOST_RECORDS = 1
    if "in step" in way:
        k3vl.load.choose_encoding = lambda device, config: EncodeInStep
    if "late" in way:
        from k3vl.kernels import dependent

        dependent._joined = ContextVar("joined", default=True)
    if "plain tower" in way:
        from k3vl.kernels.vision_attention.gpu import vision_attention
        from k3vl.kernels.vision_block import ComposedVisionBlock
        from k3vl.kernels.vision_pos.gpu import rotate

        chosen = k3vl.load.choose

        def choose(device: torch.device, dtype: torch.dtype) -> Kernels:
            kernels = chosen(device, dtype)
            block = ComposedVisionBlock(attention=vision_attention, rotate=rotate)
            return replace(kernels, vision=replace(kernels.vision, block=block))

        k3vl.load.choose = choose


def ask_all(way: frozenset[str], every: int, times: int) -> None:
    """Ask, compare and say."""
    from k3vl.kernels.recording import GraphRunner
    from k3vl.lm.decode import StaticDecode
    from k3vl.lm.engine import EngineConfig
    from k3vl.pipeline import Pipeline
    from k3vl.vision import repeats
    from tests.e2e import heldout_answers as answers

    patch(way)
    counts = Counter[str]()
    make_room, launch, make = repeats.Repeats._make_room, StaticDecode.launch, GraphRunner.make

    def counted_room(self: repeats.Repeats, nbytes: int) -> None:
        before = len(self._records)
        make_room(self, nbytes)
        counts["dropped"] += before - len(self._records)

    def counted_launch(self: StaticDecode, *args: Any, sources: Any = None) -> Launched:
        counts["steps"] += 1
        counts["ahead"] += sources is not None
        return launch(self, *args, sources=sources)

    def counted_make(self: GraphRunner, step: Step) -> Step:
        counts["graphs"] += 1
        return make(self, step)

    repeats.Repeats._make_room = counted_room
    StaticDecode.launch = counted_launch
    GraphRunner.make = counted_make
    header = Path(torch.__path__[0]) / "include/ATen/cuda/CUDAContextLight.h"
    clears = header.is_file() and "clearCublasWorkspacesForStream" in header.read_text()
    say = partial(print, flush=True)
    say(f"torch {torch.__version__}, a graph that goes clears its stream's workspace: {clears}")
    with Pipeline.load(device="cuda", engine=EngineConfig(max_requests=64)) as pipeline:
        for turn in range(times):
            asked = answers.questions()[::every]
            if "waves" in way:
                got = answers.ask_in_waves(pipeline, answers.without_masks(asked), at_once=64)
            else:
                got = answers.ask(pipeline, asked, in_flight=64)
            found = answers.differences(pipeline, got, answers.recorded())
            name = ",".join(sorted(way))
            say(f"{name}: turn {turn}: {len(found)} of {len(got)} differ, {dict(counts)}")
            for want, have in found[:6]:
                say(f"    {want[:60]!r} -> {have[:90]!r}")
    if way >= {"ahead", "waves"} and not counts["ahead"]:
        raise SystemExit("no step was launched ahead: this has shown nothing about it")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--one", action="store_true", help="in this process")
    args = parser.parse_args()
    for name in args.ways.split(";"):
        way = frozenset(part.strip() for part in name.split(","))
        if args.one:
            ask_all(way, args.every, args.times)
            continue
        environment = dict(os.environ)
        if "no workspace" in way:
            environment["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
        command = [sys.executable, "-m", "benchmarks.gpu_ways", "--one", "--ways", name]
        command += ["--every", str(args.every), "--times", str(args.times)]
        root = Path(__file__).resolve().parents[1]
        subprocess.run(command, env=environment, cwd=root, check=False)


if __name__ == "__main__":
    main()
