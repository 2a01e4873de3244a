"""Accuracy of a checkpoint on held-out scenes, through the real pipeline.

Every scene is written to disk as a PNG, JPEG or MP4 file and goes through media processor, chat
format, engine and parser. Beside each figure stands its 95 per cent interval (Wilson), and for some
sets the same questions about a grey picture.

::

    python -m k3vl.demo.evaluate --atlas FOLDER --items 500 --output figures.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

import k3vl
from k3vl.config import checkpoint_path
from k3vl.demo import metrics
from k3vl.demo.atlas import HELD, TRAIN, load_atlas
from k3vl.demo.grammar import NUMBERS
from k3vl.demo.paint import Painter, save_clip
from k3vl.demo.scene import SceneMaker, SceneOptions
from k3vl.demo.tasks import Questioner
from k3vl.demo.words import Printer, find_fonts, word_list
from k3vl.pipeline import Pipeline, Reply
from k3vl.types import ChatOptions, MediaPart, Message, SamplingParams, TextPart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k3vl.demo.atlas import Atlas
    from k3vl.demo.scene import Scene
    from k3vl.demo.turns import Turn
    from k3vl.types import Request

_CLIP_RATE = 2  # frames a second; the shipped configuration looks at all of them
_GREY = (128, 128, 128)
_MAX_TOKENS = 80

_ONE = SceneOptions(items=1, shapes=False, text=False)
_SMALL = SceneOptions(items=1, shapes=False, text=False, small=True)
_TEXT = SceneOptions(items=1, text=True, digits=False)
_ANY = SceneOptions()


def _several(count: int) -> SceneOptions:
    return SceneOptions(items=count, repeat=False, shapes=False, text=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """One row of the table.

    Attributes:
        task: which question is asked.
        style: which drawings are used.
        size: width and height of the files; None draws one between 56 and 448 pixels each time.
        scenes: options, one after the other.
        blank: also ask about a grey picture.
        held_font: print text in a font that training never saw.
        options: chat options; None takes the checkpoint's.
        suffix: file type.
    """

    name: str
    task: str
    style: str = TRAIN
    size: tuple[int, int] | None = (224, 224)
    scenes: tuple[SceneOptions, ...] = (_ANY,)
    blank: bool = False
    held_font: bool = False
    options: ChatOptions | None = None
    suffix: str = ".png"


@dataclass(frozen=True, slots=True)
class Case:
    """A file and a question about it."""

    path: Path
    scene: Scene
    turn: Turn


def suites(atlas: Atlas) -> list[Suite]:
    """The table for the styles that an atlas holds."""
    unseen = [style for style in atlas.styles if style not in (TRAIN, HELD)]
    four = (_several(3), _several(4))
    thinking = ChatOptions(thinking=True, thinking_effort="max")
    out = []
    for style in (TRAIN, HELD, *unseen):
        small = (112, 112)
        out += [
            Suite(name=f"name, {style}", task="name", style=style, scenes=(_ONE,), blank=True),
            Suite(
                name=f"name 112 px, {style}", task="name", style=style, size=small, scenes=(_SMALL,)
            ),
        ]
    out += [
        Suite(name=f"caption 3-4, {style}", task="caption", style=style, scenes=four, blank=True)
        for style in (TRAIN, *unseen)
    ]
    out += [
        Suite(name="caption 3-4, any size", task="caption", size=None, scenes=four, suffix=".jpg"),
        Suite(name="caption 3-4, thinking", task="caption", scenes=four, options=thinking),
    ]
    out += [
        Suite(name=task, task=task, blank=True)
        for task in ("count", "total", "relation", "at", "where", "yesno", "colour")
    ]
    for style in unseen:
        out += [
            Suite(name=f"yesno, {style}", task="yesno", style=style),
            Suite(name=f"relation, {style}", task="relation", style=style),
        ]
    out += [
        Suite(name="text, known fonts", task="text", scenes=(_TEXT,)),
        Suite(name="text, unseen font", task="text", scenes=(_TEXT,), held_font=True),
    ]
    for style in (TRAIN, *unseen):
        for frames in (4, 8):
            out.append(
                Suite(
                    name=f"video {frames} frames, {style}",
                    task="video",
                    style=style,
                    size=(112, 112),
                    scenes=(SceneOptions(frames=frames),),
                    blank=style == TRAIN and frames == 4,
                    suffix=".mp4",
                )
            )
    return out


class Evaluator:
    """Runs suites.

    Args:
        pipeline: with the checkpoint to measure.
        atlas: the drawings.
        folder: where files are written.
        items: questions of a suite.
    """

    def __init__(self, pipeline: Pipeline, atlas: Atlas, folder: Path, items: int) -> None:
        self._pipeline = pipeline
        self._atlas = atlas
        self._folder = folder
        self._items = items
        self._reader = metrics.CaptionReader(atlas.names)
        self._unseen = word_list(atlas.names, unseen=True)

    def run(self, suite: Suite, seed: int) -> dict[str, Any]:
        """Make the files of a suite, ask, and score."""
        cases = list(self._cases(suite, seed))
        answers = self._ask(suite, [case.path for case in cases], cases)
        result = self._score(suite, cases, answers)
        if suite.blank:
            grey = [self._grey(case.path) for case in cases]
            result["blank"] = self._score(suite, cases, self._ask(suite, grey, cases))["exact"]
        result["examples"] = [
            {"question": case.turn.question, "reference": case.turn.answer, "answer": answer}
            for case, answer in list(zip(cases, answers, strict=True))[:5]
        ]
        return result

    # ------------------------------------------------------------------ files

    def _cases(self, suite: Suite, seed: int) -> Iterator[Case]:
        maker = SceneMaker(
            self._atlas,
            seed,
            style=suite.style,
            printed=self._unseen if suite.task == "text" else None,
        )
        questions = Questioner(maker)
        fonts = find_fonts(self._atlas.folder, held=suite.held_font) if suite.task == "text" else ()
        fonts = fonts or find_fonts(self._atlas.folder)
        painter = Painter(self._atlas, Printer(fonts, seed), seed)
        rng = random.Random(seed)  # noqa: S311 - scenes, not secrets
        made = 0
        while made < self._items:
            scene = maker.scene(suite.scenes[made % len(suite.scenes)])
            turn = questions.ask(suite.task, scene)
            if turn is None:
                continue
            width, height = suite.size or (rng.randint(112, 448), rng.randint(112, 448))
            path = self._folder / f"{seed}-{made}{suite.suffix}"
            frames = painter.frames(scene, width, height)
            if suite.suffix == ".mp4":
                save_clip(frames, path, _CLIP_RATE)
            else:
                frames[0].save(path, quality=90)
            made += 1
            yield Case(path, scene, turn)

    def _grey(self, path: Path) -> Path:
        """A grey file of the same kind and size."""
        grey = path.with_name(f"grey-{path.name}")
        if path.suffix == ".mp4":
            save_clip([Image.new("RGB", (112, 112), _GREY)] * 4, grey, _CLIP_RATE)
        else:
            with Image.open(path) as image:
                Image.new("RGB", image.size, _GREY).save(grey)
        return grey

    # ------------------------------------------------------------------ answers

    def _ask(self, suite: Suite, paths: Sequence[Path], cases: Sequence[Case]) -> list[str]:
        """Contents of all replies; a failed request counts as an empty answer."""
        requests = (
            self._request(suite, path, case.turn.question)
            for path, case in zip(paths, cases, strict=True)
        )
        return [
            reply.content if isinstance(reply, Reply) else ""
            for reply in self._pipeline.replies(requests)
        ]

    def _request(self, suite: Suite, path: Path, question: str) -> Request:
        part = MediaPart("video" if suite.suffix == ".mp4" else "image", path)
        message = Message(role="user", parts=(part, TextPart(question)))
        sampling = SamplingParams(max_tokens=_MAX_TOKENS)
        return self._pipeline.request([message], options=suite.options, sampling=sampling)

    def _score(self, suite: Suite, cases: Sequence[Case], answers: Sequence[str]) -> dict[str, Any]:
        pairs = [(a, case.turn.answer) for a, case in zip(answers, cases, strict=True)]
        told = [a == r for a, r in pairs]
        plain = [metrics.without_articles(a) == metrics.without_articles(r) for a, r in pairs]
        out: dict[str, Any] = {"exact": _share(told), "without articles": _share(plain)}
        if suite.task == "name":
            out["family"] = _share([metrics.same_family(a, r) for a, r in pairs])
        if suite.task == "caption":
            out["F1"] = metrics.f1(
                (Counter(item.name for item in case.scene.items), self._reader.read(answer))
                for answer, case in zip(answers, cases, strict=True)
            )
        if suite.task in ("count", "total"):
            out["by number"] = _by_number(pairs)
        if suite.task == "text":
            words = set(self._unseen)
            for kind, wanted in (("words", True), ("codes", False)):
                own = [(a, r) for a, r in pairs if (r in words) == wanted]
                out[kind] = _share([a == r for a, r in own])
                out[f"{kind} CER"] = metrics.character_errors(own)
        return out


def _share(right: Sequence[bool]) -> dict[str, Any]:
    share = metrics.Share(sum(right), len(right))
    return {"share": share.value, "interval": share.interval, "n": share.total}


def _by_number(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Accuracy for every true number, and their mean: most things occur once."""
    out: dict[str, Any] = {}
    for number in NUMBERS:
        own = [a == r for a, r in pairs if r.lower().rstrip(".") == number]
        if own:
            out[number] = _share(own)
    out["balanced"] = sum(entry["share"] for entry in out.values()) / len(out)
    return out


def table_row(name: str, result: dict[str, Any]) -> str:
    """One line of the printed table."""
    exact, plain = result["exact"], result["without articles"]
    low, high = exact["interval"]
    cells = [
        f"{name:28s} {exact['n']:5d}  {100 * exact['share']:5.1f} "
        f"[{100 * low:5.1f}, {100 * high:5.1f}]  {100 * plain['share']:5.1f}"
    ]
    if "blank" in result:
        cells.append(f"blank {100 * result['blank']['share']:.1f}")
    if "family" in result:
        cells.append(f"family {100 * result['family']['share']:.1f}")
    if "F1" in result:
        cells.append(f"F1 {result['F1']:.3f}")
    if "by number" in result:
        cells.append(f"balanced {100 * result['by number']['balanced']:.1f}")
    cells += [
        f"{kind} {100 * result[kind]['share']:.1f} CER {result[f'{kind} CER']:.3f}"
        for kind in ("words", "codes")
        if kind in result
    ]
    return "  ".join(cells)


def provenance(checkpoint: str, items: int) -> dict[str, Any]:
    """What was measured, with what: weights by their SHA-256, versions, machine."""
    directory = checkpoint_path(checkpoint)
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return {
        "weights_sha256": digest.hexdigest(),
        "items": items,
        "versions": {
            "k3vl": k3vl.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m k3vl.demo.evaluate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--atlas", type=Path, required=True, help="folder with sheets and fonts")
    parser.add_argument("--checkpoint", default="demo", help="directory, or 'demo'")
    parser.add_argument("--items", type=int, default=200, help="questions of a row")
    parser.add_argument("--only", default="", help="rows whose name begins so")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    atlas = load_atlas(args.atlas)
    results: dict[str, Any] = {}
    start = time.monotonic()
    with Pipeline.load(args.checkpoint) as pipeline:
        for seed, suite in enumerate(suites(atlas), 50_000):
            if not suite.name.startswith(args.only):
                continue
            with tempfile.TemporaryDirectory() as folder:
                result = Evaluator(pipeline, atlas, Path(folder), args.items).run(suite, seed)
            results[suite.name] = result
            print(table_row(suite.name, result), flush=True)  # noqa: T201 - a command's output
            if args.output:
                report = provenance(args.checkpoint, args.items) | {
                    "seconds": round(time.monotonic() - start, 1),
                    "results": results,
                }
                args.output.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
