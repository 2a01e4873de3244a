"""Output files: JSON Lines as captions come, CSV and Parquet made of the journal at the end.

A JSON Lines file grows by whole lines behind the journal; what it lacks after a kill is added from
there. It is rewritten at the end of a run only where a row was replaced. CSV and Parquet cannot be
added to safely: they are written beside their place and then put there, at the end of every run,
an interrupted one included.
"""

from __future__ import annotations

import csv
import io
import json
import os
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

from k3vl.app.captioning.durable import cannot_write, replacing, sync_file, try_place, write_all
from k3vl.app.captioning.items import Key, make_key
from k3vl.app.captioning.rows import COLUMNS, Row, flat
from k3vl.app.captioning.tables import need_parquet
from k3vl.app.output import json_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from k3vl.app.captioning.journal import Journal

Format = Literal["jsonl", "csv", "parquet", "tar"]
_ENDINGS: dict[str, Format] = {".csv": "csv", ".parquet": "parquet", ".tar": "tar"}
_PARQUET_ROWS = 1024


class Output(Protocol):
    """One output file."""

    path: Path

    def recover(self, journal: Journal) -> None:
        """Bring the file to what the journal says, before the run goes on."""

    def add(self, row: Row, media: bytes | None) -> None:
        """A new row, already in the journal; media where the output :attr:`wants_media`."""

    def sync(self) -> None:
        """Put what was added on the disk."""

    def finish(self, journal: Journal) -> None:
        """Give the file its last form; also after an interruption."""

    def close(self) -> None:
        """Let go of it, in whatever state."""


def format_of(path: Path, chosen: Format | None) -> Format:
    """What a file is to hold: by its ending, else as chosen, else JSON Lines."""
    return _ENDINGS.get(path.suffix.lower()) or chosen or "jsonl"


def is_regular(path: Path) -> bool:
    """Whether a file can be read again and replaced: no pipe, no device."""
    return not path.exists() or path.is_file()


class JsonLinesOutput:
    """JSON Lines, one ``write`` for each row."""

    def __init__(self, path: Path) -> None:
        """Open for appending, so that a wrong place is found before any work.

        Raises:
            ConfigError: it cannot be written.
        """
        self.path = path
        self._replaced = False
        self._keys: set[Key] = set()
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as exc:
            raise cannot_write(path, exc) from exc

    def is_foreign(self) -> bool:
        """Whether it holds lines that are no rows of captions; a torn last one does not count."""
        if not is_regular(self.path):
            return False
        with self.path.open("rb") as file:
            for line in file:
                row = _row(line)
                if line.strip() and not (row and ("caption" in row or "error" in row)):
                    return row is not None or line.endswith(b"\n")
        return False

    def rows(self) -> Iterator[Row]:
        """What the file holds already; a piece of a line at its end is left out."""
        for _, row in _lines(self.path):
            yield row

    def recover(self, journal: Journal) -> None:
        """Cut a torn last line, then add the rows that the file lacks."""
        if not is_regular(self.path):
            return
        _end_last_line(self.path)
        self._keys = {_key(row) for row in self.rows()}
        if len(self._keys) < len(journal):
            for row in journal.rows():
                if _key(row) not in self._keys:
                    self.add(row, None)
        # A replaced row is known by its key only; after a kill it may be the old one that is here.
        unsynced = {_key(record["row"]): record["row"] for record in journal.unsynced()}
        if unsynced:
            present = {json_line(row) for row in self.rows() if _key(row) in unsynced}
            for row in unsynced.values():
                if json_line(row) not in present:
                    self.add(row, None)
        self._replaced = True

    def add(self, row: Row, media: bytes | None) -> None:
        """See :class:`Output`."""
        del media
        key = _key(row)
        self._replaced |= key in self._keys
        self._keys.add(key)
        data = json_line(row).encode()
        try:
            write_all(self._file.fileno(), data)
        except OSError as exc:
            raise cannot_write(self.path, exc) from exc

    def sync(self) -> None:
        """See :class:`Output`."""
        if is_regular(self.path):
            sync_file(self._file, self.path)

    def finish(self, journal: Journal) -> None:
        """Drop rows that later ones replaced: a caption replaces an error, never the reverse."""
        del journal
        self._file.close()
        if not self._replaced or not is_regular(self.path):
            return
        winners: dict[Key, tuple[bool, int]] = {}
        total = 0
        for place, row in _lines(self.path):
            total += 1
            winners[_key(row)] = max(
                winners.get(_key(row), (False, -1)), ("error" not in row, place)
            )
        if total == len(winners):
            return
        places = {place for _, place in winners.values()}
        try:
            with replacing(self.path) as file:
                file.writelines(
                    json_line(row).encode() for place, row in _lines(self.path) if place in places
                )
        except OSError as exc:
            raise cannot_write(self.path, exc) from exc

    def close(self) -> None:
        """See :class:`Output`."""
        self._file.close()


def _key(row: Row) -> Key:
    return make_key(str(row.get("id", row.get("path"))), str(row.get("prompt_id", "default")))


def _lines(path: Path) -> Iterator[tuple[int, Row]]:
    """Places and rows of a JSON Lines file."""
    place = 0
    with path.open("rb") as file:
        for line in file:
            row = _row(line)
            if row is not None and ("id" in row or "path" in row):
                yield place, row
            place += len(line)


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _end_last_line(path: Path) -> None:
    """Give a last line its end where it is whole; else cut it off."""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep:
            start = max(keep - 65536, 0)
            file.seek(start)
            found = file.read(keep - start).rfind(b"\n")
            if found >= 0:
                keep = start + found + 1
                break
            keep = start
        file.seek(keep)
        if _row(file.read()) is not None:
            file.write(b"\n")
        elif keep < end:
            file.truncate(keep)


class TableOutput:
    """CSV or Parquet, made of the journal."""

    def __init__(self, path: Path, form: Literal["csv", "parquet"]) -> None:
        """Try the place, so that a wrong one is found before any work.

        Raises:
            ConfigError: it cannot be written, or pyarrow is not there.
        """
        self.path = path
        self._form = form
        if form == "parquet":
            need_parquet()
        try_place(path)

    def close(self) -> None:
        """Nothing: it is open only while it is written."""

    def recover(self, journal: Journal) -> None:
        """Nothing: the file is made at the end."""

    def add(self, row: Row, media: bytes | None) -> None:
        """Nothing: the journal has it."""

    def sync(self) -> None:
        """Nothing: the journal is."""

    def finish(self, journal: Journal) -> None:
        """Write the whole table."""
        write = _write_csv if self._form == "csv" else _write_parquet
        try:
            with replacing(self.path) as file:
                write(file, journal.rows())
        except OSError as exc:
            raise cannot_write(self.path, exc) from exc


def _write_csv(file: IO[bytes], rows: Iterable[Row]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
    writer = csv.DictWriter(text, list(COLUMNS))
    writer.writeheader()
    for row in rows:
        values = flat(row)
        lists = {k: json.dumps(v) for k, v in values.items() if isinstance(v, list)}
        writer.writerow({**values, **lists})
    text.flush()
    text.detach()


def _write_parquet(file: IO[bytes], rows: Iterable[Row]) -> None:
    pq = need_parquet()
    import pyarrow as pa

    types: dict[str, Any] = {
        "text": pa.string(),
        "int": pa.int64(),
        "float": pa.float64(),
        "floats": pa.list_(pa.float64()),
        "texts": pa.list_(pa.string()),
    }
    schema = pa.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
    batch: list[dict[str, Any]] = []
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for row in rows:
            batch.append(_whole_text(flat(row)))
            if len(batch) == _PARQUET_ROWS:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                batch = []
        if batch:
            writer.write_table(pa.Table.from_pylist(batch, schema))


def _whole_text(values: dict[str, Any]) -> dict[str, Any]:
    """Names that are no text (see ``output.py``) in a form that UTF-8 can hold."""
    return {
        name: value.encode("utf-8", "backslashreplace").decode()
        if isinstance(value, str)
        else value
        for name, value in values.items()
    }
