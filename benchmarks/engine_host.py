"""The host's part of captioning: what is left when the model and the tower cost nothing.

    python -m benchmarks.engine_host [--pictures 2000] [--in-flight 64 256] [--profile 25]

Decoding and prompts go the way of a CUDA device (fixed sizes, recorded steps), and features come in
a later step than the one that asked for them; but the recorded steps and the tower return ready
tensors of the right shapes. What remains is
scheduling, filling buffers, gathering, sampling and handing out: the captions a second that no
device can exceed with this host.

- ``engine``: prompts are ready, one thread adds them and steps.
- ``pipeline``: from picture files to texts, through ``Pipeline.replies``, with the pool of
  processes that a GPU has; but they have decoded every file before (``free_worker.py``), and their
  own time is not counted: theirs are other cores. A decode step takes 10 ms. By the clock it says
  little on few cores.
- ``media``, ``prompt``: reading and cutting pictures, and writing prompts, on one thread. A worker
  makes as many media a second.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.cpu_speed import now
from benchmarks.gpu_captions import make_pictures, provenance
from benchmarks.gpu_subjects import PROMPT
from k3vl.config import checkpoint_path, load_config, load_media_config
from k3vl.kernels.argmax import argmax
from k3vl.lm.decode import StaticDecode
from k3vl.lm.engine import Engine, EngineConfig
from k3vl.lm.local import LocalBackend
from k3vl.lm.passes import Passes
from k3vl.lm.prompts import StaticPrompts
from k3vl.lm.residual import PlainStream
from k3vl.load import load_chat_defaults
from k3vl.pipeline import Pipeline
from k3vl.types import MediaPart, Message, SamplingParams, TextPart
from k3vl.vision import pool
from k3vl.vision.processor import MediaProcessor
from k3vl.vision.workers import Worker
from k3vl.xtml.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k3vl.types import EncoderItem, Prompt

NEW = 12
SAMPLING = SamplingParams(max_tokens=NEW)
STEP_SECONDS = 0.01
"""Of a decode step of the pipeline's engine. One that takes no time is run for the few requests
that are ready, again and again, which no device does."""


class FreeModel:
    """Says the same token always, at no cost."""

    stream = PlainStream

    def __init__(self, config: Any, token_id: int) -> None:
        self.config = config
        self.kernels = SimpleNamespace(row_independent=False, recordable=True, argmax=argmax)
        self.embedding = torch.zeros(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
        self._logits = torch.zeros(1, config.vocab_size)
        self._logits[0, token_id] = 1.0

    def __call__(self, batch: Any, cache: Any) -> torch.Tensor:
        return self.logits(batch.token_ids, batch.logit_rows)

    def advance(self, stream: PlainStream, batch: Any, cache: Any) -> torch.Tensor:
        return stream.first

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        return self._logits.expand(len(hidden if rows is None else rows), -1)


class FreeEncoder:
    """Features of nothing."""

    def __init__(self, width: int) -> None:
        self._rows = torch.zeros(4096, width, dtype=torch.bfloat16)

    def encode(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        return [self._rows[: item.num_tokens] for item in items]


class EncodeLater:
    """As on a stream of its own: what a step starts is there in a later one."""

    beside = True

    def __init__(self, encoder: FreeEncoder) -> None:
        self.seconds, self._encoder, self._made = 0.0, encoder, []

    def start(self, wanted: Any) -> None:
        rows = self._encoder.encode([item for _, item in wanted])
        self._made += [(feature, made) for (feature, _), made in zip(wanted, rows, strict=True)]

    def take(self, *, wait: bool) -> Any:
        made, self._made = self._made, []
        return made

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class Recorded:
    """A step that was done once: its result, at no cost, though perhaps after a while."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def make(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        out = step().clone()

        def again() -> torch.Tensor:
            if self._seconds:
                time.sleep(self._seconds)
            return out

        return again


def free_engine(in_flight: int, *, step_seconds: float = 0.0) -> Engine:
    """An engine whose model and tower cost nothing; a decode step takes so long."""
    config = load_config(checkpoint_path("demo"))
    token_id = load_tokenizer(checkpoint_path("demo")).encode_segment("a", False)[0]
    model = FreeModel(config.text, token_id)
    settings = EngineConfig(reuse=False, max_requests=in_flight, num_threads=1)
    encoder = FreeEncoder(config.text.hidden_size)
    engine = Engine(model, encoder, settings, stop_ids=(), encoding=EncodeLater)
    engine.decoder = StaticDecode(model, engine.cache, Recorded(step_seconds))
    engine.prompts = StaticPrompts(model, engine.cache, Recorded())
    engine.passes = Passes.of(settings, row_independent=False, most_rows=engine.prompts.most_rows)
    return engine


class FreeWorker(Worker):
    """A worker that has decoded everything before."""

    def _start(self, files: tuple[int, ...]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.free_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=files,
        )


def free_pipeline(in_flight: int) -> Pipeline:
    """The whole way around such an engine."""
    directory = checkpoint_path("demo")
    pool.Worker = FreeWorker  # type: ignore[misc]
    return Pipeline(
        processor=MediaProcessor(load_media_config(directory)),
        bulk_processor=pool.PooledProcessor(load_media_config(directory)),
        tokenizer=load_tokenizer(directory),
        backend=LocalBackend(free_engine(in_flight, step_seconds=STEP_SECONDS)),
        media_pad_id=load_config(directory).media_placeholder_token_id,
        defaults=load_chat_defaults(directory),
        name="free",
    )


def run_engine(engine: Engine, prompts: list[Prompt], in_flight: int) -> None:
    """Caption all."""
    made = 0

    def sink(token: Any) -> None:
        nonlocal made
        made += 1

    waiting = list(reversed(prompts))
    while waiting or engine.jobs:
        while waiting and len(engine.jobs) < in_flight:
            engine.add(len(waiting), waiting.pop(), SAMPLING, sink)
        engine.step()
    assert made == NEW * len(prompts)


def measure(paths: list[Path], in_flights: list[int], rounds: int, shown: int) -> dict[str, Any]:
    """Captions a second of every part, by medians: on a busy machine processor time tells more."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}

    def note(name: str, run: Callable[[], object]) -> None:
        run()  # compiles, and makes the sizes of a step ready
        seconds = []
        for _ in range(rounds):
            begin = now()
            run()
            seconds.append(now() - begin)
        clock, processor = (len(paths) / np.median(seconds, axis=0)).tolist()
        found[name] = {"by_the_clock": clock, "of_processor_time": processor}
        print(f"{name}: {clock:.0f} a second by the clock, {processor:.0f} of processor time")

    with free_pipeline(max(in_flights)) as pipeline:
        requests = [
            pipeline.request(
                [Message(role="user", parts=(MediaPart("image", path), TextPart(PROMPT)))],
                sampling=SAMPLING,
            )
            for path in paths
        ]
        media = [pipeline.processor.process(path) for path in paths]
        prompts = [
            pipeline.assemble(request, [each]).prompt
            for request, each in zip(requests, media, strict=True)
        ]

        asked = list(zip(requests, media, strict=True))
        note("media", lambda: [pipeline.processor.process(path) for path in paths])
        note("prompt", lambda: [pipeline.assemble(request, [each]) for request, each in asked])
        for in_flight in in_flights:
            engine = free_engine(in_flight)
            note(f"engine, {in_flight}", lambda e=engine, n=in_flight: run_engine(e, prompts, n))
            if shown:
                profiler = cProfile.Profile()
                profiler.runcall(run_engine, engine, prompts, in_flight)
                pstats.Stats(profiler).sort_stats("tottime").print_stats(shown)
            note(
                f"pipeline, {in_flight}",
                lambda n=in_flight: list(pipeline.replies(requests, in_flight=n)),
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", type=int, default=0, help="functions to show")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = make_pictures(Path(folder), options.pictures)
        found = measure(paths, options.in_flight, options.rounds, options.profile)
    if options.json:
        record = provenance() | {"captions_per_second": found, "new_tokens": NEW}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
