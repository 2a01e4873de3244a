"""From the command line's arguments to sources, as a stream that can be read more than once."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from k3vl.app.captioning.files import Choice, file_source, is_folder, walk
from k3vl.app.captioning.items import Source
from k3vl.app.captioning.shards import is_shard, shard_sources
from k3vl.app.captioning.tables import TABLE_SUFFIXES, ColumnMap, table_sources, url_media

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_URL = re.compile(r"^(data:|[A-Za-z][A-Za-z0-9+.-]+://)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The inputs of a run.

    Attributes:
        arguments: files, folders, tables, shards, URLs; ``-`` is a list of them.
        choice: which files of a folder are taken.
        columns: which column of a table holds what.
        names: the spooled standard input; None where it is not read.
    """

    arguments: tuple[str, ...]
    choice: Choice
    columns: ColumnMap
    names: IO[bytes] | None = None

    def sources(self, *, light: bool = False) -> Iterator[Source]:
        """Every source in order, from the start again on each call.

        Args:
            light: only names; shards, which cannot be listed without reading them whole, are left
                out, and so are pictures inside of Parquet files.

        Raises:
            ConfigError: a table or a shard cannot be read at all.
        """
        for name in self.given():
            yield from self._sources(name, light=light)

    @property
    def has_shards(self) -> bool:
        """Whether a light listing may be incomplete."""
        return any(map(is_shard, self.given()))

    def given(self) -> Iterator[str]:
        """Arguments, and what the list on standard input holds, as they were given."""
        for argument in self.arguments:
            yield from self._names(argument)

    def _names(self, argument: str) -> Iterator[str]:
        """An argument, or what the list on standard input holds."""
        if argument != "-" or self.names is None:
            yield argument
            return
        self.names.seek(0)
        for line in self.names:
            if name := os.fsdecode(line.rstrip(b"\r\n")):
                yield name

    def _sources(self, argument: str, *, light: bool) -> Iterator[Source]:
        if _URL.match(argument):
            yield _url_source(argument)
            return
        path = Path(argument)
        if is_folder(path):
            yield from map(file_source, walk(path, self.choice))
        elif is_shard(argument):
            if not light:
                yield from shard_sources(path)
        elif path.suffix.lower() in TABLE_SUFFIXES:
            yield from table_sources(path, self.columns, light=light)
        else:
            yield file_source(path, str(path))


def spool(stream: IO[bytes]) -> IO[bytes]:
    """Keep a list of names that arrives once, on disk where it is long."""
    kept = tempfile.SpooledTemporaryFile(max_size=2**20)  # noqa: SIM115 - lives as long as the run
    shutil.copyfileobj(stream, kept)
    return kept


def _url_source(url: str) -> Source:
    if url.startswith("data:"):
        name = f"data:{hashlib.sha256(url.encode('utf-8', 'replace')).hexdigest()[:16]}"
        return Source(id=name, path=name, media=url)
    return Source(id=url, path=url, media=url_media(url))


def find_files(paths: Sequence[Path], choice: Choice | None = None) -> list[Path]:
    """Files as given; folders give every picture and clip in them, sorted, links not followed."""
    found: list[Path] = []
    for path in paths:
        found += walk(path, choice or Choice()) if is_folder(path) else [path]
    return list(dict.fromkeys(found))
