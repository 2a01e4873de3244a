"""What the ``k3vl inspect`` commands do: records in, records out."""

from __future__ import annotations

import json
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from k3vl.app.output import write_record
from k3vl.config import (
    K3_MEDIA,
    K25_MEDIA,
    MediaConfig,
    checkpoint_path,
    load_config,
    load_media_config,
)
from k3vl.errors import ConfigError, MediaError
from k3vl.vision.inspect import describe, load_path, save_model_view
from k3vl.vision.processor import MediaProcessor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from k3vl.checkpoint_summary import CheckpointSummary
    from k3vl.load import Device
    from k3vl.types import ProcessedMedia


def transform_lines(files: Sequence[str], transform: Callable[[Any], dict[str, Any]]) -> None:
    """Answer every line of the files (none or ``-``: standard input) with one record."""
    for number, line in _lines(files):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # ValueError: also a number of too many digits
            write_record({"error": f"line {number}: not JSON"})
            continue
        write_record(transform(record))


def _lines(files: Sequence[str]) -> Iterator[tuple[int, str]]:
    for name in files or ["-"]:
        with click.open_file(name, encoding="utf-8", errors="replace") as stream:
            yield from enumerate(stream, 1)


def media_config(name: str) -> MediaConfig:
    """Media settings by the name that ``--config`` takes.

    Raises:
        ConfigError: the directory holds none.
    """
    known = {"k3": K3_MEDIA, "k25": K25_MEDIA}
    return known[name] if name in known else load_media_config(checkpoint_path(name))


def inspect_media(
    paths: Sequence[Path], config: str, *, save_dir: Path | None, parity: bool
) -> int:
    """One record per path; returns how many could not be used.

    Raises:
        ConfigError: the settings cannot be read, or the directory cannot be made.
    """
    if save_dir is not None:
        try:
            save_dir.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"{save_dir}: cannot be made ({exc.strerror})") from exc
    processor = MediaProcessor(media_config(config), parity=parity)
    stems = _unique_stems(paths)
    failures = 0
    for path, stem in zip(paths, stems, strict=True):
        try:
            media = load_path(path, processor)
            if save_dir is not None:
                _save(media, save_dir, stem)
        except MediaError as exc:
            failures += 1
            write_record({"path": str(path), "error": str(exc), "code": exc.code})
        else:
            write_record(describe(path, media))
    return failures


def _save(media: ProcessedMedia, directory: Path, stem: str) -> None:
    """Write the views; what cannot be written fails this file alone."""
    try:
        save_model_view(media, directory, stem)
    except OSError as exc:
        raise MediaError(
            f"the view cannot be saved in {directory} ({exc.strerror})", code="save_failed"
        ) from exc


def _unique_stems(paths: Sequence[Path]) -> list[str]:
    """File stems, numbered where two inputs share one, so that no view overwrites another."""
    stems = [path.stem for path in paths]
    uses = Counter(stems)
    taken = {stem for stem, times in uses.items() if times == 1}
    numbers = {stem: count(1) for stem in uses}
    unique = []
    for stem in stems:
        name = stem
        if uses[stem] > 1:
            numbered = (f"{stem}-{number}" for number in numbers[stem])
            name = next(candidate for candidate in numbered if candidate not in taken)
            taken.add(name)
        unique.append(name)
    return unique


def inspect_checkpoint(directory: Path, *, memory: int | None, device: Device) -> bool:
    """Print a checkpoint's sums; False if it is not complete or does not fit.

    Raises:
        ConfigError: there is no usable configuration.
        WeightError: a header cannot be read.
    """
    from k3vl.kernels.choice import choose
    from k3vl.load import available_memory, choose_device, summarise

    directory = checkpoint_path(directory)
    where, dtype = choose_device(device)
    summary = summarise(directory, load_config(directory))
    print_summary(summary)
    available = available_memory(where) if memory is None else memory
    fits, sentence = summary.fits(available, dtype, kept=choose(where, dtype).kept)
    click.echo(f"{where.type}: {sentence}")
    for title, names in (("missing", summary.missing), ("left over", summary.left_over)):
        if summary.weights_present and names:
            click.echo(f"{title}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}")
    for sentence in summary.wrong_shape[:5]:
        click.echo(sentence)
    return fits and (summary.complete or not summary.weights_present)


def print_summary(summary: CheckpointSummary) -> None:
    """Layers and parts as a table."""
    kinds: dict[str, list[int]] = {}
    for number, kind in enumerate(summary.layers):
        kinds.setdefault(kind, []).append(number)
    click.echo(f"{summary.directory}: {'' if summary.weights_present else 'no weights, '}layers")
    for kind, numbers in kinds.items():
        click.echo(f"  {len(numbers):3d} x {kind}: {_ranges(numbers)}")
    table = Table("part", "tensors", "parameters", "bytes", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, part in summary.parts.items():
        table.add_row(name, f"{part.tensors:,}", f"{part.parameters:,}", f"{part.nbytes:,}")
    table.add_row("total", f"{summary.tensors:,}", f"{summary.parameters:,}", f"{summary.nbytes:,}")
    Console().print(table)


def _ranges(numbers: Sequence[int]) -> str:
    """``0-2, 4`` for 0, 1, 2, 4."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
