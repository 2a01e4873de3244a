"""How a run looks while it goes on: results on standard output, progress on standard error."""

from __future__ import annotations

import json
import sys
import time
from pathlib import PurePath
from typing import TYPE_CHECKING, Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from k3vl.app.output import printable, write_record, write_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from k3vl.app.captioning.rows import Row
    from k3vl.app.captioning.run import Counts

_JSON_SECONDS = 1.0


class Meter(Protocol):
    """Shows numbers; a context manager."""

    def show(self, counts: Counts) -> None:
        """Numbers have changed."""

    def __enter__(self) -> Meter:
        """Start."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End."""


class Bar:
    """A bar with rate, time left and failures, where somebody watches."""

    def __init__(self, total: int | None, *, shown: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[failed]}"),
            console=Console(stderr=True),
            disable=not shown,
            redirect_stdout=sys.stdout.isatty(),
            transient=True,
        )
        self._task = self._progress.add_task("captioning", total=total, rate="", failed="")

    def show(self, counts: Counts) -> None:
        """See :class:`Meter`."""
        failed = counts.failed + counts.failed_before
        self._progress.update(
            self._task,
            completed=counts.done,
            rate=f"{rate(counts):.1f}/s",
            failed=f"{failed} failed" if failed else "",
        )

    def __enter__(self) -> Bar:
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wipe it away."""
        self._progress.stop()


class JsonMeter:
    """A JSON line on standard error every second, and one at the end."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._shown = 0.0
        self._last: Counts | None = None

    def show(self, counts: Counts) -> None:
        """See :class:`Meter`."""
        self._last = counts
        if time.monotonic() - self._shown >= _JSON_SECONDS:
            self._write(counts, "progress")

    def _write(self, counts: Counts, event: str) -> None:
        self._shown = time.monotonic()
        speed, left = rate(counts), None
        if self._total is not None and speed > 0:
            left = round(max(self._total - counts.done, 0) / speed, 1)
        record = {
            "event": event,
            "done": counts.done,
            "total": self._total,
            "captioned": counts.captioned,
            "failed": counts.failed,
            "skipped": counts.skipped,
            "failed_before": counts.failed_before,
            "duplicates": counts.duplicates,
            "completion_tokens": counts.tokens,
            "rate": round(speed, 3),
            "seconds": round(counts.seconds, 3),
            "eta_seconds": left,
        }
        click.echo(json.dumps(record), err=True)

    def __enter__(self) -> JsonMeter:
        """Nothing to do yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The last line."""
        if self._last is not None:
            self._write(self._last, "stopped" if kind else "finished")


def rate(counts: Counts) -> float:
    """Captions a second that this run makes."""
    made = counts.captioned + counts.failed
    return made / counts.seconds if counts.seconds > 0 else 0.0


class Terminal:
    """Results and errors, line by line, and whatever else watches."""

    def __init__(self, *, as_json: bool, meter: Meter, others: Sequence[RowWatcher] = ()) -> None:
        self._as_json = as_json
        self._meter = meter
        self._others = others

    def row(self, row: Row, thumbnail: bytes | None) -> None:
        """See :class:`k3vl.app.captioning.run.Watcher`."""
        for other in self._others:
            other.row(row, thumbnail)
        show(row, as_json=self._as_json)

    def tick(self, counts: Counts) -> None:
        """See :class:`k3vl.app.captioning.run.Watcher`."""
        self._meter.show(counts)


class RowWatcher(Protocol):
    """Sees rows as they are made."""

    def row(self, row: Row, thumbnail: bytes | None) -> None:
        """A new row."""


def show(row: Row, *, as_json: bool) -> None:
    """Results on standard output; what went wrong on standard error."""
    if as_json:
        write_record(row)
        return
    path = click.style(printable(row["id"]), bold=True)
    if "error" in row:
        reason = row["error"].removeprefix(f"{PurePath(row['path']).name}: ")
        click.echo(f"{path}: {click.style('error: ' + reason, fg='red')}", err=True)
        return
    line = f"{path}: {row['caption']}\n"
    write_text(line if sys.stdout.isatty() else click.unstyle(line))
    for warning in row["warnings"]:
        click.echo(f"{path}: {click.style('note: ' + warning, dim=True)}", err=True)
