"""Memory of the process and of the cache under random load, for several budgets.

    python benchmarks/memory_under_load.py [--seconds 20] [--budgets 4 16 64]
        [--output benchmarks/memory_under_load.json] [--plot docs/memory-under-load.png]

Every budget (MiB) runs in a process of its own: chats about pictures, fresh captions and long
shared heads, up to 24 at a time, some cancelled. After every step the books are checked and the
bytes that each kind holds, and the process's resident memory, are noted: what it has grown by since
weights and a few requests were there. The cache's buffer is written from the start, so what grows
beyond it is work space. The load is drawn by a seed. Times say nothing; the plot is over steps (it
wants matplotlib, which k3vl does not).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import torch
from PIL import Image

import k3vl
from k3vl.errors import CapacityError
from k3vl.lm.arena import KINDS
from k3vl.lm.engine import Engine, EngineConfig
from k3vl.load import REUSE_PAGE
from k3vl.pipeline import Pipeline
from k3vl.types import MediaPart, Message, SamplingParams, TextPart

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ("fox-kite-bus.png", "shapes.png", "sign.jpg", "three-strawberries.jpg")
MIB = 2**20
AT_ONCE = 24
POINTS = 400
"""Of a curve in the record and the plot; each is the largest value of the steps it stands for."""


def messages(rng: random.Random) -> list[Message]:
    kind = rng.choice(("chat", "chat", "caption", "head"))
    head = " ".join(rng.choice(("red", "green", "blue")) for _ in range(3))
    if kind == "head":
        long = Message(role="system", parts=(TextPart(f"{head} " * 80),))
        return [long, Message(role="user", parts=(TextPart(f"Question {rng.random()}"),))]
    source: Path | bytes = ROOT / "examples" / rng.choice(EXAMPLES)
    if kind == "caption":  # a picture that nobody has seen
        image = Image.open(source).convert("RGB")
        image.putpixel((0, 0), (rng.randrange(256), rng.randrange(256), rng.randrange(256)))
        out = BytesIO()
        image.save(out, "PNG")
        source = out.getvalue()
    question = rng.choice(("Describe the image.", "How many things are there?", "What is it?"))
    turns = [Message(role="user", parts=(MediaPart("image", source), TextPart(question)))]
    for turn in range(rng.randrange(3) if kind == "chat" else 0):
        turns.append(Message(role="assistant", parts=(TextPart(f"A thing, {turn}."),)))
        turns.append(Message(role="user", parts=(TextPart(f"And what else, {turn}?"),)))
    return turns


def load(budget: int, seconds: float, seed: int) -> dict[str, Any]:
    """One budget in this process."""
    process, rng = psutil.Process(), random.Random(seed)
    torch.set_num_threads(1)
    with Pipeline.load(
        device="cpu", engine=EngineConfig(cache_bytes=32 * MIB, num_threads=1)
    ) as pipe:
        shared = pipe.backend._engine  # type: ignore[attr-defined]
        for _ in range(8):  # what libraries take once, and the work space of a pass
            pipe.reply(messages(rng), sampling=SamplingParams(max_tokens=4))
        before = process.memory_info().rss
        config = EngineConfig(cache_bytes=budget, num_threads=1, page_size=REUSE_PAGE)
        encoder, stops = shared.encoding.encoder, tuple(shared.stop_ids)
        engine = Engine(shared.model, encoder, config, stop_ids=stops)
        engine.cache.buffer.fill_(0)
        curves: dict[str, list[int]] = {name: [] for name in (*KINDS, "rss")}
        requests = refused = cancelled = 0
        until = time.monotonic() + seconds
        while time.monotonic() < until or engine.jobs:
            if time.monotonic() < until and len(engine.jobs) < AT_ONCE and rng.random() < 0.5:
                prepared = pipe.prepare(pipe.request(messages(rng)))
                sampling = SamplingParams(max_tokens=rng.randint(1, 60))
                requests += 1
                try:
                    engine.add(requests, prepared.prompt, sampling, lambda _: None)
                except CapacityError:
                    refused += 1
            if engine.jobs and rng.random() < 0.02:
                cancelled += 1
                engine.cancel(rng.choice(list(engine.jobs)))
            engine.step()
            engine.scheduler.check_integrity()
            held = engine.scheduler.arena.units_by_kind()
            assert sum(held.values()) <= engine.scheduler.arena.size
            for kind in KINDS:
                curves[kind].append(held[kind] * engine.scheduler.sizes.unit_bytes)
            curves["rss"].append(process.memory_info().rss - before)
        stats = engine.stats()
        sizes = engine.scheduler.sizes
        most = max(map(sum, zip(*(curves[kind] for kind in KINDS), strict=True)))
        return {
            "budget_bytes": budget,
            "buffer_bytes": sizes.num_units * sizes.unit_bytes,
            "unit_bytes": sizes.unit_bytes,
            "steps": stats.steps,
            "requests": requests,
            "refused": refused,
            "cancelled": cancelled,
            "peak_running": stats.peak_running,
            "preemptions": stats.preemptions,
            "evictions": dict(stats.evictions),
            "hit_tokens": stats.hit_tokens,
            "prompt_tokens": stats.prompt_tokens,
            "most_held_bytes": most,
            "rss_before_bytes": before,
            "rss_peak_over_bytes": max(curves["rss"]),
            "curves": {name: thin(values) for name, values in curves.items()},
        }


def thin(values: list[int]) -> list[int]:
    width = max(1, -(-len(values) // POINTS))
    return [max(values[i : i + width]) for i in range(0, len(values), width)]


def plot(records: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(records), figsize=(4 * len(records), 3), squeeze=False)
    for axis, record in zip(axes[0], records, strict=True):
        curves = {name: [v / MIB for v in values] for name, values in record["curves"].items()}
        across = [i * record["steps"] / len(curves["rss"]) for i in range(len(curves["rss"]))]
        axis.stackplot(across, *(curves[kind] for kind in KINDS), labels=KINDS, linewidth=0)
        axis.plot(
            across, curves["rss"], color="black", linewidth=1, label="process, beyond weights"
        )
        budget = record["budget_bytes"] / MIB
        axis.axhline(budget, color="red", linewidth=0.8, linestyle="--", label="budget")
        axis.set(title=f"budget {budget:g} MiB", xlabel="step", ylim=(0, None))
    axes[0][0].set_ylabel("MiB")
    axes[0][0].legend(fontsize=6, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--budgets", type=float, nargs="+", default=[4, 16, 64], help="MiB")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/memory_under_load.json")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(load(options.one, options.seconds, seed=1)))
        return
    records = []
    for budget in options.budgets:
        command = [sys.executable, __file__, "--one", str(int(budget * MIB))]
        done = subprocess.run(
            [*command, "--seconds", str(options.seconds)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        records.append(json.loads(done.stdout.splitlines()[-1]))
        shown = {name: value for name, value in records[-1].items() if name != "curves"}
        print(json.dumps(shown))
    if options.plot:
        plot(records, options.plot)
    record = {
        "versions": {"k3vl": k3vl.__version__, "torch": torch.__version__},
        "seconds": options.seconds,
        "results": records,
    }
    options.output.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
