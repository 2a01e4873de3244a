"""Captions a second: the captioner against a loop that asks for one caption at a time.

Both use one engine in one process, without its encoder cache, over the same folder of pictures in
mixed sizes and formats, in turns, so that a busy machine is busy for both::

    python benchmarks/captioner.py --pictures 240 --rounds 2 --json captioner.json

The engine's idle time is what passes with no request in it while the run still has pictures to
bring, in the last 80 % of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from k3vl.app.captioning.engines import LocalEngine
from k3vl.app.captioning.files import Choice
from k3vl.app.captioning.journal import Journal
from k3vl.app.captioning.listing import Listing
from k3vl.app.captioning.media import MediaLoader
from k3vl.app.captioning.outputs import JsonLinesOutput
from k3vl.app.captioning.prompts import Prompts
from k3vl.app.captioning.run import Counts, Plan, Run
from k3vl.app.captioning.tables import ColumnMap
from k3vl.lm.engine import EngineConfig
from k3vl.pipeline import Pipeline
from k3vl.types import MediaPart, Message, SamplingParams, TextPart

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SAMPLING = SamplingParams(max_tokens=64)
PROMPT = "Describe the image."


def make_pictures(folder: Path, count: int) -> list[Path]:
    """Crops of the examples in sizes from 160 to 2000 pixels, as JPEG, PNG and WebP."""
    rng = random.Random(0)
    examples = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".png", ".jpg"))
    paths = []
    for number in range(count):
        with Image.open(rng.choice(examples)) as opened:
            image = opened.convert("RGB")
        left, top = (rng.uniform(0, 0.15) * side for side in image.size)
        right, bottom = (side * rng.uniform(0.85, 1.0) for side in image.size)
        width = round(160 * 12.5 ** rng.random())
        height = round(width * rng.uniform(0.6, 1.5))
        image = image.resize((width, height), box=(left, top, right, bottom))
        path = folder / f"{number:04d}.{rng.choice(('jpg', 'jpg', 'jpg', 'png', 'webp'))}"
        image.save(path)
        paths.append(path)
    return paths


class WatchedBackend:
    """The engine's backend, with a clock on how many requests are in it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._inside = 0
        self.changes: list[tuple[float, int]] = []

    def submit(self, prompt: Any, sampling: Any, sink: Any) -> int:
        """As the backend's; notes the beginning and the end."""
        self._note(1)

        def watched(item: Any) -> None:
            if isinstance(item, Exception) or item.finish is not None:
                self._note(-1)
            sink(item)

        return self._backend.submit(prompt, sampling, watched)

    def _note(self, change: int) -> None:
        with self._lock:
            self._inside += change
            self.changes.append((time.perf_counter(), self._inside))

    def cancel(self, request_id: int) -> None:
        """As the backend's."""
        self._backend.cancel(request_id)

    def close(self) -> None:
        """As the backend's."""
        self._backend.close()

    def idle_share(self, start: float, end: float) -> float:
        """Share of the last 80 % of a run that passed with nothing in the engine."""
        begin = start + 0.2 * (end - start)
        idle, inside, since = 0.0, 0, start
        for at, now_inside in [*self.changes, (end, 0)]:
            if inside == 0:
                idle += max(0.0, min(at, end) - max(since, begin))
            inside, since = now_inside, at
        return idle / (end - begin)


@dataclass(slots=True)
class Quiet:
    """Watches nothing but the rows."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def row(self, row: dict[str, Any], thumbnail: bytes | None) -> None:
        """Keep it."""
        self.rows.append(row)

    def tick(self, counts: Counts) -> None:
        """Nothing."""


def one_at_a_time(pipeline: Pipeline, paths: list[Path]) -> tuple[float, list[str]]:
    """Seconds and captions of the plain loop."""
    captions = []
    start = time.perf_counter()
    for path in paths:
        message = Message(role="user", parts=(MediaPart("image", path), TextPart(PROMPT)))
        captions.append(pipeline.reply([message], sampling=SAMPLING).content.strip())
    return time.perf_counter() - start, captions


def captioner(
    pipeline: Pipeline, folder: Path, place: Path, watched: WatchedBackend
) -> tuple[float, list[str], float]:
    """Seconds, captions and the idle share of the engine; journal and output are included."""
    listing = Listing(arguments=(str(folder),), choice=Choice(), columns=ColumnMap({}))
    watcher = Quiet()
    watched.changes.clear()
    start = time.perf_counter()
    output = JsonLinesOutput(place / "out.jsonl")
    with Journal(place / "journal", {}, "skip") as journal:
        plan = Plan(
            listing=listing,
            loader=MediaLoader(pipeline.processor),
            prompts=Prompts(sampling=SAMPLING),
            engine=LocalEngine(pipeline),
            journal=journal,
            outputs=[output],
        )
        Run(plan, watcher).go()
        output.finish(journal)
    seconds = time.perf_counter() - start
    # When the last request has gone in, nothing is left to bring.
    last = max(at for (at, inside), (_, before) in _pairs(watched.changes) if inside > before)
    return seconds, [row["caption"] for row in watcher.rows], watched.idle_share(start, last)


def _pairs(changes: list[tuple[float, int]]) -> Any:
    return zip(changes, [(0.0, 0), *changes[:-1]], strict=True)


def main() -> None:
    """Measure and write a JSON record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rounds = []
    with (
        tempfile.TemporaryDirectory() as name,
        Pipeline.load(engine=EngineConfig(reuse=False, num_threads=1)) as pipeline,
    ):
        place = Path(name)
        (place / "in").mkdir()
        paths = make_pictures(place / "in", arguments.pictures)
        watched = WatchedBackend(pipeline.backend)
        pipeline.backend = watched
        one_at_a_time(pipeline, paths[:4])  # warm up
        for number in range(arguments.rounds):
            (place / str(number)).mkdir()
            plain, expected = one_at_a_time(pipeline, paths)
            batched, found, idle = captioner(pipeline, place / "in", place / str(number), watched)
            same = sum(a == b for a, b in zip(expected, found, strict=True))
            rounds.append(
                {
                    "one_at_a_time_per_second": len(paths) / plain,
                    "captioner_per_second": len(paths) / batched,
                    "speedup": plain / batched,
                    "engine_idle_share": idle,
                    "equal_captions": same,
                }
            )
    record = {
        "pictures": arguments.pictures,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "rounds": rounds,
        "median_speedup": statistics.median(r["speedup"] for r in rounds),
    }
    text = json.dumps(record, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
