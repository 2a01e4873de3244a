"""``k3vl eval``: right answers of held-out questions, through the whole pipeline, as a table."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import track

from k3vl.app.evaluation.ask import Asked, LocalAsked, RemoteAsked
from k3vl.app.evaluation.labels import read_labels
from k3vl.app.evaluation.report import provenance, seconds_text, table
from k3vl.app.evaluation.run import ask_all, rows_of
from k3vl.app.extras import needs_extra
from k3vl.app.output import json_line
from k3vl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k3vl.app.evaluation.labels import Question
    from k3vl.app.evaluation.run import Result
    from k3vl.load import Device


_FILE_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """The flags of ``k3vl eval``.

    Attributes:
        folder: questions of one's own; None without.
        atlas: drawings that scenes are composed of; with neither, the questions of the package.
        items: questions of a split, of those composed.
        only: splits whose name begins so.
        blanks: of each split, how many questions are also asked about a grey picture.
        output: JSON with all figures; answers: JSON Lines with all answers.
        base_url: an endpoint; None is the embedded engine.
    """

    folder: Path | None = None
    atlas: Path | None = None
    items: int = 200
    only: str = ""
    blanks: int = 100
    output: Path | None = None
    answers: Path | None = None
    model: str = "demo"
    device: Device = "auto"
    tensor_parallel: int = 1
    base_url: str | None = None
    api_key: str | None = None
    in_flight: int = 16


def evaluate(options: EvalOptions) -> int:
    """Ask, print, write; returns how many questions have no answer.

    Raises:
        ConfigError: there are no questions, or a result cannot be written.
        K3VLError: the model cannot be loaded.
    """
    seconds = {"load": 0.0, "make files": 0.0, "ask": 0.0}
    start = time.perf_counter()
    results: list[Result] = []
    with ExitStack() as stack:
        asked = _asked(stack, options)
        seconds["load"] = time.perf_counter() - start
        batches = _batches(options)
        while True:
            start = time.perf_counter()
            questions = next(batches, None)
            seconds["make files"] += time.perf_counter() - start
            if questions is None:
                break
            start = time.perf_counter()
            answers = ask_all(questions, asked, blanks=options.blanks, in_flight=options.in_flight)
            splits = dict.fromkeys(question.split for question in questions)
            what = splits.popitem()[0] if len(splits) == 1 else f"{len(splits)} splits"
            results += track(answers, what, len(questions), console=Console(stderr=True))
            seconds["ask"] += time.perf_counter() - start
    if not results:
        raise ConfigError(f"no split begins with {options.only!r}")
    _report(options, results, seconds)
    return sum(result.error is not None for result in results)


def _asked(stack: ExitStack, options: EvalOptions) -> Asked:
    """Load the model, or reach the endpoint."""
    if options.base_url is None:
        from k3vl.pipeline import Pipeline

        pipeline = Pipeline.load(
            options.model, device=options.device, tensor_parallel=options.tensor_parallel
        )
        return LocalAsked(stack.enter_context(pipeline))
    from k3vl.app.inspect import media_config
    from k3vl.vision.processor import MediaProcessor

    with needs_extra("caption", "--base-url"):
        from k3vl.app.captioning.remote import RemoteEngine

    engine = RemoteEngine(
        options.base_url,
        options.model,
        MediaProcessor(media_config("k3")),
        api_key=options.api_key,
        parallel=options.in_flight,
    )
    stack.callback(engine.close)
    engine.check()
    return RemoteAsked(engine)


def _batches(options: EvalOptions) -> Iterator[list[Question]]:
    """Questions, split by split; files that are made for one are gone before the next."""
    if options.atlas is None:
        from k3vl.demo.heldout import QUICK

        questions = read_labels(options.folder or QUICK)
        if chosen := [q for q in questions if q.split.startswith(options.only)]:
            yield chosen
        return
    from k3vl.demo.atlas import load_atlas
    from k3vl.demo.floor import NameFloor
    from k3vl.demo.heldout import splits, write_split

    atlas = load_atlas(options.atlas)
    floor = NameFloor(atlas)
    for split in splits(atlas):
        if split.name.startswith(options.only):
            with TemporaryDirectory(prefix="k3vl-eval-") as folder:
                write_split(split, atlas, floor, Path(folder), options.items)
                yield read_labels(Path(folder))


def _report(options: EvalOptions, results: list[Result], seconds: dict[str, float]) -> None:
    rows = rows_of(results)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    console.print(table(rows))
    told = [r.told for r in results if r.told is not None]
    spent = {
        **seconds,
        "of it reading files (all threads)": sum(t.media_seconds for t in told),
        "answering (all threads)": sum(t.answer_seconds for t in told),
    }
    click.echo(f"{len(results)} questions: {seconds_text(spent)}")
    if options.answers is not None:
        _write(options.answers, "".join(json_line(result.record()) for result in results))
    if options.output is not None:
        report: dict[str, Any] = {} if options.base_url else provenance(options.model)
        report |= {
            "questions": len(results),
            "seconds": {name: round(value, 1) for name, value in spent.items()},
            "rows": [row.record() for row in rows],
        }
        _write(options.output, json.dumps(report, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be written ({exc.strerror})") from exc
