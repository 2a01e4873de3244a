"""What the caches are worth: the same work with them and without, interleaved in one run.

    python benchmarks/prefix_cache.py [--rounds 5] [--output benchmarks/prefix_cache.json]

Cases: the second turn of a chat about a picture, fifty questions about one picture, and a system
head of 2,000 tokens that requests share. Times are taken through the whole pipeline, media decoding
and rendering included.

An engine that keeps nothing still encodes a picture once for all requests that hold it at the same
time. So fifty questions, 16 at once, are asked of it twice: as they are, and with a salt for each
(``fifty_questions_apart``), which leaves nothing to share: every question pays for its picture.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from functools import partial
from io import BytesIO
from pathlib import Path

import psutil
import torch
from PIL import Image

import k3vl
from k3vl.lm.engine import EngineConfig
from k3vl.load import REUSE_PAGE
from k3vl.pipeline import Pipeline
from k3vl.types import MediaPart, Message, SamplingParams, TextPart

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "examples" / "fox-kite-bus.png"
WARM_UP = 1
NAMES = ("fox", "kite", "bus", "owl", "guitar", "rocket", "turtle", "boat", "tree", "clock")


def user(*parts: TextPart | MediaPart) -> Message:
    return Message(role="user", parts=parts)


def picture(number: int) -> bytes:
    """The example with one pixel changed, so that no cache has seen it."""
    image = Image.open(PICTURE).convert("RGB")
    image.putpixel((number // 1000 % image.width, number // 256_000), (number % 256, 1, 2))
    out = BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


Times = tuple[float, float]
"""Seconds by the clock and of processor time; on a machine that others use the latter tell more."""


def now() -> Times:
    return time.perf_counter(), time.process_time()


def since(begin: Times) -> Times:
    wall, cpu = now()
    return wall - begin[0], cpu - begin[1]


def first_token(pipeline: Pipeline, messages: list[Message]) -> Times:
    """From the call to the first token."""
    begin = now()
    pipeline.reply(messages, sampling=SamplingParams(max_tokens=1))
    return since(begin)


def second_turn(pipeline: Pipeline, number: int) -> Times:
    part = MediaPart("image", picture(number))
    first = user(part, TextPart("Describe the image."))
    answer = Message(role="assistant", parts=(TextPart(pipeline.reply([first]).content),))
    return first_token(pipeline, [first, answer, user(TextPart("Is there a kite in the picture?"))])


def shared_head(pipeline: Pipeline, number: int) -> Times:
    words = " ".join(NAMES[i % 10] for i in range(100))
    head = f"Session {number // 1000}. {words}"
    while len(pipeline.prepare(pipeline.request(_with_head(head))).prompt.token_ids) < 2000:
        head += " " + words
    for question in ("What is this?", "Describe the scene."):
        times = first_token(pipeline, _with_head(head, question))
    return times


def _with_head(head: str, question: str = "Hi") -> list[Message]:
    return [Message(role="system", parts=(TextPart(head),)), user(TextPart(question))]


def fifty_questions(pipeline: Pipeline, number: int, *, apart: bool = False) -> Times:
    part = MediaPart("image", picture(number))
    requests = [
        pipeline.request(
            [user(part, TextPart(f"Is there a {NAMES[i % 10]} in the picture? {i}"))],
            sampling=SamplingParams(max_tokens=8, cache_salt=f"{number} {i}" if apart else None),
        )
        for i in range(50)
    ]
    begin = now()
    for reply in pipeline.replies(requests, in_flight=16):
        assert not isinstance(reply, Exception), reply
    return since(begin)


CASES = {
    "second_turn_448x336": (second_turn, second_turn),
    "shared_head_2000": (shared_head, shared_head),
    "fifty_questions": (fifty_questions, fifty_questions),
    "fifty_questions_apart": (fifty_questions, partial(fifty_questions, apart=True)),
}
"""With caches, and without."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "prefix_cache.json")
    options = parser.parse_args()
    config = {"num_threads": 1, "page_size": REUSE_PAGE}
    process = psutil.Process()
    peak = process.memory_info().rss
    results: dict[str, dict[str, object]] = {}
    with (
        Pipeline.load(device="cpu", engine=EngineConfig(**config)) as warm,
        Pipeline.load(device="cpu", engine=EngineConfig(reuse=False, **config)) as cold,
    ):
        for number, (name, (case_on, case_off)) in enumerate(CASES.items()):
            times: dict[str, list[Times]] = {"on": [], "off": []}
            for i in range(options.rounds + WARM_UP):
                at = 1000 * (number * 100 + i)
                times["on"].append(case_on(warm, at))
                times["off"].append(case_off(cold, at))
                peak = max(peak, process.memory_info().rss)
            results[name] = {}
            for which, unit in enumerate(("seconds", "cpu_seconds")):
                found = {
                    label: [t[which] for t in values[WARM_UP:]] for label, values in times.items()
                }
                on, off = (statistics.median(found[label]) for label in ("on", "off"))
                results[name][unit] = {"on": on, "off": off, "on_over_off": on / off, "all": found}
                print(f"{name}, {unit}: {on:.3f} with caches, {off:.3f} without, {on / off:.1%}")
        stats = warm.stats()
        assert stats is not None
        held = sum(stats.bytes_by_kind.values())
        assert held <= EngineConfig().cache_bytes
        results["memory"] = {
            "budget_bytes": EngineConfig().cache_bytes,
            "held_bytes": held,
            "bytes_by_kind": dict(stats.bytes_by_kind),
            "peak_rss_of_both_engines": peak,
        }
        results["lookups"] = {str(reason): number for reason, number in stats.lookups.items()}
    record = {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
        ).stdout.strip(),
        "hardware": {
            "processor": platform.processor() or platform.machine(),
            "cores": psutil.cpu_count(),
            "load_average": psutil.getloadavg(),
            "threads_of_an_operation": 1,
        },
        "versions": {
            "k3vl": k3vl.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "results": results,
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
