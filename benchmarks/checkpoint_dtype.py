"""What compressed checkpoints cost in accuracy: second turns about pictures, behind a hit.

    python benchmarks/checkpoint_dtype.py [--pictures 48] [--output FILE.json]

Every conversation is answered by three engines that differ in ``checkpoint_dtype`` alone. The
second turn goes on from a checkpoint of the first; its logits up to the first token that differs,
and its greedy tokens, are compared with those of the exact engine, which are a cold run's. No times
are taken.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

import k3vl
from k3vl.lm.engine import Engine, EngineConfig
from k3vl.lm.packing import states_as
from k3vl.load import REUSE_PAGE
from k3vl.pipeline import Pipeline
from k3vl.types import MediaPart, Message, SamplingParams, TextPart

if TYPE_CHECKING:
    from k3vl.lm.backend import Token
    from k3vl.lm.packing import CheckpointDtype
    from k3vl.lm.sampler import Forced, Sampler
    from k3vl.types import Prompt

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "k3vl" / "demo" / "heldout_quick"
QUESTIONS = ("Describe the image.", "How many things are there?", "What is on the left?")


@dataclass(slots=True, kw_only=True)
class Asked:
    """Keeps what a sampler was shown and what it chose."""

    inner: Sampler | Forced
    logits: list[torch.Tensor] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: None = None

    def choose(self, logits: torch.Tensor) -> int:
        self.logits.append(logits.clone())
        self.ids.append(self.inner.choose(logits))
        return self.ids[-1]


def one_by_one(logits: torch.Tensor, asked: list[Asked]) -> list[int]:
    """In place of ``k3vl.lm.decode.choose``, so that everybody is shown the logits."""
    return [one.choose(row) for row, one in zip(logits, asked, strict=True)]


class Runner:
    """An engine on this thread."""

    def __init__(self, pipeline: Pipeline, dtype: CheckpointDtype) -> None:
        shared = pipeline.backend._engine  # type: ignore[attr-defined]
        config = EngineConfig(num_threads=1, page_size=REUSE_PAGE, checkpoint_dtype=dtype)
        self.engine = Engine(shared.model, shared.encoder, config, stop_ids=tuple(shared.stop_ids))
        self.count = 0
        self.errors: list[float] = []
        self.packing = states_as(dtype)
        save = self.engine.checkpoints.save

        def measured(slot: tuple[int, ...], units: tuple[int, ...]) -> None:
            save(slot, units)
            if self.packing is not None:
                self.errors.append(self._error(slot))

        self.engine.checkpoints.save = measured  # type: ignore[method-assign]

    def _error(self, slot: tuple[int, ...]) -> float:
        cache = self.engine.cache
        states = cache.cell_views[0][cache.cells([slot]).flatten()]
        assert self.packing is not None
        back = self.packing.unpack(self.packing.pack(states), states.shape[-1])
        return float((back - states).norm() / states.norm())

    def ask(self, prompt: Prompt, max_tokens: int) -> tuple[Asked, int]:
        self.count += 1
        tokens: list[Token] = []
        self.engine.add(self.count, prompt, SamplingParams(max_tokens=max_tokens), tokens.append)  # type: ignore[arg-type]
        job = self.engine.jobs[self.count]
        asked = job.sampler = Asked(inner=job.sampler)  # type: ignore[arg-type, assignment]
        while self.engine.jobs:
            self.engine.step()
        return asked, tokens[0].cached_tokens  # type: ignore[return-value]


def conversations(pipeline: Pipeline, count: int) -> list[tuple[Prompt, Prompt]]:
    """First turns and, with the demo model's own answers in them, second turns."""
    made = []
    files = sorted(FOLDER.glob("*.webp"))
    for i, path in enumerate(files[:: max(1, len(files) // count)][:count]):
        first = Message(role="user", parts=(MediaPart("image", path), TextPart(QUESTIONS[0])))
        said = Message(role="assistant", parts=(TextPart(pipeline.reply([first]).content),))
        second = Message(role="user", parts=(TextPart(QUESTIONS[1 + i % 2]),))
        prompts = [
            pipeline.prepare(pipeline.request(messages)).prompt
            for messages in ([first], [first, said, second])
        ]
        made.append((prompts[0], prompts[1]))
    return made


def compare(want: list[Asked], got: list[Asked]) -> dict[str, float]:
    logits, argmax = [], []
    for a, b in zip(want, got, strict=True):
        pairs = zip(a.ids, b.ids, strict=False)
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.ids), len(b.ids)))
        for x, y in zip(a.logits[: same + 1], b.logits[: same + 1], strict=False):
            logits.append(float((x - y).norm() / x.norm()))
            argmax.append(int(x.argmax()) != int(y.argmax()))
    return {
        "logits_relative_error_mean": sum(logits) / len(logits),
        "logits_relative_error_max": max(logits),
        "next_tokens_compared": len(logits),
        "next_tokens_changed": sum(argmax),
        "answers_compared": len(want),
        "answers_changed": sum(a.ids != b.ids for a, b in zip(want, got, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=48)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/checkpoint_dtype.json")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    torch.set_num_threads(1)
    with Pipeline.load(device="cpu", engine=EngineConfig(num_threads=1)) as pipeline:
        chats = conversations(pipeline, options.pictures)
        watching = patch("k3vl.lm.decode.choose", one_by_one)
        watching.start()
        exact: list[Asked] = []
        for dtype in ("exact", "bfloat16", "int8"):
            runner, answers, cached = Runner(pipeline, dtype), [], 0
            for first, second in chats:
                runner.ask(first, 64)
                asked, hit = runner.ask(second, 64)
                answers.append(asked)
                cached += hit
            exact = exact or answers
            sizes = runner.engine.scheduler.sizes
            results[dtype] = {
                "checkpoint_bytes": sizes.units_per_checkpoint * sizes.unit_bytes,
                "prompt_tokens": sum(len(second.token_ids) for _, second in chats),
                "cached_tokens": cached,
                "state_relative_error_mean": sum(runner.errors) / max(1, len(runner.errors)),
                "state_relative_error_max": max(runner.errors, default=0.0),
                **compare(exact, answers),
            }
            print(dtype, json.dumps(results[dtype]))
        watching.stop()
    record = {
        "versions": {"k3vl": k3vl.__version__, "torch": torch.__version__},
        "results": results,
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
