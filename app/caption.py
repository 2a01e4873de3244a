"""Batch captioning: paths in, one line or record per file out."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from k3vl.app.output import json_line, printable, write_record, write_text
from k3vl.errors import ConfigError, K3VLError, RequestError
from k3vl.pipeline import Pipeline, Reply
from k3vl.types import MediaPart, Message, Request, SamplingParams, TextPart
from k3vl.vision.inspect import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from k3vl.load import Device

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".mpo", ".png", ".apng", ".webp", ".gif", ".bmp"),
    *(".tif", ".tiff", ".ppm", ".pgm", ".avif", ".heic"),
)
VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".m2ts"),
    *(".wmv", ".flv", ".3gp", ".ogv"),
)
DEFAULT_PROMPTS = {"image": "Describe the image.", "video": "Describe the video."}


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionSettings:
    """What a run depends on beside its files."""

    model: str
    device: Device
    prompt: str | None
    max_tokens: int
    output: Path | None


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Files as given; folders give every picture and clip in them, sorted, links not followed."""
    found: list[Path] = []
    for path in paths:
        if os.path.isdir(path):  # unlike Path.is_dir, False for a name that cannot be looked up
            found += sorted(
                file
                for file in path.rglob("*")
                if file.suffix.lower() in (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)
                and os.path.isfile(file)
                and not file.is_symlink()
            )
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def caption_paths(
    paths: Sequence[Path], settings: CaptionSettings, *, as_json: bool, quiet: bool
) -> int:
    """Caption every file and print the results; returns how many failed.

    Raises:
        ConfigError: nothing to do, or the output cannot be written.
        K3VLError: the model cannot be loaded.
    """
    files = find_files(paths)
    if not files:
        raise ConfigError("no pictures or clips there: " + ", ".join(map(printable, paths)))
    failures = 0
    with ExitStack() as stack:
        keep = stack.enter_context(_output(settings.output)) if settings.output else None
        pipeline = stack.enter_context(Pipeline.load(settings.model, device=settings.device))
        progress = stack.enter_context(_progress(quiet=quiet))
        task = progress.add_task("captioning", total=len(files))
        for path, result in _captions(pipeline, files, settings):
            record = _record(path, result, pipeline.name)
            failures += isinstance(result, K3VLError)
            if keep:
                keep(json_line(record))
            _show(record, as_json=as_json)
            progress.advance(task)
    return failures


def _captions(
    pipeline: Pipeline, files: Sequence[Path], settings: CaptionSettings
) -> Iterator[tuple[Path, Reply | K3VLError]]:
    """Results in the order of the files."""
    sampling = SamplingParams(max_tokens=settings.max_tokens)
    requests = (_request(pipeline, path, settings.prompt, sampling) for path in files)
    return zip(files, pipeline.replies(requests), strict=True)


def _request(
    pipeline: Pipeline, path: Path, prompt: str | None, sampling: SamplingParams
) -> Request:
    kind = kind_of(path)
    parts = (MediaPart(kind, path), TextPart(prompt or DEFAULT_PROMPTS[kind]))
    return pipeline.request([Message(role="user", parts=parts)], sampling=sampling)


def _record(path: Path, result: Reply | K3VLError, model: str) -> dict[str, Any]:
    """The JSON Lines form of a result."""
    if isinstance(result, K3VLError):
        # The part's place in the request says nothing to somebody who gave a path.
        message = str(result).removeprefix("messages[0].content[0]: ")
        code = result.code if isinstance(result, RequestError) else "engine_error"
        return {"path": str(path), "error": message, "code": code}
    (layout,) = result.media
    return {
        "path": str(path),
        "kind": layout.kind,
        "width": layout.width,
        "height": layout.height,
        "caption": result.content.strip(),
        "finish": result.finish,
        "usage": asdict(result.usage),
        "warnings": list(result.warnings),
        "model": model,
    }


def _show(record: dict[str, Any], *, as_json: bool) -> None:
    """Results on standard output; what went wrong on standard error."""
    path = click.style(printable(record["path"]), bold=True)
    if as_json:
        write_record(record)
    elif "error" in record:
        click.echo(f"{path}: {click.style('error: ' + record['error'], fg='red')}", err=True)
    else:
        line = f"{path}: {record['caption']}\n"
        write_text(line if sys.stdout.isatty() else click.unstyle(line))
        for warning in record["warnings"]:
            click.echo(f"{path}: {click.style('note: ' + warning, dim=True)}", err=True)


def _progress(*, quiet: bool) -> Progress:
    """A bar on standard error, where somebody watches."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=quiet or not sys.stderr.isatty(),
        redirect_stdout=sys.stdout.isatty(),
        transient=True,
    )


@contextmanager
def _output(path: Path) -> Iterator[Callable[[str], None]]:
    """Open the output before any work is done; gives what writes a line to it, at once."""

    def failed(exc: OSError) -> ConfigError:
        return ConfigError(f"{printable(path)}: cannot be written ({exc.strerror})")

    def write(line: str) -> None:
        try:
            file.write(line.encode())
            file.flush()
        except OSError as exc:
            raise failed(exc) from exc

    try:
        file = path.open("wb")
    except OSError as exc:
        raise failed(exc) from exc
    try:
        yield write
    finally:
        try:
            file.close()
        except OSError as exc:
            raise failed(exc) from exc
