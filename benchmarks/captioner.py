"""Captions a second: the captioner against a loop that asks for one caption at a time.

Both use one engine in one process, without its encoder cache, over the same folder of pictures in
mixed sizes, formats and modes, in turns, so that a busy machine is busy for both::

    python benchmarks/captioner.py --json captioner.json

The engine's idle time is its own counter: seconds with no request in it. What passed between the
moment when a fifth of the requests had come in and the last one's arrival is time in which the run
left it without input; after that there is nothing more to bring.
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
ENDINGS = ("jpg", "jpg", "jpg", "jpg", "png", "webp", "gif", "tif", "bmp")


def make_pictures(folder: Path, count: int) -> list[Path]:
    """Crops of the examples, 160 to 2000 pixels wide, in every format and mode that people have."""
    rng = random.Random(0)
    examples = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".png", ".jpg"))
    paths = []
    for number in range(count):
        with Image.open(rng.choice(examples)) as opened:
            image = opened.convert(rng.choice(("RGB", "RGB", "RGB", "RGBA", "L")))
        left, top = (rng.uniform(0, 0.15) * side for side in image.size)
        right, bottom = (side * rng.uniform(0.85, 1.0) for side in image.size)
        width = round(160 * 12.5 ** rng.random())
        height = round(width * rng.uniform(0.6, 1.5))
        image = image.resize((width, height), box=(left, top, right, bottom))
        endings = ("png", "webp", "tif") if image.mode == "RGBA" else ENDINGS
        path = folder / f"{number:04d}.{rng.choice(endings)}"
        image.save(path)
        paths.append(path)
    return paths


class WatchedBackend:
    """The engine's backend; notes the time and the engine's idle seconds at every arrival."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self.arrivals: list[tuple[float, float]] = []

    def submit(self, prompt: Any, sampling: Any, sink: Any) -> int:
        number = self._backend.submit(prompt, sampling, sink)
        with self._lock:
            self.arrivals.append((time.perf_counter(), self._backend.stats().idle_seconds))
        return number

    def cancel(self, request_id: int) -> None:
        self._backend.cancel(request_id)

    def stats(self) -> Any:
        return self._backend.stats()

    def close(self) -> None:
        self._backend.close()

    def idle_seconds(self) -> tuple[float, float]:
        """Idle seconds and all seconds, from a fifth of the arrivals to the last."""
        arrivals = sorted(self.arrivals)
        (begin, idle_before), (end, idle_after) = arrivals[len(arrivals) // 5], arrivals[-1]
        return idle_after - idle_before, end - begin


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
) -> tuple[float, list[str]]:
    """Seconds and captions; journal and output are included."""
    listing = Listing(arguments=(str(folder),), choice=Choice(), columns=ColumnMap({}))
    watcher = Quiet()
    watched.arrivals.clear()
    start = time.perf_counter()
    output = JsonLinesOutput(place / "out.jsonl")
    with Journal(place / "journal", {}, "skip") as journal:
        plan = Plan(
            listing=listing,
            loader=MediaLoader(pipeline.processor),
            prompts=Prompts(sampling=SAMPLING),
            engine=LocalEngine(pipeline, min_confidence=0),
            journal=journal,
            outputs=[output],
        )
        Run(plan, watcher).go()
        output.finish(journal)
    seconds = time.perf_counter() - start
    return seconds, [row["caption"] for row in watcher.rows]


def main() -> None:
    """Measure and write a JSON record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=1)
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
            before = watched.stats().stage_seconds
            batched, found = captioner(pipeline, place / "in", place / str(number), watched)
            stages = watched.stats().stage_seconds
            idle, watched_seconds = watched.idle_seconds()
            same = sum(a == b for a, b in zip(expected, found, strict=True))
            rounds.append(
                {
                    "one_at_a_time_per_second": len(paths) / plain,
                    "captioner_per_second": len(paths) / batched,
                    "speedup": plain / batched,
                    "engine_idle_seconds": idle,
                    "of_seconds": watched_seconds,
                    "captioner_stage_seconds": {n: stages[n] - before[n] for n in stages},
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
