"""Rows of JSON Lines, CSV and Parquet files as sources, read as a stream."""

from __future__ import annotations

import codecs
import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3vl.app.captioning.items import FsspecFile, Media, Source
from k3vl.app.extras import needs_extra
from k3vl.errors import ConfigError, MediaError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TABLE_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_NAMES = {
    "id": ("id", "key"),
    "path": ("path", "file", "file_name", "filename", "image_path", "video_path"),
    "url": ("url", "image_url", "video_url"),
    "bytes": ("bytes", "image", "video"),
    "caption": ("caption", "text"),
}
"""Column names that are understood without a map."""
_PARQUET_BATCH = 64
_MAX_FIELD = 2**24


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """Which column holds what; fields without an entry are looked up by their usual names."""

    columns: Mapping[str, str]

    @classmethod
    def parse(cls, pairs: tuple[str, ...]) -> ColumnMap:
        """Read ``FIELD=COLUMN`` pairs.

        Raises:
            ConfigError: a pair without ``=``, or an unknown field.
        """
        columns = {}
        for pair in pairs:
            name, equals, column = pair.partition("=")
            if not equals or name not in _NAMES:
                raise ConfigError(
                    f"--column {pair}: expected FIELD=COLUMN, FIELD one of {', '.join(_NAMES)}"
                )
            columns[name] = column
        return cls(columns)

    def get(self, row: Mapping[str, Any], field: str) -> Any:
        """The row's value for a field; None where there is none, or an empty one."""
        names = (self.columns[field],) if field in self.columns else _NAMES[field]
        return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def table_sources(table: Path, columns: ColumnMap, *, light: bool = False) -> Iterator[Source]:
    """One source for each row; a row that cannot be used is a source with an error.

    Args:
        table: the file.
        columns: which column holds what.
        light: leave out the pictures inside of a Parquet file.

    Raises:
        ConfigError: the file cannot be read at all.
    """
    for number, row in _rows(table, light=light):
        where = f"{table}:{number}"
        if isinstance(row, MediaError):
            yield Source(id=where, path=where, error=row)
        else:
            yield _row_source(table, where, row, columns)


def _row_source(table: Path, where: str, row: Mapping[str, Any], columns: ColumnMap) -> Source:
    media, path = _media(table, row, columns)
    given = columns.get(row, "id")
    values = {name: text for name, value in row.items() if (text := as_text(value)) is not None}
    if (old := as_text(columns.get(row, "caption"))) is not None:
        values["caption"] = old
    error = None
    if media is None:
        names = ", ".join(name for name in row)
        error = MediaError(f"no picture in this row; columns: {names}", code="row_invalid")
    name = str(given) if given is not None else path or where
    beside = media if isinstance(media, Path) and media.name else None
    return Source(
        id=name,
        path=path or where,
        media=media,
        beside=beside,
        columns=values,
        error=error,
        repeats=False,
    )


def _media(
    table: Path, row: Mapping[str, Any], columns: ColumnMap
) -> tuple[Media | None, str | None]:
    """The row's bytes, file or URL, and its name; files are relative to the table."""
    data = columns.get(row, "bytes")
    if isinstance(data, dict):  # as datasets store pictures: {"bytes", "path"}
        row = {**row, **{name: value for name, value in data.items() if value is not None}}
        data = data.get("bytes")
    path, url = columns.get(row, "path"), columns.get(row, "url")
    if isinstance(data, bytes):
        return data, str(path) if path is not None else None
    if isinstance(path, str):
        return table.parent / path, str(table.parent / path)
    if isinstance(url, str):
        return url_media(url), url
    if isinstance(data, str):
        return table.parent / data, str(table.parent / data)
    return None, None


def url_media(url: str) -> Media:
    """A URL for the fetch policy, or for fsspec."""
    scheme = url.partition(":")[0].lower()
    return url if scheme in ("http", "https", "data") else FsspecFile(url)


def as_text(value: object) -> str | None:
    """What a prompt's variable stands for: a plain value, or a list of them; nothing is empty."""
    if isinstance(value, list) and all(map(_is_plain, value)):
        return ", ".join(map(str, value))
    if value is None:
        return ""
    return str(value) if _is_plain(value) else None


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _rows(table: Path, *, light: bool) -> Iterator[tuple[int, dict[str, Any] | MediaError]]:
    """Numbered rows, from 1."""
    suffix = table.suffix.lower()
    try:
        if suffix == ".parquet":
            yield from enumerate(_parquet_rows(table, light=light), 1)
        elif suffix in (".csv", ".tsv"):
            yield from enumerate(_csv_rows(table), 1)
        else:
            yield from _json_rows(table)
    except OSError as exc:
        raise ConfigError(
            f"{table}: cannot be read ({exc.strerror or type(exc).__name__})"
        ) from exc


def _json_rows(table: Path) -> Iterator[tuple[int, dict[str, Any] | MediaError]]:
    with table.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                yield number, row
            else:
                yield number, MediaError("not a JSON object", code="row_invalid")


def _csv_rows(table: Path) -> Iterator[dict[str, Any] | MediaError]:
    csv.field_size_limit(min(_MAX_FIELD, sys.maxsize))
    with table.open("rb") as file:
        is_utf16 = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    encoding = "utf-16" if is_utf16 else "utf-8-sig"
    errors = "replace" if is_utf16 else "surrogateescape"
    with table.open(encoding=encoding, errors=errors, newline="") as file:
        delimiter = _delimiter(file.readline(_MAX_FIELD))
        file.seek(0)
        # Strict: else a quote without an end would make one field of all rows behind it.
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as exc:
                yield MediaError(f"not a CSV row ({exc})", code="row_invalid")
                continue
            yield {name: value for name, value in row.items() if name is not None}


def _delimiter(header: str) -> str:
    """The first of the usual ones that parts the header; many spreadsheets write a semicolon."""
    return next((sign for sign in ",\t;|" if sign in header), ",")


def _parquet_rows(table: Path, *, light: bool) -> Iterator[dict[str, Any]]:
    pq = need_parquet()
    import pyarrow as pa

    try:
        with pq.ParquetFile(table) as file:
            binary = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_struct)
            chosen = [
                field.name
                for field in file.schema_arrow
                if not (light and any(test(field.type) for test in binary))
            ]
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH, columns=chosen):
                yield from batch.to_pylist()
    except pa.ArrowException as exc:
        raise ConfigError(f"{table}: not a Parquet file that can be read") from exc


def need_parquet() -> Any:
    """The optional ``pyarrow.parquet``.

    Raises:
        ConfigError: it is not installed.
    """
    with needs_extra("caption", "Parquet"):
        import pyarrow.parquet as pq
    return pq
